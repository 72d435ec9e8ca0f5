/* Functions that our rdma_cm programs share. */
#include "rc.h"
#include <rdma/rdma_cma.h>

/* The private data of an event. */
struct private_data {
	uint8_t data[256], len;
};

/* The id of the next event, which must be of either kind. */
static struct rdma_cm_id *next_event_of(struct rdma_event_channel *channel, enum rdma_cm_event_type kind, enum rdma_cm_event_type other,
					struct private_data *received)
{
	struct rdma_cm_event *event;
	ZERO(rdma_get_cm_event(channel, &event));
	if (event->event != kind && event->event != other)
		die("%s (%d), not %s", rdma_event_str(event->event), event->status, rdma_event_str(kind));
	struct rdma_cm_id *id = event->id;
	if (received) {
		received->len = event->param.conn.private_data_len;
		if (received->len)
			memcpy(received->data, event->param.conn.private_data, received->len);
	}
	ZERO(rdma_ack_cm_event(event));
	return id;
}

static struct rdma_cm_id *next_event(struct rdma_event_channel *channel, enum rdma_cm_event_type kind, struct private_data *received)
{
	return next_event_of(channel, kind, kind, received);
}

__attribute__((unused)) static struct rdma_cm_id *listener(struct rdma_event_channel *channel, const char *port)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(atoi(port)) };
	struct rdma_cm_id *id;
	ZERO(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	ZERO(rdma_bind_addr(id, (struct sockaddr *)&any));
	ZERO(rdma_listen(id, 1));
	return id;
}

/* An id that can connect to this peer. */
__attribute__((unused)) static struct rdma_cm_id *resolved(struct rdma_event_channel *channel, const char *host, const char *port)
{
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *found;
	struct rdma_cm_id *id;
	ZERO(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	ZERO(rdma_getaddrinfo(host, port, &hints, &found));
	ZERO(rdma_resolve_addr(id, NULL, found->ai_dst_addr, 2000));
	next_event(channel, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
	ZERO(rdma_resolve_route(id, 2000));
	next_event(channel, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
	rdma_freeaddrinfo(found);
	return id;
}
