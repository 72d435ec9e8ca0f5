/* Makes COUNT connections by rdma_cm to another process, one after the other. The initiator prints
 * the number of connections per second, the median time from rdma_connect to ESTABLISHED in
 * microseconds, and the memory of each idle connection in KiB. */
#include "rc.h"
#include <rdma/rdma_cma.h>

#define COUNT 1000

static int by_time(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;
	return (x > y) - (x < y);
}

/* The id of the next event, which must be of this kind. */
static struct rdma_cm_id *next(struct rdma_event_channel *channel, enum rdma_cm_event_type kind)
{
	struct rdma_cm_event *event;
	ZERO(rdma_get_cm_event(channel, &event));
	if (event->event != kind)
		die("%s (%d), not %s", rdma_event_str(event->event), event->status, rdma_event_str(kind));
	struct rdma_cm_id *id = event->id;
	ZERO(rdma_ack_cm_event(event));
	return id;
}

/* One completion queue for all. */
static void create_cm_qp(struct rdma_cm_id *id)
{
	static struct ibv_cq *cq;
	static struct ibv_pd *pd;
	if (!cq) {
		pd = SOME(ibv_alloc_pd(id->verbs));
		cq = SOME(ibv_create_cq(id->verbs, 4 * COUNT, NULL, NULL, 0));
	}
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2, .max_recv_sge = 2 },
	};
	ZERO(rdma_create_qp(id, pd, &init));
}

static struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };

static void serve(struct rdma_event_channel *channel, int port)
{
	struct sockaddr_in any = { .sin_family = AF_INET, .sin_port = htons(port) };
	struct rdma_cm_id *listener;
	ZERO(rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	ZERO(rdma_bind_addr(listener, (struct sockaddr *)&any));
	ZERO(rdma_listen(listener, COUNT));
	for (int gone = 0; gone < COUNT;) {
		struct rdma_cm_event *event;
		ZERO(rdma_get_cm_event(channel, &event));
		struct rdma_cm_id *id = event->id;
		enum rdma_cm_event_type kind = event->event;
		ZERO(rdma_ack_cm_event(event));
		if (kind == RDMA_CM_EVENT_CONNECT_REQUEST) {
			create_cm_qp(id);
			ZERO(rdma_accept(id, &param));
		} else if (kind == RDMA_CM_EVENT_DISCONNECTED) {
			rdma_destroy_qp(id);
			ZERO(rdma_destroy_id(id));
			gone++;
		} else if (kind != RDMA_CM_EVENT_ESTABLISHED) {
			die("%s", rdma_event_str(kind));
		}
	}
	ZERO(rdma_destroy_id(listener));
}

static void call(struct rdma_event_channel *channel, const char *host, const char *port)
{
	static struct rdma_cm_id *ids[COUNT + 1];
	static double times[COUNT];
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP }, *found;
	ZERO(rdma_getaddrinfo((char *)host, (char *)port, &hints, &found));
	long before = 0;
	double start = 0;
	for (int i = 0; i < COUNT; i++) {
		if (i == 1) {
			/* The first connection opened the device. */
			before = memory();
			start = now();
		}
		ZERO(rdma_create_id(channel, &ids[i], NULL, RDMA_PS_TCP));
		ZERO(rdma_resolve_addr(ids[i], NULL, found->ai_dst_addr, 2000));
		next(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
		ZERO(rdma_resolve_route(ids[i], 2000));
		next(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
		create_cm_qp(ids[i]);
		double connect = now();
		ZERO(rdma_connect(ids[i], &param));
		next(channel, RDMA_CM_EVENT_ESTABLISHED);
		times[i] = now() - connect;
	}
	double seconds = now() - start;
	double kibibytes = (double)(memory() - before) / (COUNT - 1);
	qsort(times, COUNT, sizeof *times, by_time);
	printf("%f %f %f\n", (COUNT - 1) / seconds, times[COUNT / 2] * 1e6, kibibytes);
	for (int i = 0; i < COUNT; i++) {
		ZERO(rdma_disconnect(ids[i]));
		rdma_destroy_qp(ids[i]);
		ZERO(rdma_destroy_id(ids[i]));
	}
	rdma_freeaddrinfo(found);
}

int main(int argc, char **argv)
{
	char *port = NULL;
	int option;
	while ((option = getopt(argc, argv, "p:")) != -1) {
		if (option != 'p')
			die("cm_connections -p PORT [HOST]");
		port = optarg;
	}
	if (!port)
		die("cm_connections -p PORT [HOST]");
	struct rdma_event_channel *channel = SOME(rdma_create_event_channel());
	if (optind < argc)
		call(channel, argv[optind], port);
	else
		serve(channel, atoi(port));
	rdma_destroy_event_channel(channel);
	return 0;
}
