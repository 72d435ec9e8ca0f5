/* all_to_all [-t] -p PORT [HOST]: the start-up of a job of eight ranks, half of them at each end,
 * as MPI does it when every rank has a message for every other: each rank opens the device and
 * makes a queue pair for each other rank, all exchange the numbers by way of one process, connect,
 * and a message passes in each direction between any two. With -t, TCP sockets in place of queue
 * pairs. The server prints the number of ranks, and the time in milliseconds from the moment at
 * which all ranks exist. */
#define _GNU_SOURCE
#include "rc.h"

#include <sched.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define RANKS 8
#define AT_AN_END (RANKS / 2)

/* The parameters by which each rank is reached from each other; over TCP only `qpn`, a port. */
static struct end table[RANKS][RANKS];

static int connection_to(const char *host, int port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, sock = socket(AF_INET, SOCK_STREAM, 0);
	if (inet_pton(AF_INET, host, &at.sin_addr) != 1 || connect(sock, (void *)&at, sizeof at))
		die("%s port %d: %s", host, port, strerror(errno));
	setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
	return sock;
}

static int listener_at(int port)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) };
	int one = 1, sock = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
	if (bind(sock, (void *)&any, sizeof any) || listen(sock, RANKS))
		die("port %d: %s", port, strerror(errno));
	return sock;
}

static void read_all(int sock, void *data, size_t length)
{
	if (!sock_read(sock, data, length))
		die("the peer has closed the connection");
}

/* Sends this rank's row of the table, and receives the table. */
static void exchange(int coordinator, int rank)
{
	sock_write(coordinator, table[rank], sizeof table[rank]);
	read_all(coordinator, table, sizeof table);
}

static void by_verbs(int coordinator, int rank)
{
	static uint8_t buffer[16];
	struct ibv_qp *qps[RANKS] = { NULL };
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 4 * RANKS, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	for (int i = 0; i < RANKS; i++)
		if (i != rank) {
			qps[i] = create_qp(pd, cq, 16);
			table[rank][i] = end_of(qps[i], 0, mr);
			post_recv(qps[i], mr, 8, 8, 1);
		}
	struct end mine[RANKS];
	memcpy(mine, table[rank], sizeof mine);
	exchange(coordinator, rank);
	for (int i = 0; i < RANKS; i++)
		if (i != rank) {
			connect_qp(qps[i], &mine[i], 0, &table[i][rank]);
			post_send(qps[i], IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
		}
	for (int left = 2 * (RANKS - 1); left > 0;) {
		struct ibv_wc wc;
		int n = ibv_poll_cq(cq, 1, &wc);
		if (n < 0 || (n == 1 && wc.status != IBV_WC_SUCCESS))
			die("rank %d: %s", rank, n < 0 ? "ibv_poll_cq" : ibv_wc_status_str(wc.status));
		left -= n;
		/* There are more ranks than processors. */
		if (!n)
			sched_yield();
	}
}

static void by_tcp(int coordinator, int rank, const char *host)
{
	int listener = listener_at(0), socks[RANKS];
	struct sockaddr_in at;
	socklen_t length = sizeof at;
	ZERO(getsockname(listener, (void *)&at, &length));
	table[rank][0].qpn = ntohs(at.sin_port);
	exchange(coordinator, rank);
	/* Each rank connects to those before it. */
	for (int i = 0; i < RANKS - 1; i++) {
		bool here = host == NULL || i >= AT_AN_END;
		socks[i] = i < rank ? connection_to(here ? "127.0.0.1" : host, table[i][0].qpn) : accept(listener, NULL, NULL);
		if (socks[i] < 0)
			die("accept: %s", strerror(errno));
		sock_write(socks[i], "", 1);
	}
	char byte;
	for (int i = 0; i < RANKS - 1; i++)
		read_all(socks[i], &byte, 1);
}

static void be_rank(int rank, bool tcp, const char *host, int port)
{
	char byte;
	int coordinator = connection_to(host ? host : "127.0.0.1", port);
	sock_write(coordinator, &rank, sizeof rank);
	read_all(coordinator, &byte, 1);
	if (tcp)
		by_tcp(coordinator, rank, host);
	else
		by_verbs(coordinator, rank);
	sock_write(coordinator, "", 1);
	/* A rank that ends closes its connections, so all wait for the last. */
	read_all(coordinator, &byte, 1);
}

static void coordinate(int listener)
{
	int socks[RANKS];
	char byte;
	for (int i = 0; i < RANKS; i++) {
		int rank, sock = accept(listener, NULL, NULL);
		read_all(sock, &rank, sizeof rank);
		if (rank < 0 || rank >= RANKS)
			die("rank %d", rank);
		socks[rank] = sock;
	}
	double start = now();
	for (int i = 0; i < RANKS; i++)
		sock_write(socks[i], "", 1);
	for (int i = 0; i < RANKS; i++)
		read_all(socks[i], table[i], sizeof table[i]);
	for (int i = 0; i < RANKS; i++)
		sock_write(socks[i], table, sizeof table);
	for (int i = 0; i < RANKS; i++)
		read_all(socks[i], &byte, 1);
	printf("%d %f\n", RANKS, (now() - start) * 1e3);
	for (int i = 0; i < RANKS; i++)
		sock_write(socks[i], "", 1);
}

int main(int argc, char **argv)
{
	bool tcp = false;
	int port = 0, option;
	while ((option = getopt(argc, argv, "tp:")) != -1)
		switch (option) {
		case 't': tcp = true; break;
		case 'p': port = atoi(optarg); break;
		default: die("all_to_all [-t] -p PORT [HOST]");
		}
	const char *host = argv[optind];
	int listener = host ? -1 : listener_at(port);
	for (int i = 0; i < AT_AN_END; i++) {
		pid_t child = fork();
		if (child < 0)
			die("fork: %s", strerror(errno));
		if (!child) {
			prctl(PR_SET_PDEATHSIG, SIGKILL);
			be_rank(i + (host ? AT_AN_END : 0), tcp, host, port);
			return 0;
		}
	}
	if (!host)
		coordinate(listener);
	for (int i = 0; i < AT_AN_END; i++) {
		int status;
		if (wait(&status) < 0 || status)
			die("a rank failed");
	}
	return 0;
}
