/* A thread destroys a queue as soon as it has polled a completion, or got an event, that a call of
 * another thread caused and that comes while this call has not returned yet. The call must not
 * touch the queue any more. So that every touch is a fault, freed memory is never mapped again.
 *
 * One processor, and the lowest priority for the thread that calls: the event preempts the call.
 * Usage: destroyed_while_posting CALL; ends after EARLY events that came during the call. */
#define _GNU_SOURCE
#include "rc.h"
#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#define EARLY 20
#define MOST_ROUNDS 20000
#define LEN 4096
#define PAGE 4096

/* The allocator: pages of their own for the sizes of queues, which are not mapped again. */
#define LEAST_OWN 200
#define MOST_OWN (1 << 16)
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

struct own {
	uint64_t mark;
	size_t len, mapped;
};
#define MARK 0x70616765206f776eu

static bool has_own_pages(size_t len)
{
	return len >= LEAST_OWN && len <= MOST_OWN;
}

static void *own_pages(size_t len)
{
	size_t mapped = PAGE + (len + PAGE - 1) / PAGE * PAGE;
	struct own *own = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (own == MAP_FAILED)
		return NULL;
	*own = (struct own){ .mark = MARK, .len = len, .mapped = mapped };
	return (char *)own + PAGE;
}

/* Memory at the start of a page that the page before it describes. The C library never returns the
 * start of a page, except for an alignment, and then the page before it is its own. */
static struct own *own_of(void *memory)
{
	if ((uintptr_t)memory % PAGE)
		return NULL;
	struct own *own = (struct own *)((char *)memory - PAGE);
	return own->mark == MARK ? own : NULL;
}

void *malloc(size_t len)
{
	return has_own_pages(len) ? own_pages(len) : __libc_malloc(len);
}

void *calloc(size_t count, size_t len)
{
	size_t total;
	bool fits = !__builtin_mul_overflow(count, len, &total);
	return fits && has_own_pages(total) ? own_pages(total) : __libc_calloc(count, len);
}

void free(void *memory)
{
	struct own *own = memory ? own_of(memory) : NULL;
	if (!own)
		__libc_free(memory);
	else if (mmap(own, own->mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0) !=
		 own)
		abort();
}

void *realloc(void *memory, size_t len)
{
	struct own *own = memory ? own_of(memory) : NULL;
	if (!own)
		return __libc_realloc(memory, len);
	void *new = malloc(len);
	if (new) {
		memcpy(new, memory, own->len < len ? own->len : len);
		free(memory);
	}
	return new;
}

void *memalign(size_t align, size_t len)
{
	return has_own_pages(len) && align <= PAGE ? own_pages(len) : __libc_memalign(align, len);
}

void *aligned_alloc(size_t align, size_t len)
{
	return memalign(align, len);
}

int posix_memalign(void **memory, size_t align, size_t len)
{
	*memory = memalign(align, len);
	return *memory ? 0 : ENOMEM;
}

/* The queues of one round. */
static struct queues {
	struct ibv_cq *cq;
	struct ibv_srq *srq;
	struct ibv_qp *qp, *peer;
	struct end end, peer_end;
} queues;

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_comp_channel *channel;
static struct ibv_cq *other_cq;

static struct ibv_qp *new_qp(struct ibv_cq *cq, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.pd = pd,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE,
	};
	struct ibv_qp *qp = SOME(ibv_create_qp_ex(context, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	return qp;
}

static void write_posted(void)
{
	post_send(queues.qp, IBV_WR_RDMA_WRITE, mr, 0, LEN / 2, &queues.peer_end, LEN / 2, 1);
}

static void write_built(void)
{
	struct ibv_qp_ex *builder = ibv_qp_to_qp_ex(queues.qp);
	ibv_wr_start(builder);
	builder->wr_id = 1;
	builder->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(builder, queues.peer_end.rkey, queues.peer_end.address + LEN / 2);
	ibv_wr_set_sge(builder, mr->lkey, (uintptr_t)mr->addr, LEN / 2);
	ZERO(ibv_wr_complete(builder));
}

static void send_from_peer(void)
{
	post_send(queues.peer, IBV_WR_SEND, mr, 0, LEN / 2, NULL, 0, 2);
}

static void receive_posted(void)
{
	post_recv(queues.qp, mr, LEN / 2, LEN / 2, 1);
}

static void shared_receive_posted(void)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr + LEN / 2, .length = LEN / 2, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 1, .sg_list = &sge, .num_sge = 1 }, *bad;
	ZERO(ibv_post_srq_recv(queues.srq, &wr, &bad));
}

