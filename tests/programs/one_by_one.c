/* one_by_one [-o send|write] [-s SIZE] [-n COUNT] -p PORT [HOST]: one message after the other
 * in one direction, each posted when the one before is complete, for counts of instructions
 * (turns.c). An end that would poll in vain lets the other end run. */
#include "rc.h"

/* Messages that show whether they complete without the other end. */
#define LEARN 100

/* turns.c, if it is preloaded. */
extern void pass_turn(void) __attribute__((weak));

static void let_the_other_run(void)
{
	if (pass_turn)
		pass_turn();
}

int main(int argc, char **argv)
{
	int port = 0, option, count = 5000;
	size_t size = 8;
	const char *kind = "send";
	while ((option = getopt(argc, argv, "p:o:s:n:")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'o': kind = optarg; break;
		case 's': size = strtoull(optarg, NULL, 0); break;
		case 'n': count = atoi(optarg); break;
		default: die("one_by_one [-o send|write] [-s SIZE] [-n COUNT] -p PORT [HOST]");
		}
	bool client = optind < argc, sends = !strcmp(kind, "send");
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 64, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, SOME(calloc(1, size)), size, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, 16);
	int sock = meet(argv[optind], port);
	struct end mine = end_of(qp, 0, mr), theirs;
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(qp, &mine, 0, &theirs);
	if (!client)
		post_recv(qp, mr, 0, size, 0);
	barrier(sock);
	if (client) {
		/* A completion that needs the other end is looked for after that had its turn. */
		bool at_once = true;
		for (int i = 0; i < count; i++) {
			struct ibv_wc wc;
			post_send(qp, sends ? IBV_WR_SEND : IBV_WR_RDMA_WRITE, mr, 0, size, sends ? NULL : &theirs, 0, i);
			if (i >= LEARN && !at_once)
				let_the_other_run();
			int found = ibv_poll_cq(cq, 1, &wc);
			if (i < LEARN)
				at_once = found == 1;
			if (!found)
				wc = next_wc(cq);
			if (wc.status != IBV_WC_SUCCESS)
				die("message %d: %s", i, ibv_wc_status_str(wc.status));
		}
		if (!sends) {
			post_send(qp, IBV_WR_SEND, mr, 0, size, NULL, 0, count);
			good_wc(cq);
		}
	}
	/* Writes complete nothing here; the Send after them does. */
	for (int i = 0; !client && i < (sends ? count : 1); i++) {
		good_wc(cq);
		if (i + 1 < count && sends)
			post_recv(qp, mr, 0, size, 0);
		if (sends)
			let_the_other_run();
	}
	barrier(sock);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	return 0;
}
