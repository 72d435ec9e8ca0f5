/* What verbs do at their edges, as adapters and the kernel do it: handles that are in use, of
 * another context or changed by the program; keys of windows, and what a peer may invalidate;
 * regions of no bytes; atomics at odd addresses; the last receive of a shared queue; and for a RoCE
 * NIC datagrams that are too long, or that are no Sends. One line for each; status 1 if one is
 * wrong. */
#include "rc.h"
#include <poll.h>

static struct ibv_context *context;
static bool roce;
static int wrong;
static uint8_t bytes[1 << 16] __attribute__((aligned(4096)));

static void expect(const char *what, long got, long want)
{
	bool good = got == want;
	wrong += !good;
	printf("%s %s: %ld", good ? "ok" : "WRONG", what, got);
	if (!good)
		printf(", not %ld", want);
	puts("");
	fflush(stdout);
}

/* A verb that fails, by its result and by errno. */
#define FAILS(what, call, want)                                                                                       \
	do {                                                                                                          \
		errno = 0;                                                                                            \
		expect(what, (call), want);                                                                           \
		expect(what ": errno", errno, want);                                                                  \
	} while (0)
/* A call that returns a pointer. */
#define NONE(call)                                                                                                    \
	({                                                                                                            \
		errno = 0;                                                                                            \
		(call) ? 0 : errno;                                                                                   \
	})
/* With a handle that the program changed. */
#define GARBLED(object, check)                                                                                        \
	do {                                                                                                          \
		(object)->handle ^= 0xdeadbeef;                                                                       \
		check;                                                                                                \
		(object)->handle ^= 0xdeadbeef;                                                                       \
	} while (0)

struct pair {
	struct ibv_pd *pd[2];
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
	struct ibv_mr *mr[2];
};

/* Two connected queue pairs, each in a domain of its own, as a server with a domain per client. */
static struct pair connected(void)
{
	struct pair pair;
	struct end end[2];
	for (int i = 0; i < 2; i++) {
		pair.pd[i] = SOME(ibv_alloc_pd(context));
		pair.cq[i] = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
		pair.qp[i] = create_qp(pair.pd[i], pair.cq[i], 8);
		struct ibv_qp_attr attr = { .qp_access_flags = EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC };
		ZERO(ibv_modify_qp(pair.qp[i], &attr, IBV_QP_ACCESS_FLAGS));
		pair.mr[i] = SOME(ibv_reg_mr(pair.pd[i], bytes, sizeof bytes,
					     EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC | IBV_ACCESS_MW_BIND));
		end[i] = end_of(pair.qp[i], 0, pair.mr[i]);
	}
	for (int i = 0; i < 2; i++)
		connect_qp(pair.qp[i], &end[i], 0, &end[!i]);
	return pair;
}

