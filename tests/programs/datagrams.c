/* Datagrams between as many queue pairs of kind UD at both ends: what was sent is received once and
 * undamaged, or counted as dropped.
 *
 * datagrams -p PORT [-q QUEUE_PAIRS] [-n DATAGRAMS] [-x] [HOST]: with HOST it sends; -x: damaged
 * packets and wrong Q_Keys in between. The counters are those of all processes of a presence, so
 * each end needs its own. */
#include "rc.h"

#define GRH 40
#define LARGEST 1000
#define QKEY 0x11223344
#define RECEIVES 64
#define SENDS 32
#define MOST_QPS 256

/* Payload: this, then bytes that follow from it. */
struct head {
	uint64_t number;
	uint32_t from, length;
};

struct peer {
	union ibv_gid gid;
	uint32_t qpns[MOST_QPS];
};

struct totals {
	uint64_t datagrams, hostile, dropped;
};

static int qps = 1;
static struct ibv_qp *qp[MOST_QPS];
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint8_t *places;
static struct peer mine, theirs;

static uint64_t counter(const char *name)
{
	char path[200], text[32] = "";
	snprintf(path, sizeof path, "/sys/class/infiniband/urnic0/ports/1/hw_counters/%s", name);
	FILE *file = SOME(fopen(path, "r"));
	if (!fgets(text, sizeof text, file))
		die("%s is empty", path);
	fclose(file);
	return strtoull(text, NULL, 10);
}

static size_t length_of(uint64_t number)
{
	return sizeof(struct head) + number * 7919 % (LARGEST - sizeof(struct head));
}

static void make_payload(uint8_t *at, uint64_t number, uint32_t from)
{
	struct head head = { .number = number, .from = from, .length = length_of(number) };
	memcpy(at, &head, sizeof head);
	fill(at + sizeof head, head.length - sizeof head, number * MOST_QPS + from);
}

static void create_qps(void)
{
	context = open_device();
	pd = SOME(ibv_alloc_pd(context));
	cq = SOME(ibv_create_cq(context, qps * (RECEIVES + SENDS), NULL, NULL, 0));
	size_t size = (size_t)qps * RECEIVES * (GRH + LARGEST);
	places = SOME(calloc(1, size));
	mr = SOME(ibv_reg_mr(pd, places, size, IBV_ACCESS_LOCAL_WRITE));
	/* The first GID of an IPv4 address. */
	ZERO(ibv_query_gid(context, 1, 3, &mine.gid));
	for (int n = 0; n < qps; n++) {
		struct ibv_qp_init_attr init = {
			.send_cq = cq,
			.recv_cq = cq,
			.qp_type = IBV_QPT_UD,
			.cap = { .max_send_wr = SENDS, .max_recv_wr = RECEIVES, .max_send_sge = 1, .max_recv_sge = 1 },
		};
		qp[n] = SOME(ibv_create_qp(pd, &init));
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qkey = QKEY };
		ZERO(ibv_modify_qp(qp[n], &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY));
		mine.qpns[n] = qp[n]->qp_num;
	}
}

static void start_qps(void)
{
	for (int n = 0; n < qps; n++) {
		struct ibv_qp_attr attr = { .qp_state = IBV_QPS_RTR };
		ZERO(ibv_modify_qp(qp[n], &attr, IBV_QP_STATE));
		attr.qp_state = IBV_QPS_RTS;
		ZERO(ibv_modify_qp(qp[n], &attr, IBV_QP_STATE | IBV_QP_SQ_PSN));
	}
}

static void receive_into(uint64_t place)
{
	struct ibv_sge sge = { (uintptr_t)places + place * (GRH + LARGEST), GRH + LARGEST, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = place, .sg_list = &sge, .num_sge = 1 }, *bad;
	ZERO(ibv_post_recv(qp[place / RECEIVES], &wr, &bad));
}

/* Checks a received datagram; it must come after those before it. */
static void check(const struct ibv_wc *wc, uint64_t *next)
{
	if (wc->status != IBV_WC_SUCCESS || !(wc->wc_flags & IBV_WC_GRH))
		die("a receive completed with status %d, flags %#x", wc->status, wc->wc_flags);
	const uint8_t *payload = places + wc->wr_id * (GRH + LARGEST) + GRH;
	int n = wc->wr_id / RECEIVES;
	struct head head;
	memcpy(&head, payload, sizeof head);
	if (wc->byte_len != GRH + head.length || head.length != length_of(head.number) || head.from != (uint32_t)n)
		die("queue pair %d received %u bytes from %u, not %u", n, wc->byte_len, head.from, head.length);
	if (wc->src_qp != theirs.qpns[n])
		die("queue pair %d received from %#x", n, wc->src_qp);
	if (head.number < next[n])
		die("queue pair %d received datagram %" PRIu64 " again, or late", n, head.number);
	next[n] = head.number + 1;
	verify(payload + sizeof head, head.length - sizeof head, head.number * MOST_QPS + head.from);
}

static uint64_t receive_all(void)
{
	static uint64_t next[MOST_QPS];
	struct ibv_wc wc[16];
	uint64_t received = 0;

	for (;;) {
		int count = ibv_poll_cq(cq, 16, wc);
		if (count < 0)
			die("ibv_poll_cq failed");
		if (count == 0)
			return received;
		for (int i = 0; i < count; i++) {
			check(&wc[i], next);
			receive_into(wc[i].wr_id);
			received++;
		}
	}
}

