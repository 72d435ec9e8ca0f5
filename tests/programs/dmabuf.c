/* Regions of a file (ibv_reg_dmabuf_mr): a queue pair that is its own peer writes into one, reads
 * from it and receives into it; the program checks the file. Then it tries arguments that must be
 * refused. With -u, it only checks that the device does not support such regions. */
#define _GNU_SOURCE
#include "rc.h"
#include <sys/mman.h>

enum { SIZE = 1 << 16, OFFSET = 4096 + 100, LENGTH = 9000 };
/* The name of the region's first byte in work requests. */
#define IOVA 0x100000064u

static void refused(struct ibv_pd *pd, uint64_t offset, size_t length, int fd, int access, int wanted)
{
	struct ibv_mr *mr = ibv_reg_dmabuf_mr(pd, offset, length, IOVA, fd, access);
	if (mr || errno != wanted)
		die("offset %" PRIu64 ", length %zu, access %#x: %s, not %s", offset, length, access,
		    mr ? "registered" : strerror(errno), strerror(wanted));
}

int main(int argc, char **argv)
{
	static uint8_t buffer[SIZE];
	int file = memfd_create("dmabuf", MFD_ALLOW_SEALING), pipes[2];
	ZERO(ftruncate(file, SIZE));
	uint8_t *shown = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (shown == MAP_FAILED)
		die("mmap: %s", strerror(errno));
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	if (argc > 1 && !strcmp(argv[1], "-u")) {
		refused(pd, 0, SIZE, file, EVERY_ACCESS, EOPNOTSUPP);
		puts("not supported");
		return 0;
	}
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	int copy = dup(file);
	struct ibv_mr *region = SOME(ibv_reg_dmabuf_mr(pd, OFFSET, LENGTH, IOVA, copy, EVERY_ACCESS));
	/* The region keeps the file's pages. */
	close(copy);
	struct ibv_qp *qp = create_qp(pd, cq, 4);
	struct end me = end_of(qp, 0, mr), far = { .address = IOVA, .rkey = region->rkey };
	connect_qp(qp, &me, 0, &me);

	fill(buffer, LENGTH, 1);
	post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, LENGTH, &far, 0, 1);
	good_wc(cq);
	verify(shown + OFFSET, LENGTH, 1);
	if (shown[OFFSET - 1] || shown[OFFSET + LENGTH])
		die("bytes outside of the region were written");
	fill(shown + OFFSET, LENGTH, 2);
	post_send(qp, IBV_WR_RDMA_READ, mr, 0, LENGTH, &far, 0, 2);
	good_wc(cq);
	verify(buffer, LENGTH, 2);
	struct ibv_sge sge = { .addr = IOVA, .length = LENGTH, .lkey = region->lkey };
	struct ibv_recv_wr wr = { .wr_id = 3, .sg_list = &sge, .num_sge = 1 }, *bad;
	ZERO(ibv_post_recv(qp, &wr, &bad));
	fill(buffer, LENGTH, 3);
	post_send(qp, IBV_WR_SEND, mr, 0, LENGTH, NULL, 0, 4);
	good_wc(cq);
	good_wc(cq);
	verify(shown + OFFSET, LENGTH, 3);
	ZERO(ibv_dereg_mr(region));

	/* After deregistration the key is invalid. */
	post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, 8, &far, 0, 5);
	if (next_wc(cq).status != IBV_WC_REM_ACCESS_ERR)
		die("a Write into a deregistered region did not fail");

	ZERO(pipe(pipes));
	refused(pd, 0, 0, file, EVERY_ACCESS, EINVAL);
	refused(pd, 0, SIZE + 1, file, EVERY_ACCESS, EINVAL);
	refused(pd, SIZE - 7, 8, file, EVERY_ACCESS, EINVAL);
	refused(pd, UINT64_MAX - 3, 8, file, EVERY_ACCESS, EINVAL);
	refused(pd, 0, SIZE, file, IBV_ACCESS_REMOTE_WRITE, EINVAL);
	refused(pd, 0, SIZE, file, EVERY_ACCESS | IBV_ACCESS_ON_DEMAND, EINVAL);
	refused(pd, 0, SIZE, -1, EVERY_ACCESS, EOPNOTSUPP);
	refused(pd, 0, 0, -1, 0, EOPNOTSUPP);
	refused(pd, 0, SIZE, 1000, EVERY_ACCESS, EBADF);
	refused(pd, 0, SIZE, pipes[0], EVERY_ACCESS, EOPNOTSUPP);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	puts("ok");
	return 0;
}
