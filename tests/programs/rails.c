/* All devices of one process at once: device i and device i + 1 connect a queue pair to each other
 * and exchange a message in both directions, and a forked child opens all devices anew. The sizes
 * are different for each connection, so that each device's counters differ. With an argument, the
 * program waits for the end of its input before it ends. */
#include "rc.h"
#include <sys/wait.h>

#define MOST 8
#define UNIT 1000

struct rail {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	uint8_t *buffer;
};

static int open_all(struct rail *rails)
{
	int count;
	struct ibv_device **list = SOME(ibv_get_device_list(&count));
	if (count < 2 || count > MOST)
		die("%d devices", count);
	for (int i = 0; i < count; i++) {
		struct rail *rail = &rails[i];
		rail->context = SOME(ibv_open_device(list[i]));
		if (strcmp(ibv_get_device_name(rail->context->device), ibv_get_device_name(list[i])))
			die("opened %s as %s", ibv_get_device_name(list[i]),
			    ibv_get_device_name(rail->context->device));
		struct ibv_device_attr attr;
		ZERO(ibv_query_device(rail->context, &attr));
		if (attr.node_guid != ibv_get_device_guid(list[i]))
			die("%s has two GUIDs", ibv_get_device_name(list[i]));
		rail->pd = SOME(ibv_alloc_pd(rail->context));
		rail->cq = SOME(ibv_create_cq(rail->context, 16, NULL, NULL, 0));
		rail->buffer = SOME(calloc(MOST, UNIT));
		rail->mr = SOME(ibv_reg_mr(rail->pd, rail->buffer, MOST * UNIT, EVERY_ACCESS));
	}
	ibv_free_device_list(list);
	return count;
}

static void message(struct rail *from, struct ibv_qp *sender, struct rail *to, struct ibv_qp *receiver, int len)
{
	memset(from->buffer, len / UNIT, len);
	memset(to->buffer, 0, len);
	post_recv(receiver, to->mr, 0, len, 1);
	post_send(sender, IBV_WR_SEND, from->mr, 0, len, NULL, 0, 2);
	good_wc(to->cq);
	good_wc(from->cq);
	for (int i = 0; i < len; i++)
		if (to->buffer[i] != len / UNIT)
			die("byte %d of %d is wrong", i, len);
}

static void between(struct rail *a, struct rail *b, int len)
{
	struct ibv_qp *first = create_qp(a->pd, a->cq, 8), *second = create_qp(b->pd, b->cq, 8);
	struct end one = end_of(first, 0, a->mr), other = end_of(second, 0, b->mr);
	connect_qp(first, &one, 0, &other);
	connect_qp(second, &other, 0, &one);
	message(a, first, b, second, len);
	message(b, second, a, first, len);
	ZERO(ibv_destroy_qp(first));
	ZERO(ibv_destroy_qp(second));
}

static void all_connected(struct rail *rails, int count)
{
	for (int i = 0; i + 1 < count; i++)
		between(&rails[i], &rails[i + 1], (i + 1) * UNIT);
}

int main(int argc, char **argv)
{
	static struct rail rails[MOST], of_child[MOST];
	int count = open_all(rails), status;
	(void)argv;
	all_connected(rails, count);
	pid_t child = fork();
	if (child == 0) {
		all_connected(of_child, open_all(of_child));
		/* The parent's devices do nothing here. */
		if (ibv_alloc_pd(rails[count - 1].context))
			die("a device of the parent works in the child");
		exit(0);
	}
	if (waitpid(child, &status, 0) != child || status)
		die("the child ended with %#x", status);
	all_connected(rails, count);
	printf("%d devices\n", count);
	fflush(stdout);
	if (argc > 1)
		while (getchar() != EOF)
			;
	for (int i = 0; i < count; i++) {
		ZERO(ibv_dereg_mr(rails[i].mr));
		ZERO(ibv_destroy_cq(rails[i].cq));
		ZERO(ibv_dealloc_pd(rails[i].pd));
		ZERO(ibv_close_device(rails[i].context));
	}
	return 0;
}
