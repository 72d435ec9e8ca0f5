/* A program whose peer is a test with a raw TCP connection. It executes the lines of its standard
 * input, and answers each with one line that begins with "= ". Numbers are hexadecimal; a queue
 * pair, REGION and MR are given by their index in the order of creation or by name.
 *
 *   qp DEPTH ACCESS                       makes a queue pair with its own completion queue: qp,
 *                                         qpn, psn
 *   connect QP GID QPN PSN IRD ORD RNR    INIT to RTS; RNR: rnr_retry of both directions
 *   recv QP ID OFFSET LEN                 a receive into the inbox
 *   post QP OPCODE ID MR ADDRESS LEN FAR-ADDRESS RKEY FLAGS
 *                                         ADDRESS is an offset within the region's STag
 *   wait QP                               the next completion: status, opcode, len, id, flags,
 *                                         more (the invalidated STag, or the immediate data)
 *   poll QP                               the next completion, as for wait; "none" when there is
 *                                         none
 *   destroy QP                            destroys the queue pair and its completion queue
 *   state QP                              by ibv_query_qp
 *   event                                 the next asynchronous event: kind, qp
 *   quiet                                 whether no asynchronous event is pending
 *   dump REGION OFFSET LEN                bytes of the region
 *   fill REGION SEED
 *   dereg MR
 *   healthy                               a hundred exchanges between two other queue pairs, over
 *                                         TCP
 *   fork                                  makes three children that hold no descriptors and stay
 *                                         alive: by fork, fork and exec, system
 *   quit                                  destroys all objects
 */
#include "rc.h"
#include <poll.h>
#include <sys/mman.h>

#define PAGE 4096
#define LARGE (16 << 20)
#define MOST 2048

static struct ibv_context *context;
static struct ibv_pd *pd, *other_pd;
static union ibv_gid gid;
static struct {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
} qps[MOST];
static unsigned qp_count;
static struct ibv_qp *healthy[2];
static struct ibv_cq *healthy_cq[2];
static struct ibv_mr *healthy_mr;
static uint8_t healthy_bytes[256];

/* The buffer that peers may write to has a page before and a page after it that no peer may
 * access. */
static uint8_t *arena, *inbox, *large;
enum { ARENA = 3 * PAGE, INBOX = 4 << 20 };

static const struct region {
	const char *name;
	uint8_t **bytes;
	size_t len;
} regions[] = { { "arena", &arena, ARENA }, { "inbox", &inbox, INBOX }, { "large", &large, LARGE } };

static struct named_mr {
	const char *name;
	struct ibv_mr *mr;
} mrs[16];

static void answer(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void answer(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fputs("= ", stdout);
	vprintf(format, args);
	putchar('\n');
	fflush(stdout);
	va_end(args);
}

static uint8_t *map(size_t len)
{
	uint8_t *bytes = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (bytes == MAP_FAILED)
		die("no memory");
	return bytes;
}

static void add_mr(const char *name, struct ibv_pd *in, void *bytes, size_t len, uint64_t iova, int access)
{
	struct named_mr *at = mrs;
	while (at->name)
		at++;
	*at = (struct named_mr){ name, SOME(ibv_reg_mr_iova(in, bytes, len, iova, access)) };
	printf(" %s=%" PRIx32, name, at->mr->rkey);
}

static struct named_mr *mr_named(const char *name)
{
	for (struct named_mr *at = mrs; at->name; at++)
		if (!strcmp(at->name, name))
			return at;
	die("no MR %s", name);
}

static const struct region *region_named(const char *name)
{
	for (size_t i = 0; i < sizeof regions / sizeof *regions; i++)
		if (!strcmp(regions[i].name, name))
			return &regions[i];
	die("no region %s", name);
}

static void introduce(void)
{
	const int reader = IBV_ACCESS_REMOTE_READ, writer = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	arena = map(ARENA), inbox = map(INBOX), large = map(LARGE);
	fill(arena, ARENA, 3);
	fill(large, LARGE, 4);
	uint8_t *buffer = arena + PAGE;
	uint64_t at = (uintptr_t)buffer;
	printf("= gid=");
	for (int i = 0; i < 16; i++)
		printf("%02x", gid.raw[i]);
	printf(" arena=%" PRIx64 " buffer=%" PRIx64 " inbox=%" PRIx64 " large=%" PRIx64, (uint64_t)(uintptr_t)arena, at,
	       (uint64_t)(uintptr_t)inbox, (uint64_t)(uintptr_t)large);
	add_mr("all", pd, buffer, PAGE, at, EVERY_ACCESS);
	add_mr("read", pd, buffer, PAGE, at, reader);
	add_mr("write", pd, buffer, PAGE, at, writer);
	add_mr("local", pd, buffer, PAGE, at, IBV_ACCESS_LOCAL_WRITE);
	add_mr("foreign", other_pd, buffer, PAGE, at, EVERY_ACCESS);
	/* The STag of this region counts from 0. */
	add_mr("zero", pd, buffer, PAGE, 0, EVERY_ACCESS);
	add_mr("in", pd, inbox, INBOX, (uintptr_t)inbox, IBV_ACCESS_LOCAL_WRITE);
	add_mr("big", pd, large, LARGE, (uintptr_t)large, EVERY_ACCESS);
	putchar('\n');
	fflush(stdout);
}

static struct ibv_qp *qp_in_init(struct ibv_cq *cq, int depth, int access)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 2, .max_recv_sge = 2 },
	};
	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = access };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	return qp;
}

