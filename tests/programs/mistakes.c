/* mistakes NAME: makes the mistake of this name, or none ("nothing", "rearm-and-poll"), with
 * a queue pair that is its own peer; for the option `strict`. Each mistake is one that programs
 * make. The exit status is 0: none of them makes the program notice. */
#define _GNU_SOURCE
#include "rc.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define DEPTH 8
#define LEN 64
#define PAGE 4096

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static struct end end;
static uint8_t *bytes;
static unsigned flags = IBV_SEND_SIGNALED;

static int send_of(uint8_t *at, uint32_t len, uint32_t lkey, uint64_t wr_id)
{
	struct ibv_sge sge = { .addr = (uintptr_t)at, .length = len, .lkey = lkey };
	struct ibv_send_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = flags }, *bad;
	return ibv_post_send(qp, &wr, &bad);
}

static void exchange(uint64_t wr_id)
{
	post_recv(qp, mr, 2 * PAGE, LEN, wr_id);
	ZERO(send_of(bytes, LEN, mr->lkey, wr_id));
}

static void complete(int count)
{
	while (count-- > 0)
		next_wc(cq);
}

static void nothing(void)
{
	for (int i = 0; i < 100; i++) {
		memset(bytes, i, LEN);
		exchange(i);
		complete(2);
		if (memcmp(bytes, bytes + 2 * PAGE, LEN))
			die("the wrong bytes arrived");
	}
}

static void wrong_rkey(void)
{
	struct end wrong = end;
	wrong.rkey ^= 1;
	post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, LEN, &wrong, 0, 7);
	complete(1);
}

static void unposted_receive(void)
{
	ZERO(send_of(bytes, LEN, mr->lkey, 1));
	usleep(50000);
	post_recv(qp, mr, 2 * PAGE, LEN, 1);
	complete(2);
}

static void reused_buffer(void)
{
	exchange(3);
	bytes[5]++;
	complete(2);
}

/* Two pages of their own, which only this process may use. */
static struct ibv_mr *own_pages(void)
{
	uint8_t *place = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	return SOME(ibv_reg_mr(pd, place, 2 * PAGE, IBV_ACCESS_LOCAL_WRITE));
}

static void free_pages(struct ibv_mr *own)
{
	void *place = own->addr;
	ZERO(ibv_dereg_mr(own));
	munmap(place, 2 * PAGE);
}

/* Looks at the place of a message, which has whole pages of its own, before the completion. */
static void premature_look(void)
{
	struct ibv_mr *own = own_pages();
	uint8_t *place = own->addr;
	memset(bytes, 'x', LEN);
	post_recv(qp, own, 0, 2 * PAGE, 9);
	ZERO(send_of(bytes, LEN, mr->lkey, 9));
	/* Long after the message arrived. */
	usleep(50000);
	if (*(volatile uint8_t *)place == 'x')
		puts("it is there before its completion");
	complete(2);
	if (*(volatile uint8_t *)place != 'x')
		die("the message is not there");
	free_pages(own);
}

__attribute__((noinline)) static void change(volatile uint8_t *byte)
{
	*byte = 1;
}

/* Writes to a page that is sent. */
static void reused_page(void)
{
	struct ibv_mr *own = own_pages();
	uint8_t *place = own->addr;
	post_recv(qp, mr, 0, 2 * PAGE, 3);
	ZERO(send_of(place, 2 * PAGE, own->lkey, 3));
	if (place[PAGE] == 1)
		die("a page that is sent may be read");
	change(place + PAGE + 1);
	complete(2);
	change(place + PAGE + 2);
	free_pages(own);
}

/* Unknown to the compiler, which therefore leaves the work to functions of libc. */
static volatile size_t page = PAGE;

/* Clears a page that is sent. */
static void cleared_page(void)
{
	struct ibv_mr *own = own_pages();
	uint8_t *place = own->addr;
	post_recv(qp, mr, 0, 2 * PAGE, 3);
	ZERO(send_of(place, 2 * PAGE, own->lkey, 3));
	memset(place + PAGE, 0, page);
	complete(2);
	free_pages(own);
}

/* Copies from the place of a message, before its completion. */
static void copied_receive(void)
{
	struct ibv_mr *own = own_pages();
	post_recv(qp, own, 0, 2 * PAGE, 9);
	ZERO(send_of(bytes, LEN, mr->lkey, 9));
	memcpy(bytes + 2 * PAGE, own->addr, page);
	complete(2);
	free_pages(own);
}

