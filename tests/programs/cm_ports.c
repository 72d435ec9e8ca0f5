/* Checks the ports of rdma_cm ids at ADDRESS, which is an address of this host, with any device.
 * Both ends are in this process. With "late", the server posts all receives but the first two
 * seconds after it accepted; the client has sent all its messages by then. */
#include "cm.h"

#define MESSAGES 8
#define LEN 4096

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .rnr_retry_count = 7 };

static void create_cm_qp(struct rdma_cm_id *id)
{
	if (!pd) {
		pd = SOME(ibv_alloc_pd(id->verbs));
		cq = SOME(ibv_create_cq(id->verbs, 4 * MESSAGES, NULL, NULL, 0));
	}
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = MESSAGES, .max_recv_wr = MESSAGES, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	ZERO(rdma_create_qp(id, pd, &init));
}

static struct sockaddr_in place(const char *address, int port)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons(port) };
	ZERO(inet_pton(AF_INET, address, &at.sin_addr) - 1);
	return at;
}

static int bind_to(struct rdma_cm_id *id, struct sockaddr_in at)
{
	return rdma_bind_addr(id, (struct sockaddr *)&at);
}

static void is_port(const char *when, struct rdma_cm_id *id, int port)
{
	if (ntohs(rdma_get_src_port(id)) != port)
		die("%s: the port is %d instead of %d", when, ntohs(rdma_get_src_port(id)), port);
}

/* Two ids may share a port if each is limited to its address family. */
static void families(struct rdma_event_channel *channel)
{
	struct sockaddr_in v4 = { .sin_family = AF_INET };
	struct sockaddr_in6 v6 = { .sin6_family = AF_INET6 };
	struct rdma_cm_id *ids[3];
	int one = 1;
	for (int i = 0; i < 3; i++)
		ZERO(rdma_create_id(channel, &ids[i], NULL, RDMA_PS_TCP));
	for (int i = 0; i < 2; i++)
		ZERO(rdma_set_option(ids[i], RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, &one, sizeof(one)));
	ZERO(bind_to(ids[0], v4));
	v6.sin6_port = rdma_get_src_port(ids[0]);
	ZERO(rdma_bind_addr(ids[1], (struct sockaddr *)&v6));
	if (rdma_bind_addr(ids[2], (struct sockaddr *)&v6) == 0)
		die("an id of both families shares a port with one of each");
	for (int i = 0; i < 2; i++)
		ZERO(rdma_listen(ids[i], 1));
	for (int i = 0; i < 3; i++)
		ZERO(rdma_destroy_id(ids[i]));
}

/* Connects a bound id. Its address is resolved with another source, and it migrates to another
 * channel before it connects. */
