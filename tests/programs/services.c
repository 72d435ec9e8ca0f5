#define _GNU_SOURCE
/* A program that keeps serving while other processes misbehave. `services -p PORT` listens with
 * rdma_cm; each connection has a second queue pair that is connected by its number. Messages on
 * both and datagrams to the program's UD queue pair come back; a region can be written and read.
 * Commands on standard input: `visit PORT [SECONDS]` is a client of such a program here, and
 * prints `visited PORT: ok` or what failed; `quit`. `services -v PORT [-n TIMES]` only visits.
 * SECONDS, and `-t` there, limit each step of a visit. No failure of a peer ends the program, and
 * each wait has a limit. */
#include "cm.h"
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>

enum { SLOTS = 8, SLOT = 64 << 10, AREA = 512 << 10, OUT = AREA + SLOTS * SLOT, SIZE = OUT + AREA };
enum { GRH = 40, DATAGRAM = 1024, QKEY = 0x1234, MOST_LINKS = 64 };
/* Seconds that a client waits for one step, and that a server keeps an idle connection. */
static _Thread_local double patience = 5;
static const double idle_limit = 10;
/* Why the last step failed. */
static _Thread_local const char *reason = "";
static atomic_int links;
static struct rdma_event_channel *requests;

/* What both ends tell each other in the private data of the connection. */
struct __attribute__((packed)) terms {
	struct { uint8_t gid[16]; uint64_t address; uint32_t qpn, psn, rkey; } end;
	uint32_t ud;
};

/* A connection: a queue pair of rdma_cm (0), a native one (1), at a client a UD queue pair (2). */
struct link {
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *channel;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp[3];
	struct ibv_ah *ah;
	uint8_t *bytes;
	int gid_index, file;
	struct end mine, theirs;
	uint32_t ud;
	atomic_bool over;
};

static bool receive(struct link *link, int qp, int slot)
{
	size_t at = AREA + slot * SLOT;
	struct ibv_sge sge = { .addr = (uintptr_t)link->bytes + at, .length = SLOT, .lkey = link->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;
	return !ibv_post_recv(link->qp[qp], &wr, &bad);
}

static bool request(struct link *link, int qp, struct ibv_send_wr wr, size_t at, size_t len)
{
	struct ibv_sge sge = { .addr = (uintptr_t)link->bytes + at, .length = len, .lkey = link->mr->lkey };
	struct ibv_send_wr *bad;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	wr.send_flags = IBV_SEND_SIGNALED;
	return !ibv_post_send(link->qp[qp], &wr, &bad);
}

/* The next completion; false after `limit` seconds, or when the connection is over. */
static bool completion(struct link *link, struct ibv_wc *wc, double limit)
{
	double end = now() + limit;
	for (bool armed = false;;) {
		int n = ibv_poll_cq(link->cq, 1, wc);
		if (n)
			return n > 0;
		if (!armed) {
			armed = !ibv_req_notify_cq(link->cq, 0);
			continue;
		}
		struct pollfd ready = { .fd = link->channel->fd, .events = POLLIN };
		reason = link->over ? "the connection is over" : "no completion";
		if (link->over || now() > end)
			return false;
		if (poll(&ready, 1, 200) > 0) {
			struct ibv_cq *cq;
			void *context;
			if (ibv_get_cq_event(link->channel, &cq, &context))
				return false;
			ibv_ack_cq_events(cq, 1);
			armed = false;
		}
	}
}

/* The last GID that is an IPv4 address: with RoCE v2, if there are several kinds. */
static int find_gid(struct ibv_context *verbs, union ibv_gid *gid)
{
	static const uint8_t mapped[12] = { [10] = 0xff, [11] = 0xff };
	int found = -1;
	union ibv_gid each;
	for (int index = 0; index < 16 && !ibv_query_gid(verbs, 1, index, &each); index++)
		if (!memcmp(each.raw, mapped, sizeof mapped)) {
			found = index;
			*gid = each;
		}
	return found;
}

/* Every other connection has memory that its peers can map, too. */
static bool get_memory(struct link *link)
{
	static atomic_int count;
	link->file = count++ % 2 ? memfd_create("services", MFD_CLOEXEC) : -1;
	if (link->file >= 0 && ftruncate(link->file, SIZE))
		return false;
	int flags = link->file >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
	link->bytes = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, flags, link->file, 0);
	return link->bytes != MAP_FAILED;
}