static void handles(void)
{
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = SOME(ibv_create_srq(pd, &shared));
	FAILS("ibv_dealloc_pd with a shared queue", ibv_dealloc_pd(pd), EBUSY);
	struct ibv_qp *qp = create_qp_with(pd, cq, 4, srq);
	FAILS("ibv_destroy_srq in use", ibv_destroy_srq(srq), EBUSY);
	FAILS("ibv_destroy_cq in use", ibv_destroy_cq(cq), EBUSY);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1 } };
	struct ibv_qp_init_attr with_srq = init, queried;
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_srq_attr limit;
	with_srq.srq = srq;
	GARBLED(cq, expect("ibv_create_qp(changed cq)", NONE(ibv_create_qp(pd, &init)), EINVAL));
	GARBLED(srq, expect("ibv_create_qp(changed srq)", NONE(ibv_create_qp(pd, &with_srq)), EINVAL));
	GARBLED(pd, expect("ibv_create_qp(changed pd)", NONE(ibv_create_qp(pd, &init)), EINVAL));
	GARBLED(pd, expect("ibv_create_srq(changed pd)", NONE(ibv_create_srq(pd, &shared)), EINVAL));
	GARBLED(qp, FAILS("ibv_modify_qp(changed)", ibv_modify_qp(qp, &attr, IBV_QP_STATE), EINVAL));
	GARBLED(qp, FAILS("ibv_query_qp(changed)", ibv_query_qp(qp, &attr, IBV_QP_STATE, &queried), EINVAL));
	GARBLED(qp, FAILS("ibv_destroy_qp(changed)", ibv_destroy_qp(qp), ENOENT));
	GARBLED(srq, FAILS("ibv_query_srq(changed)", ibv_query_srq(srq, &limit), EINVAL));
	ZERO(ibv_destroy_qp(qp));
	GARBLED(srq, FAILS("ibv_destroy_srq(changed)", ibv_destroy_srq(srq), ENOENT));
	ZERO(ibv_destroy_srq(srq));
	GARBLED(cq, expect("ibv_req_notify_cq(changed)", ibv_req_notify_cq(cq, 0), EINVAL));
	GARBLED(cq, FAILS("ibv_destroy_cq(changed)", ibv_destroy_cq(cq), ENOENT));

	struct ibv_context *other = open_device();
	struct ibv_cq *foreign = SOME(ibv_create_cq(other, 4, NULL, NULL, 0));
	init.send_cq = foreign;
	expect("ibv_create_qp(a cq of another context)", NONE(ibv_create_qp(pd, &init)), EINVAL);
	ZERO(ibv_destroy_cq(foreign));
	ZERO(ibv_close_device(other));
	ZERO(ibv_destroy_cq(cq));

	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, bytes, 4096, EVERY_ACCESS));
	FAILS("ibv_dealloc_pd with a region", ibv_dealloc_pd(pd), EBUSY);
	GARBLED(pd, expect("ibv_reg_mr(changed pd)", NONE(ibv_reg_mr(pd, bytes, 64, 0)), EINVAL));
	GARBLED(mr, FAILS("ibv_dereg_mr(changed)", ibv_dereg_mr(mr), ENOENT));
	ZERO(ibv_dereg_mr(mr));
	struct ibv_mw *mw = SOME(ibv_alloc_mw(pd, IBV_MW_TYPE_1));
	FAILS("ibv_dealloc_pd with a window", ibv_dealloc_pd(pd), EBUSY);
	GARBLED(pd, expect("ibv_alloc_mw(changed pd)", NONE(ibv_alloc_mw(pd, IBV_MW_TYPE_1)), EINVAL));
	GARBLED(mw, FAILS("ibv_dealloc_mw(changed)", ibv_dealloc_mw(mw), ENOENT));
	ZERO(ibv_dealloc_mw(mw));
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1 };
	ZERO(ibv_query_gid(context, 1, 0, &to.grh.dgid));
	struct ibv_ah *ah = SOME(ibv_create_ah(pd, &to));
	FAILS("ibv_dealloc_pd with an address handle", ibv_dealloc_pd(pd), EBUSY);
	GARBLED(ah, FAILS("ibv_destroy_ah(changed)", ibv_destroy_ah(ah), ENOENT));
	ZERO(ibv_destroy_ah(ah));
	GARBLED(pd, FAILS("ibv_dealloc_pd(changed)", ibv_dealloc_pd(pd), ENOENT));
	ZERO(ibv_dealloc_pd(pd));
}

static void post_bind(struct pair *pair, struct ibv_mw *mw, uint32_t rkey)
{
	struct ibv_send_wr *bad, wr = { .send_flags = IBV_SEND_SIGNALED, .opcode = IBV_WR_BIND_MW,
					.bind_mw = { mw, rkey, { pair->mr[1], (uintptr_t)bytes, 64, IBV_ACCESS_REMOTE_WRITE } } };
	ZERO(ibv_post_send(pair->qp[1], &wr, &bad));
}

static enum ibv_wc_status write_to(struct pair *pair, uint32_t rkey)
{
	struct end far = { .address = (uintptr_t)bytes, .rkey = rkey };
	post_send(pair->qp[0], IBV_WR_RDMA_WRITE, pair->mr[0], 4096, 8, &far, 0, 1);
	return next_wc(pair->cq[0]).status;
}

/* The end that sends gets its own status, the end that receives that of the receive. */
static void invalidate(const char *what, struct pair *pair, uint32_t rkey, bool refused)
{
	struct ibv_sge sge = { (uintptr_t)bytes, 8, pair->mr[0]->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV,
					.send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rkey };
	post_recv(pair->qp[1], pair->mr[1], 4096, 64, 1);
	ZERO(ibv_post_send(pair->qp[0], &wr, &bad));
	printf("a Send that invalidates %s\n", what);
	expect("... its receive", next_wc(pair->cq[1]).status, refused ? IBV_WC_REM_INV_REQ_ERR : IBV_WC_SUCCESS);
	expect("... the Send", next_wc(pair->cq[0]).status, refused ? IBV_WC_REM_ACCESS_ERR : IBV_WC_SUCCESS);
}

