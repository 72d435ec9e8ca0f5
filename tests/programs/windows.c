/* Memory windows of both types: a Write into one succeeds, and one that the window does not
 * permit completes with a remote access error. Each error ends its queue pairs, so each case has
 * its own. */
#include "rc.h"

#define WINDOW 4096

struct pair {
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
};

static struct pair connected(struct ibv_pd *pd)
{
	struct pair pair;
	struct end end[2];
	for (int i = 0; i < 2; i++) {
		pair.cq[i] = SOME(ibv_create_cq(pd->context, 16, NULL, NULL, 0));
		pair.qp[i] = create_qp(pd, pair.cq[i], 8);
		end[i] = end_of(pair.qp[i], 0, NULL);
	}
	for (int i = 0; i < 2; i++)
		connect_qp(pair.qp[i], &end[i], 0, &end[!i]);
	return pair;
}

/* Writes eight bytes from the first end and returns the status. */
static enum ibv_wc_status write_to(struct pair *pair, struct ibv_mr *from, uint64_t address, uint32_t rkey)
{
	struct end far = { .address = address, .rkey = rkey };
	post_send(pair->qp[0], IBV_WR_RDMA_WRITE, from, 0, 8, &far, 0, 1);
	return next_wc(pair->cq[0]).status;
}

static void expect(const char *what, enum ibv_wc_status got, enum ibv_wc_status want)
{
	if (got != want)
		die("%s: %s, not %s", what, ibv_wc_status_str(got), ibv_wc_status_str(want));
	printf("%s: %s\n", what, ibv_wc_status_str(got));
}

/* Binds by the verb at the second end; unbinds with length 0. */
static void bind_type_1(struct pair *pair, struct ibv_mw *mw, struct ibv_mr *mr, size_t offset, size_t len)
{
	struct ibv_mw_bind bind = { .wr_id = 2, .send_flags = IBV_SEND_SIGNALED,
				    .bind_info = { .mr = mr, .addr = (uintptr_t)mr->addr + offset, .length = len,
						   .mw_access_flags = len ? IBV_ACCESS_REMOTE_WRITE : 0 } };
	ZERO(ibv_bind_mw(pair->qp[1], mw, &bind));
	good_wc(pair->cq[1]);
}

/* Binds, or with no length invalidates, by work request at the second end. */
static void bind_type_2(struct pair *pair, struct ibv_mw *mw, struct ibv_mr *mr, size_t offset, size_t len)
{
	struct ibv_send_wr *bad, wr = { .wr_id = 2, .send_flags = IBV_SEND_SIGNALED, .opcode = len ? IBV_WR_BIND_MW : IBV_WR_LOCAL_INV };
	if (len) {
		wr.bind_mw.mw = mw;
		wr.bind_mw.rkey = mw->rkey = ibv_inc_rkey(mw->rkey);
		wr.bind_mw.bind_info = (struct ibv_mw_bind_info){ .mr = mr, .addr = (uintptr_t)mr->addr + offset, .length = len,
								  .mw_access_flags = IBV_ACCESS_REMOTE_WRITE };
	} else {
		wr.invalidate_rkey = mw->rkey;
	}
	ZERO(ibv_post_send(pair->qp[1], &wr, &bad));
	good_wc(pair->cq[1]);
}

int main(void)
{
	struct ibv_pd *pd = SOME(ibv_alloc_pd(open_device()));
	uint8_t *memory = SOME(calloc(4, WINDOW)), source[8] = "bytes";
	struct ibv_mr *from = SOME(ibv_reg_mr(pd, source, sizeof source, IBV_ACCESS_LOCAL_WRITE));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, memory, 4 * WINDOW, EVERY_ACCESS | IBV_ACCESS_MW_BIND));
	uint64_t inside = (uintptr_t)memory + WINDOW, last = inside + WINDOW - 8, over = last + 1, before = inside - 8;
	for (int type = 1; type <= 2; type++) {
		void (*bind)(struct pair *, struct ibv_mw *, struct ibv_mr *, size_t, size_t) = type == 1 ? bind_type_1 : bind_type_2;
		for (int n = 0; n < 4; n++) {
			struct pair pair = connected(pd), other = connected(pd);
			struct ibv_mw *mw = SOME(ibv_alloc_mw(pd, type == 1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2));
			bind(&pair, mw, mr, WINDOW, WINDOW);
			printf("type %d, ", type);
			expect("inside", write_to(&pair, from, inside, mw->rkey), IBV_WC_SUCCESS);
			expect("at its end", write_to(&pair, from, last, mw->rkey), IBV_WC_SUCCESS);
			switch (n) {
			case 0: expect("over its end", write_to(&pair, from, over, mw->rkey), IBV_WC_REM_ACCESS_ERR); break;
			case 1: expect("before it", write_to(&pair, from, before, mw->rkey), IBV_WC_REM_ACCESS_ERR); break;
			case 2: {
				uint32_t rkey = mw->rkey;
				bind(&pair, mw, mr, 0, 0);
				expect("unbound", write_to(&pair, from, inside, rkey), IBV_WC_REM_ACCESS_ERR);
				break;
			}
			/* A window of type 1 belongs to its domain, a window of type 2 to its
			 * queue pair. */
			case 3:
				expect("from another queue pair", write_to(&other, from, inside, mw->rkey),
				       type == 1 ? IBV_WC_SUCCESS : IBV_WC_REM_ACCESS_ERR);
			}
		}
	}
	if (memcmp(memory + WINDOW, source, 8) || memcmp(memory + 2 * WINDOW - 8, source, 8) || memory[2 * WINDOW] || memory[WINDOW - 1])
		die("the memory has other bytes than were written");
	return 0;
}
