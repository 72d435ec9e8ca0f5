/* Requests that a peer on another host refuses: each ends its queue pair, so each has a new one.
 * The client posts them; both ends print what they see. */
#include "rc.h"

#define LENGTH 4096

static const struct refusal {
	const char *what;
	enum ibv_wr_opcode opcode;
	/* What is added to the right rkey and to the right address. */
	uint32_t rkey, offset;
	/* The server's receive; negative: none. */
	int receive;
	enum ibv_wc_status expected;
	/* What rdma_rxe of Linux 6.1 answers instead, or 0. */
	enum ibv_wc_status of_rxe;
} refusals[] = {
	{ "Write with a wrong rkey", IBV_WR_RDMA_WRITE, 0x100, 0, -1, IBV_WC_REM_ACCESS_ERR, 0 },
	{ "Read with a wrong rkey", IBV_WR_RDMA_READ, 0x100, 0, -1, IBV_WC_REM_ACCESS_ERR, 0 },
	{ "Write beyond the region", IBV_WR_RDMA_WRITE, 0, 1, -1, IBV_WC_REM_ACCESS_ERR, 0 },
	{ "Read beyond the region", IBV_WR_RDMA_READ, 0, 1, -1, IBV_WC_REM_ACCESS_ERR, 0 },
	{ "Send longer than its receive", IBV_WR_SEND, 0, 0, LENGTH - 1, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR },
	{ "Send without a receive", IBV_WR_SEND, 0, 0, -1, IBV_WC_RNR_RETRY_EXC_ERR, 0 },
};

int main(int argc, char **argv)
{
	int port = 0, option, gid_index = 0;
	bool peer_is_rxe = false;
	while ((option = getopt(argc, argv, "p:g:x")) != -1) {
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'g': gid_index = atoi(optarg); break;
		case 'x': peer_is_rxe = true; break;
		default: die("refused -p PORT [-g GID] [-x (the peer is rxe)] [HOST]");
		}
	}
	bool client = optind < argc;
	rnr_retry = 1;
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	uint8_t *buffer = SOME(malloc(LENGTH));
	fill(buffer, LENGTH, client);
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, LENGTH, EVERY_ACCESS));
	int sock = meet(argv[optind], port);
	for (size_t i = 0; i < sizeof refusals / sizeof *refusals; i++) {
		struct refusal it = refusals[i];
		struct ibv_qp *qp = create_qp(pd, cq, 4);
		struct end mine = end_of(qp, gid_index, mr), theirs;
		swap(sock, &mine, &theirs, sizeof mine);
		connect_qp(qp, &mine, gid_index, &theirs);
		if (!client && it.receive >= 0)
			post_recv(qp, mr, 0, it.receive, 1);
		barrier(sock);
		if (client) {
			theirs.rkey += it.rkey;
			post_send(qp, it.opcode, mr, 0, LENGTH, it.opcode == IBV_WR_SEND ? NULL : &theirs, it.offset, 2);
			struct ibv_wc wc = next_wc(cq);
			bool of_rxe = peer_is_rxe && it.of_rxe && wc.status == it.of_rxe;
			if (wc.status != it.expected && !of_rxe)
				die("%s: %s, not %s", it.what, ibv_wc_status_str(wc.status), ibv_wc_status_str(it.expected));
			printf("%s: %s\n", it.what, ibv_wc_status_str(wc.status));
		} else if (it.receive >= 0) {
			struct ibv_wc wc = next_wc(cq);
			if (wc.status == IBV_WC_SUCCESS)
				die("%s: the receive succeeds", it.what);
			printf("%s: %s\n", it.what, ibv_wc_status_str(wc.status));
		}
		barrier(sock);
		/* A refused request places nothing, in either direction. */
		if (it.opcode != IBV_WR_SEND)
			verify(buffer, LENGTH, client);
		ZERO(ibv_destroy_qp(qp));
	}
	return 0;
}
