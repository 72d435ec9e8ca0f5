/* The limits: messages of a GiB, sixteen elements, every completion vector; draining; completion
 * events that wait for one another; and a poll that continues. */
#define _GNU_SOURCE
#include <poll.h>
#include <sys/mman.h>

#include "rc.h"

#define GIB (1u << 30)
#define BLOCK (32u << 20)

static struct ibv_pd *pd;

/* A queue pair that is its own peer. */
static struct ibv_qp *own_peer(struct ibv_cq *cq, int elements)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 64, .max_recv_wr = 64, .max_send_sge = elements, .max_recv_sge = elements },
	};
	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	struct end me = end_of(qp, 0, NULL);
	connect_qp(qp, &me, 0, &me);
	return qp;
}

/* A GiB of addresses that all map one block of memory, over and over. */
static uint8_t *wrapped(void)
{
	int fd = memfd_create("block", 0);
	if (fd < 0 || ftruncate(fd, BLOCK))
		die("a file in memory: %s", strerror(errno));
	uint8_t *base = mmap(NULL, GIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	for (size_t at = 0; at < GIB; at += BLOCK)
		if (mmap(base + at, BLOCK, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
			die("a mapping: %s", strerror(errno));
	close(fd);
	return base;
}

static void a_gibibyte(void)
{
	uint8_t *from = wrapped(), *to = wrapped();
	struct ibv_mr *source = SOME(ibv_reg_mr(pd, from, GIB, EVERY_ACCESS));
	struct ibv_mr *target = SOME(ibv_reg_mr(pd, to, GIB, EVERY_ACCESS));
	struct ibv_cq *cq = SOME(ibv_create_cq(pd->context, 64, NULL, NULL, 0));
	struct ibv_qp *qp = own_peer(cq, 1);
	struct end far = { .address = (uintptr_t)to, .rkey = target->rkey };
	enum ibv_wr_opcode opcodes[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ };
	for (int i = 0; i < 3; i++) {
		fill(opcodes[i] == IBV_WR_RDMA_READ ? to : from, BLOCK, i);
		if (opcodes[i] == IBV_WR_SEND)
			post_recv(qp, target, 0, GIB, 1);
		post_send(qp, opcodes[i], source, 0, GIB, &far, 0, 2);
		for (int left = opcodes[i] == IBV_WR_SEND ? 2 : 1; left; left--) {
			struct ibv_wc wc = good_wc(cq);
			if (wc.wr_id == 1 && wc.byte_len != GIB)
				die("%u bytes came", wc.byte_len);
		}
		verify(opcodes[i] == IBV_WR_RDMA_READ ? from : to, BLOCK, i);
	}
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dereg_mr(source));
	ZERO(ibv_dereg_mr(target));
	printf("a GiB: sent, written and read\n");
}

static void sixteen_elements(void)
{
	enum { COUNT = 16, LEN = 100 };
	static uint8_t from[COUNT][2 * LEN], to[COUNT][3 * LEN];
	struct ibv_mr *source = SOME(ibv_reg_mr(pd, from, sizeof from, EVERY_ACCESS));
	struct ibv_mr *target = SOME(ibv_reg_mr(pd, to, sizeof to, EVERY_ACCESS));
	struct ibv_cq *cq = SOME(ibv_create_cq(pd->context, 64, NULL, NULL, 0));
	struct ibv_qp *qp = own_peer(cq, COUNT);
	struct ibv_sge out[COUNT], in[COUNT];
	for (int i = 0; i < COUNT; i++) {
		fill(from[i], LEN, i);
		out[i] = (struct ibv_sge){ (uintptr_t)from[i], LEN, source->lkey };
		in[i] = (struct ibv_sge){ (uintptr_t)to[i], LEN, target->lkey };
	}
	struct ibv_recv_wr *bad_recv, recv = { .sg_list = in, .num_sge = COUNT };
	struct ibv_send_wr *bad, send = { .sg_list = out, .num_sge = COUNT, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED };
	ZERO(ibv_post_recv(qp, &recv, &bad_recv));
	ZERO(ibv_post_send(qp, &send, &bad));
	good_wc(cq), good_wc(cq);
	for (int i = 0; i < COUNT; i++)
		verify(to[i], LEN, i);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_cq(cq));
	printf("%d elements: gathered and scattered\n", COUNT);
}

/* A queue pair in error is empty when its last posted request is flushed. */
static void drain(struct ibv_mr *mr)
{
	enum { RECEIVES = 40, LAST = 1000 };
	struct ibv_cq *cq[2];
	for (int i = 0; i < 2; i++)
		cq[i] = SOME(ibv_create_cq(pd->context, 64, NULL, NULL, 0));
	struct ibv_qp_init_attr init = { .send_cq = cq[0], .recv_cq = cq[1], .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 8, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	struct end me = end_of(qp, 0, NULL);
	connect_qp(qp, &me, 0, &me);
	for (int i = 0; i < RECEIVES; i++)
		post_recv(qp, mr, 8, 8, i);
	attr.qp_state = IBV_QPS_ERR;
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	post_send(qp, IBV_WR_SEND, mr, 0, 8, NULL, 0, LAST);
	post_recv(qp, mr, 8, 8, LAST);
	for (int i = 0; i <= RECEIVES; i++) {
		struct ibv_wc wc = next_wc(cq[1]);
		if (wc.status != IBV_WC_WR_FLUSH_ERR || wc.wr_id != (i < RECEIVES ? (uint64_t)i : LAST))
			die("receive %d: %" PRIu64 ", %s", i, wc.wr_id, ibv_wc_status_str(wc.status));
	}
	struct ibv_wc wc = next_wc(cq[0]);
	if (wc.status != IBV_WC_WR_FLUSH_ERR || wc.wr_id != LAST)
		die("the last Send: %" PRIu64 ", %s", wc.wr_id, ibv_wc_status_str(wc.status));
	ZERO(ibv_destroy_qp(qp));
	for (int i = 0; i < 2; i++)
		ZERO(ibv_destroy_cq(cq[i]));
	printf("drain: the last request is flushed last\n");
}

static bool there(struct ibv_comp_channel *channel)
{
	struct pollfd wait = { .fd = channel->fd, .events = POLLIN };
	return poll(&wait, 1, 0) == 1;
}

static void take(struct ibv_comp_channel *channel, struct ibv_cq *want)
{
	struct ibv_cq *cq;
	void *cookie;
	ZERO(ibv_get_cq_event(channel, &cq, &cookie));
	if (cq != want)
		die("an event of another queue");
	ibv_ack_cq_events(cq, 1);
}

static void every_vector(struct ibv_mr *mr)
{
	for (int vector = 0; vector < pd->context->num_comp_vectors; vector++) {
		struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(pd->context));
		struct ibv_cq *cq = SOME(ibv_create_cq(pd->context, 64, NULL, channel, vector));
		struct ibv_qp *qp = own_peer(cq, 1);
		ZERO(ibv_req_notify_cq(cq, 0));
		post_recv(qp, mr, 8, 8, 1);
		post_send(qp, IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
		take(channel, cq);
		good_wc(cq), good_wc(cq);
		ZERO(ibv_destroy_qp(qp));
		ZERO(ibv_destroy_cq(cq));
		ZERO(ibv_destroy_comp_channel(channel));
	}
	printf("%d vectors: an event on each\n", pd->context->num_comp_vectors);
}

/* An event comes when there are four completions, or after the period. */
static void moderation(struct ibv_mr *mr)
{
	struct ibv_device_attr_ex device;
	ZERO(ibv_query_device_ex(pd->context, NULL, &device));
	struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(pd->context));
	struct ibv_cq *cq = SOME(ibv_create_cq(pd->context, 64, NULL, channel, 0));
	struct ibv_modify_cq_attr attr = { .attr_mask = IBV_CQ_ATTR_MODERATE, .moderate = { 4, device.cq_mod_caps.max_cq_period } };
	if (!device.cq_mod_caps.max_cq_count) {
		if (ibv_modify_cq(cq, &attr) != EOPNOTSUPP)
			die("moderation is accepted without support");
		printf("moderation: not on this device\n");
		return;
	}
	ZERO(ibv_modify_cq(cq, &attr));
	struct ibv_qp *qp = own_peer(cq, 1);
	struct end far = { .address = (uintptr_t)mr->addr, .rkey = mr->rkey };
	/* On a crowded machine the period, 65 ms, may be over before the fourth. */
	bool early = true;
	for (int round = 0; early; round++) {
		if (round == 1000)
			die("no event waits");
		early = false;
		ZERO(ibv_req_notify_cq(cq, 0));
		for (int n = 0; n < 4; n++) {
			early |= there(channel);
			post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, 8, &far, 8, 1);
			good_wc(cq);
		}
		take(channel, cq);
	}
	/* One completion has its event after the period. */
	ZERO(ibv_req_notify_cq(cq, 0));
	post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, 8, &far, 8, 1);
	take(channel, cq);
	good_wc(cq);
	attr.moderate.cq_count = attr.moderate.cq_period = 0;
	ZERO(ibv_modify_cq(cq, &attr));
	ZERO(ibv_req_notify_cq(cq, 0));
	post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, 8, &far, 8, 1);
	take(channel, cq);
	good_wc(cq);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_destroy_comp_channel(channel));
	printf("moderation: events for four, or for the time\n");
}