/* Looks at what an RDMA Read fetches, before the completion. */
static void premature_read(void)
{
	struct ibv_mr *own = own_pages();
	memset(bytes, 'x', 2 * PAGE);
	post_send(qp, IBV_WR_RDMA_READ, own, 0, 2 * PAGE, &end, 0, 5);
	usleep(50000);
	if (*(volatile uint8_t *)own->addr == 'x')
		puts("it is there before its completion");
	complete(1);
	for (int at = 0; at < 2 * PAGE; at++)
		if (((uint8_t *)own->addr)[at] != 'x')
			die("what was read is not there");
	free_pages(own);
}

/* Looks at a receive of a shared queue, before the completion. Both have one wr_id. */
static void shared_look(void)
{
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = DEPTH, .max_sge = 1 } };
	struct ibv_srq *srq = SOME(ibv_create_srq(pd, &shared));
	struct ibv_qp *old = qp;
	qp = create_qp_with(pd, cq, DEPTH, srq);
	struct end own_end = end_of(qp, 0, mr);
	connect_qp(qp, &own_end, 0, &own_end);
	struct ibv_mr *own[2] = { own_pages(), own_pages() };
	for (int i = 0; i < 2; i++) {
		struct ibv_sge sge = { .addr = (uintptr_t)own[i]->addr, .length = 2 * PAGE, .lkey = own[i]->lkey };
		struct ibv_recv_wr wr = { .wr_id = 6, .sg_list = &sge, .num_sge = 1 }, *bad;
		ZERO(ibv_post_srq_recv(srq, &wr, &bad));
	}
	memset(bytes, 'x', LEN);
	for (int i = 0; i < 2; i++)
		ZERO(send_of(bytes, LEN, mr->lkey, 8));
	usleep(50000);
	if (*(volatile uint8_t *)own[1]->addr == 'x')
		puts("it is there before its completion");
	for (int i = 0; i < 4; i++) {
		struct ibv_wc wc = good_wc(cq);
		if (wc.wr_id != (wc.opcode == IBV_WC_RECV ? 6 : 8))
			die("wr_id %d", (int)wc.wr_id);
	}
	for (int i = 0; i < 2; i++)
		if (*(volatile uint8_t *)own[i]->addr != 'x')
			die("the message is not there");
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_srq(srq));
	free_pages(own[0]);
	free_pages(own[1]);
	qp = old;
}

static void written_receive(void)
{
	post_recv(qp, mr, 2 * PAGE, LEN, 4);
	bytes[2 * PAGE + 1] = 1;
	ZERO(send_of(bytes, LEN, mr->lkey, 4));
	complete(2);
}

static void small_queue(void)
{
	for (int i = 0; i < DEPTH; i++)
		post_recv(qp, mr, 2 * PAGE, LEN, i);
	ZERO(send_of(bytes, LEN, mr->lkey, 1));
	complete(2);
}

static void leak(void)
{
	for (int i = 0; i < 3; i++)
		SOME(ibv_reg_mr(pd, bytes, PAGE, IBV_ACCESS_LOCAL_WRITE));
}

/* The queue pair is made by librdmacm. */
static void cm_leak(void)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct ibv_qp_init_attr init = {
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.qp_type = IBV_QPT_RC,
	};
	struct rdma_event_channel *events = SOME(rdma_create_event_channel());
	struct rdma_cm_id *id;
	ZERO(rdma_create_id(events, &id, NULL, RDMA_PS_TCP));
	ZERO(rdma_bind_addr(id, (struct sockaddr *)&address));
	ZERO(rdma_create_qp(id, NULL, &init));
}

static void none_signalled(void)
{
	flags = 0;
	for (int i = 0; i < DEPTH; i++)
		post_recv(qp, mr, 2 * PAGE, LEN, i);
	int posted = 0;
	while (!send_of(bytes, LEN, mr->lkey, posted))
		posted++;
	complete(posted < DEPTH ? posted : DEPTH);
}

static void wrong_lkey(void)
{
	post_recv(qp, mr, 2 * PAGE, LEN, 1);
	ZERO(send_of(bytes, LEN, mr->rkey ^ 1, 1));
	complete(2);
}

static void gone_lkey(void)
{
	struct ibv_mr *gone = SOME(ibv_reg_mr(pd, bytes, PAGE, 0));
	uint32_t lkey = gone->lkey;
	ZERO(ibv_dereg_mr(gone));
	post_recv(qp, mr, 2 * PAGE, LEN, 1);
	ZERO(send_of(bytes, LEN, lkey, 1));
	complete(2);
}

