/* Checks the events of rdma_cm against those of the device: IDENTITY ADDRESS. Both ends are in
 * this process. A RoCE NIC has private data of fixed lengths, reasons of rejections and
 * TIMEWAIT_EXIT. */
#include "cm.h"
#include <poll.h>

static bool roce;
static const char *address;
static struct rdma_event_channel *served, *connecting;
static struct rdma_cm_id *server;
static char port[8];
static uint8_t data[256];

static void create_cm_qp(struct rdma_cm_id *id)
{
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	ZERO(rdma_create_qp(id, NULL, &init));
}

static struct rdma_cm_event *event_of(struct rdma_event_channel *channel, enum rdma_cm_event_type kind, int status)
{
	struct rdma_cm_event *event;
	ZERO(rdma_get_cm_event(channel, &event));
	if (event->event != kind || event->status != status)
		die("%s (%d), not %s (%d)", rdma_event_str(event->event), event->status, rdma_event_str(kind), status);
	return event;
}

/* The event has these bytes of private data, of which `len` were sent, and these depths. */
static void has(const struct rdma_cm_event *event, int all, int len, int resources, int depth)
{
	const struct rdma_conn_param *param = &event->param.conn;
	const uint8_t *bytes = param->private_data;
	if (param->private_data_len != (roce ? all : len))
		die("%s: %d bytes of private data", rdma_event_str(event->event), param->private_data_len);
	for (int i = 0; i < param->private_data_len; i++)
		if (bytes[i] != (i < len ? data[i] : 0))
			die("%s: byte %d is %d", rdma_event_str(event->event), i, bytes[i]);
	if (param->responder_resources != resources || param->initiator_depth != depth)
		die("%s: responder_resources %d, initiator_depth %d, not %d, %d", rdma_event_str(event->event),
		    param->responder_resources, param->initiator_depth, resources, depth);
}

static struct rdma_conn_param with(int len, int depth)
{
	return (struct rdma_conn_param){ .private_data = data,
					 .private_data_len = len,
					 .responder_resources = depth,
					 .initiator_depth = depth,
					 .retry_count = 7,
					 .rnr_retry_count = 7 };
}

