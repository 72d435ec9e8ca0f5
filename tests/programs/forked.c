/* The calls of a forked child on inherited objects: every call returns, with an error, whatever
 * the parent's other threads did at the fork. First those threads certainly hold the locks of a
 * completion queue and of a send queue (ibv_start_poll, ibv_wr_start); then they make
 * calls of all kinds, and the main thread forks repeatedly. Prints "answered" at its end. */
#define _GNU_SOURCE
#include "rc.h"
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#define FORKS 150
#define LEN 4096

struct all {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq_ex *polled;
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_mr *mr;
	struct ibv_mw *mw;
	struct ibv_dm *dm;
	struct ibv_qp *qp, *shared;
	struct ibv_qp_ex *builder;
	uint8_t *bytes;
};

static struct ibv_qp *builder_of(struct all *all)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = all->cq,
		.recv_cq = all->cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = all->pd,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	return SOME(ibv_create_qp_ex(all->context, &init));
}

static void to_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	ZERO(ibv_modify_qp(qp, &error, IBV_QP_STATE));
}

static struct all make(void)
{
	struct all all = { .context = open_device(), .bytes = SOME(calloc(1, LEN)) };
	all.pd = SOME(ibv_alloc_pd(all.context));
	all.polled = SOME(ibv_create_cq_ex(all.context, &(struct ibv_cq_init_attr_ex){ .cqe = 64 }));
	all.cq = SOME(ibv_create_cq(all.context, 4096, NULL, NULL, 0));
	all.srq = SOME(ibv_create_srq(all.pd, &(struct ibv_srq_init_attr){ .attr = { .max_wr = 64, .max_sge = 1 } }));
	all.mr = SOME(ibv_reg_mr(all.pd, all.bytes, LEN, EVERY_ACCESS));
	all.mw = SOME(ibv_alloc_mw(all.pd, IBV_MW_TYPE_1));
	all.dm = SOME(ibv_alloc_dm(all.context, &(struct ibv_alloc_dm_attr){ .length = 64 }));
	all.qp = builder_of(&all);
	all.builder = SOME(ibv_qp_to_qp_ex(all.qp));
	to_error(all.qp);
	/* What it posts is flushed to the extended queue. */
	struct ibv_qp_init_attr init = {
		.send_cq = ibv_cq_ex_to_cq(all.polled),
		.recv_cq = ibv_cq_ex_to_cq(all.polled),
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	all.shared = SOME(ibv_create_qp(all.pd, &init));
	to_error(all.shared);
	return all;
}

static const char *current = "nothing";

static void late(int signal)
{
	(void)signal;
	static const char text[] = "a call in a forked child does not return: ";
	if (write(2, text, sizeof text - 1) && write(2, current, strlen(current)) && write(2, "\n", 1))
		_exit(3);
	_exit(3);
}

/* In a child: the call fails because there is no device. */
#define DEAD(call)                                                                                                    \
	do {                                                                                                          \
		current = #call;                                                                                      \
		int dead_ = (call);                                                                                   \
		if (dead_ != EIO)                                                                                     \
			die("in a child, %s: %d", #call, dead_);                                                      \
	} while (0)
#define NONE(call)                                                                                                    \
	do {                                                                                                          \
		current = #call;                                                                                      \
		if (call)                                                                                             \
			die("in a child, %s succeeds", #call);                                                        \
	} while (0)
#define ANY(call)                                                                                                     \
	do {                                                                                                          \
		current = #call;                                                                                      \
		(void)(call);                                                                                         \
	} while (0)

static void try_posts(struct all *all)
{
	struct ibv_sge sge = { .addr = (uintptr_t)all->bytes, .length = 8, .lkey = all->mr->lkey };
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad_send = NULL;
	struct ibv_recv_wr receive = { .sg_list = &sge, .num_sge = 1 }, *bad_receive = NULL;
	DEAD(ibv_post_send(all->qp, &send, &bad_send));
	DEAD(ibv_post_recv(all->qp, &receive, &bad_receive));
	if (bad_send != &send || bad_receive != &receive)
		die("in a child, requests are not refused");
	bad_receive = NULL;
	DEAD(ibv_post_srq_recv(all->srq, &receive, &bad_receive));
	if (bad_receive != &receive)
		die("in a child, a request is not refused");
	DEAD(ibv_bind_mw(all->qp, all->mw, &(struct ibv_mw_bind){ .bind_info.mr = all->mr }));
	current = "ibv_wr_start";
	ibv_wr_start(all->builder);
	ibv_wr_send(all->builder);
	ibv_wr_set_sge(all->builder, sge.lkey, sge.addr, sge.length);
	ibv_wr_set_inline_data(all->builder, all->bytes, 8);
	DEAD(ibv_wr_complete(all->builder));
	ibv_wr_abort(all->builder);
}

static void try_polls(struct all *all)
{
	struct ibv_wc wc;
	current = "ibv_poll_cq";
	if (ibv_poll_cq(all->cq, 1, &wc) >= 0 || ibv_poll_cq(ibv_cq_ex_to_cq(all->polled), 1, &wc) >= 0)
		die("in a child, ibv_poll_cq works");
	DEAD(ibv_req_notify_cq(all->cq, 0));
	DEAD(ibv_req_notify_cq(ibv_cq_ex_to_cq(all->polled), 1));
	DEAD(ibv_start_poll(all->polled, &(struct ibv_poll_cq_attr){}));
	DEAD(ibv_next_poll(all->polled));
	current = "ibv_end_poll";
	ibv_end_poll(all->polled);
	DEAD(ibv_resize_cq(all->cq, 8192));
	DEAD(ibv_modify_cq(all->cq, &(struct ibv_modify_cq_attr){ .attr_mask = IBV_CQ_ATTR_MODERATE }));
}

static void try_makings(struct all *all)
{
	struct ibv_qp_init_attr init = { .send_cq = all->cq, .recv_cq = all->cq, .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	NONE(ibv_alloc_pd(all->context));
	NONE(ibv_create_cq(all->context, 8, NULL, NULL, 0));
	NONE(ibv_create_cq_ex(all->context, &(struct ibv_cq_init_attr_ex){ .cqe = 8 }));
	NONE(ibv_create_srq(all->pd, &(struct ibv_srq_init_attr){ .attr = { .max_wr = 8, .max_sge = 1 } }));
	NONE(ibv_create_qp(all->pd, &init));
	NONE(ibv_reg_mr(all->pd, all->bytes, LEN, EVERY_ACCESS));
	NONE(ibv_alloc_mw(all->pd, IBV_MW_TYPE_2));
	NONE(ibv_reg_dm_mr(all->pd, all->dm, 0, 64, IBV_ACCESS_ZERO_BASED));
	NONE(ibv_alloc_null_mr(all->pd));
	ANY(ibv_alloc_dm(all->context, &(struct ibv_alloc_dm_attr){ .length = 64 }));
	ANY(ibv_query_device(all->context, &device));
	ANY(ibv_query_port(all->context, 1, &port));
	ANY(ibv_alloc_td(all->context, &(struct ibv_td_init_attr){}));
}

static void try_endings(struct all *all)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	struct ibv_qp_init_attr init;
	struct ibv_srq_attr limit = { .srq_limit = 1 };
	struct ibv_sge sge = { .addr = (uintptr_t)all->bytes, .length = 8, .lkey = all->mr->lkey };
	DEAD(ibv_modify_qp(all->qp, &attr, IBV_QP_STATE));
	DEAD(ibv_query_qp(all->qp, &attr, IBV_QP_STATE, &init));
	DEAD(ibv_modify_srq(all->srq, &limit, IBV_SRQ_LIMIT));
	ANY(ibv_query_srq(all->srq, &limit));
	ANY(ibv_advise_mr(all->pd, IBV_ADVISE_MR_ADVICE_PREFETCH, IBV_ADVISE_MR_FLAG_FLUSH, &sge, 1));
	ANY(ibv_rereg_mr(all->mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE));
	DEAD(ibv_destroy_qp(all->qp));
	DEAD(ibv_destroy_qp(all->shared));
	DEAD(ibv_destroy_srq(all->srq));
	DEAD(ibv_dealloc_mw(all->mw));
	DEAD(ibv_dereg_mr(all->mr));
	DEAD(ibv_destroy_cq(all->cq));
	DEAD(ibv_destroy_cq(ibv_cq_ex_to_cq(all->polled)));
	ANY(ibv_free_dm(all->dm));
	ANY(ibv_dealloc_pd(all->pd));
	ANY(ibv_close_device(all->context));
}

/* At the end with a device of the child's own, if `own` is set. */
static void child_tries(struct all *all, bool own)
{
	pid_t child = fork();
	if (child < 0)
		die("fork: %s", strerror(errno));
	if (child == 0) {
		signal(SIGALRM, late);
		alarm(60);
		try_polls(all);
		try_posts(all);
		try_makings(all);
		try_endings(all);
		if (own) {
			current = "the child's own device";
			struct all new = make();
			struct ibv_wc wc;
			if (ibv_poll_cq(new.cq, 1, &wc) != 0)
				die("the child's own queue does not work");
			ZERO(ibv_destroy_qp(new.qp));
		}
		_exit(0);
	}
	int status;
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	if (status)
		die("a child ended with %#x", status);
}

/* The threads of the parent. */
static struct all all;
static volatile bool over;
static pthread_barrier_t held, forked;

static void flushed_receive(struct ibv_qp *qp)
{
	struct ibv_sge sge = { .addr = (uintptr_t)all.bytes, .length = 8, .lkey = all.mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 5, .sg_list = &sge, .num_sge = 1 }, *bad;
	ibv_post_recv(qp, &wr, &bad);
}

static void *holds_both_queues(void *unused)
{
	int found;
	flushed_receive(all.shared);
	while ((found = ibv_start_poll(all.polled, &(struct ibv_poll_cq_attr){})) == ENOENT)
		;
	ZERO(found);
	ibv_wr_start(all.builder);
	pthread_barrier_wait(&held);
	pthread_barrier_wait(&forked);
	ibv_wr_abort(all.builder);
	if (ibv_wc_read_opcode(all.polled) != IBV_WC_RECV)
		die("the parent's completion changed");
	ibv_end_poll(all.polled);
	return unused;
}

static void *polls_and_posts(void *unused)
{
	struct ibv_sge sge = { .addr = (uintptr_t)all.bytes, .length = 8, .lkey = all.mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &sge, .num_sge = 1 }, *bad;
	while (!over) {
		struct ibv_wc wc[4];
		flushed_receive(all.qp);
		ibv_poll_cq(all.cq, 4, wc);
		ibv_post_srq_recv(all.srq, &wr, &bad);
		ibv_req_notify_cq(all.cq, 0);
		ibv_wr_start(all.builder);
		ibv_wr_abort(all.builder);
	}
	return unused;
}

static void *makes_and_destroys(void *unused)
{
	while (!over) {
		struct ibv_qp *qp = builder_of(&all);
		struct ibv_mr *mr = SOME(ibv_reg_mr(all.pd, all.bytes, LEN, EVERY_ACCESS));
		struct ibv_cq *cq = SOME(ibv_create_cq(all.context, 8, NULL, NULL, 0));
		struct ibv_dm *dm = SOME(ibv_alloc_dm(all.context, &(struct ibv_alloc_dm_attr){ .length = 64 }));
		ZERO(ibv_resize_cq(cq, 64));
		to_error(qp);
		ZERO(ibv_free_dm(dm));
		ZERO(ibv_destroy_qp(qp));
		ZERO(ibv_dereg_mr(mr));
		ZERO(ibv_destroy_cq(cq));
	}
	return unused;
}

static void *looks_for_devices(void *unused)
{
	while (!over)
		ZERO(ibv_close_device(open_device()));
	return unused;
}

int main(void)
{
	pthread_t threads[4];
	all = make();
	ZERO(pthread_barrier_init(&held, NULL, 2));
	ZERO(pthread_barrier_init(&forked, NULL, 2));
	ZERO(pthread_create(&threads[0], NULL, holds_both_queues, NULL));
	pthread_barrier_wait(&held);
	child_tries(&all, true);
	pthread_barrier_wait(&forked);
	ZERO(pthread_join(threads[0], NULL));

	void *(*const bodies[])(void *) = { polls_and_posts, polls_and_posts, makes_and_destroys, looks_for_devices };
	for (int i = 0; i < 4; i++)
		ZERO(pthread_create(&threads[i], NULL, bodies[i], NULL));
	for (int i = 0; i < FORKS; i++)
		child_tries(&all, false);
	over = true;
	for (int i = 0; i < 4; i++)
		ZERO(pthread_join(threads[i], NULL));
	puts("answered");
	return 0;
}