static void long_inline(void)
{
	flags |= IBV_SEND_INLINE;
	if (!send_of(bytes, 2 * PAGE, 0, 1))
		die("8192 bytes fit inline");
}

/* The same with the builder, which says so only at its end. */
static void built_inline(void)
{
	struct ibv_qp_init_attr_ex init = {
		.send_cq = cq,
		.recv_cq = cq,
		.pd = pd,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp *own = SOME(ibv_create_qp_ex(context, &init));
	struct ibv_qp_ex *builder = SOME(ibv_qp_to_qp_ex(own));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(own, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	struct end own_end = end_of(own, 0, mr);
	connect_qp(own, &own_end, 0, &own_end);
	ibv_wr_start(builder);
	builder->wr_id = 1;
	builder->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(builder);
	ibv_wr_set_inline_data(builder, bytes, 2 * PAGE);
	if (!ibv_wr_complete(builder))
		die("8192 bytes fit inline");
	ZERO(ibv_destroy_qp(own));
}

static void wrong_state(void)
{
	struct ibv_qp *unconnected = create_qp(pd, cq, 1), *connected = qp;
	qp = unconnected;
	if (!send_of(bytes, LEN, mr->lkey, 1))
		die("a queue pair sends in INIT");
	qp = connected;
	ZERO(ibv_destroy_qp(unconnected));
}

static void unmapped(void)
{
	void *other = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *region = SOME(ibv_reg_mr(pd, other, PAGE, IBV_ACCESS_LOCAL_WRITE));
	munmap(other, PAGE);
	ZERO(ibv_dereg_mr(region));
}

static void wrong_order(void)
{
	if (ibv_dealloc_pd(pd) != EBUSY)
		die("a domain with a queue pair is gone");
}

enum poll { NEVER, PLAINLY, LAZILY };

/* Requests an event while completions wait; polls, or not, before it takes the event. */
static void rearm(enum poll poll)
{
	struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(context));
	struct ibv_cq_init_attr_ex attr = { .cqe = 2 * DEPTH, .channel = channel };
	struct ibv_cq_ex *lazy = SOME(ibv_create_cq_ex(context, &attr));
	struct ibv_cq *slept_on = ibv_cq_ex_to_cq(lazy), *woken;
	struct ibv_qp *own = create_qp(pd, slept_on, DEPTH), *other = qp;
	struct end own_end = end_of(own, 0, mr);
	struct ibv_poll_cq_attr no_attr = { 0 };
	int left = 4;
	void *unused;
	connect_qp(own, &own_end, 0, &own_end);
	qp = own;
	exchange(1);
	/* The first completions are there before the event is requested. */
	usleep(50000);
	ZERO(ibv_req_notify_cq(slept_on, 0));
	exchange(2);
	/* The event is there before a poll. */
	usleep(50000);
	if (poll == PLAINLY)
		next_wc(slept_on);
	else if (poll == LAZILY) {
		ZERO(ibv_start_poll(lazy, &no_attr));
		ibv_end_poll(lazy);
	}
	left -= poll != NEVER;
	ZERO(ibv_get_cq_event(channel, &woken, &unused));
	ibv_ack_cq_events(woken, 1);
	while (left--)
		next_wc(slept_on);
	qp = other;
	ZERO(ibv_destroy_qp(own));
	ZERO(ibv_destroy_cq(slept_on));
	ZERO(ibv_destroy_comp_channel(channel));
}

static void missed_rearm(void)
{
	rearm(NEVER);
}

static void rearm_and_poll(void)
{
	rearm(PLAINLY);
	rearm(LAZILY);
}

/* Ends the program when its first thread has slept for two seconds: it has done all that it had to
 * do before, also on a slow machine. */
static void *leave(void *unused)
{
	char path[64], text[256];
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", getpid());
	for (int looks = 0; looks < 20; looks++) {
		FILE *file = SOME(fopen(path, "r"));
		size_t len = fread(text, 1, sizeof text - 1, file);
		fclose(file);
		text[len] = 0;
		/* The state comes after the name, which is in parentheses. */
		const char *name_end = SOME(strrchr(text, ')'));
		if (name_end[2] != 'S')
			looks = 0;
		usleep(100000);
	}
	(void)unused;
	exit(0);
}

static void no_acknowledgement(void)
{
	struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(context));
	struct ibv_cq *slept_on = SOME(ibv_create_cq(context, 2 * DEPTH, NULL, channel, 0)), *woken;
	struct ibv_qp *own = create_qp(pd, slept_on, DEPTH);
	struct end own_end = end_of(own, 0, mr);
	void *unused;
	connect_qp(own, &own_end, 0, &own_end);
	ZERO(ibv_req_notify_cq(slept_on, 0));
	struct ibv_qp *other = qp;
	qp = own;
	exchange(1);
	ZERO(ibv_get_cq_event(channel, &woken, &unused));
	for (int i = 0; i < 2; i++)
		next_wc(slept_on);
	qp = other;
	ZERO(ibv_destroy_qp(own));
	/* The next call never returns. */
	pthread_t thread;
	ZERO(pthread_create(&thread, NULL, leave, NULL));
	ZERO(ibv_destroy_cq(slept_on));
}