static bool build(struct link *link, bool client)
{
	struct ibv_context *verbs = link->id->verbs;
	link->gid_index = find_gid(verbs, &link->mine.gid);
	if (link->gid_index < 0 || !get_memory(link) || !(link->pd = ibv_alloc_pd(verbs)) ||
	    !(link->channel = ibv_create_comp_channel(verbs)) ||
	    !(link->cq = ibv_create_cq(verbs, 256, NULL, link->channel, 0)) ||
	    !(link->mr = ibv_reg_mr(link->pd, link->bytes, SIZE, EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC)))
		return false;
	struct ibv_qp_init_attr init = {
		.send_cq = link->cq,
		.recv_cq = link->cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 64, .max_recv_wr = SLOTS, .max_send_sge = 1, .max_recv_sge = 2 },
	};
	struct ibv_qp_attr attr = {
		.qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS | IBV_ACCESS_REMOTE_ATOMIC, .qkey = QKEY
	};
	int rights = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	if (rdma_create_qp(link->id, link->pd, &init))
		return false;
	link->qp[0] = link->id->qp;
	if (!(link->qp[1] = ibv_create_qp(link->pd, &init)) || ibv_modify_qp(link->qp[1], &attr, rights))
		return false;
	for (int slot = 0; slot < SLOTS; slot++)
		if (!receive(link, slot % 2, slot))
			return false;
	link->mine.qpn = link->qp[1]->qp_num;
	link->mine.psn = (link->mine.qpn * 7 + getpid()) & 0xffffff;
	link->mine.address = (uintptr_t)link->bytes;
	link->mine.rkey = link->mr->rkey;
	init.qp_type = IBV_QPT_UD;
	if (!client || !(link->qp[2] = ibv_create_qp(link->pd, &init)))
		return !client;
	int ud = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
	bool ready = !ibv_modify_qp(link->qp[2], &attr, ud);
	attr.qp_state = IBV_QPS_RTR;
	ready = ready && !ibv_modify_qp(link->qp[2], &attr, IBV_QP_STATE);
	attr.qp_state = IBV_QPS_RTS;
	return ready && !ibv_modify_qp(link->qp[2], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN);
}

static void tear_down(struct link *link)
{
	if (link->ah)
		ibv_destroy_ah(link->ah);
	for (int qp = 1; qp < 3; qp++)
		if (link->qp[qp])
			ibv_destroy_qp(link->qp[qp]);
	if (link->qp[0])
		rdma_destroy_qp(link->id);
	if (link->mr)
		ibv_dereg_mr(link->mr);
	if (link->cq)
		ibv_destroy_cq(link->cq);
	if (link->channel)
		ibv_destroy_comp_channel(link->channel);
	if (link->pd)
		ibv_dealloc_pd(link->pd);
	if (link->id)
		rdma_destroy_id(link->id);
	if (link->bytes && link->bytes != MAP_FAILED)
		munmap(link->bytes, SIZE);
	if (link->file > 0)
		close(link->file);
}

static struct terms terms_of(const struct link *link, uint32_t ud)
{
	struct terms terms = { .ud = ud };
	memcpy(terms.end.gid, link->mine.gid.raw, 16);
	terms.end.address = link->mine.address;
	terms.end.qpn = link->mine.qpn;
	terms.end.psn = link->mine.psn;
	terms.end.rkey = link->mine.rkey;
	return terms;
}

static void read_terms(struct terms *terms, const struct rdma_conn_param *param)
{
	if (param->private_data_len >= sizeof *terms)
		memcpy(terms, param->private_data, sizeof *terms);
}

/* Whether the peer has said who it is. */
static bool learn(struct link *link, const struct terms *terms)
{
	memcpy(link->theirs.gid.raw, terms->end.gid, 16);
	link->theirs.address = terms->end.address;
	link->theirs.qpn = terms->end.qpn;
	link->theirs.psn = terms->end.psn;
	link->theirs.rkey = terms->end.rkey;
	link->ud = terms->ud;
	return terms->end.qpn;
}

