/* Traffic that survives the failure of a rail: two devices, an RC queue pair on each, and messages
 * on the first one that works.
 *
 *     rail_failover -p PORT           receives
 *     rail_failover -p PORT HOST      sends, until SIGINT or SIGTERM
 *
 * A rail fails when a request fails, or, with -e, when its device reports IBV_EVENT_PORT_ERR. The
 * sender then goes on with the other rail, from the oldest message that was not acknowledged. It
 * reconnects a failed rail every 200 ms while its port is active, and returns to the first rail as
 * soon as a probe has come through. If no rail works for -t SECONDS (10), it gives up.
 *
 * A message may arrive twice: its acknowledgement was lost with the rail. So each has a number, and
 * the receiver drops those that it has. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <inttypes.h>
#include <netdb.h>
#include <poll.h>
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

#define RAILS 2
#define SIZE 4096
#define WINDOW 16 /* messages that are sent and not acknowledged */
#define RECEIVES (2 * WINDOW)
#define AHEAD (4 * WINDOW) /* numbers that the receiver tells apart */
#define RETRY_MS 200
#define PROBE UINT64_MAX /* the number of a message that says nothing */

enum state { FAILED, PROBED, WORKS };

struct rail {
	int number;
	enum state state;
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	double failed_at;
	uint64_t count; /* messages that were acknowledged, or received, on this rail */
};

/* What one end tells the other of its queue pair on a rail. */
struct end {
	uint32_t rail, qpn, psn, unused;
	union ibv_gid gid;
};

static struct rail rails[RAILS];
static uint8_t buffers[RECEIVES][SIZE];
static int control;
static volatile sig_atomic_t stopped;

static void stop(int signal)
{
	(void)signal;
	stopped = 1;
}

__attribute__((noreturn, format(printf, 1, 2))) static void die(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vfprintf(stderr, format, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

__attribute__((format(printf, 1, 2))) static void say(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vprintf(format, args);
	va_end(args);
	putchar('\n');
	fflush(stdout);
}

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec + time.tv_nsec / 1e9;
}

static void open_rails(void)
{
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);
	if (!list || count < RAILS)
		die("%d devices; this needs %d", list ? count : 0, RAILS);
	for (int i = 0; i < RAILS; i++) {
		struct rail *rail = &rails[i];
		rail->number = i;
		rail->context = ibv_open_device(list[i]);
		if (!rail->context)
			die("cannot open %s", ibv_get_device_name(list[i]));
		rail->pd = ibv_alloc_pd(rail->context);
		rail->cq = ibv_create_cq(rail->context, 4 * RECEIVES, NULL, NULL, 0);
		if (!rail->pd || !rail->cq)
			die("%s: %s", ibv_get_device_name(list[i]), strerror(errno));
		rail->mr = ibv_reg_mr(rail->pd, buffers, sizeof buffers, IBV_ACCESS_LOCAL_WRITE);
		if (!rail->mr)
			die("cannot register memory: %s", strerror(errno));
		/* Events are read when there are some. */
		int fd = rail->context->async_fd;
		fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
		say("rail %d: %s", i, ibv_get_device_name(list[i]));
	}
	ibv_free_device_list(list);
}

static bool port_is_active(const struct rail *rail)
{
	struct ibv_port_attr port;
	return !ibv_query_port(rail->context, 1, &port) && port.state == IBV_PORT_ACTIVE;
}

/* Gives the rail a new queue pair. */
static struct end new_qp(struct rail *rail)
{
	struct ibv_qp_init_attr init = {
		.send_cq = rail->cq,
		.recv_cq = rail->cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = RECEIVES, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	struct end end = { .rail = rail->number };
	if (rail->qp && ibv_destroy_qp(rail->qp))
		die("cannot destroy a queue pair");
	rail->qp = ibv_create_qp(rail->pd, &init);
	if (!rail->qp)
		die("cannot create a queue pair: %s", strerror(errno));
	if (ibv_modify_qp(rail->qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS) ||
	    ibv_query_gid(rail->context, 1, 0, &end.gid))
		die("rail %d cannot be connected", rail->number);
	end.qpn = rail->qp->qp_num;
	end.psn = (rail->qp->qp_num * 7 + getpid()) & 0xffffff;
	return end;
}

static bool connect_qp(struct rail *rail, const struct end *mine, const struct end *theirs)
{
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = theirs->qpn,
		.rq_psn = theirs->psn,
		.min_rnr_timer = 12,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = theirs->gid, .hop_limit = 1 } },
	};
	if (ibv_modify_qp(rail->qp, &attr,
			  IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
				  IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER))
		return false;
	attr = (struct ibv_qp_attr){
		.qp_state = IBV_QPS_RTS, .sq_psn = mine->psn, .timeout = 14, .retry_cnt = 7, .rnr_retry = 7
	};
	return !ibv_modify_qp(rail->qp, &attr,
			      IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY |
				      IBV_QP_MAX_QP_RD_ATOMIC);
}

