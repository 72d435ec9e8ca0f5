/* How connections of rdma_cm begin and end, on any device: private data of several lengths go
 * with connect, reject and accept; either end disconnects; either end invalidates an STag of the
 * other's by its Send, and the Write into it that follows ends the connection. -l: a rejection
 * may come as an error, and without its private data, because soft-iWARP sometimes loses a
 * Reply after which the peer closes at once. */
#include "cm.h"

#define LENGTH 4096

enum ending { REJECTED, INITIATOR_ENDS, RESPONDER_ENDS, INITIATOR_INVALIDATES, RESPONDER_INVALIDATES };

static const struct {
	const char *name;
	enum ending ending;
	/* Bytes of private data. 248 are the most that soft-iWARP sends after the word of MPA
	 * revision 2. */
	uint8_t call, answer;
} rows[] = {
	{ "rejected", REJECTED, 0, 0 },
	{ "rejected with a reason", REJECTED, 100, 148 },
	{ "rejected with long private data", REJECTED, 248, 248 },
	{ "ended by the initiator", INITIATOR_ENDS, 0, 0 },
	{ "ended by the responder", RESPONDER_ENDS, 1, 248 },
	{ "invalidated by the initiator", INITIATOR_INVALIDATES, 248, 1 },
	{ "invalidated by the responder", RESPONDER_INVALIDATES, 56, 57 },
};
#define ROWS (sizeof rows / sizeof *rows)

enum { RECEIVED = 0, MINE = 256, NOTE = 512, END = 1024 };

/* One end of a connection: `messages` holds sent and received data, `open` is for the peer. */
struct connection {
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_cq *sent, *received;
	struct ibv_mr *messages, *open;
};

static bool loses_replies;

static struct connection set_up(struct rdma_cm_id *id)
{
	struct connection it = { .id = id, .pd = SOME(ibv_alloc_pd(id->verbs)) };
	it.sent = SOME(ibv_create_cq(id->verbs, 16, NULL, NULL, 0));
	it.received = SOME(ibv_create_cq(id->verbs, 16, NULL, NULL, 0));
	struct ibv_qp_init_attr init = {
		.send_cq = it.sent,
		.recv_cq = it.received,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	ZERO(rdma_create_qp(id, it.pd, &init));
	it.messages = SOME(ibv_reg_mr(it.pd, SOME(calloc(1, END)), END, EVERY_ACCESS));
	it.open = SOME(ibv_reg_mr(it.pd, SOME(calloc(1, LENGTH)), LENGTH, EVERY_ACCESS));
	post_recv(id->qp, it.messages, RECEIVED, sizeof(struct end), 0);
	post_recv(id->qp, it.messages, NOTE, 1, 0);
	return it;
}

static void tear_down(struct connection *it)
{
	rdma_destroy_qp(it->id);
	for (int n = 0; n < 2; n++) {
		struct ibv_mr *mr = n ? it->open : it->messages;
		void *memory = mr->addr;
		ZERO(ibv_dereg_mr(mr));
		free(memory);
	}
	ZERO(ibv_destroy_cq(it->sent));
	ZERO(ibv_destroy_cq(it->received));
	ZERO(ibv_dealloc_pd(it->pd));
}

/* Only the end that ends the connection waits for its completion: siw reports that the Send
 * failed if the peer, which has received it, ends the connection before siw has recorded that it
 * was sent. */
static void send_end(struct connection *it)
{
	struct end end = { .address = (uintptr_t)it->open->addr, .rkey = it->open->rkey };
	memcpy((uint8_t *)it->messages->addr + MINE, &end, sizeof end);
	post_send(it->id->qp, IBV_WR_SEND, it->messages, MINE, sizeof end, NULL, 0, 0);
}

static struct end receive_end(struct connection *it)
{
	struct end end;
	good_wc(it->received);
	memcpy(&end, it->messages->addr, sizeof end);
	return end;
}

static void invalidate(struct connection *it, const struct end *far)
{
	struct ibv_sge sge = { .addr = (uintptr_t)it->messages->addr, .length = 1, .lkey = it->messages->lkey };
	struct ibv_send_wr *bad, wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND_WITH_INV,
					.send_flags = IBV_SEND_SIGNALED, .invalidate_rkey = far->rkey };
	/* libsiw reads the key here. */
	wr.wr.rdma.rkey = far->rkey;
	ZERO(ibv_post_send(it->id->qp, &wr, &bad));
	/* The first Send, and this one. */
	good_wc(it->sent);
	good_wc(it->sent);
	memset((uint8_t *)it->messages->addr + MINE, 0xff, 8);
	/* The Write may complete successfully: the peer finds the STag invalid. */
	post_send(it->id->qp, IBV_WR_RDMA_WRITE, it->messages, MINE, 8, far, 0, 0);
}