/* The UD queue pair of the program, which sends each datagram back. */
static struct link mailbox;

static void return_datagram(const struct ibv_wc *wc)
{
	uint8_t *at = mailbox.bytes + AREA + wc->wr_id * SLOT;
	struct ibv_ah *ah = ibv_create_ah_from_wc(mailbox.pd, (struct ibv_wc *)wc, (void *)at, 1);
	struct ibv_send_wr wr = { .wr_id = SLOTS, .opcode = IBV_WR_SEND };
	struct ibv_wc sent;
	wr.wr.ud.ah = ah;
	wr.wr.ud.remote_qpn = wc->src_qp;
	wr.wr.ud.remote_qkey = QKEY;
	size_t len = wc->byte_len > GRH ? wc->byte_len - GRH : 0;
	memcpy(mailbox.bytes + OUT, at + GRH, len);
	if (ah && request(&mailbox, 2, wr, OUT, len))
		while (completion(&mailbox, &sent, patience) && sent.wr_id != SLOTS)
			receive(&mailbox, 2, sent.wr_id);
	if (ah)
		ibv_destroy_ah(ah);
}

static void *serve_datagrams(void *unused)
{
	struct ibv_wc wc;
	for (;;) {
		if (!completion(&mailbox, &wc, 3600))
			continue;
		if (wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV)
			return_datagram(&wc);
		receive(&mailbox, 2, wc.wr_id);
	}
	return unused;
}

/* Sends back what arrives on either queue pair. */
static void *serve(void *argument)
{
	struct link *link = argument;
	struct ibv_wc wc;
	while (completion(link, &wc, idle_limit) && wc.status == IBV_WC_SUCCESS) {
		int qp = wc.qp_num == link->mine.qpn;
		struct ibv_send_wr wr = { .wr_id = wc.wr_id, .opcode = IBV_WR_SEND };
		bool posted = wc.opcode == IBV_WC_RECV ? request(link, qp, wr, AREA + wc.wr_id * SLOT, wc.byte_len) :
							 receive(link, qp, wc.wr_id);
		if (!posted)
			break;
	}
	rdma_disconnect(link->id);
	tear_down(link);
	free(link);
	links--;
	return NULL;
}

static void greet(struct rdma_cm_id *id, const struct terms *asked)
{
	struct link *link = calloc(1, sizeof *link);
	pthread_t thread;
	link->id = id;
	id->context = link;
	if (links++ < MOST_LINKS && learn(link, asked) && build(link, false) &&
	    !try_connect_qp(link->qp[1], &link->mine, link->gid_index, &link->theirs)) {
		struct terms terms = terms_of(link, mailbox.qp[2]->qp_num);
		struct rdma_conn_param param = { .responder_resources = 8, .initiator_depth = 8, .rnr_retry_count = 7,
						 .private_data = &terms, .private_data_len = sizeof terms };
		if (!rdma_accept(id, &param) && !pthread_create(&thread, NULL, serve, link)) {
			pthread_detach(thread);
			return;
		}
	}
	rdma_reject(id, NULL, 0);
	tear_down(link);
	free(link);
	links--;
}

static void *take_requests(void *unused)
{
	struct rdma_cm_event *event;
	while (!rdma_get_cm_event(requests, &event)) {
		struct rdma_cm_id *id = event->id;
		struct link *link = id->context;
		struct terms terms = { 0 };
		bool new = event->event == RDMA_CM_EVENT_CONNECT_REQUEST;
		if (new)
			read_terms(&terms, &event->param.conn);
		else if (link && event->event != RDMA_CM_EVENT_ESTABLISHED)
			link->over = true;
		rdma_ack_cm_event(event);
		if (new)
			greet(id, &terms);
	}
	return unused;
}

/* Waits for an event of this kind; the private data that it has goes to `terms`. */
static bool event_of(struct rdma_event_channel *channel, enum rdma_cm_event_type kind, struct terms *terms)
{
	struct pollfd ready = { .fd = channel->fd, .events = POLLIN };
	struct rdma_cm_event *event;
	reason = "no event";
	if (poll(&ready, 1, patience * 1000) < 1 || rdma_get_cm_event(channel, &event))
		return false;
	bool right = event->event == kind;
	reason = rdma_event_str(event->event);
	if (right && terms)
		read_terms(terms, &event->param.conn);
	rdma_ack_cm_event(event);
	return right;
}

