/* Messages of every kind of size, including zero, up to MAX (8 MiB), over one connection of
 * rdma_cm, on any device: in its turn, each end sends a message, writes as many bytes into the
 * other's memory, reads as many from it, and reports that; the other end compares each byte, and
 * checks that no byte after the data was written. -r: no Reads of zero bytes by this end, because
 * soft-iWARP sometimes answers one with a byte. */
#include "cm.h"

#define MOST (8u << 20)
/* Bytes after the written and the read data. */
#define GUARD 64

enum turn { INITIATOR, RESPONDER };
enum { SENT = 1, WRITTEN, TO_READ };

/* Kinds of completions: the wr_id. */
enum { MESSAGE, NOTICE, ACTION, NOTICE_SENT, KINDS };

/* Three areas: data from the other end, data that the other end reads, and data that is sent and
 * written. */
enum { IN = 0, OUT = MOST + GUARD, SCRATCH = 2 * (MOST + GUARD), RECEIVED = 3 * (MOST + GUARD), NOTE = 4 * (MOST + GUARD), END = NOTE + 64 };

static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint8_t *memory_of_ours;
static struct end far;
static bool reads_nothing = true;

static uint64_t seed_of(size_t size, enum turn turn, int kind)
{
	return size * 8 + turn * 4 + kind;
}

/* The next completion of this kind. Completions of other kinds that come first are kept until
 * the program asks for that kind. */
static struct ibv_wc await(int kind)
{
	static struct ibv_wc early[KINDS];
	static bool there[KINDS];
	while (!there[kind]) {
		struct ibv_wc wc = good_wc(cq);
		early[wc.wr_id] = wc;
		there[wc.wr_id] = true;
	}
	there[kind] = false;
	return early[kind];
}

static void is_untouched(size_t offset)
{
	for (size_t at = 0; at < GUARD; at++)
		if (memory_of_ours[offset + at] != 0xee)
			die("a byte after the message was written, at %zu", at);
}

static void act(struct ibv_qp *qp, size_t size, enum turn turn)
{
	fill(memory_of_ours + SCRATCH, size, seed_of(size, turn, SENT));
	post_send(qp, IBV_WR_SEND, mr, SCRATCH, size, NULL, 0, ACTION);
	await(ACTION);
	fill(memory_of_ours + SCRATCH, size, seed_of(size, turn, WRITTEN));
	post_send(qp, IBV_WR_RDMA_WRITE, mr, SCRATCH, size, &far, IN, ACTION);
	await(ACTION);
	if (size == 0 && !reads_nothing)
		return;
	memset(memory_of_ours + SCRATCH, 0xee, size + GUARD);
	post_send(qp, IBV_WR_RDMA_READ, mr, SCRATCH, size, &far, OUT, ACTION);
	await(ACTION);
	verify(memory_of_ours + SCRATCH, size, seed_of(size, turn, TO_READ));
	is_untouched(SCRATCH + size);
}

/* Puts the data that the other end will read in its next turn into place, and posts the
 * receives. */
static void prepare(struct ibv_qp *qp, size_t size, enum turn turn)
{
	memset(memory_of_ours + IN, 0xee, size + GUARD);
	memset(memory_of_ours + RECEIVED, 0xee, size + GUARD);
	fill(memory_of_ours + OUT, size, seed_of(size, turn, TO_READ));
	post_recv(qp, mr, RECEIVED, MOST, MESSAGE);
	post_recv(qp, mr, NOTE, 1, NOTICE);
}

static void suffer(size_t size, enum turn turn)
{
	struct ibv_wc wc = await(MESSAGE);
	if (wc.byte_len != size)
		die("%u bytes, not %zu", wc.byte_len, size);
	verify(memory_of_ours + RECEIVED, size, seed_of(size, turn, SENT));
	is_untouched(RECEIVED + size);
	await(NOTICE);
	verify(memory_of_ours + IN, size, seed_of(size, turn, WRITTEN));
	is_untouched(IN + size);
}

