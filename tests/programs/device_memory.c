/* device_memory [-p PORT] [HOST]: both ends write into each other's device memory, and read it
 * back. */
#include "rc.h"

enum { SIZE = 64 << 10, PIECE = 1024, PIECES = SIZE / PIECE };

int main(int argc, char **argv)
{
	int port = 18515, option;
	while ((option = getopt(argc, argv, "p:")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		default: die("usage: device_memory [-p PORT] [HOST]");
		}
	const char *host = argv[optind];
	int sock = meet(host, port);
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 4, NULL, NULL, 0));
	uint8_t *bytes = SOME(malloc(SIZE)), *seen = SOME(malloc(SIZE));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, bytes, SIZE, IBV_ACCESS_LOCAL_WRITE));
	struct ibv_dm *dm = SOME(ibv_alloc_dm(context, &(struct ibv_alloc_dm_attr){ .length = SIZE }));
	struct ibv_mr *device = SOME(ibv_reg_dm_mr(pd, dm, 0, SIZE, EVERY_ACCESS | IBV_ACCESS_ZERO_BASED));
	struct ibv_qp *qp = create_qp(pd, cq, 4);
	struct end mine = end_of(qp, 0, device), theirs;
	/* Offsets of the region begin at zero. */
	mine.address = 0;
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(qp, &mine, 0, &theirs);
	barrier(sock);
	/* One after the other, in pieces; each end has bytes of its own. */
	fill(bytes, SIZE, !host);
	for (int piece = 0; piece < PIECES; piece++) {
		size_t at = piece * PIECE;
		post_send(qp, IBV_WR_RDMA_WRITE, mr, at, PIECE, &theirs, at, piece);
		good_wc(cq);
	}
	/* After the writes: the peer's memory has them all. */
	memset(bytes, 0, SIZE);
	post_send(qp, IBV_WR_RDMA_READ, mr, 0, SIZE, &theirs, 0, PIECES);
	good_wc(cq);
	verify(bytes, SIZE, !host);
	barrier(sock);
	ZERO(ibv_memcpy_from_dm(seen, dm, 0, SIZE));
	verify(seen, SIZE, !!host);
	barrier(sock);
	puts("every byte as written");
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(device));
	ZERO(ibv_free_dm(dm));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