/* Waits for a completion that is a success. */
static bool success(struct link *link, struct ibv_wc *wc)
{
	if (!completion(link, wc, patience))
		return false;
	reason = ibv_wc_status_str(wc->status);
	return wc->status == IBV_WC_SUCCESS;
}

/* Waits for this many of them. */
static bool completions(struct link *link, int count)
{
	struct ibv_wc wc;
	for (; count > 0; count--)
		if (!success(link, &wc))
			return false;
	return true;
}

/* A message there and back; the answer goes to one of the queue pair's receives. */
static bool echo(struct link *link, int qp, size_t len, uint64_t seed)
{
	struct ibv_send_wr wr = { .wr_id = SLOTS, .opcode = IBV_WR_SEND };
	struct ibv_wc wc;
	fill(link->bytes + OUT, len, seed);
	if (!request(link, qp, wr, OUT, len))
		return false;
	for (int left = 2; left > 0; left--) {
		if (!success(link, &wc))
			return false;
		if (wc.wr_id == SLOTS)
			continue;
		reason = "other bytes came back";
		if (wc.byte_len != len || !is_filled(link->bytes + AREA + wc.wr_id * SLOT, len, seed) ||
		    !receive(link, qp, wc.wr_id))
			return false;
	}
	return true;
}

/* Writes bytes to the peer's region, reads them back, and compares. */
static bool write_and_read(struct link *link, int qp, size_t len, uint64_t seed)
{
	struct ibv_send_wr wr = { .wr_id = SLOTS, .opcode = IBV_WR_RDMA_WRITE };
	wr.wr.rdma.remote_addr = link->theirs.address + 64;
	wr.wr.rdma.rkey = link->theirs.rkey;
	fill(link->bytes + OUT, len, seed);
	if (!request(link, qp, wr, OUT, len))
		return false;
	wr.opcode = IBV_WR_RDMA_READ;
	if (!request(link, qp, wr, 64, len) || !completions(link, 2))
		return false;
	reason = "other bytes were read";
	return is_filled(link->bytes + 64, len, seed);
}

static bool add(struct link *link, int qp)
{
	struct ibv_send_wr wr = { .wr_id = SLOTS, .opcode = IBV_WR_ATOMIC_FETCH_AND_ADD };
	wr.wr.atomic.remote_addr = link->theirs.address;
	wr.wr.atomic.rkey = link->theirs.rkey;
	wr.wr.atomic.compare_add = 1;
	return request(link, qp, wr, 0, 8) && completions(link, 1);
}

/* This many datagrams there and back, and more while none came back: some may be lost. */
static bool datagrams(struct link *link, int count)
{
	double end = now() + patience;
	struct ibv_ah_attr attr = { .is_global = 1, .port_num = 1 };
	struct ibv_send_wr wr = { .wr_id = SLOTS, .opcode = IBV_WR_SEND };
	struct ibv_wc wc;
	int back = 0;
	attr.grh.dgid = link->theirs.gid;
	attr.grh.sgid_index = link->gid_index;
	link->ah = ibv_create_ah(link->pd, &attr);
	if (!link->ah)
		return false;
	wr.wr.ud.ah = link->ah;
	wr.wr.ud.remote_qpn = link->ud;
	wr.wr.ud.remote_qkey = QKEY;
	for (int n = 0; n < count || (!back && now() < end); n++) {
		if (!receive(link, 2, 0) || !request(link, 2, wr, OUT, DATAGRAM - n % 1000))
			return false;
		while (completion(link, &wc, 0.2))
			if (wc.status == IBV_WC_SUCCESS && wc.opcode == IBV_WC_RECV && ++back)
				break;
	}
	return back > 0;
}

