/* atomics [-n COUNT] [-c CLIENTS]: one counter, to which CLIENTS other processes and this
 * one's own queue pair add by fetch-and-add, COUNT times each, several at a time. The sum must be
 * exact, and every value must have been fetched once. */
#define _GNU_SOURCE
#include "rc.h"
#include <sys/wait.h>

#define DEPTH 8

/* Adds COUNT times; the fetched values must grow. Returns their sum. */
static uint64_t add(struct ibv_cq *cq, struct ibv_qp *qp, struct ibv_mr *mr, const struct end *far, uint64_t count)
{
	const volatile uint64_t *fetched = mr->addr;
	uint64_t posted = 0, completed = 0, sum = 0, last = 0;
	while (completed < count) {
		for (; posted < count && posted - completed < DEPTH; posted++) {
			struct ibv_sge sge = { (uintptr_t)&fetched[posted % DEPTH], 8, mr->lkey };
			struct ibv_send_wr *bad, wr = {
				.wr_id = posted,
				.sg_list = &sge,
				.num_sge = 1,
				.opcode = IBV_WR_ATOMIC_FETCH_AND_ADD,
				.send_flags = IBV_SEND_SIGNALED,
				.wr.atomic = { .remote_addr = far->address, .compare_add = 1, .rkey = far->rkey },
			};
			ZERO(ibv_post_send(qp, &wr, &bad));
		}
		if (good_wc(cq).wr_id != completed)
			die("completions are out of order");
		uint64_t value = fetched[completed % DEPTH];
		if (completed && value <= last)
			die("%" PRIu64 " was fetched after %" PRIu64, value, last);
		last = value, sum += value, completed++;
	}
	return sum;
}

/* A queue pair for atomics, connected to the queue pair at the other end of the socket, or to
 * itself. */
static struct ibv_qp *connected(struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_mr *mr, int sock, struct end *theirs)
{
	struct ibv_qp *qp = create_qp(pd, cq, 2 * DEPTH);
	struct ibv_qp_attr attr = { .qp_access_flags = EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_ACCESS_FLAGS));
	struct end mine = end_of(qp, 0, mr);
	*theirs = mine;
	if (sock >= 0)
		swap(sock, &mine, theirs, sizeof mine);
	connect_qp(qp, &mine, 0, theirs);
	return qp;
}

int main(int argc, char **argv)
{
	uint64_t count = 20000;
	int clients = 4, option;
	while ((option = getopt(argc, argv, "n:c:")) != -1) {
		switch (option) {
		case 'n': count = strtoull(optarg, NULL, 0); break;
		case 'c': clients = atoi(optarg); break;
		default: die("usage: atomics [-n COUNT] [-c CLIENTS]");
		}
	}
	int socks[clients];
	bool client = false;
	for (int i = 0; i < clients && !client; i++) {
		int pair[2];
		ZERO(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
		client = !fork();
		socks[client ? 0 : i] = pair[client];
		close(pair[!client]);
	}
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0));
	uint64_t memory[1 + DEPTH] = { 0 };
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, memory, sizeof memory, EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC));
	struct ibv_mr *into = SOME(ibv_reg_mr(pd, memory + 1, sizeof memory - 8, IBV_ACCESS_LOCAL_WRITE));
	struct end theirs;
	if (client) {
		struct ibv_qp *qp = connected(pd, cq, mr, socks[0], &theirs);
		uint64_t sum = add(cq, qp, into, &theirs, count);
		sock_write(socks[0], &sum, sizeof sum);
		/* Waits until the counter has been read. */
		sock_read(socks[0], &sum, sizeof sum);
		return 0;
	}
	for (int i = 0; i < clients; i++)
		connected(pd, cq, mr, socks[i], &theirs);
	struct ibv_qp *own = connected(pd, cq, mr, -1, &theirs);
	uint64_t all = count * (clients + 1), fetched = add(cq, own, into, &theirs, count);
	for (int i = 0; i < clients; i++) {
		uint64_t sum;
		if (!sock_read(socks[i], &sum, sizeof sum))
			die("client %d has ended", i);
		fetched += sum;
	}
	if (memory[0] != all)
		die("the counter is %" PRIu64 ", not %" PRIu64, memory[0], all);
	/* 0 + 1 + … + (all - 1), as it wraps. */
	uint64_t want = all % 2 ? (all - 1) / 2 * all : all / 2 * (all - 1);
	if (fetched != want)
		die("the fetched values add up to %" PRIu64 ", not %" PRIu64, fetched, want);
	for (int i = 0; i < clients; i++)
		close(socks[i]);
	for (int i = 0, status; i < clients; i++) {
		if (wait(&status) < 0 || status)
			die("a client failed");
	}
	printf("%" PRIu64 " additions\n", all);
	return 0;
}
