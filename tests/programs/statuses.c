/* Every status that a work completion can have here, and the asynchronous events. Each error
 * ends its queue pairs, so each case has its own pair. Both are in this process, so the
 * requester's completion has the peer's result for the request, with the Terminate's first word
 * as vendor_err. */
#include "rc.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static uint8_t place[1 << 16];

struct options {
	struct ibv_cq *send_cq;
	struct ibv_srq *srq;
	int reads, rnr_retry;
};

struct pair {
	struct ibv_cq *cq[2];
	struct ibv_qp *qp[2];
	struct end end[2];
};

/* The options of the second end are in `options`, if the case is about an event; the first end
 * requests. */
static struct pair connected(struct options options)
{
	struct pair pair;
	for (int i = 0; i < 2; i++) {
		struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
						 .srq = i ? options.srq : NULL,
						 .cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2 } };
		pair.cq[i] = SOME(ibv_create_cq(context, 64, NULL, NULL, 0));
		init.recv_cq = pair.cq[i];
		init.send_cq = !i && options.send_cq ? options.send_cq : pair.cq[i];
		pair.qp[i] = SOME(ibv_create_qp(pd, &init));
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1,
					    .qp_access_flags = EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC };
		ZERO(ibv_modify_qp(pair.qp[i], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
		pair.end[i] = end_of(pair.qp[i], 0, mr);
	}
	for (int i = 0; i < 2; i++) {
		struct end *theirs = &pair.end[!i];
		struct ibv_qp_attr rtr = { .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .dest_qp_num = theirs->qpn,
					   .rq_psn = theirs->psn, .max_dest_rd_atomic = 8, .min_rnr_timer = 1,
					   .ah_attr = { .is_global = 1, .port_num = 1,
							.grh = { .dgid = theirs->gid, .hop_limit = 1 } } };
		struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .sq_psn = pair.end[i].psn, .timeout = 14, .retry_cnt = 7,
					   .rnr_retry = options.rnr_retry, .max_rd_atomic = options.reads };
		ZERO(ibv_modify_qp(pair.qp[i], &rtr, IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
		ZERO(ibv_modify_qp(pair.qp[i], &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT |
				   IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC));
	}
	return pair;
}

static struct pair usual(void)
{
	return connected((struct options){ .reads = 8, .rnr_retry = 7 });
}

static void expect(const char *what, struct ibv_wc wc, enum ibv_wc_status status, uint32_t vendor_err)
{
	if (wc.status != status || wc.vendor_err != vendor_err)
		die("%s: %s, vendor_err %#x; not %s, %#x", what, ibv_wc_status_str(wc.status), wc.vendor_err,
		    ibv_wc_status_str(status), vendor_err);
	printf("%d %s: %s, vendor_err %#x\n", wc.status, what, ibv_wc_status_str(wc.status), wc.vendor_err);
}

static void receive(struct pair *pair, size_t len, uint32_t lkey)
{
	struct ibv_sge sge = { (uintptr_t)place, len, lkey };
	struct ibv_recv_wr *bad, wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 };
	ZERO(ibv_post_recv(pair->qp[1], &wr, &bad));
}

/* The place of the data of requests. */
static uint64_t *const word = (uint64_t *)(place + 4096);

/* A request of eight bytes by the first end; returns its completion. An atomic adds one. */
static struct ibv_wc request(struct pair *pair, enum ibv_wr_opcode opcode, uint32_t lkey, uint64_t to, uint32_t rkey)
{
	struct ibv_sge sge = { (uintptr_t)word, 8, lkey };
	struct ibv_send_wr *bad, wr = { .wr_id = 2, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED };
	if (opcode == IBV_WR_SEND_WITH_INV) {
		wr.invalidate_rkey = rkey;
	} else if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = to;
		wr.wr.atomic.compare_add = 1;
		wr.wr.atomic.rkey = rkey;
	} else if (opcode != IBV_WR_SEND) {
		wr.wr.rdma.remote_addr = to;
		wr.wr.rdma.rkey = rkey;
	}
	ZERO(ibv_post_send(pair->qp[0], &wr, &bad));
	return next_wc(pair->cq[0]);
}

/* Reads and atomics whose memory for the answer is refused: the peer carries them out first, so
 * its refusal counts before ours. */
static void without_sink(uint32_t key, uint32_t none)
{
	uint64_t at = (uintptr_t)place, *target = (uint64_t *)place;
	*target = 6;
	*word = 2;
	struct pair pair = usual();
	expect("a Read into unregistered memory", request(&pair, IBV_WR_RDMA_READ, none, at, key), IBV_WC_LOC_PROT_ERR, 0);
	pair = usual();
	expect("a Read of and into unregistered memory", request(&pair, IBV_WR_RDMA_READ, none, at, none), IBV_WC_REM_ACCESS_ERR,
	       0x0100e000);
	pair = usual();
	expect("an atomic into unregistered memory", request(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, none, at, key), IBV_WC_LOC_PROT_ERR, 0);
	if (*target != 7)
		die("the peer's word is %" PRIu64, *target);
	pair = usual();
	expect("an atomic of no word into unregistered memory", request(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, none, at + 1, key),
	       IBV_WC_REM_INV_REQ_ERR, 0x0207c000);
	pair = usual();
	expect("an atomic of unregistered memory and no word", request(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, key, at + 1, none),
	       IBV_WC_REM_INV_REQ_ERR, 0x0207c000);
	if (*target != 7 || *word != 2)
		die("a refused request changed memory: %" PRIu64 ", %" PRIu64, *target, *word);
}

