/* Children of fork(2) have the memory that their parent registered, a copy of their own, whether
 * the program prepared for it or not. What a child writes is seen by no other process, neither
 * through the parent's device nor by a peer that reaches the parent's memory directly; what the
 * peer writes is not seen by the child; and the end of the child changes nothing.
 *
 * Usage: fork_safe WAY, with ibv_fork_init called by name (init), found in libibverbs by dlsym
 * (found), or not at all (none). Prints the answer of ibv_is_fork_initialized. */
#define _GNU_SOURCE
#include "rc.h"
#include <dlfcn.h>
#include <sys/mman.h>
#include <sys/wait.h>

#define LEN (64 << 10)
#define HALF (LEN / 2)
#define RECEIVED 64

static void all_are(const uint8_t *bytes, size_t len, uint8_t value, const char *whose)
{
	for (size_t at = 0; at < len; at++)
		if (bytes[at] != value)
			die("%s: byte %zu is '%c', not '%c'", whose, at, bytes[at], value);
}

/* The other process: reads and writes the memory of the parent. */
static void peer(int sock)
{
	uint8_t *bytes = SOME(calloc(1, 2 * LEN));
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, bytes, 2 * LEN, EVERY_ACCESS));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_qp *qp = create_qp(pd, cq, 8);
	struct end mine = end_of(qp, 0, mr), far;
	swap(sock, &mine, &far, sizeof mine);
	connect_qp(qp, &mine, 0, &far);
	barrier(sock);
	for (uint8_t round = 0; round < 2; round++) {
		/* The parent and its child have written. */
		barrier(sock);
		post_send(qp, IBV_WR_RDMA_READ, mr, 0, LEN, &far, 0, 1);
		good_wc(cq);
		all_are(bytes, LEN, 'p' + round, "read by the peer");
		memset(bytes + LEN, 'w' + round, HALF);
		post_send(qp, IBV_WR_RDMA_WRITE, mr, LEN, HALF, &far, HALF, 2);
		good_wc(cq);
		post_send(qp, IBV_WR_SEND, mr, LEN, 8, NULL, 0, 3);
		good_wc(cq);
		barrier(sock);
	}
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
}

/* The parent's memory: whole pages; on pages with other memory; and of a receive that is posted. */
struct memory {
	uint8_t *bytes, *mixed, *received;
};

/* In the child: its copies are its own. */
static void child(struct memory memory, struct ibv_cq *cq, int sock)
{
	struct ibv_wc wc;
	uint8_t *bytes = memory.bytes, *mixed = memory.mixed;
	all_are(bytes, LEN, 'o', "inherited");
	memset(bytes, 'c', LEN);
	memset(memory.received, 'c', RECEIVED);
	char *line = SOME(malloc(64));
	snprintf(line, 64, "%c", mixed[0]);
	if (line[0] != 'm')
		die("the child has no registered heap");
	free(line);
	barrier(sock);
	/* The peer has written to the parent. */
	barrier(sock);
	all_are(bytes, LEN, 'c', "the child's");
	all_are(memory.received, RECEIVED, 'c', "received by the child");
	if (ibv_poll_cq(cq, 1, &wc) >= 0)
		die("the child polls its parent's queue");
	/* With the handlers and destructors of a process that ends. */
	exit(0);
}

static int own_fork_init(void)
{
	void *library = dlopen("libibverbs.so.1", RTLD_NOW);
	int (*init)(void) = library ? dlvsym(library, "ibv_fork_init", "IBVERBS_1.1") : NULL;
	if (!init)
		die("libibverbs has no ibv_fork_init: %s", dlerror());
	return init();
}

static void parent(int sock, const char *way)
{
	if (!strcmp(way, "init"))
		ZERO(ibv_fork_init());
	else if (!strcmp(way, "found"))
		ZERO(own_fork_init());
	else if (strcmp(way, "none"))
		die("usage: fork_safe init|found|none");
	printf("fork state %d\n", ibv_is_fork_initialized());
	fflush(stdout);

	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	uint8_t *bytes = mmap(NULL, LEN, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	/* On pages with other memory of the program. */
	uint8_t *mixed = SOME(malloc(320));
	memset(mixed, 'm', 320);
	struct ibv_mr *mixed_mr = SOME(ibv_reg_mr(pd, mixed, 320, IBV_ACCESS_LOCAL_WRITE));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, mixed, 320, EVERY_ACCESS));
	ZERO(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, bytes, LEN, 0));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_qp *qp = create_qp(pd, cq, 8);
	struct end mine = end_of(qp, 0, mr), far;
	swap(sock, &mine, &far, sizeof mine);
	connect_qp(qp, &mine, 0, &far);
	uint8_t *received = SOME(calloc(1, RECEIVED));
	struct ibv_mr *received_mr = SOME(ibv_reg_mr(pd, received, RECEIVED, EVERY_ACCESS));
	post_recv(qp, received_mr, 0, RECEIVED, 1);
	barrier(sock);

	memset(bytes, 'o', LEN);
	int pair[2];
	ZERO(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	pid_t pid = fork();
	if (pid < 0)
		die("fork: %s", strerror(errno));
	if (pid == 0) {
		close(pair[0]);
		child((struct memory){ bytes, mixed, received }, cq, pair[1]);
	}
	close(pair[1]);
	for (uint8_t round = 0; round < 2; round++) {
		if (round == 0) {
			barrier(pair[0]);
			all_are(bytes, LEN, 'o', "the parent's");
		}
		memset(bytes, 'p' + round, LEN);
		barrier(sock);
		good_wc(cq);
		all_are(received, 8, 'w' + round, "received by the parent");
		all_are(bytes, HALF, 'p' + round, "the parent's first half");
		all_are(bytes + HALF, HALF, 'w' + round, "the parent's second half");
		if (round == 0)
			post_recv(qp, received_mr, 0, RECEIVED, 2);
		barrier(sock);
		if (round == 0) {
			int status;
			barrier(pair[0]);
			if (waitpid(pid, &status, 0) != pid || status)
				die("the child ended with %#x", status);
		}
	}
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_dereg_mr(received_mr));
	ZERO(ibv_dereg_mr(mixed_mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	/* Deregistered memory is inherited as well. */
	pid = fork();
	if (pid == 0)
		_exit(bytes[0] != 'q' || mixed[0] != 'm');
	int status;
	if (waitpid(pid, &status, 0) != pid || status)
		die("the second child ended with %#x", status);
}

int main(int argc, char **argv)
{
	int pair[2], status;
	if (argc != 2)
		die("usage: fork_safe init|found|none");
	ZERO(socketpair(AF_UNIX, SOCK_STREAM, 0, pair));
	pid_t other = fork();
	if (other == 0) {
		close(pair[0]);
		peer(pair[1]);
		return 0;
	}
	close(pair[1]);
	parent(pair[0], argv[1]);
	if (waitpid(other, &status, 0) != other || status)
		die("the peer ended with %#x", status);
	puts("separate");
	return 0;
}
