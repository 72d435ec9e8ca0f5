/* last_byte [-p PORT] [HOST]: the client writes into the server's memory, by RDMA Writes of some
 * lengths. The server polls the last byte of each (no completion queue: then it might be the one
 * that places the bytes) and looks at the first at once. It says how often that was there, and
 * checks that all come. */
#include "rc.h"

enum { SIZE = 16384, ROUNDS = 200 };

static uint32_t length(int round)
{
	static const uint32_t lengths[] = { 2, 100, 4096, SIZE };
	return lengths[round % 4];
}

int main(int argc, char **argv)
{
	int port = 18515, option, there = 0;
	while ((option = getopt(argc, argv, "p:")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		default: die("usage: last_byte [-p PORT] [HOST]");
		}
	const char *host = argv[optind];
	int sock = meet(host, port);
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 4, NULL, NULL, 0));
	volatile uint8_t *bytes = SOME(calloc(1, SIZE));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, (void *)bytes, SIZE, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, 4);
	struct end mine = end_of(qp, 0, mr), theirs;
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(qp, &mine, 0, &theirs);
	barrier(sock);
	for (int round = 0; round < ROUNDS; round++) {
		uint32_t len = length(round);
		uint8_t value = round + 1;
		if (host) {
			memset((void *)bytes, value, len);
			post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, len, &theirs, 0, round);
			good_wc(cq);
		} else {
			while (bytes[len - 1] != value)
				;
			there += bytes[0] == value;
		}
		/* After the completion of the write. */
		barrier(sock);
		for (uint32_t at = 0; !host && at < len; at++)
			if (bytes[at] != value)
				die("round %d: byte %u did not come", round, at);
		barrier(sock);
	}
	if (!host)
		printf("the first byte was there %d times of %d\n", there, ROUNDS);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