static enum ibv_wc_status local_inv(struct pair *pair, uint32_t rkey)
{
	struct ibv_send_wr *bad, wr = { .opcode = IBV_WR_LOCAL_INV, .send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = rkey };
	ZERO(ibv_post_send(pair->qp[1], &wr, &bad));
	return next_wc(pair->cq[1]).status;
}

static void keys(void)
{
	struct pair pair = connected();
	struct ibv_mw *two = SOME(ibv_alloc_mw(pair.pd[1], IBV_MW_TYPE_2));
	uint32_t low = (two->rkey + 1) & 0xff, key = (two->rkey & ~0xffu) | low;
	post_bind(&pair, two, 0x400 | low);
	expect("ibv_mw.rkey after the bind was posted: the new key", two->rkey == key, 1);
	expect("a bind whose key has other high bits", next_wc(pair.cq[1]).status, IBV_WC_SUCCESS);
	expect("a Write by the window's number and the key", write_to(&pair, key), IBV_WC_SUCCESS);
	invalidate("a window of type 2", &pair, key, false);
	post_bind(&pair, two, low + 1);
	expect("a bind after the invalidation", next_wc(pair.cq[1]).status, IBV_WC_SUCCESS);
	expect("a local invalidation of it", local_inv(&pair, (key & ~0xffu) | ((low + 1) & 0xff)), IBV_WC_SUCCESS);

	struct ibv_mr *region = SOME(ibv_reg_mr(pair.pd[1], bytes, 64, EVERY_ACCESS));
	invalidate("a region", &pair, region->rkey, roce);
	pair = connected();
	struct ibv_mw *one = SOME(ibv_alloc_mw(pair.pd[1], IBV_MW_TYPE_1));
	struct ibv_mw_bind by_verb = { .send_flags = IBV_SEND_SIGNALED,
				       .bind_info = { pair.mr[1], (uintptr_t)bytes, 64, IBV_ACCESS_REMOTE_WRITE } };
	ZERO(ibv_bind_mw(pair.qp[1], one, &by_verb));
	good_wc(pair.cq[1]);
	invalidate("a window of type 1", &pair, one->rkey, roce);
	pair = connected();
	region = SOME(ibv_reg_mr(pair.pd[1], bytes, 64, EVERY_ACCESS));
	expect("a local invalidation of a region", local_inv(&pair, region->rkey), roce ? IBV_WC_MW_BIND_ERR : IBV_WC_SUCCESS);
}

static void regions(void)
{
	struct pair pair = connected();
	for (int i = 0; i < 2; i++) {
		struct ibv_mr *none = ibv_reg_mr(pair.pd[1], bytes + i, 0, EVERY_ACCESS);
		expect("a region of no bytes", none != NULL, 1);
		struct end far = { .address = (uintptr_t)bytes, .rkey = none->rkey };
		post_send(pair.qp[0], IBV_WR_RDMA_WRITE, pair.mr[0], 0, 0, &far, 0, 1);
		expect("a Write of no bytes to it", next_wc(pair.cq[0]).status, IBV_WC_SUCCESS);
		if (i)
			expect("a Write of bytes to it", write_to(&pair, none->rkey), IBV_WC_REM_ACCESS_ERR);
		ZERO(ibv_dereg_mr(none));
	}
	pair = connected();
	struct ibv_sge sge = { (uintptr_t)bytes, 8, pair.mr[0]->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
					.send_flags = IBV_SEND_SIGNALED,
					.wr.atomic = { (uintptr_t)bytes + 65, 1, 0, pair.mr[1]->rkey } };
	ZERO(ibv_post_send(pair.qp[0], &wr, &bad));
	expect("an atomic at an odd address", next_wc(pair.cq[0]).status, IBV_WC_REM_INV_REQ_ERR);
	FAILS("advice on an ordinary region",
	      ibv_advise_mr(pair.pd[0], IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1), EOPNOTSUPP);
	/* As NCCL and UCX ask. */
	expect("ibv_reg_dmabuf_mr(no descriptor)", NONE(ibv_reg_dmabuf_mr(pair.pd[0], 0, 0, 0, -1, 0)), EOPNOTSUPP);
	expect("ibv_reg_dmabuf_mr(no descriptor, a page)",
	       NONE(ibv_reg_dmabuf_mr(pair.pd[0], 0, 4096, 0, -1, IBV_ACCESS_LOCAL_WRITE)), EOPNOTSUPP);
}