/* The end whose STag was invalidated: checks the message, and that no later Write was placed. */
static void suffer(struct connection *it, struct rdma_event_channel *channel)
{
	struct ibv_wc wc = good_wc(it->received);
	/* libsiw does not report the key. */
	if ((wc.wc_flags & IBV_WC_WITH_INV) && wc.invalidated_rkey != it->open->rkey)
		die("STag %#x, not %#x", wc.invalidated_rkey, it->open->rkey);
	next_event(channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
	const uint8_t *memory = it->open->addr;
	for (size_t at = 0; at < LENGTH; at++)
		if (memory[at])
			die("byte %zu was written after the invalidation", at);
}

/* Runs the connection from ESTABLISHED on. */
static void end_it(struct connection *it, struct rdma_event_channel *channel, bool initiator, enum ending ending)
{
	struct end far;
	/* The initiator sends first: MPA requires it. */
	if (initiator)
		send_end(it);
	far = receive_end(it);
	if (!initiator)
		send_end(it);
	switch (ending) {
	case INITIATOR_ENDS:
	case RESPONDER_ENDS:
		if (initiator == (ending == INITIATOR_ENDS)) {
			good_wc(it->sent);
			ZERO(rdma_disconnect(it->id));
		}
		next_event(channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
		break;
	default:
		if (initiator != (ending == INITIATOR_INVALIDATES)) {
			suffer(it, channel);
		} else {
			invalidate(it, &far);
			next_event(channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
		}
	}
}

/* The content of the private data: each end can compute the other's. */
static uint64_t seed_of(size_t row, bool initiator)
{
	return 2 * row + initiator;
}

static void check_private_data(const struct private_data *received, size_t row, bool by_initiator)
{
	uint8_t len = by_initiator ? rows[row].call : rows[row].answer;
	if (received->len != len)
		die("%s: %u bytes of private data, not %u", rows[row].name, received->len, len);
	verify(received->data, len, seed_of(row, by_initiator));
}

static void call(struct rdma_event_channel *channel, const char *host, const char *port, size_t row)
{
	struct rdma_cm_id *id = resolved(channel, host, port);
	struct connection it = set_up(id);
	uint8_t data[256];
	struct private_data received;
	fill(data, rows[row].call, seed_of(row, true));
	struct rdma_conn_param param = {
		.responder_resources = 1, .initiator_depth = 1, .private_data = data, .private_data_len = rows[row].call
	};
	ZERO(rdma_connect(id, &param));
	if (rows[row].ending != REJECTED) {
		next_event(channel, RDMA_CM_EVENT_ESTABLISHED, &received);
		check_private_data(&received, row, false);
		end_it(&it, channel, true, rows[row].ending);
	} else {
		next_event_of(channel, RDMA_CM_EVENT_REJECTED, loses_replies ? RDMA_CM_EVENT_CONNECT_ERROR : RDMA_CM_EVENT_REJECTED, &received);
		if (received.len || !loses_replies)
			check_private_data(&received, row, false);
	}
	tear_down(&it);
	ZERO(rdma_destroy_id(id));
}

static void answer(struct rdma_event_channel *channel, size_t row)
{
	uint8_t data[256], len = rows[row].answer;
	struct private_data received;
	struct rdma_cm_id *id = next_event(channel, RDMA_CM_EVENT_CONNECT_REQUEST, &received);
	check_private_data(&received, row, true);
	fill(data, len, seed_of(row, false));
	if (rows[row].ending == REJECTED) {
		ZERO(rdma_reject(id, data, len));
	} else {
		struct connection it = set_up(id);
		struct rdma_conn_param param = {
			.responder_resources = 1, .initiator_depth = 1, .private_data = data, .private_data_len = len
		};
		ZERO(rdma_accept(id, &param));
		next_event(channel, RDMA_CM_EVENT_ESTABLISHED, NULL);
		end_it(&it, channel, false, rows[row].ending);
		tear_down(&it);
	}
	ZERO(rdma_destroy_id(id));
}

int main(int argc, char **argv)
{
	char *port = NULL;
	int option;
	while ((option = getopt(argc, argv, "p:l")) != -1) {
		switch (option) {
		case 'p': port = optarg; break;
		case 'l': loses_replies = true; break;
		default: port = NULL; optind = argc;
		}
	}
	if (!port)
		die("cm_endings -p PORT [-l] [HOST]");
	struct rdma_event_channel *channel = SOME(rdma_create_event_channel());
	if (optind == argc)
		listener(channel, port);
	for (size_t row = 0; row < ROWS; row++) {
		if (optind < argc)
			call(channel, argv[optind], port, row);
		else
			answer(channel, row);
		printf("%s\n", rows[row].name);
		fflush(stdout);
	}
	return 0;
}