static struct rdma_cm_id *requested(int len, int depth)
{
	struct rdma_cm_event *event = event_of(served, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	has(event, 56, len, depth, depth);
	struct rdma_cm_id *id = event->id;
	ZERO(rdma_ack_cm_event(event));
	create_cm_qp(id);
	return id;
}

static void no_event(struct rdma_event_channel *channel)
{
	struct pollfd readable = { .fd = channel->fd, .events = POLLIN };
	if (poll(&readable, 1, 1500) != 0)
		die("there is another event");
}

/* Connects and disconnects, with these lengths of private data and depths. */
static void connects(int request, int reply, int depth)
{
	struct rdma_cm_id *id = resolved(connecting, address, port);
	create_cm_qp(id);
	struct rdma_conn_param param = with(57, depth);
	if (roce && (rdma_connect(id, &param) == 0 || errno != EINVAL))
		die("a request takes 57 bytes");
	param = with(request, depth);
	ZERO(rdma_connect(id, &param));
	struct rdma_cm_id *accepted = requested(request, depth);
	param = with(reply, depth);
	ZERO(rdma_accept(accepted, &param));
	struct rdma_cm_event *event = event_of(connecting, RDMA_CM_EVENT_ESTABLISHED, 0);
	has(event, 196, reply, depth, depth);
	ZERO(rdma_ack_cm_event(event));
	event = event_of(served, RDMA_CM_EVENT_ESTABLISHED, 0);
	has(event, 0, 0, roce ? 0 : depth, roce ? 0 : depth);
	ZERO(rdma_ack_cm_event(event));
	ZERO(rdma_disconnect(id));
	struct rdma_event_channel *channels[] = { served, connecting };
	for (int i = 0; i < 2; i++)
		ZERO(rdma_ack_cm_event(event_of(channels[i], RDMA_CM_EVENT_DISCONNECTED, 0)));
	ZERO(rdma_disconnect(accepted));
	for (int i = 0; i < 2 && roce; i++)
		ZERO(rdma_ack_cm_event(event_of(channels[i], RDMA_CM_EVENT_TIMEWAIT_EXIT, 0)));
	for (int i = 0; i < 2; i++)
		no_event(channels[i]);
	rdma_destroy_qp(id);
	rdma_destroy_qp(accepted);
	ZERO(rdma_destroy_id(id));
	ZERO(rdma_destroy_id(accepted));
}

static void rejects(void)
{
	struct rdma_cm_id *id = resolved(connecting, address, port);
	create_cm_qp(id);
	struct rdma_conn_param param = with(0, 1);
	ZERO(rdma_connect(id, &param));
	struct rdma_cm_id *rejected = requested(0, 1);
	if (roce && (rdma_reject(rejected, data, 149) == 0 || errno != EINVAL))
		die("a rejection takes 149 bytes");
	ZERO(rdma_reject(rejected, data, 100));
	if (rdma_reject(rejected, data, 0) == 0 || errno != EINVAL)
		die("a request is rejected twice");
	struct rdma_cm_event *event = event_of(connecting, RDMA_CM_EVENT_REJECTED, roce ? 28 : -ECONNREFUSED);
	if (event->param.conn.private_data_len != (roce ? 148 : 100) || memcmp(event->param.conn.private_data, data, 100))
		die("a rejection has %d bytes", event->param.conn.private_data_len);
	ZERO(rdma_ack_cm_event(event));
	rdma_destroy_qp(id);
	rdma_destroy_qp(rejected);
	ZERO(rdma_destroy_id(id));
	ZERO(rdma_destroy_id(rejected));
}

/* Connects to the listener from a source port; returns the initiator. */
static struct rdma_cm_id *bound_to(int source)
{
	struct sockaddr_in from = { .sin_family = AF_INET, .sin_port = htons(source) };
	struct rdma_cm_id *id;
	int one = 1;
	ZERO(rdma_create_id(connecting, &id, NULL, RDMA_PS_TCP));
	ZERO(rdma_set_option(id, RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, &one, sizeof(one)));
	ZERO(inet_pton(AF_INET, address, &from.sin_addr) - 1);
	ZERO(rdma_bind_addr(id, (struct sockaddr *)&from));
	return id;
}

/* Two ids connect from one source port, each to another listener. */
static void share_a_source_port(void)
{
	struct rdma_cm_id *listeners[2] = { server, listener(served, "0") }, *ids[2], *accepted[2];
	ids[0] = bound_to(0);
	int source = ntohs(rdma_get_src_port(ids[0]));
	ids[1] = bound_to(source);
	struct rdma_conn_param param = with(0, 1);
	for (int i = 0; i < 2; i++) {
		struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = rdma_get_src_port(listeners[i]) };
		ZERO(inet_pton(AF_INET, address, &to.sin_addr) - 1);
		ZERO(rdma_resolve_addr(ids[i], NULL, (struct sockaddr *)&to, 2000));
		next_event(connecting, RDMA_CM_EVENT_ADDR_RESOLVED, NULL);
		ZERO(rdma_resolve_route(ids[i], 2000));
		next_event(connecting, RDMA_CM_EVENT_ROUTE_RESOLVED, NULL);
	}
	for (int i = 0; i < 2; i++) {
		create_cm_qp(ids[i]);
		ZERO(rdma_connect(ids[i], &param));
		accepted[i] = requested(0, 1);
		if (ntohs(rdma_get_dst_port(accepted[i])) != source)
			die("connection %d came from port %d", i, ntohs(rdma_get_dst_port(accepted[i])));
		ZERO(rdma_accept(accepted[i], &param));
		next_event(connecting, RDMA_CM_EVENT_ESTABLISHED, NULL);
		next_event(served, RDMA_CM_EVENT_ESTABLISHED, NULL);
	}
	for (int i = 0; i < 2; i++) {
		rdma_destroy_qp(ids[i]);
		rdma_destroy_qp(accepted[i]);
		ZERO(rdma_destroy_id(ids[i]));
		ZERO(rdma_destroy_id(accepted[i]));
	}
	ZERO(rdma_destroy_id(listeners[1]));
}

int main(int argc, char **argv)
{
	(void)argc;
	roce = strcmp(argv[1], "roce") == 0;
	address = argv[2];
	for (int i = 0; i < 256; i++)
		data[i] = i + 1;
	served = SOME(rdma_create_event_channel());
	connecting = SOME(rdma_create_event_channel());
	server = listener(served, "0");
	snprintf(port, sizeof(port), "%d", ntohs(rdma_get_src_port(server)));
	connects(0, 0, 16);
	connects(56, 196, 1);
	if (!roce)
		connects(255, 255, 16);
	rejects();
	share_a_source_port();
	ZERO(rdma_destroy_id(server));
	struct rdma_cm_id *id = resolved(connecting, address, port);
	create_cm_qp(id);
	struct rdma_conn_param param = with(0, 1);
	ZERO(rdma_connect(id, &param));
	ZERO(rdma_ack_cm_event(event_of(connecting, RDMA_CM_EVENT_REJECTED, roce ? 8 : -ECONNREFUSED)));
	rdma_destroy_qp(id);
	ZERO(rdma_destroy_id(id));
	return 0;
}
