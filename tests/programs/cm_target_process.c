/* A program that connects through librdmacm to a test with a raw TCP connection. It executes the
 * lines of its standard input, and answers each with one line that begins with "= ". Numbers are
 * hexadecimal, bytes are pairs of digits, "-" for none; an id gets the lowest free number; the id
 * of a Request gets its number with its event.
 *
 *   listen ADDRESS BACKLOG                a listener at a port of the kernel's choice: id, port
 *   connect ADDRESS PORT IRD ORD BYTES    resolves, and connects with a new queue pair: id, errno
 *   event                                 the next event: event, status (negative ones as 64
 *                                         bits), id, about, ird, ord, data
 *   quiet                                 whether no event is pending
 *   accept ID IRD ORD BYTES               accepts with a new queue pair: errno
 *   reject ID BYTES                       errno
 *   disconnect ID                         errno
 *   destroy ID                            destroys the id and its queue pair
 *   post ID OPCODE WR-ID LEN ADDRESS RKEY   a request with the buffer: errno
 *   recv ID WR-ID                         a receive of a page
 *   wait ID, poll ID                      the next completion of its queue: status, len, id, qp;
 *                                         "none" when there is none
 *   state ID                              the state of the id's queue pair
 *   buffer                                address, rkey, and the first bytes
 *   shared                                later queue pairs share a completion queue
 *   external                              later initiators use queue pairs that librdmacm does
 *                                         not manage
 *   establish ID                          completes an external connect: errno
 *   fail ID                               moves its queue pair to the error state
 *   quit                                  destroys all objects
 */
#include "rc.h"
#include <poll.h>
#include <rdma/rdma_cma.h>

#define MOST 512
#define DEPTH 16
#define RECEIVES 4
#define PAGE 4096

static struct rdma_event_channel *channel;
static struct ibv_pd *pd;
static struct ibv_mr *mr;
static struct ibv_cq *shared_cq;
static bool shared, external;
static uint8_t buffer[(RECEIVES + 1) * PAGE] __attribute__((aligned(PAGE)));
static struct one {
	struct rdma_cm_id *id;
	struct ibv_cq *cq;
	struct ibv_qp *qp;
} ids[MOST];
static unsigned id_count;

__attribute__((format(printf, 1, 2))) static void answer(const char *format, ...)
{
	va_list args;
	va_start(args, format);
	fputs("= ", stdout);
	vprintf(format, args);
	va_end(args);
	putchar('\n');
	fflush(stdout);
}

static unsigned enter(struct rdma_cm_id *id)
{
	unsigned index = 0;
	while (index < id_count && ids[index].id)
		index++;
	if (index == MOST)
		die("too many ids");
	if (index == id_count)
		id_count++;
	ids[index].id = id;
	id->context = (void *)(uintptr_t)index;
	return index;
}

static struct one *one(const char *word)
{
	unsigned long index = word ? strtoul(word, NULL, 16) : MOST;
	if (index >= MOST || !ids[index].id)
		die("unknown id: %s", word ? word : "none given");
	return &ids[index];
}

static size_t bytes(const char *word, uint8_t *to)
{
	size_t len = 0;
	for (; word && word[0] != '-' && sscanf(word, "%2hhx", to + len) == 1; word += 2)
		len++;
	return len;
}

static int outcome(int result)
{
	return result ? errno : 0;
}

static bool event_waits(void)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	return poll(&fd, 1, 0) == 1;
}

static void receive(struct one *it, uint64_t wr_id)
{
	post_recv(it->qp, mr, (1 + wr_id % RECEIVES) * PAGE, PAGE, wr_id);
}

/* A queue pair with receives posted. */
static void equip(struct one *it)
{
	struct ibv_context *verbs = it->id->verbs;
	if (!pd) {
		pd = SOME(ibv_alloc_pd(verbs));
		mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	}
	if (shared && !shared_cq)
		shared_cq = SOME(ibv_create_cq(verbs, MOST * DEPTH, NULL, NULL, 0));
	it->cq = shared ? shared_cq : SOME(ibv_create_cq(verbs, 2 * DEPTH, NULL, NULL, 0));
	if (external) {
		it->qp = create_qp(pd, it->cq, DEPTH);
	} else {
		struct ibv_qp_init_attr init = {
			.send_cq = it->cq,
			.recv_cq = it->cq,
			.qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = DEPTH, .max_recv_wr = DEPTH, .max_send_sge = 1, .max_recv_sge = 1 },
		};
		ZERO(rdma_create_qp(it->id, pd, &init));
		it->qp = it->id->qp;
	}
	for (int i = 0; i < RECEIVES; i++)
		receive(it, i);
}

