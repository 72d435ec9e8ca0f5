/* delivered [-p PORT] [-s BYTES] [-n ROUNDS] [HOST]: each round the client writes BYTES bytes into
 * the server's memory, polls the completion, and notifies the server by TCP. The server checks
 * its memory at once, and prints the number of rounds that found bytes of an earlier round. */
#include "rc.h"

int main(int argc, char **argv)
{
	int port = 18515, option;
	size_t size = 1 << 20;
	uint64_t rounds = 500, stale = 0;
	while ((option = getopt(argc, argv, "p:s:n:")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 's': size = strtoul(optarg, NULL, 0) & ~7ul; break;
		case 'n': rounds = strtoull(optarg, NULL, 0); break;
		default: die("usage: delivered [-p PORT] [-s BYTES] [-n ROUNDS] [HOST]");
		}
	const char *host = argv[optind];
	size_t words = size / sizeof(uint64_t);
	int sock = meet(host, port);

	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	volatile uint64_t *buffer = SOME(calloc(words, sizeof *buffer));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, (void *)buffer, size, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, 8);
	struct end mine = end_of(qp, 0, mr), theirs;
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(qp, &mine, 0, &theirs);
	barrier(sock);

	for (uint64_t round = 1; round <= rounds; round++) {
		if (host) {
			for (size_t at = 0; at < words; at++)
				buffer[at] = round;
			post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, size, &theirs, 0, round);
			good_wc(cq);
			barrier(sock);
		} else {
			barrier(sock);
			bool old = false;
			for (size_t at = 0; at < words; at++)
				old |= buffer[at] != round;
			stale += old;
		}
		/* The server has checked its memory. */
		barrier(sock);
	}
	if (!host)
		printf("%" PRIu64 " rounds, %" PRIu64 " stale\n", rounds, stale);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
