/* kills [-n OPERATIONS] [-s SEED]: a process with connections to children, which are killed at
 * random moments (some are stopped first) and replaced. Both ends of each connection write, read
 * back, send and count at random; every byte is checked. When a child is dead, all requests to it
 * complete, and its memory regions are deregistered: after that, nothing changes in them any more.
 * The other connections go on. */
#define _GNU_SOURCE
#include "rc.h"
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum {
	CHILDREN = 4,
	/* Each end writes to the peer's first half only, and receives into the second. */
	AREA = 1 << 20,
	HALF = AREA / 2,
	GUARD = 4096,
	/* In the first half: the counter, then the part that is written. */
	WRITTEN = 4096,
	RECEIVES = 4,
	SLOT = HALF / RECEIVES,
	DEPTH = 16,
	GUARDED = 0xa5,
	REVOKED = 0x5a,
};

/* The first bytes of a Send; the rest is `fill` by its seed. */
struct head {
	uint64_t seed, operations;
};

/* One end of a connection. */
struct side {
	uint8_t *memory;
	/* The area, with guards around it, for the peer; and own memory. */
	struct ibv_mr *area, *own;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct end far;
	/* Requests and receives that have not completed. */
	int sending, receiving;
	/* The request that runs: its length, offset and seed. */
	enum { WRITES, READS, SENDS, ADDS } kind;
	uint32_t length;
	size_t offset;
	uint64_t seed, added;
	/* Checked operations, and those of the peer as it has told. */
	uint64_t operations, told;
	/* Of the first completion that failed. */
	enum ibv_wc_status status;
};

static uint64_t state;

static uint64_t any(void)
{
	/* xorshift64* */
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return state * 0x2545f4914f6cdd1du;
}

/* Most are short; some are those that take other ways (rings, parts, one copy). */
static uint32_t any_length(uint32_t most)
{
	static const uint32_t limits[] = { 64, 64, 64, 512, 512, 4096, 32768, SLOT };
	uint32_t limit = limits[any() % 8];
	return sizeof(struct head) + any() % ((limit < most ? limit : most) - sizeof(struct head) + 1);
}

static void receive(struct side *side, uint64_t slot)
{
	post_recv(side->qp, side->area, GUARD + HALF + slot * SLOT, SLOT, slot);
	side->receiving++;
}

static void create(struct side *side, struct ibv_pd *pd)
{
	memset(side, 0, sizeof *side);
	size_t len = AREA + 2 * GUARD;
	side->memory = SOME(aligned_alloc(4096, len));
	memset(side->memory, GUARDED, AREA + 2 * GUARD);
	memset(side->memory + GUARD, 0, WRITTEN);
	/* Registered from the guard on: what the peer may name is checked by the key and by `far`. */
	side->area = SOME(ibv_reg_mr(pd, side->memory, AREA + 2 * GUARD, EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC));
	side->own = SOME(ibv_reg_mr(pd, SOME(aligned_alloc(4096, AREA)), AREA, IBV_ACCESS_LOCAL_WRITE));
	side->cq = SOME(ibv_create_cq(pd->context, 4 * DEPTH, NULL, NULL, 0));
	side->qp = create_qp(pd, side->cq, DEPTH);
	struct ibv_qp_attr attr = { .qp_access_flags = EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC };
	ZERO(ibv_modify_qp(side->qp, &attr, IBV_QP_ACCESS_FLAGS));
	for (uint64_t slot = 0; slot < RECEIVES; slot++)
		receive(side, slot);
}

static void join(struct side *side, int sock)
{
	struct end mine = end_of(side->qp, 0, side->area);
	mine.address += GUARD;
	swap(sock, &mine, &side->far, sizeof mine);
	connect_qp(side->qp, &mine, 0, &side->far);
	barrier(sock);
}