static bool tell(const struct end *end)
{
	return send(control, end, sizeof *end, MSG_NOSIGNAL) == sizeof *end;
}

static bool hear(struct end *end)
{
	return recv(control, end, sizeof *end, MSG_WAITALL) == sizeof *end && end->rail < RAILS;
}

/* Byte `at` of a message. */
static uint8_t byte_of(uint64_t number, size_t at)
{
	return (number * 31 + at) ^ (number >> 8);
}

static void post(struct rail *rail, uint64_t number)
{
	uint8_t *buffer = buffers[number == PROBE ? WINDOW : number % WINDOW];
	struct ibv_sge sge = { .addr = (uintptr_t)buffer, .length = SIZE, .lkey = rail->mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = number, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED
	};
	struct ibv_send_wr *bad;
	memcpy(buffer, &number, sizeof number);
	for (size_t at = sizeof number; at < SIZE; at++)
		buffer[at] = byte_of(number, at);
	/* What cannot be posted fails the rail, by the requests before it. */
	ibv_post_send(rail->qp, &wr, &bad);
}

static void post_receive(struct rail *rail, uint64_t place)
{
	struct ibv_sge sge = { .addr = (uintptr_t)buffers[place], .length = SIZE, .lkey = rail->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = place, .sg_list = &sge, .num_sge = 1 };
	struct ibv_recv_wr *bad;
	ibv_post_recv(rail->qp, &wr, &bad);
}

/* The sender's state: messages from `acknowledged` on to `next` are on their way on a rail. */
static uint64_t acknowledged, next;
static struct rail *active;
static bool by_events;

static void use(struct rail *rail)
{
	active = rail;
	next = acknowledged;
	if (rail)
		say("traffic on rail %d", rail->number);
	else
		say("no rail works");
}

/* The requests of the queue pair are done with: nothing of it arrives, or changes memory, later. */
static void fail(struct rail *rail, const char *reason)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_ERR };
	if (rail->state == FAILED)
		return;
	if (rail->state == WORKS)
		say("rail %d failed: %s", rail->number, reason);
	ibv_modify_qp(rail->qp, &attr, IBV_QP_STATE);
	rail->state = FAILED;
	rail->failed_at = now();
	if (rail != active)
		return;
	use(NULL);
	for (int i = 0; i < RAILS; i++)
		if (rails[i].state == WORKS && !active)
			use(&rails[i]);
}

static void read_events(struct rail *rail)
{
	struct ibv_async_event event;
	while (!ibv_get_async_event(rail->context, &event)) {
		ibv_ack_async_event(&event);
		switch (event.event_type) {
		case IBV_EVENT_PORT_ERR:
			say("rail %d: port error", rail->number);
			if (by_events)
				fail(rail, "port error");
			break;
		case IBV_EVENT_PORT_ACTIVE:
			say("rail %d: port active", rail->number);
			break;
		default:
			break;
		}
	}
}

/* Connects a failed rail again; a probe shows whether it works. */
static void reconnect(struct rail *rail)
{
	struct end theirs, mine;
	rail->failed_at = now();
	if (!port_is_active(rail))
		return;
	mine = new_qp(rail);
	if (!tell(&mine) || !hear(&theirs))
		die("the receiver is gone");
	if (connect_qp(rail, &mine, &theirs)) {
		rail->state = PROBED;
		post(rail, PROBE);
	}
}

static void take_completions(struct rail *rail)
{
	struct ibv_wc wc;
	while (rail->qp && ibv_poll_cq(rail->cq, 1, &wc) > 0) {
		/* Of a queue pair before. */
		if (wc.qp_num != rail->qp->qp_num || rail->state == FAILED)
			continue;
		if (wc.status != IBV_WC_SUCCESS) {
			fail(rail, ibv_wc_status_str(wc.status));
		} else if (wc.wr_id == PROBE) {
			rail->state = WORKS;
			say("rail %d works", rail->number);
		} else if (rail == active) {
			acknowledged = wc.wr_id + 1;
			rail->count++;
		}
	}
}

/* The first rail that works has the traffic, as soon as nothing is on its way on another. */
static bool wants_other_rail(void)
{
	for (int i = 0; i < RAILS; i++)
		if (rails[i].state == WORKS)
			return &rails[i] != active;
	return false;
}