static struct rdma_conn_param parameters(struct one *it, char **word, uint8_t *data)
{
	struct rdma_conn_param param = {
		.responder_resources = strtoul(word[0], NULL, 16),
		.initiator_depth = strtoul(word[1], NULL, 16),
		.private_data = data,
		.private_data_len = bytes(word[2], data),
		.qp_num = it->qp->qp_num,
		.rnr_retry_count = 7,
	};
	return param;
}

static void expect(enum rdma_cm_event_type wanted)
{
	struct rdma_cm_event *event;
	ZERO(rdma_get_cm_event(channel, &event));
	if (event->event != wanted)
		die("%s, status %d, not %s", rdma_event_str(event->event), event->status, rdma_event_str(wanted));
	ZERO(rdma_ack_cm_event(event));
}

static void listen_at(char **word)
{
	struct rdma_addrinfo hints = { .ai_flags = RAI_PASSIVE | RAI_NUMERICHOST, .ai_port_space = RDMA_PS_TCP }, *found;
	struct rdma_cm_id *id;
	ZERO(rdma_getaddrinfo(word[0], NULL, &hints, &found));
	ZERO(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	unsigned index = enter(id);
	ZERO(rdma_bind_addr(id, found->ai_src_addr));
	rdma_freeaddrinfo(found);
	ZERO(rdma_listen(id, strtol(word[1], NULL, 16)));
	answer("id=%x port=%x", index, ntohs(rdma_get_src_port(id)));
}

/* No other events may come meanwhile. */
static void call(char **word)
{
	struct sockaddr_storage there = { 0 };
	struct sockaddr_in *four = (void *)&there;
	struct sockaddr_in6 *six = (void *)&there;
	in_port_t port = htons(strtoul(word[1], NULL, 16));
	if (inet_pton(AF_INET, word[0], &four->sin_addr) == 1)
		four->sin_family = AF_INET, four->sin_port = port;
	else if (inet_pton(AF_INET6, word[0], &six->sin6_addr) == 1)
		six->sin6_family = AF_INET6, six->sin6_port = port;
	else
		die("%s is not an address", word[0]);

	struct rdma_cm_id *id;
	ZERO(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	unsigned index = enter(id);
	ZERO(rdma_resolve_addr(id, NULL, (void *)&there, 2000));
	expect(RDMA_CM_EVENT_ADDR_RESOLVED);
	ZERO(rdma_resolve_route(id, 2000));
	expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
	equip(&ids[index]);
	uint8_t data[256];
	struct rdma_conn_param param = parameters(&ids[index], word + 2, data);
	answer("id=%x errno=%x", index, outcome(rdma_connect(id, &param)));
}

static void next_event(void)
{
	struct rdma_cm_event *event;
	ZERO(rdma_get_cm_event(channel, &event));
	/* A new id shares its context with its listener until it is entered. */
	struct rdma_cm_id *listener = event->listen_id ? event->listen_id : event->id;
	unsigned id = (uintptr_t)listener->context, about = id;
	if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST)
		about = enter(event->id);
	char data[2 * 256 + 1] = "-";
	const uint8_t *at = event->param.conn.private_data;
	for (unsigned i = 0; i < event->param.conn.private_data_len; i++)
		sprintf(data + 2 * i, "%02x", at[i]);
	/* The acknowledgement frees the memory that the event points to. */
	unsigned kind = event->event, ird = event->param.conn.responder_resources, ord = event->param.conn.initiator_depth;
	uint64_t status = (int64_t)event->status;
	ZERO(rdma_ack_cm_event(event));
	answer("event=%x status=%" PRIx64 " id=%x about=%x ird=%x ord=%x data=%s", kind, status, id, about, ird, ord, data);
}

static void take_up(struct one *it, char **word)
{
	uint8_t data[256];
	equip(it);
	struct rdma_conn_param param = parameters(it, word, data);
	answer("errno=%x", outcome(rdma_accept(it->id, &param)));
}

static void post(struct one *it, char **word)
{
	struct ibv_sge sge = { .addr = (uintptr_t)buffer, .length = strtoul(word[2], NULL, 16), .lkey = mr->lkey };
	struct ibv_send_wr wr = {
		.wr_id = strtoull(word[1], NULL, 16),
		.sg_list = &sge,
		.num_sge = 1,
		.opcode = strtoul(word[0], NULL, 16),
		.send_flags = IBV_SEND_SIGNALED,
		.wr.rdma = { .remote_addr = strtoull(word[3], NULL, 16), .rkey = strtoul(word[4], NULL, 16) },
	};
	struct ibv_send_wr *bad;
	answer("errno=%x", ibv_post_send(it->qp, &wr, &bad));
}

static void show(struct ibv_cq *cq, bool wait)
{
	struct ibv_wc wc;
	int n;
	/* Yields between polls: other processes need the processor, too. */
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0 && wait)
		usleep(200);
	if (n < 0)
		die("ibv_poll_cq: %d", n);
	if (!n)
		return answer("none");
	for (unsigned i = 0; i < id_count; i++)
		if (ids[i].id && ids[i].qp && ids[i].qp->qp_num == wc.qp_num)
			return answer("status=%x len=%x id=%" PRIx64 " of=%x", wc.status, wc.byte_len, wc.wr_id, i);
	die("a completion of queue pair %#x", wc.qp_num);
}