/* Begins an operation. */
static void begin(struct side *side)
{
	uint8_t *own = side->own->addr;
	side->seed = any() >> 8;
	side->kind = (any() % 8 == 0) ? ADDS : (any() % 2) ? SENDS : WRITES;
	side->sending++;
	if (side->kind == ADDS) {
		struct ibv_sge sge = { (uintptr_t)own, 8, side->own->lkey };
		struct ibv_send_wr wr = {
			.wr_id = DEPTH, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.atomic = { side->far.address, 3, 0, side->far.rkey },
		}, *bad;
		ZERO(ibv_post_send(side->qp, &wr, &bad));
		return;
	}
	side->length = any_length(SLOT);
	fill(own, side->length, side->seed);
	if (side->kind == SENDS) {
		struct head head = { side->seed, side->operations };
		memcpy(own, &head, sizeof head);
		post_send(side->qp, IBV_WR_SEND, side->own, 0, side->length, NULL, 0, DEPTH);
		return;
	}
	side->offset = WRITTEN + any() % (HALF - WRITTEN - side->length);
	post_send(side->qp, IBV_WR_RDMA_WRITE, side->own, 0, side->length, &side->far, side->offset, DEPTH);
}

/* The running operation has completed. */
static void proceed(struct side *side)
{
	uint64_t before;
	switch (side->kind) {
	case WRITES:
		side->kind = READS;
		side->sending++;
		memset((uint8_t *)side->own->addr + HALF, 0, side->length);
		post_send(side->qp, IBV_WR_RDMA_READ, side->own, HALF, side->length, &side->far, side->offset, DEPTH);
		return;
	case READS:
		verify((uint8_t *)side->own->addr + HALF, side->length, side->seed);
		side->operations += 2;
		break;
	case ADDS:
		memcpy(&before, side->own->addr, 8);
		if (before != side->added)
			die("the counter is %" PRIu64 ", not %" PRIu64, before, side->added);
		side->added += 3;
		side->operations++;
		break;
	case SENDS:
		side->operations++;
	}
	begin(side);
}

/* Takes completions; false: the connection has failed. */
static bool step(struct side *side)
{
	struct ibv_wc wc[8];
	int n = ibv_poll_cq(side->cq, 8, wc);
	if (n < 0)
		die("ibv_poll_cq: %d", n);
	/* There are more processes than processors. */
	if (!n)
		sched_yield();
	bool well = true;
	for (int i = 0; i < n; i++) {
		if (wc[i].wr_id == DEPTH)
			side->sending--;
		else
			side->receiving--;
		if (wc[i].status) {
			side->status = side->status ? side->status : wc[i].status;
			well = false;
			continue;
		}
		if (wc[i].wr_id == DEPTH) {
			if (well)
				proceed(side);
			continue;
		}
		struct head head;
		uint8_t *message = side->memory + GUARD + HALF + wc[i].wr_id * SLOT;
		memcpy(&head, message, sizeof head);
		/* The head stands in the place of these bytes. */
		fill(message, sizeof head, head.seed);
		verify(message, wc[i].byte_len, head.seed);
		side->told = head.operations;
		if (well)
			receive(side, wc[i].wr_id);
	}
	return well;
}

static int child(int sock, uint64_t seed)
{
	struct side side;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	state = seed;
	create(&side, SOME(ibv_alloc_pd(open_device())));
	join(&side, sock);
	begin(&side);
	while (step(&side))
		;
	/* The parent has deregistered its memory, and kills this process next. */
	for (;;)
		pause();
}

/* A connection of the parent. */
struct slot {
	pid_t pid;
	struct side side;
	/* The memory of the child before, which nobody may write to. */
	uint8_t *revoked;
};

static void start(struct slot *slot, struct ibv_pd *pd)
{
	int socks[2];
	ZERO(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, socks));
	char sock[16], seed[32];
	snprintf(seed, sizeof seed, "%" PRIu64, any() | 1);
	create(&slot->side, pd);
	slot->pid = fork();
	if (!slot->pid) {
		snprintf(sock, sizeof sock, "%d", dup(socks[1]));
		execl("/proc/self/exe", "kills", "-c", sock, "-s", seed, NULL);
		_exit(127);
	}
	close(socks[1]);
	join(&slot->side, socks[0]);
	close(socks[0]);
	begin(&slot->side);
}

