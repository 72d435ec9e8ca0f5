/* uc_cm [-p PORT] [HOST]: a connection of librdmacm between UC queue pairs. The client sends; the
 * server receives what it has receives for. Prints "done". */
#include "rc.h"
#include <rdma/rdma_verbs.h>

int main(int argc, char **argv)
{
	const char *port = "18515";
	int option;
	while ((option = getopt(argc, argv, "p:")) != -1)
		switch (option) {
		case 'p': port = optarg; break;
		default: die("usage: uc_cm [-p PORT] [HOST]");
		}
	const char *host = argv[optind];
	struct rdma_addrinfo hints = { .ai_port_space = RDMA_PS_TCP, .ai_qp_type = IBV_QPT_UC }, *found;
	if (!host)
		hints.ai_flags = RAI_PASSIVE;
	ZERO(rdma_getaddrinfo(host, port, &hints, &found));
	struct ibv_qp_init_attr init = {
		.qp_type = IBV_QPT_UC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
		.sq_sig_all = 1,
	};
	struct rdma_cm_id *listener, *id;
	char bytes[64] = "to a receive that is there";
	if (host) {
		ZERO(rdma_create_ep(&id, found, NULL, &init));
	} else {
		ZERO(rdma_create_ep(&listener, found, NULL, &init));
		ZERO(rdma_listen(listener, 1));
		ZERO(rdma_get_request(listener, &id));
	}
	if (id->qp->qp_type != IBV_QPT_UC)
		die("queue pair of type %d", id->qp->qp_type);
	struct ibv_mr *mr = SOME(rdma_reg_msgs(id, bytes, sizeof bytes));
	struct ibv_wc wc;
	if (host) {
		ZERO(rdma_connect(id, NULL));
		for (int i = 0; i < 3; i++) {
			ZERO(rdma_post_send(id, NULL, bytes, sizeof bytes, mr, 0));
			if (rdma_get_send_comp(id, &wc) != 1 || wc.status)
				die("send %d: %s", i, ibv_wc_status_str(wc.status));
		}
		ZERO(rdma_disconnect(id));
	} else {
		/* One receive for three messages. */
		ZERO(rdma_post_recv(id, NULL, bytes, sizeof bytes, mr));
		ZERO(rdma_accept(id, NULL));
		if (rdma_get_recv_comp(id, &wc) != 1 || wc.status || wc.byte_len != sizeof bytes)
			die("receive: %s", ibv_wc_status_str(wc.status));
		struct rdma_cm_event *event;
		ZERO(rdma_get_cm_event(id->channel, &event));
		if (event->event != RDMA_CM_EVENT_DISCONNECTED)
			die("%s", rdma_event_str(event->event));
		ZERO(rdma_ack_cm_event(event));
	}
	ZERO(rdma_dereg_mr(mr));
	rdma_destroy_ep(id);
	if (!host)
		rdma_destroy_ep(listener);
	rdma_freeaddrinfo(found);
	printf("done\n");
	return 0;
}
