/* How each state of a queue pair handles work requests, posted by ibv_post_send and by the
 * builder (ibv_wr_start): prints a line for each state, and "kept" when inline data arrived with
 * its content at the post, although the buffers were overwritten before it could be sent. */
#include "rc.h"

#define DEPTH 16
#define LEN 200

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static uint8_t bytes[4096];

struct side {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct end end;
};

static struct side side(void)
{
	struct side side = { .cq = SOME(ibv_create_cq(context, 8 * DEPTH, NULL, NULL, 0)) };
	struct ibv_qp_init_attr_ex init = {
		.send_cq = side.cq,
		.recv_cq = side.cq,
		.qp_type = IBV_QPT_RC,
		.sq_sig_all = 1,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 2, .max_recv_sge = 1, .max_inline_data = LEN },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	side.qp = SOME(ibv_create_qp_ex(context, &init));
	side.end = end_of(side.qp, 0, mr);
	return side;
}

static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
}

static void to_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

static int try_send(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_send_wr wr = { .wr_id = id, .opcode = IBV_WR_SEND }, *bad = NULL;
	int result = ibv_post_send(qp, &wr, &bad);
	if ((bad == &wr) != (result != 0))
		die("bad_wr is %p after %d", (void *)bad, result);
	return result;
}

static int build(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_qp_ex *builder = SOME(ibv_qp_to_qp_ex(qp));
	ibv_wr_start(builder);
	builder->wr_id = id;
	builder->wr_flags = 0;
	ibv_wr_send(builder);
	return ibv_wr_complete(builder);
}

