/* Opens and closes everything ROUNDS times, a queue pair connected to itself in each;
 * the number of descriptors and threads must not grow. */
#include "rc.h"
#include <dirent.h>

static int entries(const char *folder)
{
	int count = 0;
	DIR *dir = SOME(opendir(folder));
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

static void round_of_all(void)
{
	uint8_t buffer[64] = "to myself";
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, channel, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, 4);
	struct end me = end_of(qp, 0, mr);
	connect_qp(qp, &me, 0, &me);
	post_recv(qp, mr, 32, 32, 1);
	post_send(qp, IBV_WR_SEND, mr, 0, 10, NULL, 0, 2);
	good_wc(cq);
	good_wc(cq);
	if (memcmp(buffer, buffer + 32, 10))
		die("the message did not arrive");
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_destroy_comp_channel(channel));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
}

int main(int argc, char **argv)
{
	int rounds = argc > 1 ? atoi(argv[1]) : 1000;
	/* The first rounds may create permanent objects: the presence tree, a listener. */
	for (int i = 0; i < 3; i++)
		round_of_all();
	int descriptors = entries("/proc/self/fd"), threads = entries("/proc/self/task");
	for (int i = 0; i < rounds; i++)
		round_of_all();
	int descriptors_now = entries("/proc/self/fd"), threads_now = entries("/proc/self/task");
	if (descriptors_now > descriptors || threads_now > threads)
		die("after %d rounds: %d descriptors were %d, %d threads were %d", rounds, descriptors_now, descriptors,
		    threads_now, threads);
	printf("%d rounds, %d descriptors, %d threads\n", rounds, descriptors_now - 2, threads_now - 2);
	return 0;
}
