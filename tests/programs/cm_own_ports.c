/* cm_own_ports ADDRESS PORT SOURCE: one number as the port of a TCP socket, of a listener of
 * rdma_cm for connections, and of one for datagrams, at an address of this host. All ends are in
 * this process. The connection comes from port SOURCE. Prints "each port has its own". */
#include "cm.h"
#include <sys/socket.h>

static struct sockaddr_storage address;
static socklen_t address_len;

/* The address with this port, in network order. */
static struct sockaddr *at(in_port_t port)
{
	static struct sockaddr_storage place;
	place = address;
	if (place.ss_family == AF_INET)
		((struct sockaddr_in *)&place)->sin_port = port;
	else
		((struct sockaddr_in6 *)&place)->sin6_port = port;
	return (struct sockaddr *)&place;
}

static struct rdma_cm_id *listens(struct rdma_event_channel *channel, enum rdma_port_space space, in_port_t port)
{
	struct rdma_cm_id *id;
	ZERO(rdma_create_id(channel, &id, NULL, space));
	ZERO(rdma_bind_addr(id, at(port)));
	ZERO(rdma_listen(id, 1));
	if (rdma_get_src_port(id) != port)
		die("the port is %d instead of %d", ntohs(rdma_get_src_port(id)), ntohs(port));
	return id;
}

static void is_taken(struct rdma_event_channel *channel, enum rdma_port_space space, in_port_t port)
{
	struct rdma_cm_id *id;
	struct in6_addr *v6 = &((struct sockaddr_in6 *)&address)->sin6_addr;
	bool any = address.ss_family == AF_INET ? !((struct sockaddr_in *)&address)->sin_addr.s_addr : IN6_IS_ADDR_UNSPECIFIED(v6);
	ZERO(rdma_create_id(channel, &id, NULL, space));
	if (!rdma_bind_addr(id, at(port)) || errno != (any ? EADDRNOTAVAIL : EADDRINUSE))
		die("two ids of port space %x have a port: %s", space, strerror(errno));
	ZERO(rdma_destroy_id(id));
}

