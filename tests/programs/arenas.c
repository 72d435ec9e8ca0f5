/* Opens the device, and reports whether a thread made an arena of the allocator after
 * ibv_open_device() returned. Each new thread is delayed, as on a loaded machine: its creator
 * must wait for it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <pthread.h>
#include "rc.h"

static struct start {
	void *(*run)(void *);
	void *argument;
} starts[16];
static int started;

static void *delayed(void *argument)
{
	struct start *start = argument;
	usleep(50000);
	return start->run(start->argument);
}

/* The loader finds this function before the C library's. */
__attribute__((visibility("default"))) int pthread_create(pthread_t *thread, const pthread_attr_t *attr, void *(*run)(void *), void *argument)
{
	int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = SOME(dlsym(RTLD_NEXT, "pthread_create"));
	struct start *start = &starts[started++];
	*start = (struct start){ run, argument };
	return create(thread, attr, delayed, start);
}

static int arenas(void)
{
	char *text;
	size_t len;
	FILE *out = SOME(open_memstream(&text, &len));
	int count = 0;
	ZERO(malloc_info(0, out));
	ZERO(fclose(out));
	for (const char *at = text; (at = strstr(at, "<heap nr=")); at++)
		count++;
	free(text);
	return count;
}

int main(void)
{
	int n;
	struct ibv_device **list = SOME(ibv_get_device_list(&n));
	struct ibv_context *context = SOME(ibv_open_device(list[0]));
	int opened = arenas();
	usleep(200000);
	if (!started)
		die("no thread was created");
	printf("%s: %d, then %d\n", arenas() == opened ? "all there" : "late", opened, arenas());
	ZERO(ibv_close_device(context));
	ibv_free_device_list(list);
	return 0;
}
