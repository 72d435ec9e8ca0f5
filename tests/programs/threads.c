/* Two threads share a device: one posts messages to a queue pair of its own process, the other
 * polls, reads the messages and posts the buffer again. Correct without arguments; with an
 * argument it makes the error of that name, which a sanitizer or valgrind must report. */
#include "rc.h"
#include <pthread.h>
#include <semaphore.h>

#define MESSAGES 200
#define SLOTS 8
#define SLOT 64

#ifdef OWN_OPTIONS
/* Many programs define this: the runtime calls this function, and no other of its name. */
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
	return "detect_leaks=1";
}
#endif

/* Made by the thread that posts, read and freed by the thread that polls: only the queues
 * synchronise them. */
struct job {
	int number, slot;
};

static struct ibv_qp *to, *from;
static struct ibv_mr *mr;
static struct ibv_cq *cq;
static sem_t room;
static int both_write;

static const char *mistake = "";
static void *volatile lost;

static bool makes(const char *name)
{
	return !strcmp(mistake, name);
}

static void *poll_all(void *unused)
{
	(void)unused;
	int sent = 0, received = 0;
	while (sent < MESSAGES || received < MESSAGES) {
		struct ibv_wc wc = good_wc(cq);
		if (wc.opcode & IBV_WC_RECV) {
			uint8_t *buffer = (uint8_t *)mr->addr + (SLOTS + wc.wr_id) * SLOT;
			verify(buffer, SLOT, received++);
			buffer[0] = 0;
			post_recv(to, mr, (SLOTS + wc.wr_id) * SLOT, SLOT, wc.wr_id);
		} else {
			struct job *job = (struct job *)(uintptr_t)wc.wr_id;
			if (job->number != sent++)
				die("message %d completed as number %d", job->number, sent - 1);
			memset((uint8_t *)mr->addr + job->slot * SLOT, 0xee, SLOT);
			free(job);
			sem_post(&room);
		}
	}
	if (makes("race"))
		both_write++;
	/* The stack of a thread that has ended hides no pointer from a search for leaks, and the
	 * registers hide at most a few. */
	for (int block = 0; makes("leak") && block < 100; block++)
		lost = SOME(malloc(100));
	lost = NULL;
	return NULL;
}

static void post_all(void)
{
	for (int number = 0; number < MESSAGES; number++) {
		while (sem_wait(&room))
			;
		struct job *job = SOME(malloc(sizeof *job));
		job->number = number;
		job->slot = number % SLOTS;
		fill((uint8_t *)mr->addr + job->slot * SLOT, SLOT, number);
		post_send(from, IBV_WR_SEND, mr, job->slot * SLOT, SLOT, NULL, 0, (uintptr_t)job);
	}
	/* No synchronisation orders this access and the other thread's, in any schedule. */
	if (makes("race"))
		both_write++;
}

/* Volatile, so that the compiler cannot warn about the values. */
static volatile size_t past_the_end = 16;

int main(int argc, char **argv)
{
	if (argc > 1)
		mistake = argv[1];
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	cq = SOME(ibv_create_cq(context, 4 * SLOTS, NULL, NULL, 0));
	uint8_t *buffer = SOME(calloc(2 * SLOTS, SLOT));
	mr = SOME(ibv_reg_mr(pd, buffer, 2 * SLOTS * SLOT, EVERY_ACCESS));
	from = create_qp(pd, cq, 2 * SLOTS);
	to = create_qp(pd, cq, 2 * SLOTS);
	struct end a = end_of(from, 0, mr), b = end_of(to, 0, mr);
	connect_qp(from, &a, 0, &b);
	connect_qp(to, &b, 0, &a);
	for (int slot = 0; slot < SLOTS; slot++)
		post_recv(to, mr, (SLOTS + slot) * SLOT, SLOT, slot);
	/* Fewer than there are receives, so a receive is always posted. */
	ZERO(sem_init(&room, 0, SLOTS / 2));

	pthread_t poller;
	ZERO(pthread_create(&poller, NULL, poll_all, NULL));
	post_all();
	ZERO(pthread_join(poller, NULL));

	if (makes("overflow")) {
		char *small = SOME(malloc(16));
		small[past_the_end] = 1;
		free(small);
	}
	ZERO(ibv_destroy_qp(from));
	ZERO(ibv_destroy_qp(to));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	free(buffer);
	printf("%d messages between two threads\n", MESSAGES);
	return 0;
}