static void check(const uint8_t *bytes, size_t len, uint8_t value, const char *what)
{
	for (size_t at = 0; at < len; at++)
		if (bytes[at] != value)
			die("%s: byte %zu is %#x", what, at, bytes[at]);
}

static void check_revoked(struct slot *slot)
{
	if (slot->revoked)
		check(slot->revoked, AREA + 2 * GUARD, REVOKED, "memory that was deregistered");
	free(slot->revoked);
	slot->revoked = NULL;
}

/* Kills a child, some time after it was stopped if `stopped`; returns what both ends did. */
static uint64_t end(struct slot *slot, bool stopped)
{
	struct side *side = &slot->side;
	if (stopped) {
		kill(slot->pid, SIGSTOP);
		poll(NULL, 0, any() % 4);
	}
	/* Some regions go while the child may still use them. */
	bool early = any() % 2;
	if (early) {
		ZERO(ibv_dereg_mr(side->area));
		memset(side->memory, REVOKED, AREA + 2 * GUARD);
	}
	kill(slot->pid, SIGKILL);
	int status;
	if (waitpid(slot->pid, &status, 0) != slot->pid || !WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL)
		die("a child ended with %#x before it was killed", status);
	double limit = now() + 60;
	while (side->sending || side->receiving) {
		struct ibv_wc wc;
		int n = ibv_poll_cq(side->cq, 1, &wc);
		if (n > 0)
			*(wc.wr_id == DEPTH ? &side->sending : &side->receiving) -= 1;
		if (n < 0 || now() > limit)
			die("%d requests and %d receives have not completed", side->sending, side->receiving);
	}
	ZERO(ibv_destroy_qp(side->qp));
	if (!early) {
		check(side->memory, GUARD, GUARDED, "the guard before an area");
		check(side->memory + GUARD + AREA, GUARD, GUARDED, "the guard after an area");
		ZERO(ibv_dereg_mr(side->area));
		memset(side->memory, REVOKED, AREA + 2 * GUARD);
	}
	check_revoked(slot);
	slot->revoked = side->memory;
	void *own = side->own->addr;
	ZERO(ibv_dereg_mr(side->own));
	free(own);
	ZERO(ibv_destroy_cq(side->cq));
	return side->operations + side->told;
}

int main(int argc, char **argv)
{
	uint64_t wanted = 100000, done = 0, kills = 0;
	int option, sock = -1;
	state = getpid();
	while ((option = getopt(argc, argv, "n:s:c:")) != -1)
		switch (option) {
		case 'n': wanted = strtoull(optarg, NULL, 0); break;
		case 's': state = strtoull(optarg, NULL, 0); break;
		case 'c': sock = atoi(optarg); break;
		default: die("usage: kills [-n OPERATIONS] [-s SEED]");
		}
	if (sock >= 0)
		return child(sock, state);
	printf("seed %" PRIu64 "\n", state);
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct slot slots[CHILDREN] = { 0 };
	for (int i = 0; i < CHILDREN; i++)
		start(&slots[i], pd);
	double next = now();
	while (done < wanted) {
		uint64_t running = 0;
		for (int i = 0; i < CHILDREN; i++) {
			if (!step(&slots[i].side))
				die("a child lives, and its connection failed: %s",
				    ibv_wc_status_str(slots[i].side.status));
			running += slots[i].side.operations + slots[i].side.told;
		}
		if (done + running >= wanted && kills)
			break;
		if (now() < next)
			continue;
		struct slot *slot = &slots[any() % CHILDREN];
		done += end(slot, any() % 3 == 0);
		kills++;
		start(slot, pd);
		next = now() + any() % 60000 / 1e6;
	}
	for (int i = 0; i < CHILDREN; i++) {
		done += end(&slots[i], false);
		check_revoked(&slots[i]);
	}
	printf("%" PRIu64 " operations, %" PRIu64 " kills\n", done, kills + CHILDREN);
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