static void statuses(void)
{
	struct ibv_mr *local = SOME(ibv_reg_mr(pd, place, sizeof place, IBV_ACCESS_LOCAL_WRITE));
	uint32_t key = mr->lkey, none = key ^ 0x5a5a00;
	uint64_t at = (uintptr_t)place;
	struct pair pair = usual();
	receive(&pair, 64, key);
	expect("a Send", request(&pair, IBV_WR_SEND, key, 0, 0), IBV_WC_SUCCESS, 0);
	expect("its receive", next_wc(pair.cq[1]), IBV_WC_SUCCESS, 0);

	pair = usual();
	receive(&pair, 4, key);
	expect("a Send that is too long", request(&pair, IBV_WR_SEND, key, 0, 0), IBV_WC_REM_INV_REQ_ERR, 0x1205c000);
	expect("its receive", next_wc(pair.cq[1]), IBV_WC_LOC_LEN_ERR, 0);

	pair = usual();
	receive(&pair, 64, none);
	expect("a Send to a receive without memory", request(&pair, IBV_WR_SEND, key, 0, 0), IBV_WC_REM_OP_ERR, 0x1000c000);
	expect("its receive", next_wc(pair.cq[1]), IBV_WC_LOC_PROT_ERR, 0);

	pair = usual();
	expect("a Send from unregistered memory", request(&pair, IBV_WR_SEND, none, 0, 0), IBV_WC_LOC_PROT_ERR, 0);
	without_sink(key, none);
	pair = usual();
	expect("a Write to unregistered memory", request(&pair, IBV_WR_RDMA_WRITE, key, at, none), IBV_WC_REM_ACCESS_ERR, 0x1100c000);
	pair = usual();
	expect("a Write after the memory", request(&pair, IBV_WR_RDMA_WRITE, key, at + sizeof place - 7, key), IBV_WC_REM_ACCESS_ERR,
	       0x1101c000);
	pair = usual();
	expect("a Write without the right", request(&pair, IBV_WR_RDMA_WRITE, key, at, local->rkey), IBV_WC_REM_ACCESS_ERR, 0x0102c000);
	pair = usual();
	expect("a Read of unregistered memory", request(&pair, IBV_WR_RDMA_READ, key, at, none), IBV_WC_REM_ACCESS_ERR, 0x0100e000);
	pair = usual();
	expect("a Read without the right", request(&pair, IBV_WR_RDMA_READ, key, at, local->rkey), IBV_WC_REM_ACCESS_ERR, 0x0102e000);
	pair = usual();
	expect("an atomic of no word", request(&pair, IBV_WR_ATOMIC_FETCH_AND_ADD, key, at + 1, key), IBV_WC_REM_INV_REQ_ERR, 0x0207c000);
	pair = usual();
	receive(&pair, 64, key);
	expect("a Send that invalidates nothing", request(&pair, IBV_WR_SEND_WITH_INV, key, 0, none), IBV_WC_REM_ACCESS_ERR, 0x0209c000);

	pair = connected((struct options){ .reads = 0, .rnr_retry = 7 });
	expect("a Read where none may be outstanding", request(&pair, IBV_WR_RDMA_READ, key, at, key), IBV_WC_LOC_QP_OP_ERR, 0);

	pair = usual();
	struct ibv_mw *mw = SOME(ibv_alloc_mw(pd, IBV_MW_TYPE_2));
	struct ibv_send_wr *bad, wr = { .wr_id = 2, .send_flags = IBV_SEND_SIGNALED, .opcode = IBV_WR_BIND_MW,
					.bind_mw = { .mw = mw, .rkey = ibv_inc_rkey(mw->rkey),
						     .bind_info = { .mr = local, .addr = at, .length = 64,
								    .mw_access_flags = IBV_ACCESS_REMOTE_READ } } };
	ZERO(ibv_post_send(pair.qp[0], &wr, &bad));
	expect("a window of memory that may have none", next_wc(pair.cq[0]), IBV_WC_MW_BIND_ERR, 0);

	pair = usual();
	receive(&pair, 64, key);
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	ZERO(ibv_modify_qp(pair.qp[1], &error, IBV_QP_STATE));
	expect("a receive of a queue pair in error", next_wc(pair.cq[1]), IBV_WC_WR_FLUSH_ERR, 0);
	ZERO(ibv_modify_qp(pair.qp[0], &error, IBV_QP_STATE));
	expect("a Send there", request(&pair, IBV_WR_SEND, key, 0, 0), IBV_WC_WR_FLUSH_ERR, 0);

	pair = connected((struct options){ .reads = 8, .rnr_retry = 1 });
	expect("a Send without a receive", request(&pair, IBV_WR_SEND, key, 0, 0), IBV_WC_RNR_RETRY_EXC_ERR, 0x1202c000);

	/* Both ends are connected once a message has passed between them. */
	pair = usual();
	receive(&pair, 64, key);
	expect("a Send", request(&pair, IBV_WR_SEND, key, 0, 0), IBV_WC_SUCCESS, 0);
	ZERO(ibv_destroy_qp(pair.qp[1]));
	struct ibv_wc wc;
	/* Requests that are sent before the peer's end is detected are flushed or lost,
	 * depending on the timing. */
	wc = request(&pair, IBV_WR_RDMA_READ, key, at, key);
	expect("a Read from a destroyed queue pair", wc, IBV_WC_RETRY_EXC_ERR, 0);
}