static void release(struct one *it)
{
	if (it->id->qp)
		rdma_destroy_qp(it->id);
	else if (it->qp)
		ZERO(ibv_destroy_qp(it->qp));
	ZERO(rdma_destroy_id(it->id));
	if (it->cq && it->cq != shared_cq)
		ZERO(ibv_destroy_cq(it->cq));
	memset(it, 0, sizeof *it);
}

static bool execute(char **word)
{
	const char *order = word[0];
	uint8_t data[256];

	if (!strcmp(order, "listen")) {
		listen_at(word + 1);
	} else if (!strcmp(order, "connect")) {
		call(word + 1);
	} else if (!strcmp(order, "event")) {
		next_event();
	} else if (!strcmp(order, "quiet")) {
		answer("quiet=%x", !event_waits());
	} else if (!strcmp(order, "accept")) {
		take_up(one(word[1]), word + 2);
	} else if (!strcmp(order, "reject")) {
		size_t len = bytes(word[2], data);
		answer("errno=%x", outcome(rdma_reject(one(word[1])->id, data, len)));
	} else if (!strcmp(order, "establish")) {
		answer("errno=%x", outcome(rdma_establish(one(word[1])->id)));
	} else if (!strcmp(order, "fail")) {
		struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
		ZERO(ibv_modify_qp(one(word[1])->qp, &attr, IBV_QP_STATE));
		answer("done");
	} else if (!strcmp(order, "disconnect")) {
		answer("errno=%x", outcome(rdma_disconnect(one(word[1])->id)));
	} else if (!strcmp(order, "destroy")) {
		release(one(word[1]));
		answer("done");
	} else if (!strcmp(order, "post")) {
		post(one(word[1]), word + 2);
	} else if (!strcmp(order, "recv")) {
		receive(one(word[1]), strtoull(word[2], NULL, 16));
		answer("done");
	} else if (!strcmp(order, "wait") || !strcmp(order, "poll")) {
		show(one(word[1])->cq, order[0] == 'w');
	} else if (!strcmp(order, "state")) {
		struct ibv_qp_attr attr;
		struct ibv_qp_init_attr init;
		ZERO(ibv_query_qp(one(word[1])->qp, &attr, IBV_QP_STATE, &init));
		answer("state=%x", attr.qp_state);
	} else if (!strcmp(order, "buffer")) {
		answer("address=%" PRIx64 " rkey=%x first=%02x%02x%02x%02x", (uint64_t)(uintptr_t)buffer, mr->rkey, buffer[0],
		       buffer[1], buffer[2], buffer[3]);
	} else if (!strcmp(order, "shared")) {
		shared = true;
		answer("done");
	} else if (!strcmp(order, "external")) {
		external = true;
		answer("done");
	} else if (!strcmp(order, "quit")) {
		return false;
	} else {
		die("unknown command: %s", order);
	}
	return true;
}

int main(void)
{
	channel = SOME(rdma_create_event_channel());
	answer("ready");

	read_commands(execute);
	/* The ids of Requests before their listeners. */
	for (unsigned i = id_count; i-- > 0;)
		if (ids[i].id)
			release(&ids[i]);
	if (shared_cq)
		ZERO(ibv_destroy_cq(shared_cq));
	if (pd) {
		ZERO(ibv_dereg_mr(mr));
		ZERO(ibv_dealloc_pd(pd));
	}
	rdma_destroy_event_channel(channel);
	answer("left in good order");
	return 0;
}