static void send_messages(double patience)
{
	double worked_at = now();
	for (;;) {
		for (int i = 0; i < RAILS; i++) {
			read_events(&rails[i]);
			take_completions(&rails[i]);
			if (rails[i].state == FAILED && now() - rails[i].failed_at > RETRY_MS / 1e3)
				reconnect(&rails[i]);
		}
		if (wants_other_rail() && next == acknowledged) {
			for (int i = RAILS - 1; i >= 0; i--)
				if (rails[i].state == WORKS)
					active = &rails[i];
			use(active);
		}
		if (active)
			worked_at = now();
		else if (now() - worked_at > patience)
			die("no rail has worked for %g s", patience);
		if (stopped && active && next == acknowledged)
			break;
		while (active && !stopped && !wants_other_rail() && next < acknowledged + WINDOW)
			post(active, next++);
		usleep(100);
	}
	say("%" PRIu64 " messages were acknowledged: %" PRIu64 " on rail 0, %" PRIu64 " on rail 1", acknowledged,
	    rails[0].count, rails[1].count);
}

/* The receiver's end of a rail, anew. Returns false when the sender has closed the connection. */
static bool serve_reconnect(void)
{
	struct end theirs, mine;
	if (!hear(&theirs))
		return false;
	struct rail *rail = &rails[theirs.rail];
	mine = new_qp(rail);
	for (int i = 0; i < WINDOW; i++)
		post_receive(rail, rail->number * WINDOW + i);
	if (!connect_qp(rail, &mine, &theirs))
		say("rail %d cannot be connected", rail->number);
	return tell(&mine);
}

/* The receiver's state: it has all messages before `expected`, and some of those after. */
static uint64_t expected, twice;
static bool is_here[AHEAD];

/* Takes a message. The last ones of a rail may be polled after the first ones of another. */
static void take(struct rail *rail, const uint8_t *buffer)
{
	uint64_t number;
	memcpy(&number, buffer, sizeof number);
	for (size_t at = sizeof number; at < SIZE; at++)
		if (buffer[at] != byte_of(number, at))
			die("byte %zu of message %" PRIu64 " is wrong", at, number);
	if (number == PROBE)
		return;
	if (number >= expected + AHEAD)
		die("message %" PRIu64 " is missing", expected);
	if (number < expected || is_here[number % AHEAD]) {
		twice++;
		return;
	}
	is_here[number % AHEAD] = true;
	rail->count++;
	for (; is_here[expected % AHEAD]; expected++)
		is_here[expected % AHEAD] = false;
}

static void receive_messages(void)
{
	struct pollfd sender = { .fd = control, .events = POLLIN };
	for (;;) {
		bool was_quiet = true;
		for (int i = 0; i < RAILS; i++) {
			struct rail *rail = &rails[i];
			struct ibv_wc wc;
			read_events(rail);
			while (rail->qp && ibv_poll_cq(rail->cq, 1, &wc) > 0) {
				if (wc.qp_num != rail->qp->qp_num || wc.status != IBV_WC_SUCCESS)
					continue;
				was_quiet = false;
				take(rail, buffers[wc.wr_id]);
				post_receive(rail, wc.wr_id);
			}
		}
		if (poll(&sender, 1, 0) == 1 && !serve_reconnect())
			break;
		if (was_quiet)
			usleep(100);
	}
	say("%" PRIu64 " messages arrived: %" PRIu64 " on rail 0, %" PRIu64 " on rail 1; %" PRIu64 " came twice",
	    expected, rails[0].count, rails[1].count, twice);
}

/* The connection by which the ends tell each other of their queue pairs. */
static int control_connection(const char *host, const char *port)
{
	struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = host ? 0 : AI_PASSIVE }, *found;
	int one = 1;
	if (getaddrinfo(host, port, &hints, &found))
		die("%s: unknown host", host ? host : port);
	int sock = socket(found->ai_family, SOCK_STREAM, 0), failed;
	if (host) {
		failed = connect(sock, found->ai_addr, found->ai_addrlen);
	} else {
		int listener = sock;
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
		failed = bind(listener, found->ai_addr, found->ai_addrlen) || listen(listener, 1);
		sock = failed ? -1 : accept(listener, NULL, NULL);
	}
	freeaddrinfo(found);
	if (failed || sock < 0)
		die("port %s: %s", port, strerror(errno));
	return sock;
}

int main(int argc, char **argv)
{
	const char *port = "7471";
	double patience = 10;
	for (int option; (option = getopt(argc, argv, "p:t:e")) != -1;) {
		if (option == 'p')
			port = optarg;
		else if (option == 't')
			patience = atof(optarg);
		else if (option == 'e')
			by_events = true;
		else
			die("usage: rail_failover [-p PORT] [-t SECONDS] [-e] [HOST]");
	}
	signal(SIGINT, stop);
	signal(SIGTERM, stop);
	open_rails();
	control = control_connection(argv[optind], port);
	if (argv[optind])
		send_messages(patience);
	else
		receive_messages();
	return 0;
}