static struct ibv_async_event event(enum ibv_event_type type)
{
	struct ibv_async_event event;
	ZERO(ibv_get_async_event(context, &event));
	while (event.event_type != type) {
		printf("also: %s\n", ibv_event_type_str(event.event_type));
		ibv_ack_async_event(&event);
		ZERO(ibv_get_async_event(context, &event));
	}
	return event;
}

static atomic_bool destroyed;

static void *destroy(void *qp)
{
	ZERO(ibv_destroy_qp(qp));
	destroyed = true;
	return NULL;
}

static void events(void)
{
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_srq *srq = SOME(ibv_create_srq(pd, &init));
	struct ibv_sge sge = { (uintptr_t)place, 64, mr->lkey };
	struct ibv_recv_wr *bad, wr = { .sg_list = &sge, .num_sge = 1 };
	for (int i = 0; i < 3; i++)
		ZERO(ibv_post_srq_recv(srq, &wr, &bad));
	struct ibv_srq_attr limit = { .srq_limit = 2 };
	ZERO(ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
	struct pair pair = connected((struct options){ .srq = srq, .reads = 8, .rnr_retry = 7 });
	for (int i = 0; i < 2; i++)
		expect("a Send to a shared queue", request(&pair, IBV_WR_SEND, mr->lkey, 0, 0), IBV_WC_SUCCESS, 0);
	struct ibv_async_event got = event(IBV_EVENT_SRQ_LIMIT_REACHED);
	if (got.element.srq != srq)
		die("the limit of another queue");
	ibv_ack_async_event(&got);
	printf("event: %s\n", ibv_event_type_str(got.event_type));

	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	ZERO(ibv_modify_qp(pair.qp[1], &error, IBV_QP_STATE));
	got = event(IBV_EVENT_QP_LAST_WQE_REACHED);
	if (got.element.qp != pair.qp[1])
		die("the last receive of another queue pair");
	/* The queue pair must not be destroyed before its event is acknowledged. */
	pthread_t thread;
	ZERO(pthread_create(&thread, NULL, destroy, pair.qp[1]));
	for (int i = 0; i < 10000; i++) {
		sched_yield();
		if (destroyed)
			die("a queue pair was destroyed before its event was acknowledged");
	}
	ibv_ack_async_event(&got);
	ZERO(pthread_join(thread, NULL));
	printf("event: %s\n", ibv_event_type_str(got.event_type));

	pair = usual();
	request(&pair, IBV_WR_RDMA_WRITE, mr->lkey, (uintptr_t)place, mr->lkey ^ 0x5a5a00);
	got = event(IBV_EVENT_QP_ACCESS_ERR);
	if (got.element.qp != pair.qp[1])
		die("the error of another queue pair");
	ibv_ack_async_event(&got);
	printf("event: %s\n", ibv_event_type_str(got.event_type));

	struct ibv_cq *small = SOME(ibv_create_cq(context, 1, NULL, NULL, 0));
	pair = connected((struct options){ .send_cq = small, .reads = 8, .rnr_retry = 7 });
	for (int i = 0; i < small->cqe + 1; i++)
		post_send(pair.qp[0], IBV_WR_RDMA_WRITE, mr, 0, 8, &pair.end[1], 0, i);
	/* In either order. */
	for (bool lost = false, ended = false; !lost || !ended;) {
		ZERO(ibv_get_async_event(context, &got));
		lost |= got.event_type == IBV_EVENT_CQ_ERR && got.element.cq == small;
		ended |= got.event_type == IBV_EVENT_QP_FATAL && got.element.qp == pair.qp[0];
		ibv_ack_async_event(&got);
		printf("event: %s\n", ibv_event_type_str(got.event_type));
	}
}

int main(void)
{
	context = open_device();
	pd = SOME(ibv_alloc_pd(context));
	mr = SOME(ibv_reg_mr(pd, place, sizeof place, EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC));
	statuses();
	events();
	return 0;
}
