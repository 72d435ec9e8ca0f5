/* ends: a connection ends in several ways while Sends are on their way, for which the peer has
 * fewer receives. What the peer received succeeds, the oldest of the rest says why it failed, and
 * the others are flushed; unsignalled ones, too. Then queue pairs of this process alone: their
 * Sends find no receive and no retry is left. */
#define _GNU_SOURCE
#include "rc.h"
#include <sys/prctl.h>
#include <sys/wait.h>

enum { SENDS = 5, LEN = 64, UNSIGNALED = 3 };

/* What ends the connection. */
static const struct {
	const char *what;
	/* The receives that the peer has, and with them the Sends that succeed. */
	int received;
	enum ibv_wc_status oldest;
} ends[] = {
	{ "error", 0, IBV_WC_WR_FLUSH_ERR },
	{ "killed", 0, IBV_WC_RETRY_EXC_ERR },
	{ "killed", 2, IBV_WC_RETRY_EXC_ERR },
	{ "exit", 0, IBV_WC_RETRY_EXC_ERR },
	{ "exit", 2, IBV_WC_RETRY_EXC_ERR },
	{ "destroy", 2, IBV_WC_RETRY_EXC_ERR },
	{ "reset", 2, IBV_WC_RETRY_EXC_ERR },
	{ "peer's error", 2, IBV_WC_RETRY_EXC_ERR },
	{ "exit", SENDS, IBV_WC_SUCCESS },
	{ "destroy", SENDS, IBV_WC_SUCCESS },
};

/* One end of a connection. */
struct side {
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
};

static void create(struct side *side, struct ibv_context *context)
{
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	side->channel = SOME(ibv_create_comp_channel(context));
	side->cq = SOME(ibv_create_cq(context, 4 * SENDS, NULL, side->channel, 0));
	side->mr = SOME(ibv_reg_mr(pd, SOME(calloc(1, SENDS * LEN)), SENDS * LEN, EVERY_ACCESS));
	side->qp = create_qp(pd, side->cq, 1 + SENDS);
}

static void join(struct side *side, int sock)
{
	struct end mine = end_of(side->qp, 0, NULL), theirs;
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(side->qp, &mine, 0, &theirs);
	barrier(sock);
}

static void change(struct side *side, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	ZERO(ibv_modify_qp(side->qp, &attr, IBV_QP_STATE));
}

/* The peer: it never polls. */
static _Noreturn void child(int sock, int number)
{
	struct side side;
	char go;
	const char *what = ends[number].what;
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	create(&side, open_device());
	for (int i = 0; i < 1 + ends[number].received; i++)
		post_recv(side.qp, side.mr, 0, LEN, i);
	join(&side, sock);
	if (!sock_read(sock, &go, 1))
		die("the parent has ended");
	if (!strcmp(what, "exit"))
		exit(0);
	if (!strcmp(what, "destroy"))
		ZERO(ibv_destroy_qp(side.qp));
	else if (!strcmp(what, "reset"))
		change(&side, IBV_QPS_RESET);
	else if (!strcmp(what, "peer's error"))
		change(&side, IBV_QPS_ERR);
	for (;;)
		pause();
}

static void send_one(struct side *side, int id, bool signaled)
{
	struct ibv_sge sge = { (uintptr_t)side->mr->addr, LEN, side->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = signaled ? IBV_SEND_SIGNALED : 0 };
	struct ibv_send_wr *bad;
	ZERO(ibv_post_send(side->qp, &wr, &bad));
}

/* Checks the completions of the Sends from number `from` to before `to`. Sleeps until there are
 * some. */
static void check(struct side *side, int number, int from, int to)
{
	struct ibv_wc wc;
	for (int id = from; id < to; id++) {
		bool received = id < ends[number].received;
		if (received && id == UNSIGNALED)
			continue;
		double limit = now() + 60;
		while (!ibv_poll_cq(side->cq, 1, &wc)) {
			struct ibv_cq *cq;
			void *unused;
			ZERO(ibv_req_notify_cq(side->cq, 0));
			if (ibv_poll_cq(side->cq, 1, &wc))
				break;
			alarm(60);
			ZERO(ibv_get_cq_event(side->channel, &cq, &unused));
			alarm(0);
			ibv_ack_cq_events(cq, 1);
			if (now() > limit)
				die("Send %d has no completion", id);
		}
		enum ibv_wc_status status = received			  ? IBV_WC_SUCCESS
					    : id == ends[number].received ? ends[number].oldest
									  : IBV_WC_WR_FLUSH_ERR;
		if (wc.wr_id != (uint64_t)id || wc.status != status)
			die("completion of Send %" PRIu64 ": %s; expected Send %d: %s", wc.wr_id, ibv_wc_status_str(wc.status), id,
			    ibv_wc_status_str(status));
	}
}