/* The sizes: small ones; below, at and above each power of two; and three large ones. */
static size_t next_size(size_t size)
{
	if (size < 5)
		return size + 1;
	if (size < 63)
		return 63;
	if (size >= 65536)
		return size == 65536 ? (1u << 20) - 1 : size < MOST ? MOST : MOST + 1;
	bool above = size > 5 && ((size - 1) & (size - 2)) == 0;
	return above ? 2 * (size - 1) - 1 : size + 1;
}

static void all_sizes(struct ibv_qp *qp, enum turn mine, size_t max)
{
	int sizes = 0;
	double start = now();
	for (size_t size = 0; size <= max; size = next_size(size), sizes++) {
		for (enum turn turn = INITIATOR; turn <= RESPONDER; turn++) {
			if (turn != mine) {
				suffer(size, turn);
				continue;
			}
			act(qp, size, turn);
			/* Prepares for the other end's turn, which begins with our notice. */
			if (turn == INITIATOR)
				prepare(qp, size, RESPONDER);
			else if (next_size(size) <= max)
				prepare(qp, next_size(size), INITIATOR);
			post_send(qp, IBV_WR_SEND, mr, NOTE, 1, NULL, 0, NOTICE_SENT);
			await(NOTICE_SENT);
		}
	}
	printf("%d sizes up to %zu in %.1f s\n", sizes, max, now() - start);
}

static void learn_far(const struct private_data *received)
{
	if (received->len < sizeof far)
		die("%u bytes of private data", received->len);
	memcpy(&far, received->data, sizeof far);
}

static struct end set_up(struct rdma_cm_id *id, enum turn mine)
{
	struct ibv_pd *pd = SOME(ibv_alloc_pd(id->verbs));
	cq = SOME(ibv_create_cq(id->verbs, 16, NULL, NULL, 0));
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	ZERO(rdma_create_qp(id, pd, &init));
	memory_of_ours = SOME(malloc(END));
	mr = SOME(ibv_reg_mr(pd, memory_of_ours, END, EVERY_ACCESS));
	if (mine == RESPONDER)
		prepare(id->qp, 0, INITIATOR);
	return (struct end){ .address = (uintptr_t)mr->addr, .rkey = mr->rkey };
}

int main(int argc, char **argv)
{
	char *port = NULL;
	size_t max = MOST;
	int option;
	while ((option = getopt(argc, argv, "p:m:r")) != -1) {
		switch (option) {
		case 'p': port = optarg; break;
		case 'r': reads_nothing = false; break;
		case 'm': max = strtoull(optarg, NULL, 0); break;
		default: port = NULL; optind = argc;
		}
	}
	if (!port || max > MOST)
		die("cm_sizes -p PORT [-m MAX] [-r] [HOST]");
	struct rdma_event_channel *channel = SOME(rdma_create_event_channel());
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .private_data_len = sizeof far };
	struct private_data received;
	if (optind < argc) {
		struct rdma_cm_id *id = resolved(channel, argv[optind], port);
		struct end end = set_up(id, INITIATOR);
		param.private_data = &end;
		ZERO(rdma_connect(id, &param));
		next_event(channel, RDMA_CM_EVENT_ESTABLISHED, &received);
		learn_far(&received);
		all_sizes(id->qp, INITIATOR, max);
		next_event(channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
		return 0;
	}
	listener(channel, port);
	struct rdma_cm_id *id = next_event(channel, RDMA_CM_EVENT_CONNECT_REQUEST, &received);
	learn_far(&received);
	struct end end = set_up(id, RESPONDER);
	param.private_data = &end;
	ZERO(rdma_accept(id, &param));
	next_event(channel, RDMA_CM_EVENT_ESTABLISHED, NULL);
	all_sizes(id->qp, RESPONDER, max);
	/* The end that sent the last message closes: when its Send is complete, neither end waits for
	 * anything. The other end would close before its device has confirmed that message. */
	ZERO(rdma_disconnect(id));
	return 0;
}
