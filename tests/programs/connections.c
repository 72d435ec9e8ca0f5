/* COUNT queue pairs connected to those of another process. The initiator prints the memory of
 * each idle queue pair in KiB, and the number of connections per second; a connection counts
 * when a message has come back through it. */
#include "rc.h"

#define COUNT 1000

int main(int argc, char **argv)
{
	int port = 0, option;
	while ((option = getopt(argc, argv, "p:")) != -1) {
		if (option != 'p')
			die("connections -p PORT [HOST]");
		port = atoi(optarg);
	}
	bool client = optind < argc;
	static uint8_t buffer[16];
	static struct ibv_qp *qps[COUNT];
	static struct end mine[COUNT], theirs[COUNT];

	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 4 * COUNT, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	int sock = meet(argv[optind], port);
	long before = memory();
	double start = now();
	for (int i = 0; i < COUNT; i++) {
		qps[i] = create_qp(pd, cq, 16);
		mine[i] = end_of(qps[i], 0, mr);
	}
	swap(sock, mine, theirs, sizeof mine);
	for (int i = 0; i < COUNT; i++) {
		connect_qp(qps[i], &mine[i], 0, &theirs[i]);
		post_recv(qps[i], mr, 8, 8, 1);
	}
	/* One message in each direction on each connection, all at once. */
	for (int i = 0; client && i < COUNT; i++)
		post_send(qps[i], IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
	for (int left = 2 * COUNT; left > 0; left--) {
		struct ibv_wc wc = good_wc(cq);
		if (!client && wc.wr_id == 1)
			for (int i = 0; i < COUNT; i++)
				if (qps[i]->qp_num == wc.qp_num)
					post_send(qps[i], IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
	}
	double seconds = now() - start;
	barrier(sock);
	if (client)
		printf("%f %f\n", (double)(memory() - before) / COUNT, COUNT / seconds);
	barrier(sock);
	for (int i = 0; i < COUNT; i++)
		ZERO(ibv_destroy_qp(qps[i]));
	return 0;
}