/* Receives until each packet is accounted for. */
static void serve(int sock)
{
	uint64_t received = 0, accounted;
	struct totals totals;
	fd_set set;

	do {
		FD_ZERO(&set);
		FD_SET(sock, &set);
		received += receive_all();
	} while (select(sock + 1, &set, NULL, NULL, &(struct timeval){ 0 }) == 0);
	if (!sock_read(sock, &totals, sizeof totals))
		die("the sender is gone");
	uint64_t sent = totals.datagrams - totals.dropped;
	do {
		received += receive_all();
		accounted = received + counter("rx_datagram_drops") + counter("rx_datagram_errors") +
			    counter("qkey_violations");
		if (received > sent || accounted > sent + totals.hostile)
			die("%" PRIu64 " received, %" PRIu64 " accounted for, of %" PRIu64, received, accounted, sent);
	} while (accounted < sent + totals.hostile || counter("rx_datagrams") != received);
	printf("%" PRIu64 " sent, %" PRIu64 " received, %" PRIu64 " dropped by receiver, %" PRIu64
	       " by sender, %" PRIu64 " hostile\n",
	       totals.datagrams, received, counter("rx_datagram_drops"), totals.dropped, totals.hostile);
	if (received == 0)
		die("nothing was received");
}

static struct ibv_ah *address_of(const union ibv_gid *gid)
{
	struct ibv_ah_attr attr = {
		.is_global = 1, .port_num = 1, .grh = { .dgid = *gid, .sgid_index = 3, .hop_limit = 1 }
	};
	return SOME(ibv_create_ah(pd, &attr));
}

static void send_one(int n, struct ibv_ah *to, uint32_t qpn, uint32_t qkey, uint64_t number)
{
	uint8_t *place = places + n * LARGEST;
	struct ibv_wc wc;
	make_payload(place, number, n);
	struct ibv_sge sge = { (uintptr_t)place, length_of(number), mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge,
				  .num_sge = 1,
				  .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED,
				  .wr.ud = { to, qpn, qkey } },
			   *bad;
	ZERO(ibv_post_send(qp[n], &wr, &bad));
	while (ibv_poll_cq(cq, 1, &wc) == 0)
		;
	if (wc.status != IBV_WC_SUCCESS)
		die("a send completed with status %d", wc.status);
}

/* A true packet, which a UDP socket at the place of a queue pair has received. */
static size_t packet(int udp, struct ibv_ah *self, uint8_t *bytes, size_t room)
{
	struct sockaddr_in name;
	socklen_t len = sizeof name;
	ZERO(getsockname(udp, (struct sockaddr *)&name, &len));
	send_one(0, self, (uint32_t)ntohs(name.sin_port) << 8, QKEY, 1);
	ssize_t got = recv(udp, bytes, room, 0);
	if (got <= 0)
		die("recv: %s", strerror(errno));
	return got;
}

/* One packet that must not be delivered. */
static void attack(int udp, uint8_t *bytes, size_t length, struct ibv_ah *to, uint64_t number)
{
	int n = number % qps;
	struct sockaddr_in name = { .sin_family = AF_INET, .sin_port = htons(theirs.qpns[n] >> 8) };
	uint8_t random[256];

	memcpy(&name.sin_addr, theirs.gid.raw + 12, 4);
	switch (number % 4) {
	case 0:
		send_one(n, to, theirs.qpns[n], QKEY + 1 + number % 7, number);
		return;
	case 1:
		fill(random, sizeof random, number);
		length = number % sizeof random;
		bytes = random;
		break;
	case 2:
		/* A bit of a true packet, whose ICRC is of another port besides. */
		bytes[number % length] ^= 1 << number % 8;
		break;
	default:
		length = number % length;
	}
	if (sendto(udp, bytes, length, 0, (struct sockaddr *)&name, sizeof name) < 0)
		die("sendto: %s", strerror(errno));
}

static void send_all(int sock, uint64_t count, bool hostile)
{
	struct ibv_ah *to = address_of(&theirs.gid), *self = address_of(&mine.gid);
	struct totals totals = { .datagrams = count };
	int udp = socket(AF_INET, SOCK_DGRAM, 0);
	struct sockaddr_in any = { .sin_family = AF_INET };
	uint8_t bytes[2048];
	size_t length = 0;

	memcpy(&any.sin_addr, mine.gid.raw + 12, 4);
	ZERO(bind(udp, (struct sockaddr *)&any, sizeof any));
	if (hostile)
		length = packet(udp, self, bytes, sizeof bytes);
	for (uint64_t number = 0; number < count; number++) {
		int n = number % qps;
		send_one(n, to, theirs.qpns[n], QKEY, number);
		if (hostile) {
			attack(udp, bytes, length, to, number);
			totals.hostile++;
		}
	}
	totals.dropped = counter("tx_datagram_drops");
	sock_write(sock, &totals, sizeof totals);
}

int main(int argc, char **argv)
{
	uint64_t count = 10000;
	bool hostile = false;
	int option, port = 18515;

	while ((option = getopt(argc, argv, "p:q:n:x")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'q': qps = atoi(optarg); break;
		case 'n': count = strtoull(optarg, NULL, 10); break;
		case 'x': hostile = true; break;
		default: return 2;
		}
	if (qps < 1 || qps > MOST_QPS)
		die("1 to %d queue pairs", MOST_QPS);
	const char *host = optind < argc ? argv[optind] : NULL;
	create_qps();
	if (!host)
		for (uint64_t place = 0; place < (uint64_t)qps * RECEIVES; place++)
			receive_into(place);
	start_qps();
	int sock = meet(host, port);
	swap(sock, &mine, &theirs, sizeof mine);
	if (host)
		send_all(sock, count, hostile);
	else
		serve(sock);
	barrier(sock);
	for (int n = 0; n < qps; n++)
		ZERO(ibv_destroy_qp(qp[n]));
	return 0;
}
