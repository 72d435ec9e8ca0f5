/* Functions that our verbs programs share: one device, RC queue pairs, numbers exchanged over a
 * TCP connection like those of ibv_rc_pingpong. Programs take -p PORT; with a host behind the
 * options they connect, without one they wait. Any failure ends the program with one line and
 * status 1. */
#include <arpa/inet.h>
#include <errno.h>
#include <getopt.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

__attribute__((noreturn, format(printf, 1, 2), unused)) static void die(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

/* The value of a call that returns NULL, or non-zero, when it fails. */
#define SOME(call)                                                                                                    \
	({                                                                                                            \
		__typeof__(call) some_ = (call);                                                                      \
		if (!some_)                                                                                           \
			die("%s: %s", #call, strerror(errno));                                                        \
		some_;                                                                                                \
	})
#define ZERO(call)                                                                                                    \
	do {                                                                                                          \
		int zero_ = (call);                                                                                   \
		if (zero_)                                                                                            \
			die("%s: %s", #call, strerror(zero_ > 0 ? zero_ : errno));                                    \
	} while (0)

#define EVERY_ACCESS (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ)

/* The device is urnic0, or the one that DEVICE names. */
__attribute__((unused)) static struct ibv_context *open_device(void)
{
	const char *name = getenv("DEVICE") ?: "urnic0";
	int count;
	struct ibv_device **list = SOME(ibv_get_device_list(&count));
	struct ibv_context *context = NULL;
	for (int i = 0; i < count; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			context = SOME(ibv_open_device(list[i]));
	ibv_free_device_list(list);
	if (!context)
		die("no %s among %d devices", name, count);
	return context;
}

__attribute__((unused)) static struct ibv_qp *create_qp_with(struct ibv_pd *pd, struct ibv_cq *cq, int depth, struct ibv_srq *srq)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = depth, .max_recv_wr = depth, .max_send_sge = 2, .max_recv_sge = 2 },
	};
	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	return qp;
}

__attribute__((unused)) static struct ibv_qp *create_qp(struct ibv_pd *pd, struct ibv_cq *cq, int depth)
{
	return create_qp_with(pd, cq, depth, NULL);
}

/* The parameters of a queue pair and a buffer that one end sends to the other. */
struct end {
	union ibv_gid gid;
	uint64_t address;
	uint32_t qpn, psn, rkey, unused;
};

__attribute__((unused)) static struct end end_of(struct ibv_qp *qp, int gid_index, struct ibv_mr *mr)
{
	/* PSNs that soon wrap. */
	struct end end = { .qpn = qp->qp_num, .psn = 0xffffff - (qp->qp_num * 7 + getpid()) % 300 };
	ZERO(ibv_query_gid(qp->context, 1, gid_index, &end.gid));
	if (mr) {
		end.address = (uintptr_t)mr->addr;
		end.rkey = mr->rkey;
	}
	return end;
}

/* Code of InfiniBand's table: the time limit for one try to reach the peer. */
__attribute__((unused)) static uint8_t ack_timeout = 14;

/* Retries of a Send that finds no receive; 7 = no limit. */
__attribute__((unused)) static uint8_t rnr_retry = 7;

/* Moves the queue pair from INIT to RTR and RTS; returns 0, or the errno of the step that
 * failed. */
__attribute__((unused)) static int try_connect_qp(struct ibv_qp *qp, const struct end *mine, int gid_index, const struct end *theirs)
{
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = theirs->qpn,
		.rq_psn = theirs->psn,
		.max_dest_rd_atomic = 8,
		.min_rnr_timer = 12,
		.ah_attr = { .is_global = 1,
			     .port_num = 1,
			     .grh = { .dgid = theirs->gid, .sgid_index = gid_index, .hop_limit = 1 } },
	};
	int failed = ibv_modify_qp(qp, &rtr,
				   IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
					   IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
	if (failed)
		return failed;
	struct ibv_qp_attr rts = {
		.qp_state = IBV_QPS_RTS,
		.sq_psn = mine->psn,
		.timeout = ack_timeout,
		.retry_cnt = 7,
		.rnr_retry = rnr_retry,
		.max_rd_atomic = 8,
	};
	return ibv_modify_qp(qp, &rts,
			     IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				     IBV_QP_MAX_QP_RD_ATOMIC);
}

__attribute__((unused)) static void connect_qp(struct ibv_qp *qp, const struct end *mine, int gid_index, const struct end *theirs)
{
	ZERO(try_connect_qp(qp, mine, gid_index, theirs));
}

__attribute__((unused)) static void sock_write(int sock, const void *data, size_t len)
{
	for (const char *at = data; len > 0;) {
		ssize_t n = send(sock, at, len, MSG_NOSIGNAL);
		if (n <= 0)
			die("the peer has closed the connection (%s)", strerror(errno));
		at += n, len -= n;
	}
}

/* Reads from the socket; false at the end of the stream. */
__attribute__((unused)) static bool sock_read(int sock, void *data, size_t len)
{
	for (char *at = data; len > 0;) {
		ssize_t n = recv(sock, at, len, 0);
		if (n <= 0)
			return false;
		at += n, len -= n;
	}
	return true;
}

/* Exchanges data. Both ends send and receive the same number of bytes; also a barrier. */
__attribute__((unused)) static void swap(int sock, const void *mine, void *theirs, size_t len)
{
	sock_write(sock, mine, len);
	if (!sock_read(sock, theirs, len))
		die("the peer has closed the connection");
}

__attribute__((unused)) static void barrier(int sock)
{
	char mine = 1, theirs;
	swap(sock, &mine, &theirs, 1);
}

/* The TCP connection between the two programs. */
__attribute__((unused)) static int meet(const char *host, int port)
{
	int one = 1, sock;
	if (host) {
		char service[8];
		struct addrinfo hints = { .ai_socktype = SOCK_STREAM }, *found;
		snprintf(service, sizeof service, "%d", port);
		if (getaddrinfo(host, service, &hints, &found))
			die("%s: unknown host", host);
		sock = socket(found->ai_family, SOCK_STREAM, 0);
		if (connect(sock, found->ai_addr, found->ai_addrlen))
			die("%s: %s", host, strerror(errno));
		freeaddrinfo(found);
	} else {
		struct sockaddr_in6 any = { .sin6_family = AF_INET6, .sin6_port = htons(port) };
		int listener = socket(AF_INET6, SOCK_STREAM, 0);
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		if (bind(listener, (void *)&any, sizeof any) || listen(listener, 1))
			die("port %d: %s", port, strerror(errno));
		sock = accept(listener, NULL, NULL);
		close(listener);
	}
	if (sock < 0)
		die("no connection: %s", strerror(errno));
	setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	return sock;
}

/* The next completion, by polling. */
__attribute__((unused)) static struct ibv_wc next_wc(struct ibv_cq *cq)
{
	struct ibv_wc wc;
	int n;
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	if (n < 0)
		die("ibv_poll_cq: %d", n);
	return wc;
}

__attribute__((unused)) static struct ibv_wc good_wc(struct ibv_cq *cq)
{
	struct ibv_wc wc = next_wc(cq);
	if (wc.status != IBV_WC_SUCCESS)
		die("completion %" PRIu64 " on QP %#x: %s", wc.wr_id, wc.qp_num, ibv_wc_status_str(wc.status));
	return wc;
}

__attribute__((unused)) static void post_recv(struct ibv_qp *qp, struct ibv_mr *mr, size_t offset, size_t len, uint64_t id)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr + offset, .length = len, .lkey = mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = id, .sg_list = &sge, .num_sge = 1 }, *bad;
	ZERO(ibv_post_recv(qp, &wr, &bad));
}

