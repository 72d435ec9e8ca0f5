/* Registered memory that is unmapped, protected, or in a file that is truncated. Each access of
 * the device then is an error of the request, at the requester or at the target, and nothing else:
 * the process stays alive, and its other connection continues.
 *
 *   unmapped near     both ends in this process
 *   unmapped far      the target is another process
 *   unmapped twice    two requests fail on the same region, whose key is printed
 */
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "rc.h"

#define PAGE 4096
#define MOST (1 << 20)
#define RIGHTS (EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC)
/* Far from the kernel's other mappings: no other mapping is placed where memory was unmapped. */
#define PLACE ((uint8_t *)0x200000000000)

enum way { UNMAP, HOLE, NO_ACCESS, READ_ONLY, TRUNCATE, WAYS };
static const char *const way_names[] = { "unmapped", "a hole", "no access", "read-only", "truncated" };

enum operation { SEND, WRITE, READ, ATOMIC, OPERATIONS };
static const char *const operation_names[] = { "Send", "Write", "Read", "atomic" };
static const enum ibv_wr_opcode opcodes[] = { IBV_WR_SEND, IBV_WR_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD };

static struct ibv_context *context;
static struct ibv_pd *pd;

/* Memory at a fixed address. */
struct stage {
	uint8_t *bytes;
	size_t len;
	int file;
	struct ibv_mr *mr;
};

static struct stage stage_at(uint8_t *place, size_t len)
{
	struct stage stage = { .bytes = place, .len = (len + PAGE - 1) / PAGE * PAGE, .file = memfd_create("stage", MFD_CLOEXEC) };
	if (stage.file < 0)
		die("memfd_create: %s", strerror(errno));
	ZERO(ftruncate(stage.file, stage.len));
	if (mmap(place, stage.len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, stage.file, 0) != place)
		die("mmap: %s", strerror(errno));
	memset(place, 1, stage.len);
	stage.mr = SOME(ibv_reg_mr(pd, place, stage.len, RIGHTS));
	return stage;
}

static void take_away(struct stage *stage, enum way way)
{
	size_t last = stage->len - PAGE;
	switch (way) {
	case UNMAP:
		ZERO(munmap(stage->bytes, stage->len));
		break;
	case HOLE:
		ZERO(munmap(stage->bytes + last, PAGE));
		break;
	case NO_ACCESS:
		ZERO(mprotect(stage->bytes, stage->len, PROT_NONE));
		break;
	case READ_ONLY:
		ZERO(mprotect(stage->bytes, stage->len, PROT_READ));
		break;
	case TRUNCATE:
	default:
		ZERO(ftruncate(stage->file, last));
	}
}

static void strike(struct stage *stage)
{
	ZERO(ibv_dereg_mr(stage->mr));
	munmap(stage->bytes, stage->len);
	close(stage->file);
}

/* One end of a connection. */
struct line {
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct end end;
};

static struct line line_with(struct ibv_mr *mr)
{
	struct line line = { .cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0)) };
	line.qp = create_qp(pd, line.cq, 8);
	struct ibv_qp_attr attr = { .qp_access_flags = RIGHTS };
	ZERO(ibv_modify_qp(line.qp, &attr, IBV_QP_ACCESS_FLAGS));
	line.end = end_of(line.qp, 0, mr);
	return line;
}

static void hang_up(struct line *line)
{
	ZERO(ibv_destroy_qp(line->qp));
	ZERO(ibv_destroy_cq(line->cq));
}

static void post(struct line *line, enum operation operation, struct ibv_mr *mr, size_t len, const struct end *far)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr, .length = operation == ATOMIC ? 8 : len, .lkey = mr->lkey };
	if (operation == ATOMIC)
		/* The last word, which every way of removal affects. */
		sge.addr += mr->length - 8;
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcodes[operation], .send_flags = IBV_SEND_SIGNALED };
	if (operation == ATOMIC) {
		wr.wr.atomic.remote_addr = far->address + mr->length - 8;
		wr.wr.atomic.rkey = far->rkey;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = far->address;
		wr.wr.rdma.rkey = far->rkey;
	}
	ZERO(ibv_post_send(line->qp, &wr, &bad));
}

static void expect(const char *where, enum operation operation, enum way way, size_t len, enum ibv_wc_status got,
		   enum ibv_wc_status want)
{
	if (got != want)
		die("%s of %zu bytes, memory of the %s %s: %s, not %s", operation_names[operation], len, where, way_names[way],
		    ibv_wc_status_str(got), ibv_wc_status_str(want));
}