/* The answer of libibverbs, or the one that it gives before Linux 5.12 if an adapter is present. */
static bool kernel_is_old;

enum ibv_fork_status ibv_is_fork_initialized(void)
{
	enum ibv_fork_status (*answer)(void) = SOME(dlsym(RTLD_NEXT, "ibv_is_fork_initialized"));
	return kernel_is_old ? IBV_FORK_DISABLED : answer();
}

static void forked(void)
{
	pid_t child = fork();
	if (child == 0)
		_exit(0);
	waitpid(child, NULL, 0);
}

static void forked_on_old_kernel(void)
{
	kernel_is_old = true;
	forked();
}

static const struct mistake {
	const char *name;
	void (*make)(void);
	int entries;
	bool leaves;
} MISTAKES[] = {
	{ "nothing", nothing, 2 * DEPTH, false },
	{ "wrong-rkey", wrong_rkey, 2 * DEPTH, false },
	{ "unposted-receive", unposted_receive, 2 * DEPTH, false },
	{ "reused-buffer", reused_buffer, 2 * DEPTH, false },
	{ "premature-look", premature_look, 2 * DEPTH, false },
	{ "reused-page", reused_page, 2 * DEPTH, false },
	{ "cleared-page", cleared_page, 2 * DEPTH, false },
	{ "copied-receive", copied_receive, 2 * DEPTH, false },
	{ "premature-read", premature_read, 2 * DEPTH, false },
	{ "shared-look", shared_look, 2 * DEPTH, false },
	{ "written-receive", written_receive, 2 * DEPTH, false },
	{ "small-queue", small_queue, DEPTH, false },
	{ "leak", leak, 2 * DEPTH, true },
	{ "cm-leak", cm_leak, 2 * DEPTH, true },
	{ "none-signalled", none_signalled, 2 * DEPTH, false },
	{ "wrong-lkey", wrong_lkey, 2 * DEPTH, false },
	{ "gone-lkey", gone_lkey, 2 * DEPTH, false },
	{ "long-inline", long_inline, 2 * DEPTH, false },
	{ "built-inline", built_inline, 2 * DEPTH, false },
	{ "wrong-state", wrong_state, 2 * DEPTH, false },
	{ "unmapped", unmapped, 2 * DEPTH, false },
	{ "wrong-order", wrong_order, 2 * DEPTH, false },
	{ "rearm-and-poll", rearm_and_poll, 2 * DEPTH, false },
	{ "missed-rearm", missed_rearm, 2 * DEPTH, false },
	{ "no-acknowledgement", no_acknowledgement, 2 * DEPTH, true },
	{ "forked", forked, 2 * DEPTH, false },
	{ "forked-on-old-kernel", forked_on_old_kernel, 2 * DEPTH, false },
};

int main(int argc, char **argv)
{
	const struct mistake *mistake = NULL;
	for (size_t i = 0; argc == 2 && i < sizeof MISTAKES / sizeof *MISTAKES; i++)
		if (!strcmp(argv[1], MISTAKES[i].name))
			mistake = &MISTAKES[i];
	if (!mistake)
		die("usage: mistakes NAME");
	bytes = mmap(NULL, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	context = open_device();
	pd = SOME(ibv_alloc_pd(context));
	cq = SOME(ibv_create_cq(context, mistake->entries, NULL, NULL, 0));
	mr = SOME(ibv_reg_mr(pd, bytes, 4 * PAGE, EVERY_ACCESS));
	qp = create_qp(pd, cq, DEPTH);
	end = end_of(qp, 0, mr);
	connect_qp(qp, &end, 0, &end);
	mistake->make();
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	if (mistake->leaves)
		return 0;
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
