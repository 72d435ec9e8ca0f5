/* Registrations of every kind, each with a Write from it and one into it: zero-based, with a
 * given address, relaxed, on huge pages, on demand. Pages that are mapped and unmapped under an
 * on-demand region are available when they are accessed, or the access is an error of the
 * request. A registration that the device does not support fails with the errno of the manual. */
#include <sys/mman.h>

#include "rc.h"

#define PAGE 4096
#define HUGE (2 << 20)
#define RIGHTS (EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC)

static struct ibv_pd *pd;
static struct ibv_mr *steady;
static uint8_t *bytes;

static uint8_t *map(void *at, size_t len, int flags)
{
	void *mapped = mmap(at, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
	return mapped == MAP_FAILED ? NULL : mapped;
}

/* The status of one request over a connection of its own, to `far` by `rkey`, from or into
 * `near` by `lkey`. */
static enum ibv_wc_status status_of(enum ibv_wr_opcode opcode, uint64_t near, uint32_t lkey, uint64_t far, uint32_t rkey)
{
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
	struct end end[2];
	for (int i = 0; i < 2; i++) {
		cq[i] = SOME(ibv_create_cq(pd->context, 16, NULL, NULL, 0));
		qp[i] = create_qp(pd, cq[i], 8);
		struct ibv_qp_attr attr = { .qp_access_flags = RIGHTS };
		ZERO(ibv_modify_qp(qp[i], &attr, IBV_QP_ACCESS_FLAGS));
		end[i] = end_of(qp[i], 0, NULL);
	}
	for (int i = 0; i < 2; i++)
		connect_qp(qp[i], &end[i], 0, &end[!i]);
	struct ibv_sge sge = { .addr = near, .length = 8, .lkey = lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED };
	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = far, wr.wr.atomic.rkey = rkey, wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = far, wr.wr.rdma.rkey = rkey;
	}
	ZERO(ibv_post_send(qp[0], &wr, &bad));
	enum ibv_wc_status status = next_wc(cq[0]).status;
	for (int i = 0; i < 2; i++)
		ZERO(ibv_destroy_qp(qp[i]));
	for (int i = 0; i < 2; i++)
		ZERO(ibv_destroy_cq(cq[i]));
	return status;
}

static void expect(const char *what, enum ibv_wc_status got, enum ibv_wc_status want)
{
	if (got != want)
		die("%s: %s, not %s", what, ibv_wc_status_str(got), ibv_wc_status_str(want));
}

/* Sends eight bytes of the region to steady memory and receives eight others; `name` is the
 * address of the region's first byte in work requests. */
static void serves(const char *what, struct ibv_mr *mr, uint64_t name, uint8_t *memory)
{
	memcpy(memory, "outbound", 8);
	expect(what, status_of(IBV_WR_RDMA_WRITE, name, mr->lkey, (uintptr_t)bytes, steady->rkey), IBV_WC_SUCCESS);
	if (memcmp(bytes, "outbound", 8))
		die("%s: other bytes went out", what);
	memcpy(bytes, "incoming", 8);
	expect(what, status_of(IBV_WR_RDMA_WRITE, (uintptr_t)bytes, steady->lkey, name, mr->rkey), IBV_WC_SUCCESS);
	if (memcmp(memory, "incoming", 8))
		die("%s: other bytes came in", what);
	memset(bytes, 0, 8);
	expect(what, status_of(IBV_WR_RDMA_READ, (uintptr_t)bytes, steady->lkey, name, mr->rkey), IBV_WC_SUCCESS);
	if (memcmp(bytes, "incoming", 8))
		die("%s: other bytes were read", what);
	printf("%s: there and back\n", what);
}

static void always_there(void)
{
	uint8_t *memory = SOME(map(NULL, PAGE, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, memory, PAGE, RIGHTS | IBV_ACCESS_ZERO_BASED));
	serves("zero-based", mr, 0, memory);
	ZERO(ibv_dereg_mr(mr));
	mr = SOME(ibv_reg_mr_iova(pd, memory, PAGE, 0x123456789000, RIGHTS));
	serves("named", mr, 0x123456789000, memory);
	ZERO(ibv_dereg_mr(mr));
	mr = SOME(ibv_reg_mr(pd, memory, PAGE, RIGHTS | IBV_ACCESS_RELAXED_ORDERING));
	serves("relaxed", mr, (uintptr_t)memory, memory);
	ZERO(ibv_dereg_mr(mr));

	uint8_t *huge = map(NULL, HUGE, MAP_HUGETLB);
	if (!huge) {
		printf("huge pages: none\n");
		return;
	}
	mr = SOME(ibv_reg_mr(pd, huge, HUGE, RIGHTS | IBV_ACCESS_HUGETLB));
	serves("huge pages", mr, (uintptr_t)huge + HUGE - 64, huge + HUGE - 64);
	ZERO(ibv_dereg_mr(mr));
	munmap(huge, HUGE);
}