static void in_error(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	do
		ZERO(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	while (attr.qp_state != IBV_QPS_ERR);
}

/* The next asynchronous event, which must be for `qp`. */
static enum ibv_event_type event_of(struct ibv_qp *qp)
{
	struct ibv_async_event event;
	ZERO(ibv_get_async_event(context, &event));
	if (event.element.qp != qp)
		die("%s is for another object", ibv_event_type_str(event.event_type));
	enum ibv_event_type type = event.event_type;
	ibv_ack_async_event(&event);
	return type;
}

/* A connection that is never disturbed. */
static struct {
	struct line line;
	struct stage stage;
	struct end far;
} steady;

static void steady_goes_on(void)
{
	static uint8_t round;
	uint8_t *back = steady.stage.bytes + 2 * PAGE;
	memset(steady.stage.bytes, ++round, PAGE);
	post_send(steady.line.qp, IBV_WR_RDMA_WRITE, steady.stage.mr, 0, PAGE, &steady.far, PAGE, 1);
	good_wc(steady.line.cq);
	memset(back, 0, PAGE);
	post_send(steady.line.qp, IBV_WR_RDMA_READ, steady.stage.mr, 2 * PAGE, PAGE, &steady.far, PAGE, 2);
	good_wc(steady.line.cq);
	if (back[0] != round || memcmp(back, back + 1, PAGE - 1))
		die("other bytes arrived on the steady connection");
}

/* Whether the removal affects the device: memory that the device only reads may be read-only. */
static bool matters(enum operation operation, enum way way, bool target)
{
	bool written = operation == ATOMIC || (operation == READ) != target;
	return way != READ_ONLY || written;
}

/* The status of the requester's completion when memory of the target, or of the requester, is no
 * longer accessible. */
static enum ibv_wc_status status_for(enum operation operation, bool target)
{
	if (!target)
		return IBV_WC_LOC_PROT_ERR;
	return operation == SEND ? IBV_WC_REM_OP_ERR : IBV_WC_REM_ACCESS_ERR;
}

static void near_case(enum operation operation, enum way way, size_t len, bool target)
{
	struct stage stage[2] = { stage_at(PLACE, len), stage_at(PLACE + 2 * MOST, len) };
	struct line line[2] = { line_with(stage[0].mr), line_with(stage[1].mr) };
	for (int i = 0; i < 2; i++)
		connect_qp(line[i].qp, &line[i].end, 0, &line[!i].end);
	if (operation == SEND)
		post_recv(line[1].qp, stage[1].mr, 0, stage[1].len, 7);
	take_away(&stage[target], way);
	post(&line[0], operation, stage[0].mr, len, &line[1].end);
	enum ibv_wc_status status = next_wc(line[0].cq).status;
	expect(target ? "target" : "requester", operation, way, len, status, status_for(operation, target));
	if (operation == SEND) {
		status = next_wc(line[1].cq).status;
		expect("receiver", operation, way, len, status, target ? IBV_WC_LOC_PROT_ERR : IBV_WC_WR_FLUSH_ERR);
	}
	for (int i = 0; i < 2; i++)
		in_error(line[i].qp);
	steady_goes_on();
	for (int i = 0; i < 2; i++) {
		hang_up(&line[i]);
		strike(&stage[i]);
	}
}

static const size_t sizes[] = { PAGE, 2 * PAGE, 64 << 10, MOST };
#define SIZES (sizeof sizes / sizeof *sizes)

static void near(void)
{
	int cases = 0;
	for (int operation = 0; operation < OPERATIONS; operation++)
		for (int way = 0; way < WAYS; way++)
			for (unsigned n = 0; n < SIZES; n++)
				for (int target = 0; target < 2; target++)
					if (matters(operation, way, target)) {
						near_case(operation, way, sizes[n], target);
						cases++;
					}
	/* Below the size that is gathered in place. */
	for (int target = 0; target < 2; target++)
		for (int operation = 0; operation < ATOMIC; operation++)
			near_case(operation, NO_ACCESS, 64, target), near_case(operation, UNMAP, 1500, target), cases += 2;
	printf("near: %d cases\n", cases);
}

/* The target's end of a case, in another process. */
static void far_target(int sock)
{
	struct end theirs;
	struct {
		enum operation operation;
		enum way way;
		size_t len;
	} order;
	while (sock_read(sock, &order, sizeof order)) {
		struct stage stage = stage_at(PLACE, order.len);
		struct line line = line_with(stage.mr);
		swap(sock, &line.end, &theirs, sizeof theirs);
		connect_qp(line.qp, &line.end, 0, &theirs);
		if (order.operation == SEND)
			post_recv(line.qp, stage.mr, 0, stage.len, 7);
		take_away(&stage, order.way);
		barrier(sock);
		if (order.operation == SEND)
			expect("target", SEND, order.way, order.len, next_wc(line.cq).status, IBV_WC_LOC_PROT_ERR);
		enum ibv_event_type type = event_of(line.qp);
		if (type != IBV_EVENT_QP_FATAL && type != IBV_EVENT_QP_ACCESS_ERR && type != IBV_EVENT_QP_REQ_ERR)
			die("the target's event is %s", ibv_event_type_str(type));
		in_error(line.qp);
		steady_goes_on();
		barrier(sock);
		hang_up(&line);
		strike(&stage);
	}
}

/* When the peer refuses data that TCP has taken, the error is in the completion of a later
 * request. */
static enum ibv_wc_status first_error(struct line *line, struct ibv_mr *mr, const struct end *far)
{
	enum ibv_wc_status status;
	while ((status = next_wc(line->cq).status) == IBV_WC_SUCCESS)
		post_send(line->qp, IBV_WR_RDMA_WRITE, mr, 0, 0, far, 0, 9);
	return status;
}

static void far_requester(int sock)
{
	int cases = 0;
	for (int operation = 0; operation < OPERATIONS; operation++)
		for (int way = 0; way < WAYS; way++)
			for (unsigned n = 0; n < SIZES; n++) {
				struct {
					enum operation operation;
					enum way way;
					size_t len;
				} order = { operation, way, sizes[n] };
				if (!matters(operation, way, true))
					continue;
				struct end theirs;
				sock_write(sock, &order, sizeof order);
				struct stage stage = stage_at(PLACE, order.len);
				struct line line = line_with(stage.mr);
				swap(sock, &line.end, &theirs, sizeof theirs);
				connect_qp(line.qp, &line.end, 0, &theirs);
				barrier(sock);
				post(&line, operation, stage.mr, order.len, &theirs);
				expect("target", operation, way, order.len, first_error(&line, stage.mr, &theirs), status_for(operation, true));
				steady_goes_on();
				barrier(sock);
				hang_up(&line);
				strike(&stage);
				cases++;
			}
	printf("far: %d cases\n", cases);
}

static void prepare_steady(int sock)
{
	steady.stage = stage_at(PLACE + 8 * MOST, 3 * PAGE);
	steady.line = line_with(steady.stage.mr);
	swap(sock, &steady.line.end, &steady.far, sizeof steady.far);
	connect_qp(steady.line.qp, &steady.line.end, 0, &steady.far);
	barrier(sock);
}

static void begin(void)
{
	context = open_device();
	pd = SOME(ibv_alloc_pd(context));
}

static void far(void)
{
	int ends[2];
	ZERO(socketpair(AF_UNIX, SOCK_STREAM, 0, ends));
	pid_t target = fork();
	bool child = target == 0;
	int sock = ends[child];
	close(ends[!child]);
	begin();
	prepare_steady(sock);
	if (child) {
		far_target(sock);
		exit(0);
	}
	far_requester(sock);
	close(sock);
	int status;
	if (waitpid(target, &status, 0) != target || status)
		die("the target's status is %#x", status);
}

/* A steady connection within the process: its two ends are two queue pairs, one of which only
 * serves. */
static struct line prepare_steady_here(void)
{
	steady.stage = stage_at(PLACE + 8 * MOST, 3 * PAGE);
	struct stage there = stage_at(PLACE + 9 * MOST, 2 * PAGE);
	steady.line = line_with(steady.stage.mr);
	struct line serves = line_with(there.mr);
	steady.far = serves.end;
	connect_qp(steady.line.qp, &steady.line.end, 0, &serves.end);
	connect_qp(serves.qp, &serves.end, 0, &steady.line.end);
	return serves;
}

static void twice(void)
{
	struct stage stage = stage_at(PLACE, PAGE), whole = stage_at(PLACE + 2 * MOST, PAGE);
	take_away(&stage, UNMAP);
	for (int n = 0; n < 2; n++) {
		struct line line[2] = { line_with(whole.mr), line_with(stage.mr) };
		for (int i = 0; i < 2; i++)
			connect_qp(line[i].qp, &line[i].end, 0, &line[!i].end);
		post(&line[0], WRITE, whole.mr, 64, &line[1].end);
		expect("target", WRITE, UNMAP, 64, next_wc(line[0].cq).status, IBV_WC_REM_ACCESS_ERR);
		for (int i = 0; i < 2; i++)
			hang_up(&line[i]);
	}
	printf("twice: %#010x in pid %d\n", stage.mr->rkey, getpid());
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	if (!strcmp(what, "far")) {
		far();
		return 0;
	}
	begin();
	prepare_steady_here();
	if (!strcmp(what, "near"))
		near();
	else if (!strcmp(what, "twice"))
		twice();
	else
		die("unmapped near, unmapped far or unmapped twice");
	return 0;
}