static int receive(struct ibv_qp *qp, uint64_t id)
{
	struct ibv_sge sge = { .addr = (uintptr_t)bytes + 2048, .length = LEN, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	return ibv_post_recv(qp, &wr, &bad);
}

static void posts(const char *state, struct ibv_qp *qp)
{
	int sent = try_send(qp, 1), built = build(qp, 2), received = receive(qp, 3);
	printf("%s: send %d, built %d, receive %d\n", state, sent, built, received);
}

/* Prints the available completions, as statuses with their ids. */
static void completions(const char *state, struct ibv_cq *cq, int expected)
{
	printf("%s completes:", state);
	for (int i = 0; i < expected; i++) {
		struct ibv_wc wc = next_wc(cq);
		printf(" %" PRIu64 "=%d", wc.wr_id, wc.status);
	}
	struct ibv_wc more;
	for (int i = 0; i < 1000; i++)
		if (ibv_poll_cq(cq, 1, &more))
			die("%s: one completion too many, %" PRIu64, state, more.wr_id);
	printf("\n");
}

static void reset_and_init(void)
{
	struct side a = side();
	posts("RESET", a.qp);
	to_init(a.qp);
	posts("INIT", a.qp);
	completions("INIT", a.cq, 0);
	ZERO(ibv_destroy_qp(a.qp));
	ZERO(ibv_destroy_cq(a.cq));
}

static void connected(void)
{
	struct side a = side(), b = side();
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = b.qp->qp_num, .rq_psn = b.end.psn,
		.max_dest_rd_atomic = 1, .min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = b.end.gid, .hop_limit = 1 } },
	};
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .sq_psn = a.end.psn, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
				   .max_rd_atomic = 1 };
	to_init(a.qp);
	to_init(b.qp);
	ZERO(ibv_modify_qp(a.qp, &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					       IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	posts("RTR", a.qp);
	completions("RTR", a.cq, 0);
	ZERO(ibv_modify_qp(a.qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
					       IBV_QP_MAX_QP_RD_ATOMIC));
	posts("RTS", a.qp);
	for (int id = 0; id < 4; id++)
		ZERO(receive(b.qp, 10 + id));
	connect_qp(b.qp, &b.end, 0, &a.end);
	/* All four, in order, now that there is a connection. */
	completions("RTS", a.cq, 4);
	completions("the peer", b.cq, 4);
	to_state(a.qp, IBV_QPS_ERR);
	posts("ERR", a.qp);
	completions("ERR", a.cq, 5);
	ZERO(ibv_destroy_qp(a.qp));
	ZERO(ibv_destroy_qp(b.qp));
	ZERO(ibv_destroy_cq(a.cq));
	ZERO(ibv_destroy_cq(b.cq));
}

static void closing(void)
{
	struct side a = side(), b = side();
	to_init(a.qp);
	to_init(b.qp);
	connect_qp(a.qp, &a.end, 0, &b.end);
	connect_qp(b.qp, &b.end, 0, &a.end);
	ZERO(receive(b.qp, 1));
	ZERO(try_send(a.qp, 1));
	next_wc(a.cq);
	next_wc(b.cq);
	to_state(a.qp, IBV_QPS_SQD);
	printf("SQD: send %d, built %d\n", try_send(a.qp, 1), build(a.qp, 2));
	ZERO(ibv_destroy_qp(a.qp));
	ZERO(ibv_destroy_qp(b.qp));
	ZERO(ibv_destroy_cq(a.cq));
	ZERO(ibv_destroy_cq(b.cq));
}

/* Posts at the closed gate of a queue pair without a connection, so that no data was sent
 * when the buffers change. */
static void inline_data(void)
{
	struct side a = side(), b = side();
	to_init(a.qp);
	to_init(b.qp);
	connect_qp(a.qp, &a.end, 0, &b.end);
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr attr;
	ZERO(ibv_query_qp(a.qp, &attr, IBV_QP_CAP, &init));
	/* The buffers are not registered; the device does not check a key of inline data. */
	static uint8_t data[2][LEN / 2], big[4096];
	fill(data[0], LEN / 2, 1);
	fill(data[1], LEN / 2, 2);
	struct ibv_sge sges[2] = { { (uintptr_t)data[0], LEN / 2, 0xdead }, { (uintptr_t)data[1], LEN / 2, 0xbeef } };
	struct ibv_send_wr wr = { .wr_id = 1, .sg_list = sges, .num_sge = 2, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE };
	struct ibv_send_wr *bad;
	ZERO(ibv_post_send(a.qp, &wr, &bad));
	struct ibv_qp_ex *builder = SOME(ibv_qp_to_qp_ex(a.qp));
	ibv_wr_start(builder);
	builder->wr_id = 2;
	builder->wr_flags = 0;
	ibv_wr_send(builder);
	ibv_wr_set_inline_data(builder, data[1], LEN / 2);
	/* Copied by the call that sets the data, not by the call that completes the post. */
	memset(data, 0xee, sizeof data);
	ZERO(ibv_wr_complete(builder));
	struct ibv_sge too_much = { (uintptr_t)big, init.cap.max_inline_data + 1, 0 };
	struct ibv_send_wr wrong = { .sg_list = &too_much, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_INLINE };
	printf("inline: %d, one byte more: %d\n", init.cap.max_inline_data >= LEN, ibv_post_send(a.qp, &wrong, &bad));

	memset(bytes, 0, sizeof bytes);
	post_recv(b.qp, mr, 0, LEN, 1);
	post_recv(b.qp, mr, LEN, LEN, 2);
	connect_qp(b.qp, &b.end, 0, &a.end);
	if (good_wc(b.cq).byte_len != LEN || good_wc(b.cq).byte_len != LEN / 2)
		die("messages of other lengths");
	verify(bytes, LEN / 2, 1);
	verify(bytes + LEN / 2, LEN / 2, 2);
	verify(bytes + LEN, LEN / 2, 2);
	puts("kept");
	ZERO(ibv_destroy_qp(a.qp));
	ZERO(ibv_destroy_qp(b.qp));
}

int main(void)
{
	context = open_device();
	pd = SOME(ibv_alloc_pd(context));
	mr = SOME(ibv_reg_mr(pd, bytes, sizeof bytes, EVERY_ACCESS));
	reset_and_init();
	connected();
	closing();
	inline_data();
	return 0;
}