/* All kinds of traffic; returns what failed, or NULL. */
static const char *exchange(struct link *link)
{
	static const size_t sizes[] = { 1, 40, 104, 1000, 4096, 30000, SLOT };
	for (int qp = 0; qp < 2; qp++) {
		for (int n = 0; n < 7; n++)
			if (!echo(link, qp, sizes[n], n + qp))
				return qp ? "echo by number" : "echo";
		for (int n = 0; n < 24; n++)
			if (!write_and_read(link, qp, n < 20 ? 16 : 30000 << (n - 20), n))
				return "Writes and Reads";
		if (!add(link, qp))
			return "atomic operation";
	}
	return datagrams(link, 20) ? NULL : "datagrams";
}

static const char *visit_with(struct link *link, struct rdma_event_channel *channel, int port)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct terms terms = { 0 };
	if (rdma_create_id(channel, &link->id, NULL, RDMA_PS_TCP) || rdma_resolve_addr(link->id, NULL, (void *)&to, 2000) ||
	    !event_of(channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL) || rdma_resolve_route(link->id, 2000) ||
	    !event_of(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL))
		return "address or route";
	if (!build(link, true))
		return "objects";
	struct terms mine = terms_of(link, link->qp[2]->qp_num);
	struct rdma_conn_param param = { .responder_resources = 8, .initiator_depth = 8, .retry_count = 7, .rnr_retry_count = 7,
					 .private_data = &mine, .private_data_len = sizeof mine };
	if (rdma_connect(link->id, &param) || !event_of(channel, RDMA_CM_EVENT_ESTABLISHED, &terms))
		return "connection";
	if (!learn(link, &terms) || try_connect_qp(link->qp[1], &link->mine, link->gid_index, &link->theirs))
		return "connection by number";
	const char *failed = exchange(link);
	rdma_disconnect(link->id);
	return failed;
}

static bool visit(int port)
{
	struct link link = { 0 };
	double begun = now();
	struct rdma_event_channel *channel = rdma_create_event_channel();
	const char *failed = channel ? visit_with(&link, channel, port) : "channel";
	int error = errno;
	double took = now() - begun;
	tear_down(&link);
	if (channel)
		rdma_destroy_event_channel(channel);
	if (failed)
		printf("visited %d: no %s after %.1f s: %s (%s)\n", port, failed, took, reason, strerror(error));
	else
		printf("visited %d: ok\n", port);
	fflush(stdout);
	return !failed;
}

static bool execute(char **word)
{
	if (!strcmp(word[0], "visit") && word[1]) {
		if (word[2])
			patience = atof(word[2]);
		visit(atoi(word[1]));
	}
	return strcmp(word[0], "quit");
}

/* Starts the listener and the UD queue pair, each with its thread. */
static void start(int port)
{
	struct sockaddr_in here = { .sin_family = AF_INET, .sin_port = htons(port), .sin_addr = { htonl(INADDR_LOOPBACK) } };
	struct rdma_cm_id *listener;
	pthread_t thread;
	requests = SOME(rdma_create_event_channel());
	ZERO(rdma_create_id(requests, &listener, NULL, RDMA_PS_TCP));
	ZERO(rdma_bind_addr(listener, (void *)&here));
	mailbox.id = listener;
	if (!build(&mailbox, true))
		die("no queue pair for datagrams: %s", strerror(errno));
	for (int slot = 0; slot < SLOTS; slot++)
		receive(&mailbox, 2, slot);
	ZERO(pthread_create(&thread, NULL, serve_datagrams, NULL));
	ZERO(rdma_listen(listener, 64));
	ZERO(pthread_create(&thread, NULL, take_requests, NULL));
	printf("serves %d\n", port);
	fflush(stdout);
}

int main(int argc, char **argv)
{
	int option, port = 0, target = 0, times = 1;
	while ((option = getopt(argc, argv, "p:v:n:t:")) != -1) {
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'v': target = atoi(optarg); break;
		case 'n': times = atoi(optarg); break;
		case 't': patience = atof(optarg); break;
		default: port = target = 0; optind = argc;
		}
	}
	if (!port == !target)
		die("services -p PORT | services -v PORT [-n TIMES] [-t SECONDS]");
	if (port) {
		start(port);
		read_commands(execute);
		return 0;
	}
	bool ok = true;
	while (times-- > 0)
		ok &= visit(target);
	return !ok;
}
