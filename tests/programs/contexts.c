/* Two contexts of one device: on the first a thread moves bytes and checks them without a pause,
 * while the main thread opens, disturbs and closes others, one after the other: with requests in
 * flight, with errors, and in forked children that destroy inherited objects. None of this may
 * affect the first context. */
#include "rc.h"
#include <pthread.h>
#include <sys/wait.h>

#define DEPTH 16
#define LEN 20000
#define ROUNDS 24

/* A context with a queue pair that is its own peer. */
struct use {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	struct end end;
	uint8_t *bytes;
};

static struct use use(void)
{
	struct use use = { .context = open_device(), .bytes = SOME(calloc(2, LEN)) };
	use.pd = SOME(ibv_alloc_pd(use.context));
	use.cq = SOME(ibv_create_cq(use.context, 4 * DEPTH, NULL, NULL, 0));
	use.mr = SOME(ibv_reg_mr(use.pd, use.bytes, 2 * LEN, EVERY_ACCESS));
	use.qp = create_qp(use.pd, use.cq, DEPTH);
	use.end = end_of(use.qp, 0, use.mr);
	connect_qp(use.qp, &use.end, 0, &use.end);
	return use;
}

static void put_away(struct use *use)
{
	ZERO(ibv_destroy_qp(use->qp));
	ZERO(ibv_dereg_mr(use->mr));
	ZERO(ibv_destroy_cq(use->cq));
	ZERO(ibv_dealloc_pd(use->pd));
	ZERO(ibv_close_device(use->context));
	free(use->bytes);
}

/* Transfers one Write and one Send, and checks the data. */
static void move(struct use *use, uint64_t seed)
{
	fill(use->bytes, LEN, seed);
	memset(use->bytes + LEN, 0, LEN);
	post_send(use->qp, IBV_WR_RDMA_WRITE, use->mr, 0, LEN / 2, &use->end, LEN, 1);
	if (good_wc(use->cq).wr_id != 1)
		die("not the completion of the Write");
	post_recv(use->qp, use->mr, LEN + LEN / 2, LEN / 2, 2);
	post_send(use->qp, IBV_WR_SEND, use->mr, LEN / 2, LEN / 2, NULL, 0, 3);
	if (good_wc(use->cq).wr_id + good_wc(use->cq).wr_id != 5)
		die("not the completions of the Send and its receive");
	verify(use->bytes + LEN, LEN, seed);
}

static volatile bool over;
static volatile uint64_t moved;

static void *moves(void *first)
{
	while (!over)
		move(first, ++moved);
	return NULL;
}

/* Fills the queues with Writes and with receives that get no message. */
static void burden(struct use *use)
{
	for (int i = 0; i < DEPTH; i++) {
		post_recv(use->qp, use->mr, 0, LEN, i);
		post_send(use->qp, IBV_WR_RDMA_WRITE, use->mr, 0, LEN, &use->end, LEN, i);
	}
}

/* A child calls functions on inherited objects, although it cannot use them. */
static void in_a_child(struct use *inherited)
{
	pid_t child = fork();
	if (child < 0)
		die("fork: %s", strerror(errno));
	if (child == 0) {
		alarm(120);
		struct ibv_sge sge = { .addr = (uintptr_t)inherited->bytes, .length = LEN, .lkey = inherited->mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;
		ibv_post_send(inherited->qp, &wr, &bad);
		ibv_destroy_qp(inherited->qp);
		ibv_dereg_mr(inherited->mr);
		ibv_close_device(inherited->context);
		struct use own = use();
		for (int i = 0; i < 5; i++)
			move(&own, i);
		/* The child ends without destroying these objects. */
		burden(&own);
		_exit(0);
	}
	int status;
	while (waitpid(child, &status, 0) < 0 && errno == EINTR)
		;
	if (status)
		die("the child ended with %#x", status);
}

int main(void)
{
	struct use first = use();
	pthread_t mover;
	ZERO(pthread_create(&mover, NULL, moves, &first));
	for (int round = 0; round < ROUNDS; round++) {
		struct use other = use();
		uint64_t before = moved;
		move(&other, round);
		switch (round % 4) {
		case 0:
			/* Everything is destroyed while the message is on its way. */
			burden(&other);
			break;
		case 1: {
			burden(&other);
			struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
			ZERO(ibv_modify_qp(other.qp, &error, IBV_QP_STATE));
			break;
		}
		case 2: {
			/* The memory of the first context is in another domain. */
			struct end wrong = other.end;
			wrong.address = first.end.address;
			wrong.rkey = first.end.rkey;
			post_send(other.qp, IBV_WR_RDMA_WRITE, other.mr, 0, LEN / 2, &wrong, LEN, 1);
			/* The request may complete before it is refused, because the queue pair
			 * is its own peer. */
			next_wc(other.cq);
			struct ibv_qp_attr now = { .qp_state = IBV_QPS_RTS };
			while (now.qp_state != IBV_QPS_ERR)
				ZERO(ibv_query_qp(other.qp, &now, IBV_QP_STATE, &(struct ibv_qp_init_attr){}));
			break;
		}
		case 3:
			in_a_child(&other);
			move(&other, round);
			break;
		}
		while (moved < before + 2)
			usleep(1000);
		put_away(&other);
	}
	over = true;
	ZERO(pthread_join(mover, NULL));
	move(&first, 0);
	put_away(&first);
	puts("undisturbed");
	return 0;
}
