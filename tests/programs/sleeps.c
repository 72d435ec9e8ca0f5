/* sleeps [-p PORT] [-n ROUNDS] [HOST]: in each round the client sends three messages and writes
 * 128 KiB after them, and sleeps until all four requests are complete. The server sleeps until it
 * has the messages. */
#include "rc.h"

enum { SIZE = 128 << 10, MESSAGES = 3 };

static void sleep_for(struct ibv_comp_channel *channel, struct ibv_cq *cq, int requests)
{
	for (;;) {
		struct ibv_wc wc;
		ZERO(ibv_req_notify_cq(cq, 0));
		while (requests > 0 && ibv_poll_cq(cq, 1, &wc)) {
			if (wc.status)
				die("request %d: %s", (int)wc.wr_id, ibv_wc_status_str(wc.status));
			requests--;
		}
		if (!requests)
			return;
		struct ibv_cq *notified;
		void *context;
		ZERO(ibv_get_cq_event(channel, &notified, &context));
		ibv_ack_cq_events(notified, 1);
	}
}

int main(int argc, char **argv)
{
	int port = 18515, option, rounds = 1000;
	while ((option = getopt(argc, argv, "p:n:")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'n': rounds = atoi(optarg); break;
		default: die("usage: sleeps [-p PORT] [-n ROUNDS] [HOST]");
		}
	const char *host = argv[optind];
	int sock = meet(host, port);

	struct ibv_context *context = open_device();
	struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(context));
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, channel, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, SOME(calloc(1, SIZE)), SIZE, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, 8);
	struct end mine = end_of(qp, 0, mr), theirs;
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(qp, &mine, 0, &theirs);
	for (int round = 0; round < rounds; round++) {
		for (int n = 0; n < MESSAGES && !host; n++)
			post_recv(qp, mr, 0, 64, n);
		barrier(sock);
		for (int n = 0; n < MESSAGES && host; n++)
			post_send(qp, IBV_WR_SEND, mr, 0, 64, NULL, 0, n);
		if (host)
			post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, SIZE, &theirs, 0, MESSAGES);
		sleep_for(channel, cq, host ? MESSAGES + 1 : MESSAGES);
	}
	barrier(sock);
	printf("%d rounds\n", rounds);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_destroy_comp_channel(channel));
	ZERO(ibv_close_device(context));
	return 0;
}