static void ends_by(int number)
{
	struct side side;
	char sock[16], index[16];
	int socks[2], status;
	ZERO(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, socks));
	create(&side, open_device());
	pid_t pid = fork();
	if (!pid) {
		snprintf(sock, sizeof sock, "%d", dup(socks[1]));
		snprintf(index, sizeof index, "%d", number);
		execl("/proc/self/exe", "ends", sock, index, NULL);
		_exit(127);
	}
	close(socks[1]);
	join(&side, socks[0]);
	/* The connection is there when a first Send is complete. */
	send_one(&side, SENDS, true);
	good_wc(side.cq);
	/* Its device does not run until the connection is to end; one that is killed runs before. */
	const char *what = ends[number].what;
	bool stops = strcmp(what, "killed") || !ends[number].received;
	if (stops) {
		kill(pid, SIGSTOP);
		if (waitpid(pid, &status, WUNTRACED) != pid || !WIFSTOPPED(status))
			die("the child does not stop");
	}
	for (int id = 0; id < SENDS; id++)
		send_one(&side, id, id != UNSIGNALED);
	struct ibv_wc wc;
	for (int i = 0; stops && i < 1000; i++)
		if (ibv_poll_cq(side.cq, 1, &wc))
			die("Send %" PRIu64 " is complete, and the peer did not run: %s", wc.wr_id, ibv_wc_status_str(wc.status));
	int confirmed = stops ? 0 : ends[number].received;
	check(&side, number, 0, confirmed);
	if (!strcmp(what, "error"))
		change(&side, IBV_QPS_ERR);
	else if (!strcmp(what, "killed"))
		kill(pid, SIGKILL);
	else {
		sock_write(socks[0], "g", 1);
		kill(pid, SIGCONT);
	}
	check(&side, number, confirmed, SENDS);
	ZERO(ibv_destroy_qp(side.qp));
	kill(pid, SIGKILL);
	if (waitpid(pid, &status, 0) != pid)
		die("waitpid");
	printf("%s, %d received: well\n", what, ends[number].received);
}

/* Queue pairs of this process: one that is its own peer, or two. */
static void without_receives(bool own_peer, int retries)
{
	struct ibv_context *context = open_device();
	struct side sides[2];
	struct ibv_wc wc;
	for (int i = 0; i < 2; i++)
		create(&sides[i], context);
	struct end mine = end_of(sides[0].qp, 0, NULL), theirs = end_of(sides[1].qp, 0, NULL);
	rnr_retry = retries;
	connect_qp(sides[0].qp, &mine, 0, own_peer ? &mine : &theirs);
	if (!own_peer)
		connect_qp(sides[1].qp, &theirs, 0, &mine);
	for (int id = 0; id < 2; id++)
		send_one(&sides[0], id, true);
	double limit = now() + 60;
	for (int id = 0; id < 2; id++) {
		while (!ibv_poll_cq(sides[0].cq, 1, &wc))
			if (now() > limit)
				die("%s, %d retries: Send %d has no completion", own_peer ? "own peer" : "two", retries, id);
		enum ibv_wc_status expected = id ? IBV_WC_WR_FLUSH_ERR : IBV_WC_RNR_RETRY_EXC_ERR;
		if (wc.wr_id != (uint64_t)id || wc.status != expected)
			die("%s, %d retries: Send %" PRIu64 ": %s", own_peer ? "own peer" : "two", retries, wc.wr_id,
			    ibv_wc_status_str(wc.status));
	}
	for (int i = 0; i < 2; i++)
		ZERO(ibv_destroy_qp(sides[i].qp));
	printf("%s, %d retries: well\n", own_peer ? "own peer" : "two queue pairs", retries);
}

int main(int argc, char **argv)
{
	setlinebuf(stdout);
	if (argc > 2)
		child(atoi(argv[1]), atoi(argv[2]));
	for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
		ends_by(i);
	for (int retries = 0; retries < 2; retries++) {
		without_receives(true, retries);
		without_receives(false, retries);
	}
	return 0;
}