/* Between start and end of a poll, more requests may be posted, and complete, than the queue has
 * entries. */
static void one_session(struct ibv_mr *mr)
{
	struct ibv_cq_init_attr_ex init = { .cqe = 8 };
	struct ibv_cq_ex *cq = SOME(ibv_create_cq_ex(pd->context, &init));
	struct ibv_qp *qp = own_peer(ibv_cq_ex_to_cq(cq), 1);
	struct end far = { .address = (uintptr_t)mr->addr, .rkey = mr->rkey };
	struct ibv_poll_cq_attr attr = {};
	double start = now();
	post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, 8, &far, 8, 0);
	while (ibv_start_poll(cq, &attr))
		;
	for (uint64_t n = 0; n < 1000; n++) {
		if (cq->wr_id != n || cq->status != IBV_WC_SUCCESS)
			die("completion %" PRIu64 " of one poll: %s", cq->wr_id, ibv_wc_status_str(cq->status));
		post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, 8, &far, 8, n + 1);
		while (ibv_next_poll(cq))
			if (now() > start + 120)
				die("completion %" PRIu64 " of one poll does not come", n + 1);
	}
	ibv_end_poll(cq);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_cq(ibv_cq_ex_to_cq(cq)));
	printf("one poll: more completions than the queue has entries\n");
}

int main(void)
{
	static uint8_t buffer[64];
	pd = SOME(ibv_alloc_pd(open_device()));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	a_gibibyte();
	sixteen_elements();
	every_vector(mr);
	drain(mr);
	moderation(mr);
	one_session(mr);
	return 0;
}