static uint32_t psn_of(struct ibv_qp *qp)
{
	return (qp->qp_num * 7 + 1) & 0xffffff;
}

static void to_rts(struct ibv_qp *qp, const union ibv_gid *dgid, uint32_t qpn, uint32_t psn, int ird, int ord, int rnr)
{
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = qpn,
		.rq_psn = psn,
		.max_dest_rd_atomic = ird,
		.min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = *dgid, .hop_limit = 1 } },
	};
	ZERO(ibv_modify_qp(qp, &rtr,
			   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER));
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = psn_of(qp),
		.timeout = 18,
		.retry_cnt = 7,
		.rnr_retry = rnr,
		.max_rd_atomic = ord,
	};
	ZERO(ibv_modify_qp(qp, &rts,
			   IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				   IBV_QP_MAX_QP_RD_ATOMIC));
}

static void make_healthy(void)
{
	for (int i = 0; i < 2; i++) {
		healthy_cq[i] = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
		healthy[i] = qp_in_init(healthy_cq[i], 8, 0);
	}
	healthy_mr = SOME(ibv_reg_mr(pd, healthy_bytes, sizeof healthy_bytes, IBV_ACCESS_LOCAL_WRITE));
	for (int i = 0; i < 2; i++)
		to_rts(healthy[i], &gid, healthy[!i]->qp_num, psn_of(healthy[!i]), 1, 1, 7);
}

/* Exchanges messages between two queue pairs, a hundred times. */
static void be_healthy(void)
{
	for (int i = 0; i < 200; i++) {
		int from = i & 1, to = !from;
		memset(healthy_bytes, i, 64);
		post_recv(healthy[to], healthy_mr, 128, 64, 1);
		post_send(healthy[from], IBV_WR_SEND, healthy_mr, 0, 64, NULL, 0, 2);
		good_wc(healthy_cq[from]);
		good_wc(healthy_cq[to]);
		if (memcmp(healthy_bytes, healthy_bytes + 128, 64))
			die("the healthy queue pairs lost message %d", i);
	}
	answer("healthy");
}

static void show(const struct ibv_wc *wc)
{
	uint32_t more = wc->wc_flags & IBV_WC_WITH_INV ? wc->invalidated_rkey : ntohl(wc->imm_data);
	answer("status=%x opcode=%x len=%x id=%" PRIx64 " flags=%x more=%x", wc->status, wc->opcode, wc->byte_len, wc->wr_id,
	       wc->wc_flags, more);
}

static void next_event(void)
{
	struct ibv_async_event event;
	ZERO(ibv_get_async_event(context, &event));
	unsigned qp = 0;
	while (qp < qp_count && qps[qp].qp != event.element.qp)
		qp++;
	answer("kind=%x qp=%x", event.event_type, qp);
	ibv_ack_async_event(&event);
}

static bool event_waits(void)
{
	struct pollfd fd = { .fd = context->async_fd, .events = POLLIN };
	return poll(&fd, 1, 0) == 1;
}

/* Waits for a completion without keeping the processor from others. */
static struct ibv_wc patient_wc(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int n;
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		usleep(100);
	if (n < 0)
		die("ibv_poll_cq: %d", n);
	return wc;
}

static void make_children(void)
{
	pid_t forked = fork();
	if (forked == 0) {
		alarm(300);
		for (;;)
			pause();
	}
	pid_t exec = fork();
	if (exec == 0) {
		execlp("sleep", "sleep", "300", NULL);
		_exit(1);
	}
	/* The pid of sleep; the shell has ended. */
	FILE *out = popen("sleep 300 >/dev/null & echo $!", "r");
	int apart = 0;
	if (forked < 0 || exec < 0 || !out || fscanf(out, "%d", &apart) != 1)
		die("no children");
	pclose(out);
	answer("forked=%x exec=%x apart=%x", forked, exec, apart);
}

static void dump(const uint8_t *bytes, size_t len)
{
	fputs("= ", stdout);
	for (size_t i = 0; i < len; i++)
		printf("%02x", bytes[i]);
	putchar('\n');
	fflush(stdout);
}

