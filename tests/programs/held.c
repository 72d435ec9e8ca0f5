/* held [-r]: a peer is killed while a message of its own waits here for a receive. Requests that
 * only the peer could complete do so nevertheless, although the program posts no receive before
 * they have. With -r the stream is reset when the peer dies, and what waited is not delivered. */
#define _GNU_SOURCE
#include "rc.h"
#include <sys/prctl.h>
#include <sys/wait.h>

enum { DEPTH = 4, REQUEST = 9 };

/* A short message waits whole; of a long one the rest is not even read. */
static const struct {
	const char *what;
	uint32_t length;
	bool adds;
} cases[] = {
	{ "a Send after a short message", 64, false },
	{ "an atomic after a short message", 64, true },
	{ "a Send after a long message", 1 << 20, false },
	{ "an atomic after a long message", 1 << 20, true },
};
static bool resets;

/* One end of a connection. */
struct side {
	struct ibv_mr *mr;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct end far;
};

static void create(struct side *side, uint32_t length)
{
	struct ibv_pd *pd = SOME(ibv_alloc_pd(open_device()));
	side->mr = SOME(ibv_reg_mr(pd, SOME(aligned_alloc(4096, 1 << 20)), length,
				   EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC));
	side->cq = SOME(ibv_create_cq(pd->context, 4 * DEPTH, NULL, NULL, 0));
	side->qp = create_qp(pd, side->cq, DEPTH);
	struct ibv_qp_attr attr = { .qp_access_flags = EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC };
	ZERO(ibv_modify_qp(side->qp, &attr, IBV_QP_ACCESS_FLAGS));
}

static void join(struct side *side, int sock)
{
	struct end mine = end_of(side->qp, 0, side->mr);
	swap(sock, &mine, &side->far, sizeof mine);
	connect_qp(side->qp, &mine, 0, &side->far);
	barrier(sock);
}

/* As `next_wc`, but gives up, and says what it waited for: a completion that never comes is
 * what this program looks for. */
static struct ibv_wc next(struct side *side, const char *what)
{
	struct ibv_wc wc;
	double limit = now() + 60;
	int n;
	while (!(n = ibv_poll_cq(side->cq, 1, &wc)))
		if (now() > limit)
			die("%s: no completion", what);
	if (n < 0)
		die("ibv_poll_cq: %d", n);
	return wc;
}

/* Sends two messages, for which the parent has one receive. */
static _Noreturn void child(int sock, uint32_t length)
{
	struct side side;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	create(&side, length);
	join(&side, sock);
	for (uint64_t n = 0; n < 2; n++)
		post_send(side.qp, IBV_WR_SEND, side.mr, 0, length, NULL, 0, n);
	/* They leave at the latest now. */
	struct ibv_wc wc;
	for (int i = 0; i < 1000; i++)
		if (ibv_poll_cq(side.cq, 1, &wc) && (wc.wr_id || wc.status))
			die("Send %" PRIu64 ": %s", wc.wr_id, ibv_wc_status_str(wc.status));
	barrier(sock);
	for (;;)
		pause();
}

static void dies_in(int number)
{
	const char *what = cases[number].what;
	bool adds = cases[number].adds;
	uint32_t length = cases[number].length;
	struct side side;
	char sock[16], size[16];
	int socks[2], status;
	ZERO(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, socks));
	create(&side, length);
	post_recv(side.qp, side.mr, 0, length, 0);
	pid_t pid = fork();
	if (!pid) {
		snprintf(sock, sizeof sock, "%d", dup(socks[1]));
		snprintf(size, sizeof size, "%u", length);
		execl("/proc/self/exe", "held", sock, size, NULL);
		_exit(127);
	}
	join(&side, socks[0]);
	next(&side, "the message");
	barrier(socks[0]);
	/* It has nothing for this request: no receive, and no time. */
	kill(pid, SIGSTOP);
	if (waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status))
		die("the child does not stop");
	if (adds) {
		struct ibv_sge sge = { (uintptr_t)side.mr->addr, 8, side.mr->lkey };
		struct ibv_send_wr wr = {
			.wr_id = REQUEST, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.atomic = { side.far.address, 1, 0, side.far.rkey },
		}, *bad;
		ZERO(ibv_post_send(side.qp, &wr, &bad));
	} else {
		post_send(side.qp, IBV_WR_SEND, side.mr, 0, 64, NULL, 0, REQUEST);
	}
	struct ibv_wc wc;
	for (int i = 0; i < 1000; i++)
		if (ibv_poll_cq(side.cq, 1, &wc))
			die("%s is complete, and the peer did not run: %s", what, ibv_wc_status_str(wc.status));
	kill(pid, SIGKILL);
	if (waitpid(pid, &status, 0) != pid)
		die("waitpid");
	wc = next(&side, what);
	if (wc.wr_id != REQUEST)
		die("request %" PRIu64 " is complete, not %s", wc.wr_id, what);
	if (wc.status != IBV_WC_RETRY_EXC_ERR)
		die("%s: %s", what, ibv_wc_status_str(wc.status));
	/* The message that waited is not there any more. */
	post_recv(side.qp, side.mr, 0, length, 1);
	wc = next(&side, "the receive");
	if (wc.wr_id != 1 || wc.status != IBV_WC_WR_FLUSH_ERR)
		die("the receive after %s: %s", what, ibv_wc_status_str(wc.status));
	ZERO(ibv_destroy_qp(side.qp));
	printf("%s: well\n", what);
}

int main(int argc, char **argv)
{
	if (argc > 2)
		child(atoi(argv[1]), atoi(argv[2]));
	resets = argc > 1;
	for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
		dies_in(i);
	return 0;
}
