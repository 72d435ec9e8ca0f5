/* Opens the device, sends a message to itself ("works"), and waits until the device is lost
 * ("gone"); four times, but for the last wait. The objects on a lost device stay until the end,
 * and are destroyed then. */
#include "rc.h"

#define ROUNDS 4

static struct use {
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	uint8_t bytes[64];
} uses[ROUNDS];

static struct ibv_context *open_at_last(void)
{
	struct ibv_device **list = SOME(ibv_get_device_list(NULL));
	struct ibv_context *context = NULL;
	for (int i = 0; list[i] && !context; i++)
		for (int tries = 0; !strcmp(ibv_get_device_name(list[i]), "urnic0") && !context && tries < 600; tries++) {
			context = ibv_open_device(list[i]);
			if (!context)
				usleep(100000);
		}
	ibv_free_device_list(list);
	return SOME(context);
}

int main(void)
{
	for (struct use *use = uses; use < uses + ROUNDS; use++) {
		use->context = open_at_last();
		use->pd = SOME(ibv_alloc_pd(use->context));
		use->cq = SOME(ibv_create_cq(use->context, 16, NULL, NULL, 0));
		use->mr = SOME(ibv_reg_mr(use->pd, use->bytes, sizeof use->bytes, EVERY_ACCESS));
		use->qp = create_qp(use->pd, use->cq, 8);
		struct end me = end_of(use->qp, 0, use->mr);
		connect_qp(use->qp, &me, 0, &me);
		strcpy((char *)use->bytes, "round");
		post_recv(use->qp, use->mr, 32, 32, 1);
		post_send(use->qp, IBV_WR_SEND, use->mr, 0, 32, NULL, 0, 2);
		good_wc(use->cq);
		good_wc(use->cq);
		if (memcmp(use->bytes, use->bytes + 32, 32))
			die("other bytes came than were sent");
		puts("works");
		fflush(stdout);
		struct ibv_async_event event = {};
		while (use < uses + ROUNDS - 1 && event.event_type != IBV_EVENT_DEVICE_FATAL) {
			ZERO(ibv_get_async_event(use->context, &event));
			ibv_ack_async_event(&event);
		}
		if (use < uses + ROUNDS - 1)
			puts("gone");
		fflush(stdout);
	}
	for (struct use *use = uses; use < uses + ROUNDS; use++) {
		ZERO(ibv_destroy_qp(use->qp));
		ZERO(ibv_dereg_mr(use->mr));
		ZERO(ibv_destroy_cq(use->cq));
		ZERO(ibv_dealloc_pd(use->pd));
		ZERO(ibv_close_device(use->context));
	}
	return 0;
}