static void connects(const char *address, bool late)
{
	struct rdma_event_channel *first = SOME(rdma_create_event_channel()), *second = SOME(rdma_create_event_channel()),
				  *served = SOME(rdma_create_event_channel());
	struct rdma_cm_id *listener, *id, *other;
	ZERO(rdma_create_id(served, &listener, NULL, RDMA_PS_TCP));
	ZERO(bind_to(listener, place(address, 0)));
	ZERO(rdma_listen(listener, 1));
	struct sockaddr_in source = place(address, 0), to = place(address, ntohs(rdma_get_src_port(listener)));

	ZERO(rdma_create_id(first, &id, NULL, RDMA_PS_TCP));
	ZERO(bind_to(id, source));
	int port = ntohs(rdma_get_src_port(id));
	ZERO(!port);
	ZERO(rdma_resolve_addr(id, (struct sockaddr *)&source, (struct sockaddr *)&to, 2000));
	next_event(first, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
	is_port("resolved", id, port);
	if (rdma_resolve_addr(id, (struct sockaddr *)&source, (struct sockaddr *)&to, 2000) == 0 || errno != EINVAL)
		die("a second resolution of an address succeeds");
	ZERO(rdma_create_id(first, &other, NULL, RDMA_PS_TCP));
	if (bind_to(other, place(address, port)) == 0 || errno != EADDRINUSE)
		die("another id gets the port of a bound id: %s", strerror(errno));
	ZERO(rdma_destroy_id(other));
	ZERO(rdma_migrate_id(id, second));
	ZERO(rdma_resolve_route(id, 2000));
	next_event(second, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
	create_cm_qp(id);
	ZERO(rdma_connect(id, &param));
	struct rdma_cm_id *child = next_event(served, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
	if (ntohs(rdma_get_dst_port(child)) != port)
		die("the peer's port is %d instead of %d", ntohs(rdma_get_dst_port(child)), port);
	create_cm_qp(child);
	uint8_t *memory = SOME(calloc(2, LEN));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, memory, 2 * LEN, IBV_ACCESS_LOCAL_WRITE));
	/* The first receive is posted before the connection, as every protocol does. */
	post_recv(child->qp, mr, LEN, LEN, 0);
	for (int i = 1; i < MESSAGES && !late; i++)
		post_recv(child->qp, mr, LEN, LEN, i);
	ZERO(rdma_accept(child, &param));
	next_event(second, RDMA_CM_EVENT_ESTABLISHED, NULL);
	is_port("connected", id, port);
	for (int i = 0; i < MESSAGES; i++)
		post_send(id->qp, IBV_WR_SEND, mr, 0, LEN, NULL, 0, MESSAGES + i);
	next_event(served, RDMA_CM_EVENT_ESTABLISHED, NULL);
	if (late) {
		sleep(2);
		for (int i = 1; i < MESSAGES; i++)
			post_recv(child->qp, mr, LEN, LEN, i);
	}
	for (int i = 0; i < 2 * MESSAGES; i++)
		good_wc(cq);
	ZERO(rdma_disconnect(id));
	next_event(second, RDMA_CM_EVENT_DISCONNECTED, NULL);
	next_event(served, RDMA_CM_EVENT_DISCONNECTED, NULL);
	rdma_destroy_qp(id);
	rdma_destroy_qp(child);
	ZERO(rdma_destroy_id(listener));
	/* The port is free at once, although the connections that it took have only just ended. */
	ZERO(rdma_create_id(served, &listener, NULL, RDMA_PS_TCP));
	ZERO(bind_to(listener, to));
	ZERO(rdma_listen(listener, 1));
	ZERO(rdma_destroy_id(id));
	ZERO(rdma_destroy_id(child));
	ZERO(rdma_destroy_id(listener));
}

/* A source address that is in use or belongs to another host fails at once. */
static void sources(struct rdma_event_channel *channel, const char *address)
{
	struct rdma_cm_id *holder, *id;
	ZERO(rdma_create_id(channel, &holder, NULL, RDMA_PS_TCP));
	ZERO(bind_to(holder, place(address, 0)));
	struct sockaddr_in taken = place(address, ntohs(rdma_get_src_port(holder))), to = place(address, 1), foreign = place("203.0.113.1", 0);
	ZERO(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	if (rdma_resolve_addr(id, (struct sockaddr *)&taken, (struct sockaddr *)&to, 2000) == 0 || errno != EADDRINUSE)
		die("a source address in use is accepted: %s", strerror(errno));
	if (rdma_resolve_addr(id, (struct sockaddr *)&foreign, (struct sockaddr *)&to, 2000) == 0)
		die("a source address of another host is accepted");
	/* Linux keeps the foreign source with the id. */
	ZERO(rdma_destroy_id(id));
	ZERO(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	ZERO(rdma_resolve_addr(id, NULL, (struct sockaddr *)&to, 2000));
	next_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
	ZERO(rdma_destroy_id(id));
	ZERO(rdma_destroy_id(holder));
}

int main(int argc, char **argv)
{
	bool late = argc == 3 && !strcmp(argv[2], "late");
	if (argc < 2)
		die("usage: cm_ports ADDRESS [late]");
	struct rdma_event_channel *channel = SOME(rdma_create_event_channel());
	if (!late) {
		families(channel);
		sources(channel, argv[1]);
	}
	connects(argv[1], late);
	puts("the ports are as they should be");
	return 0;
}