static void on_demand(void)
{
	int access = RIGHTS | IBV_ACCESS_ON_DEMAND;
	/* Far from where the kernel puts mappings, so that nothing else takes the place meanwhile. */
	uint8_t *memory = map((void *)0x200000000000, 3 * PAGE, MAP_FIXED_NOREPLACE);
	if (!memory)
		memory = SOME(map(NULL, 3 * PAGE, 0));
	uint64_t at = (uintptr_t)memory, here = (uintptr_t)bytes;
	/* No page is mapped yet. */
	ZERO(munmap(memory, 3 * PAGE));
	struct ibv_mr *mr = ibv_reg_mr(pd, memory, 3 * PAGE, access);
	if (!mr && errno == EOPNOTSUPP) {
		printf("on demand: not on this device\n");
		return;
	}
	SOME(mr);
	expect("a Write from unmapped memory", status_of(IBV_WR_RDMA_WRITE, at, mr->lkey, here, steady->rkey), IBV_WC_LOC_PROT_ERR);
	expect("a Write to unmapped memory", status_of(IBV_WR_RDMA_WRITE, here, steady->lkey, at, mr->rkey), IBV_WC_REM_ACCESS_ERR);
	expect("a Read of unmapped memory", status_of(IBV_WR_RDMA_READ, here, steady->lkey, at, mr->rkey), IBV_WC_REM_ACCESS_ERR);
	if (status_of(IBV_WR_ATOMIC_FETCH_AND_ADD, here, steady->lkey, at, mr->rkey) == IBV_WC_SUCCESS)
		die("an atomic on unmapped memory succeeded");
	SOME(map(memory, 3 * PAGE, MAP_FIXED_NOREPLACE));
	serves("on demand", mr, at + PAGE, memory + PAGE);
	ZERO(madvise(memory, 3 * PAGE, MADV_DONTNEED));
	expect("an atomic", status_of(IBV_WR_ATOMIC_FETCH_AND_ADD, here, steady->lkey, at, mr->rkey), IBV_WC_SUCCESS);
	if (*(uint64_t *)memory != 1)
		die("the sum is %" PRIu64, *(uint64_t *)memory);
	ZERO(mprotect(memory, PAGE, PROT_READ));
	expect("a Write to read-only memory", status_of(IBV_WR_RDMA_WRITE, here, steady->lkey, at, mr->rkey), IBV_WC_REM_ACCESS_ERR);
	expect("a Read of it", status_of(IBV_WR_RDMA_READ, here, steady->lkey, at, mr->rkey), IBV_WC_SUCCESS);

	struct ibv_sge sge = { .addr = at + PAGE, .length = 2 * PAGE, .lkey = mr->lkey };
	ZERO(ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	unsigned char in_core[2];
	ZERO(mincore(memory + PAGE, 2 * PAGE, in_core));
	if (!(in_core[0] & in_core[1] & 1))
		die("advised memory is not available");
	sge.length++;
	if (ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1) != EFAULT)
		die("advice after the region's end");
	sge = (struct ibv_sge){ .addr = here, .length = 8, .lkey = steady->lkey };
	if (ibv_advise_mr(pd, IBV_ADVISE_MR_ADVICE_PREFETCH, 0, &sge, 1) != EOPNOTSUPP)
		die("advice on a region that is not on demand");
	ZERO(ibv_dereg_mr(mr));

	/* All of the address space. */
	mr = SOME(ibv_reg_mr(pd, NULL, SIZE_MAX, access));
	serves("implicit", mr, at + 2 * PAGE, memory + 2 * PAGE);
	expect("a Write to address 0", status_of(IBV_WR_RDMA_WRITE, here, steady->lkey, 0, mr->rkey), IBV_WC_REM_ACCESS_ERR);
	ZERO(ibv_dereg_mr(mr));
	munmap(memory, 3 * PAGE);
}

int main(void)
{
	pd = SOME(ibv_alloc_pd(open_device()));
	bytes = SOME(map(NULL, PAGE, 0));
	steady = SOME(ibv_reg_mr(pd, bytes, PAGE, RIGHTS));
	always_there();
	on_demand();
	return 0;
}
