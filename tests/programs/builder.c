/* A program between ibv_wr_start and ibv_wr_complete holds its own send queue, and nothing else:
 * new connections, other queue pairs and the end of the program are not blocked. ROUNDS times. */
#include "rc.h"

#define ROUNDS 20

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *held_cq, *other_cq;
static struct ibv_mr *mr;
static uint8_t buffer[64];

static struct ibv_qp_ex *create(struct ibv_cq *cq)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp *qp = SOME(ibv_create_qp_ex(context, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	return ibv_qp_to_qp_ex(qp);
}

static void build_send(struct ibv_qp_ex *qp, uint64_t id)
{
	qp->wr_id = id;
	qp->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(qp);
	ibv_wr_set_sge(qp, mr->lkey, (uintptr_t)buffer, 8);
}

/* Two queue pairs, each the other's peer, with one receive: number 100 and 101. */
static void create_pair(struct ibv_qp_ex *pair[2], struct ibv_cq *cq)
{
	pair[0] = create(cq);
	pair[1] = create(cq);
	struct end ends[2] = { end_of(&pair[0]->qp_base, 0, mr), end_of(&pair[1]->qp_base, 0, mr) };
	for (int i = 0; i < 2; i++) {
		connect_qp(&pair[i]->qp_base, &ends[i], 0, &ends[!i]);
		post_recv(&pair[i]->qp_base, mr, 32, 8, 100 + i);
	}
}

/* Waits for a successful completion of each of these, in any order. */
static void complete(struct ibv_cq *cq, uint64_t a, uint64_t b)
{
	uint64_t first = good_wc(cq).wr_id, second = good_wc(cq).wr_id;
	if ((first != a || second != b) && (first != b || second != a))
		die("%" PRIu64 " and %" PRIu64 " completed, not %" PRIu64 " and %" PRIu64, first, second, a, b);
}

static void round_of_all(void)
{
	struct ibv_qp_ex *held[2], *other[2];

	/* Before the connection is established: one Send is posted, one is being built. */
	create_pair(held, held_cq);
	post_send(&held[0]->qp_base, IBV_WR_SEND, mr, 0, 8, NULL, 0, 1);
	for (int i = 0; i < 2; i++) {
		ibv_wr_start(held[i]);
		build_send(held[i], 2 + i);
	}
	create_pair(other, other_cq);
	ibv_wr_start(other[0]);
	build_send(other[0], 4);
	ZERO(ibv_wr_complete(other[0]));
	complete(other_cq, 4, 101);

	/* The request that was posted before is sent although the rest is aborted; the request
	 * under construction is sent when it is complete. */
	ibv_wr_abort(held[0]);
	complete(held_cq, 1, 101);
	ZERO(ibv_wr_complete(held[1]));
	complete(held_cq, 3, 100);

	/* A queue pair that is destroyed between ibv_wr_start and ibv_wr_complete. */
	ibv_wr_start(other[1]);
	build_send(other[1], 5);
	for (int i = 0; i < 2; i++) {
		ZERO(ibv_destroy_qp(&other[i]->qp_base));
		ZERO(ibv_destroy_qp(&held[i]->qp_base));
	}

	/* Also before its connection is established. */
	create_pair(held, held_cq);
	for (int i = 0; i < 2; i++)
		ibv_wr_start(held[i]);
	for (int i = 0; i < 2; i++)
		ZERO(ibv_destroy_qp(&held[i]->qp_base));
}

int main(void)
{
	context = open_device();
	pd = SOME(ibv_alloc_pd(context));
	held_cq = SOME(ibv_create_cq(context, 64, NULL, NULL, 0));
	other_cq = SOME(ibv_create_cq(context, 64, NULL, NULL, 0));
	mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	for (int i = 0; i < ROUNDS; i++)
		round_of_all();
	printf("%d rounds\n", ROUNDS);
	return 0;
}
