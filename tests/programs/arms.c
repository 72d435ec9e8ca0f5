/* Many completion queues in one context, all armed at once; each must wake the thread that waits
 * for it. */
#include "rc.h"

#define QUEUES 600
#define ROUNDS 10

int main(void)
{
	static struct ibv_cq *cqs[QUEUES];
	static struct ibv_qp *qps[QUEUES];
	static uint8_t buffer[128];
	struct ibv_context *context = open_device();
	struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(context));
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	for (int i = 0; i < QUEUES; i++) {
		cqs[i] = SOME(ibv_create_cq(context, 4, NULL, channel, 0));
		qps[i] = create_qp(pd, cqs[i], 2);
		struct end me = end_of(qps[i], 0, mr);
		connect_qp(qps[i], &me, 0, &me);
	}
	for (int round = 0; round < ROUNDS; round++) {
		static bool woken[QUEUES];
		memset(woken, 0, sizeof woken);
		for (int i = 0; i < QUEUES; i++)
			ZERO(ibv_req_notify_cq(cqs[i], 0));
		for (int i = 0; i < QUEUES; i++) {
			post_recv(qps[i], mr, 64, 8, 1);
			post_send(qps[i], IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
		}
		for (int n = 0; n < QUEUES; n++) {
			struct ibv_cq *cq;
			void *cookie;
			ZERO(ibv_get_cq_event(channel, &cq, &cookie));
			ibv_ack_cq_events(cq, 1);
			int i = 0;
			while (cqs[i] != cq)
				i++;
			if (woken[i])
				die("round %d: queue %d woke twice", round, i);
			woken[i] = true;
		}
		for (int i = 0; i < QUEUES; i++) {
			good_wc(cqs[i]);
			good_wc(cqs[i]);
		}
	}
	for (int i = 0; i < QUEUES; i++) {
		ZERO(ibv_destroy_qp(qps[i]));
		ZERO(ibv_destroy_cq(cqs[i]));
	}
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_destroy_comp_channel(channel));
	ZERO(ibv_close_device(context));
	return 0;
}
