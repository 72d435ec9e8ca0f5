/* revoke [-p PORT] [-n ROUNDS] [-k] [-s] [HOST]: in each round the client writes into the
 * server's memory without a pause. At some moment the server stops the client (SIGSTOP; with -k it
 * kills a process that the client forked for the round), deregisters the memory, and reads it. Then
 * it lets the client continue, and checks that no byte has changed when the client's connection has
 * ended. With -s the client sends, and the memory is that of the server's receives; in every other
 * round the server does not deregister it, but ends the queue pair. */
#define _GNU_SOURCE
#include "rc.h"
#include <sys/prctl.h>
#include <sys/wait.h>

enum { SIZE = 256 << 10, DEPTH = 8 };

static bool sends;

/* Writes, or sends, until that fails. The lengths are those of short, medium and long accesses. */
static void write_on(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mr *mr, const struct end *theirs)
{
	static const uint32_t lengths[] = { 8, 4096, 65536, SIZE };
	enum ibv_wr_opcode opcode = sends ? IBV_WR_SEND : IBV_WR_RDMA_WRITE;
	uint8_t *bytes = mr->addr;
	for (uint64_t n = 1;; n++) {
		struct ibv_wc wc;
		uint32_t length = lengths[n % 4];
		memset(bytes, (uint8_t)n, length);
		post_send(qp, opcode, mr, 0, length, sends ? NULL : theirs, 0, n);
		while (!ibv_poll_cq(cq, 1, &wc))
			;
		if (wc.status)
			return;
	}
}

static void client_round(int sock)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, SOME(malloc(SIZE)), SIZE, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, DEPTH);
	struct end mine = end_of(qp, 0, mr), theirs;
	mine.unused = getpid();
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(qp, &mine, 0, &theirs);
	barrier(sock);
	write_on(qp, cq, mr, &theirs);
	barrier(sock);
	exit(0);
}

/* Posts the receives again that messages have taken; whether none has failed. */
static bool post_again(struct ibv_qp *qp, struct ibv_cq *cq, struct ibv_mr *mr)
{
	struct ibv_wc wc;
	while (ibv_poll_cq(cq, 1, &wc)) {
		if (wc.status)
			return false;
		post_recv(qp, mr, 0, SIZE, 0);
	}
	return true;
}

int main(int argc, char **argv)
{
	int port = 18515, option, rounds = 30;
	bool kills = false;
	while ((option = getopt(argc, argv, "p:n:ks")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'n': rounds = atoi(optarg); break;
		case 'k': kills = true; break;
		case 's': sends = true; break;
		default: die("usage: revoke [-p PORT] [-n ROUNDS] [-k] [-s] [HOST]");
		}
	const char *host = argv[optind];
	int sock = meet(host, port);
	if (host) {
		for (int round = 0; round < rounds; round++) {
			pid_t child = fork();
			if (!child) {
				prctl(PR_SET_PDEATHSIG, SIGKILL);
				client_round(sock);
			}
			int status;
			waitpid(child, &status, 0);
			if (!kills && status)
				die("round %d: the client ended with %#x", round, status);
			barrier(sock);
		}
		return 0;
	}

	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 2 * DEPTH, NULL, NULL, 0));
	volatile uint8_t *buffer = SOME(calloc(1, SIZE));
	uint8_t *seen = SOME(malloc(SIZE));
	srandom(getpid());
	for (int round = 0; round < rounds; round++) {
		struct ibv_mr *mr = SOME(ibv_reg_mr(pd, (void *)buffer, SIZE, EVERY_ACCESS));
		struct ibv_qp *qp = create_qp(pd, cq, DEPTH);
		struct end mine = end_of(qp, 0, mr), theirs;
		swap(sock, &mine, &theirs, sizeof mine);
		for (int n = 0; sends && n < DEPTH; n++)
			post_recv(qp, mr, 0, SIZE, 0);
		connect_qp(qp, &mine, 0, &theirs);
		buffer[0] = 0;
		barrier(sock);
		/* They have begun. */
		while (!buffer[0])
			;
		for (long n = random() % (sends ? 20000 : 2000000); n > 0; n--)
			if (!sends)
				(void)buffer[0];
			else if (!post_again(qp, cq, mr))
				die("round %d: a receive failed", round);
		if (kill(theirs.unused, kills ? SIGKILL : SIGSTOP))
			die("round %d: the client is gone", round);
		struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
		struct ibv_mr gone = *mr;
		bool ends = sends && round % 2;
		if (ends)
			ZERO(ibv_modify_qp(qp, &error, IBV_QP_STATE));
		else
			ZERO(ibv_dereg_mr(mr));
		memcpy(seen, (const void *)buffer, SIZE);
		if (!kills) {
			/* A Send that found no receive would wait instead of failing. */
			if (sends && !ends)
				post_again(qp, cq, &gone);
			kill(theirs.unused, SIGCONT);
			/* Its requests fail. */
			barrier(sock);
		}
		/* The client's process has ended. */
		barrier(sock);
		if (memcmp(seen, (const void *)buffer, SIZE))
			die("round %d: memory changed after its %s", round, ends ? "flush" : "deregistration");
		ZERO(ibv_destroy_qp(qp));
		if (ends)
			ZERO(ibv_dereg_mr(mr));
		struct ibv_wc wc;
		while (ibv_poll_cq(cq, 1, &wc))
			;
	}
	printf("%d rounds, no byte changed\n", rounds);
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