/* The event of this one tells of a completion that came before. */
static void completion_awaited(void)
{
	ZERO(ibv_req_notify_cq(queues.cq, 0));
}

static void complete_one(void)
{
	receive_posted();
	send_from_peer();
	good_wc(other_cq);
}

static void nothing(void)
{
}

static const struct call {
	const char *name;
	void (*prepare)(void), (*make)(void);
	bool shares, arms;
} CALLS[] = {
	{ "ibv_post_send", nothing, write_posted, false, false },
	{ "ibv_wr_complete", nothing, write_built, false, false },
	{ "ibv_post_recv", send_from_peer, receive_posted, false, false },
	{ "ibv_post_srq_recv", send_from_peer, shared_receive_posted, true, false },
	{ "ibv_req_notify_cq", complete_one, completion_awaited, false, true },
};

static const struct call *call;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int requested;
static volatile int returned;

static void *caller(void *unused)
{
	struct sched_param none = { 0 };
	if (sched_setscheduler(0, SCHED_IDLE, &none))
		die("SCHED_IDLE: %s", strerror(errno));
	for (int round = 0; round >= 0;) {
		pthread_mutex_lock(&mutex);
		while (requested == round)
			pthread_cond_wait(&changed, &mutex);
		round = requested;
		pthread_mutex_unlock(&mutex);
		if (round > 0)
			call->make();
		returned = round;
	}
	return unused;
}

static void request(int round)
{
	pthread_mutex_lock(&mutex);
	requested = round;
	pthread_cond_signal(&changed);
	pthread_mutex_unlock(&mutex);
}

/* Returns whether the event came during the call. */
static bool played(int round)
{
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, channel, 0)), *of_event;
	struct ibv_srq *srq = NULL;
	void *unused;
	if (call->shares)
		srq = SOME(ibv_create_srq(pd, &(struct ibv_srq_init_attr){ .attr = { .max_wr = 8, .max_sge = 1 } }));
	queues = (struct queues){ .cq = cq, .srq = srq, .qp = new_qp(cq, srq), .peer = new_qp(other_cq, NULL) };
	queues.end = end_of(queues.qp, 0, mr);
	queues.peer_end = end_of(queues.peer, 0, mr);
	connect_qp(queues.qp, &queues.end, 0, &queues.peer_end);
	connect_qp(queues.peer, &queues.peer_end, 0, &queues.end);
	call->prepare();
	if (!call->arms)
		ZERO(ibv_req_notify_cq(cq, 0));
	request(round);
	ZERO(ibv_get_cq_event(channel, &of_event, &unused));
	ibv_ack_cq_events(cq, 1);
	good_wc(cq);
	bool early = returned != round;
	ZERO(ibv_destroy_qp(queues.qp));
	ZERO(ibv_destroy_qp(queues.peer));
	if (srq)
		ZERO(ibv_destroy_srq(srq));
	ZERO(ibv_destroy_cq(cq));
	while (returned != round)
		usleep(50);
	return early;
}

int main(int argc, char **argv)
{
	for (size_t i = 0; argc == 2 && i < sizeof CALLS / sizeof *CALLS; i++)
		if (!strcmp(argv[1], CALLS[i].name))
			call = &CALLS[i];
	if (!call)
		die("usage: destroyed_while_posting CALL");
	cpu_set_t all, one;
	ZERO(sched_getaffinity(0, sizeof all, &all));
	CPU_ZERO(&one);
	for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&one); cpu++)
		if (CPU_ISSET(cpu, &all))
			CPU_SET(cpu, &one);
	ZERO(sched_setaffinity(0, sizeof one, &one));

	static uint8_t bytes[LEN];
	context = open_device();
	pd = SOME(ibv_alloc_pd(context));
	mr = SOME(ibv_reg_mr(pd, bytes, LEN, EVERY_ACCESS));
	channel = SOME(ibv_create_comp_channel(context));
	other_cq = SOME(ibv_create_cq(context, 4096, NULL, NULL, 0));
	pthread_t thread;
	ZERO(pthread_create(&thread, NULL, caller, NULL));
	int early = 0, rounds = 0;
	while (early < EARLY && rounds < MOST_ROUNDS)
		early += played(++rounds);
	request(-1);
	ZERO(pthread_join(thread, NULL));
	if (early < EARLY)
		die("only %d of %d events came during the call", early, rounds);
	puts("destroyed");
	return 0;
}
