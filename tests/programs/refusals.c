/* refusals [-p PORT] [HOST]: the client posts three requests at a time, and the
 * server's device refuses the second, in each round for another reason. They complete as
 * successful, with the status of the reason, and as flushed. */
#include "rc.h"

enum { REQUESTS = 3, LENGTH = 8, TOO_LONG = 64 };

struct refusal {
	const char *name;
	enum ibv_wr_opcode opcode;
	enum ibv_wc_status status;
	/* Receives that the server posts. */
	int receives;
};

static const struct refusal REFUSALS[] = {
	{ "a wrong key", IBV_WR_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR, 0 },
	{ "a Send that is longer than its receive", IBV_WR_SEND, IBV_WC_REM_INV_REQ_ERR, REQUESTS },
	{ "no receive", IBV_WR_SEND, IBV_WC_RNR_RETRY_EXC_ERR, 1 },
};

int main(int argc, char **argv)
{
	int port = 18515, option;
	static uint8_t buffer[4096];
	while ((option = getopt(argc, argv, "p:")) != -1)
		if (option == 'p')
			port = atoi(optarg);
		else
			die("usage: refusals [-p PORT] [HOST]");
	const char *host = argv[optind];
	int sock = meet(host, port);

	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	rnr_retry = 0;
	for (size_t n = 0; n < sizeof REFUSALS / sizeof *REFUSALS; n++) {
		const struct refusal *refusal = &REFUSALS[n];
		struct ibv_qp *qp = create_qp(pd, cq, 8);
		struct end mine = end_of(qp, 0, mr), theirs;
		swap(sock, &mine, &theirs, sizeof mine);
		connect_qp(qp, &mine, 0, &theirs);
		if (!host)
			for (int i = 0; i < refusal->receives; i++)
				post_recv(qp, mr, 0, LENGTH, i);
		barrier(sock);
		for (int i = 0; host && i < REQUESTS; i++) {
			bool write = refusal->opcode == IBV_WR_RDMA_WRITE;
			bool too_long = i == 1 && !write && refusal->receives > 1;
			struct end far = theirs;
			if (i == 1)
				far.rkey ^= 1;
			post_send(qp, refusal->opcode, mr, 0, too_long ? TOO_LONG : LENGTH, write ? &far : NULL, 0, i);
		}
		for (int i = 0; host && i < REQUESTS; i++) {
			struct ibv_wc wc = next_wc(cq);
			enum ibv_wc_status wanted = i == 0 ? IBV_WC_SUCCESS : i == 1 ? refusal->status : IBV_WC_WR_FLUSH_ERR;
			if (wc.wr_id != (uint64_t)i || wc.status != wanted)
				die("%s: request %" PRIu64 " completed with \"%s\", not request %d with \"%s\"", refusal->name,
				    wc.wr_id, ibv_wc_status_str(wc.status), i, ibv_wc_status_str(wanted));
		}
		barrier(sock);
		ZERO(ibv_destroy_qp(qp));
		struct ibv_wc wc;
		while (ibv_poll_cq(cq, 1, &wc) > 0)
			;
		if (host)
			printf("%s: ok\n", refusal->name);
	}
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