static void post(char **word)
{
	struct ibv_sge sge = { .addr = strtoull(word[4], NULL, 16), .length = strtoul(word[5], NULL, 16) };
	/* A number is an lkey that may be invalid. */
	sge.lkey = word[3][0] == '#' ? strtoul(word[3] + 1, NULL, 16) : mr_named(word[3])->mr->lkey;
	struct ibv_send_wr wr = {
		.wr_id = strtoull(word[2], NULL, 16),
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = strtoul(word[1], NULL, 16),
		.send_flags = strtoul(word[8], NULL, 16),
		.wr.rdma = { .remote_addr = strtoull(word[6], NULL, 16), .rkey = strtoul(word[7], NULL, 16) },
	};
	struct ibv_send_wr *bad;
	answer("errno=%x", ibv_post_send(qps[strtoul(word[0], NULL, 16)].qp, &wr, &bad));
}

static void leave(void)
{
	struct ibv_async_event event;
	while (event_waits() && !ibv_get_async_event(context, &event))
		ibv_ack_async_event(&event);
	for (unsigned i = 0; i < qp_count; i++) {
		if (!qps[i].qp)
			continue;
		ZERO(ibv_destroy_qp(qps[i].qp));
		ZERO(ibv_destroy_cq(qps[i].cq));
	}
	for (int i = 0; i < 2; i++) {
		ZERO(ibv_destroy_qp(healthy[i]));
		ZERO(ibv_destroy_cq(healthy_cq[i]));
	}
	ZERO(ibv_dereg_mr(healthy_mr));
	for (struct named_mr *at = mrs; at->name; at++)
		if (at->mr)
			ZERO(ibv_dereg_mr(at->mr));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_dealloc_pd(other_pd));
	ZERO(ibv_close_device(context));
	answer("left in good order");
}

static bool execute(char **word)
{
	const char *order = word[0];
	uint64_t number[10];
	for (int i = 1; i < 10; i++)
		number[i] = word[i] ? strtoull(word[i], NULL, 16) : 0;
	struct ibv_qp *qp = number[1] < qp_count ? qps[number[1]].qp : NULL;
	struct ibv_cq *cq = number[1] < qp_count ? qps[number[1]].cq : NULL;
	struct ibv_wc wc;
	int n;

	if (!strcmp(order, "qp")) {
		if (qp_count == MOST)
			die("too many queue pairs");
		qps[qp_count].cq = SOME(ibv_create_cq(context, 4 * number[1], NULL, NULL, 0));
		qps[qp_count].qp = qp_in_init(qps[qp_count].cq, number[1], number[2]);
		answer("qp=%x qpn=%x psn=%x", qp_count, qps[qp_count].qp->qp_num, psn_of(qps[qp_count].qp));
		qp_count++;
	} else if (!strcmp(order, "connect")) {
		union ibv_gid dgid;
		for (int i = 0; i < 16; i++)
			sscanf(word[2] + 2 * i, "%2hhx", &dgid.raw[i]);
		to_rts(qp, &dgid, number[3], number[4], number[5], number[6], number[7]);
		answer("done");
	} else if (!strcmp(order, "recv")) {
		post_recv(qp, mr_named("in")->mr, number[3], number[4], number[2]);
		answer("done");
	} else if (!strcmp(order, "post")) {
		post(word + 1);
	} else if (!strcmp(order, "wait")) {
		wc = patient_wc(cq);
		show(&wc);
	} else if (!strcmp(order, "poll")) {
		n = ibv_poll_cq(cq, 1, &wc);
		if (n < 0)
			die("ibv_poll_cq: %d", n);
		if (n)
			show(&wc);
		else
			answer("none");
	} else if (!strcmp(order, "destroy")) {
		ZERO(ibv_destroy_qp(qp));
		ZERO(ibv_destroy_cq(cq));
		qps[number[1]].qp = NULL;
		answer("done");
	} else if (!strcmp(order, "state")) {
		struct ibv_qp_attr attr;
		struct ibv_qp_init_attr init;
		ZERO(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
		answer("state=%x", attr.qp_state);
	} else if (!strcmp(order, "event")) {
		next_event();
	} else if (!strcmp(order, "quiet")) {
		answer("quiet=%x", !event_waits());
	} else if (!strcmp(order, "dump")) {
		const struct region *region = region_named(word[1]);
		if (number[2] > region->len || number[3] > region->len - number[2])
			die("unknown range of %s", word[1]);
		dump(*region->bytes + number[2], number[3]);
	} else if (!strcmp(order, "fill")) {
		const struct region *region = region_named(word[1]);
		fill(*region->bytes, region->len, number[2]);
		answer("done");
	} else if (!strcmp(order, "dereg")) {
		struct named_mr *named = mr_named(word[1]);
		ZERO(ibv_dereg_mr(named->mr));
		named->mr = NULL;
		answer("done");
	} else if (!strcmp(order, "healthy")) {
		be_healthy();
	} else if (!strcmp(order, "fork")) {
		make_children();
	} else if (!strcmp(order, "quit")) {
		return false;
	} else {
		die("unknown command: %s", order);
	}
	return true;
}

int main(void)
{
	context = open_device();
	pd = SOME(ibv_alloc_pd(context)), other_pd = SOME(ibv_alloc_pd(context));
	ZERO(ibv_query_gid(context, 1, 0, &gid));
	introduce();
	make_healthy();

	read_commands(execute);
	leave();
	return 0;
}
