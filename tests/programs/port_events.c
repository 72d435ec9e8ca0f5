/* Sends a message to itself, and prints the next two events of its port with the port's state. For
 * faults on demand. */
#include "rc.h"

int main(void)
{
	static uint8_t bytes[128];
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 4, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, bytes, sizeof bytes, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, 2);
	struct end end = end_of(qp, 0, mr);
	connect_qp(qp, &end, 0, &end);
	post_recv(qp, mr, 64, 64, 1);
	post_send(qp, IBV_WR_SEND, mr, 0, 64, NULL, 0, 2);
	for (int i = 0; i < 2; i++)
		good_wc(cq);
	for (int i = 0; i < 2; i++) {
		struct ibv_async_event event;
		struct ibv_port_attr port;
		ZERO(ibv_get_async_event(context, &event));
		ZERO(ibv_query_port(context, 1, &port));
		printf("%s, state %d\n", ibv_event_type_str(event.event_type), port.state);
		ibv_ack_async_event(&event);
	}
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