static int events_of(enum ibv_event_type type)
{
	struct pollfd ready = { context->async_fd, POLLIN, 0 };
	int count = 0;
	/* The events came before ibv_modify_qp returned, or come soon. */
	while (poll(&ready, 1, count ? 0 : 5000) == 1) {
		struct ibv_async_event event;
		ZERO(ibv_get_async_event(context, &event));
		count += event.event_type == type;
		ibv_ack_async_event(&event);
	}
	return count;
}

static void last_receives(void)
{
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 4, .max_sge = 1 } };
	struct ibv_srq *srq = SOME(ibv_create_srq(pd, &shared));
	for (int reached = 0; reached < 2; reached++) {
		struct ibv_qp *qp = create_qp_with(pd, cq, 4, srq);
		struct end me = end_of(qp, 0, NULL), nobody = me;
		nobody.qpn ^= 1;
		if (reached)
			connect_qp(qp, &me, 0, &nobody);
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
		ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
		expect(reached ? "LAST_WQE_REACHED from RTS without a peer" : "LAST_WQE_REACHED from INIT",
		       events_of(IBV_EVENT_QP_LAST_WQE_REACHED), 1);
		ZERO(ibv_destroy_qp(qp));
	}
}

static struct ibv_qp *of_kind(struct ibv_pd *pd, struct ibv_cq *cq, enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = type, .cap = { 8, 8, 2, 2 } };
	return SOME(ibv_create_qp(pd, &init));
}

/* Requests that a queue pair for datagrams does not have, and datagrams of each length. */
static void datagrams(void)
{
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, bytes, sizeof bytes, EVERY_ACCESS));
	struct ibv_qp *qp = of_kind(pd, cq, IBV_QPT_UD);
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = 7 };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
	attr.qp_state = IBV_QPS_RTR;
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	struct ibv_port_attr port;
	ZERO(ibv_query_port(context, 1, &port));
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .sgid_index = 3, .traffic_class = 0xb8 } };
	ZERO(ibv_query_gid(context, 1, 3, &to.grh.dgid));
	struct ibv_ah *ah = SOME(ibv_create_ah(pd, &to));
	uint32_t mtu = 128u << port.active_mtu;
	struct ibv_sge sge = { (uintptr_t)bytes + 32768, mtu, mr->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					.send_flags = IBV_SEND_SIGNALED, .wr.ud = { ah, qp->qp_num, 7 } };
	post_recv(qp, mr, 0, 16384, 1);
	ZERO(ibv_post_send(qp, &wr, &bad));
	good_wc(cq);
	good_wc(cq);
	expect("the traffic class in the GRH", bytes[21], 0xb8);
	sge.length = mtu + 1;
	ZERO(ibv_post_send(qp, &wr, &bad));
	expect("a datagram longer than the MTU", next_wc(cq).status, IBV_WC_LOC_LEN_ERR);
	enum ibv_wr_opcode opcodes[] = { IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM,
					 IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_SEND_WITH_INV };
	for (size_t i = 0; i < sizeof opcodes / sizeof *opcodes; i++) {
		attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTS };
		ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
		sge.length = 8;
		struct ibv_send_wr other = { .sg_list = &sge, .num_sge = 1, .opcode = opcodes[i], .send_flags = IBV_SEND_SIGNALED };
		printf("opcode %d on UD\n", opcodes[i]);
		expect("... is posted", ibv_post_send(qp, &other, &bad), 0);
		expect("... and fails", next_wc(cq).status, IBV_WC_LOC_QP_OP_ERR);
		ZERO(ibv_query_qp(qp, &attr, IBV_QP_STATE, &(struct ibv_qp_init_attr){ 0 }));
		expect("... which stops the send queue", attr.qp_state, IBV_QPS_SQE);
	}
}

int main(void)
{
	context = open_device();
	roce = context->device->transport_type == IBV_TRANSPORT_IB;
	handles();
	keys();
	regions();
	last_receives();
	if (roce)
		datagrams();
	return wrong != 0;
}