/* An RDMA operation needs `far`, a Send does not. */
__attribute__((unused)) static void post_send(struct ibv_qp *qp, enum ibv_wr_opcode opcode, struct ibv_mr *mr, size_t offset,
					      size_t len, const struct end *far, size_t far_offset, uint64_t id)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr + offset, .length = len, .lkey = mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = id, .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED
	};
	struct ibv_send_wr *bad;
	if (far) {
		wr.wr.rdma.remote_addr = far->address + far_offset;
		wr.wr.rdma.rkey = far->rkey;
	}
	ZERO(ibv_post_send(qp, &wr, &bad));
}

/* Byte `at` of a stream that differs everywhere and between seeds. */
__attribute__((unused)) static void fill(uint8_t *buffer, size_t len, uint64_t seed)
{
	for (size_t at = 0; at < len; at++) {
		uint64_t x = (at + seed * 0x10001) * 0x9e3779b97f4a7c15u;
		buffer[at] = (x >> 56) ^ (x >> 24);
	}
}

/* Whether these bytes are as `fill` writes them. */
__attribute__((unused)) static bool is_filled(const uint8_t *buffer, size_t len, uint64_t seed)
{
	for (size_t at = 0; at < len; at++) {
		uint64_t x = (at + seed * 0x10001) * 0x9e3779b97f4a7c15u;
		if (buffer[at] != (uint8_t)((x >> 56) ^ (x >> 24)))
			return false;
	}
	return true;
}

__attribute__((unused)) static void verify(const uint8_t *buffer, size_t len, uint64_t seed)
{
	for (size_t at = 0; at < len; at++) {
		uint64_t x = (at + seed * 0x10001) * 0x9e3779b97f4a7c15u;
		uint8_t want = (x >> 56) ^ (x >> 24);
		if (buffer[at] != want)
			die("byte %zu is %#x, not %#x", at, buffer[at], want);
	}
}

/* The time in seconds. */
__attribute__((unused)) static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

/* Private memory of this process, in KiB. */
__attribute__((unused)) static long memory(void)
{
	char line[128];
	long sum = 0, value;
	FILE *file = SOME(fopen("/proc/self/smaps_rollup", "r"));
	while (fgets(line, sizeof line, file))
		if (sscanf(line, "Private_Clean: %ld", &value) == 1 || sscanf(line, "Private_Dirty: %ld", &value) == 1)
			sum += value;
	fclose(file);
	return sum;
}

/* Passes the words of each line of standard input to `execute`, until `execute` returns false. */
__attribute__((unused)) static void read_commands(bool (*execute)(char **word))
{
	char *line = NULL;
	size_t size = 0;
	while (getline(&line, &size, stdin) > 0) {
		char *word[12] = { NULL };
		int count = 0;
		for (char *at = strtok(line, " \n"); at && count < 11; at = strtok(NULL, " \n"))
			word[count++] = at;
		if (count && !execute(word))
			break;
	}
	free(line);
}

__attribute__((unused)) static double now_us(void)
{
	struct timespec now;
	ZERO(clock_gettime(CLOCK_MONOTONIC, &now));
	return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

/* For qsort. */
__attribute__((unused)) static int by_value(const void *a, const void *b)
{
	double first = *(const double *)a, second = *(const double *)b;
	return (first > second) - (first < second);
}
