/* Moves BYTES by one kind of operation, in messages of CHUNK (the last may be shorter), and
 * compares every byte at the far end. */
#include "rc.h"

#define WINDOW 16

int main(int argc, char **argv)
{
	size_t bytes = 256u << 20, chunk = 1u << 20;
	const char *kind = "send";
	int port = 0, option, gid_index = 0;
	while ((option = getopt(argc, argv, "p:o:b:c:g:t:")) != -1) {
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'o': kind = optarg; break;
		case 'b': bytes = strtoull(optarg, NULL, 0); break;
		case 'c': chunk = strtoull(optarg, NULL, 0); break;
		case 'g': gid_index = atoi(optarg); break;
		case 't': ack_timeout = atoi(optarg); break;
		default: die("transfer -p PORT [-o send|write|read] [-b BYTES] [-c CHUNK] [-g GID] [-t ACK_TIMEOUT] [HOST]");
		}
	}
	bool client = optind < argc, sends = !strcmp(kind, "send"), reads = !strcmp(kind, "read");
	enum ibv_wr_opcode opcode = sends ? IBV_WR_SEND : reads ? IBV_WR_RDMA_READ : IBV_WR_RDMA_WRITE;
	/* The initiator posts the requests; data goes from it to the responder, but for reads. */
	bool source = reads ? !client : client;

	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 4 * WINDOW, NULL, NULL, 0));
	uint8_t *buffer = SOME(malloc(bytes));
	if (source)
		fill(buffer, bytes, 1);
	else
		memset(buffer, 0xee, bytes);
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, bytes, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, 2 * WINDOW);

	int sock = meet(argv[optind], port);
	struct end mine = end_of(qp, gid_index, mr), theirs;
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(qp, &mine, gid_index, &theirs);

	size_t posted = 0, completed = 0, total = (bytes + chunk - 1) / chunk;
	if (client || sends) {
		while (completed < total) {
			for (; posted < total && posted - completed < WINDOW; posted++) {
				size_t offset = posted * chunk;
				size_t len = bytes - offset < chunk ? bytes - offset : chunk;
				if (client)
					post_send(qp, opcode, mr, offset, len, sends ? NULL : &theirs, offset, posted);
				else
					post_recv(qp, mr, offset, len, posted);
			}
			struct ibv_wc wc = good_wc(cq);
			if (wc.wr_id != completed)
				die("completion %" PRIu64 " came in place of %zu", wc.wr_id, completed);
			completed++;
		}
	}
	if (!sends) {
		/* A Send after them proves that Writes are in place (RFC 5040 §5.1), and that
		 * Reads are done. */
		if (client) {
			post_send(qp, IBV_WR_SEND, mr, 0, 0, NULL, 0, total);
		} else {
			post_recv(qp, mr, 0, 0, total);
		}
		if (good_wc(cq).wr_id != total)
			die("the last completion is not the last request's");
	}
	if (!source)
		verify(buffer, bytes, 1);
	barrier(sock);

	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	free(buffer);
	printf("%s: %zu bytes in messages of %zu\n", kind, bytes, chunk);
	return 0;
}