/* An id that asks for a port, from port `source` unless that is 0. */
static struct rdma_cm_id *asks(struct rdma_event_channel *channel, enum rdma_port_space space, in_port_t port, in_port_t source,
			       enum ibv_qp_type type)
{
	struct rdma_cm_id *id;
	ZERO(rdma_create_id(channel, &id, NULL, space));
	if (source)
		ZERO(rdma_bind_addr(id, at(source)));
	ZERO(rdma_resolve_addr(id, NULL, at(port), 2000));
	next_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
	ZERO(rdma_resolve_route(id, 2000));
	next_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
	struct ibv_qp_init_attr init = {
		.qp_type = type,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	ZERO(rdma_create_qp(id, NULL, &init));
	return id;
}

int main(int argc, char **argv)
{
	if (argc != 4)
		die("usage: cm_own_ports ADDRESS PORT SOURCE");
	struct addrinfo hints = { .ai_flags = AI_NUMERICHOST, .ai_socktype = SOCK_STREAM }, *found;
	ZERO(getaddrinfo(argv[1], "0", &hints, &found));
	memcpy(&address, found->ai_addr, address_len = found->ai_addrlen);
	freeaddrinfo(found);

	struct rdma_event_channel *channel = SOME(rdma_create_event_channel()), *served = SOME(rdma_create_event_channel()),
				  *datagrams = SOME(rdma_create_event_channel());
	in_port_t port = htons(atoi(argv[2])), source = htons(atoi(argv[3]));
	struct rdma_cm_id *listener = listens(served, RDMA_PS_TCP, port);
	int tcp = socket(address.ss_family, SOCK_STREAM, 0), one = 1;
	ZERO(setsockopt(tcp, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one));
	if (bind(tcp, at(port), address_len) || listen(tcp, 1))
		die("TCP port %d: %s", ntohs(port), strerror(errno));
	struct rdma_cm_id *service = listens(datagrams, RDMA_PS_UDP, port);
	is_taken(channel, RDMA_PS_TCP, port);
	is_taken(channel, RDMA_PS_UDP, port);

	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1, .private_data = "to rdma_cm", .private_data_len = 11 };
	struct private_data got;
	/* With a number whose TCP port another process has, it would have another TCP port. */
	struct rdma_cm_id *id = asks(channel, RDMA_PS_TCP, port, source, IBV_QPT_RC);
	ZERO(rdma_connect(id, &param));
	struct rdma_cm_id *child = next_event(served, RDMA_CM_EVENT_CONNECT_REQUEST, &got);
	if (memcmp(got.data, "to rdma_cm", 11))
		die("private data: %.11s", (char *)got.data);
	if (rdma_get_src_port(child) != port || rdma_get_dst_port(id) != port)
		die("ports of a connection: %d and %d, not %d", ntohs(rdma_get_src_port(child)), ntohs(rdma_get_dst_port(id)), ntohs(port));
	if (rdma_get_dst_port(child) != source || rdma_get_src_port(id) != source)
		die("a connection comes from %d and %d, not %d", ntohs(rdma_get_dst_port(child)), ntohs(rdma_get_src_port(id)), ntohs(source));
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RC,
					 .cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 } };
	ZERO(rdma_create_qp(child, NULL, &init));
	uint8_t bytes[2][64];
	struct ibv_mr *from = SOME(ibv_reg_mr(id->pd, bytes[0], sizeof bytes[0], IBV_ACCESS_LOCAL_WRITE)),
		      *to = SOME(ibv_reg_mr(child->pd, bytes[1], sizeof bytes[1], IBV_ACCESS_LOCAL_WRITE));
	fill(bytes[0], sizeof bytes[0], 7);
	post_recv(child->qp, to, 0, sizeof bytes[1], 1);
	ZERO(rdma_accept(child, &param));
	next_event(channel, RDMA_CM_EVENT_ESTABLISHED, NULL);
	post_send(id->qp, IBV_WR_SEND, from, 0, sizeof bytes[0], NULL, 0, 2);
	good_wc(id->send_cq);
	good_wc(child->recv_cq);
	verify(bytes[1], sizeof bytes[1], 7);

	struct rdma_cm_id *asker = asks(channel, RDMA_PS_UDP, port, 0, IBV_QPT_UD);
	ZERO(rdma_connect(asker, &param));
	struct rdma_cm_id *asked = next_event(datagrams, RDMA_CM_EVENT_CONNECT_REQUEST, NULL);
	if (rdma_get_src_port(asked) != port)
		die("the port of a request is %d", ntohs(rdma_get_src_port(asked)));
	ZERO(rdma_reject(asked, NULL, 0));
	next_event(channel, RDMA_CM_EVENT_UNREACHABLE, NULL);

	int near = socket(address.ss_family, SOCK_STREAM, 0);
	if (connect(near, at(port), address_len))
		die("connect: %s", strerror(errno));
	int far = accept(tcp, NULL, NULL);
	char text[4];
	sock_write(near, "tcp", 4);
	if (!sock_read(far, text, 4) || strcmp(text, "tcp"))
		die("TCP delivers something else");

	ZERO(rdma_disconnect(id));
	next_event(channel, RDMA_CM_EVENT_DISCONNECTED, NULL);
	/* Without its listener the number is that of nobody, or of TCP alone. */
	ZERO(rdma_destroy_id(service));
	ZERO(rdma_destroy_id(listener));
	close(tcp);
	struct rdma_cm_id *late = asks(channel, RDMA_PS_TCP, port, 0, IBV_QPT_RC);
	ZERO(rdma_connect(late, &param));
	next_event(channel, RDMA_CM_EVENT_REJECTED, NULL);
	puts("each port has its own");
	return 0;
}
