/* Completions that come before the program requests an event: `missed_events reported` expects one
 * event for those that no event has announced, `missed_events unreported` expects none. */
#include "rc.h"
#include <poll.h>

static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;

/* Makes one completion, that of the receive. */
static void transfer(void)
{
	struct ibv_sge sge = { .addr = (uintptr_t)mr->addr, .length = 8, .lkey = mr->lkey };
	struct ibv_recv_wr recv = { .sg_list = &sge, .num_sge = 1 }, *bad_recv;
	struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad_send;

	ZERO(ibv_post_recv(qp, &recv, &bad_recv));
	ZERO(ibv_post_send(qp, &send, &bad_send));
}

static void take_completion(void)
{
	struct ibv_wc wc;

	while (ibv_poll_cq(cq, 1, &wc) == 0)
		;
	if (wc.status != IBV_WC_SUCCESS)
		die("a completion with status %d", wc.status);
}

static void take_event(void)
{
	struct ibv_cq *of;
	void *cookie;

	ZERO(ibv_get_cq_event(channel, &of, &cookie));
	ibv_ack_cq_events(of, 1);
}

static bool has_event(void)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	int ready = poll(&fd, 1, 0);

	if (ready < 0)
		die("poll: %s", strerror(errno));
	return ready > 0;
}

static void transfer_with_event(void)
{
	ZERO(ibv_req_notify_cq(cq, 0));
	transfer();
	take_event();
}

int main(int argc, char **argv)
{
	static uint8_t buffer[64];
	bool reported = argc > 1 && !strcmp(argv[1], "reported");
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));

	channel = SOME(ibv_create_comp_channel(context));
	cq = SOME(ibv_create_cq(context, 8, NULL, channel, 0));
	mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	qp = create_qp(pd, cq, 8);
	struct end me = end_of(qp, 0, mr);
	connect_qp(qp, &me, 0, &me);

	/* An event announces the first completion. A request before the program takes it adds none. */
	transfer_with_event();
	ZERO(ibv_req_notify_cq(cq, 0));
	if (has_event())
		die("a second event announces the same completion");
	take_completion();
	transfer();
	take_event();
	take_completion();

	/* This completion comes while the queue is not armed. */
	/* Both ends are of one process, so the completion exists when the post returns. */
	transfer();
	ZERO(ibv_req_notify_cq(cq, 0));
	if (reported) {
		take_event();
	} else {
		if (has_event())
			die("a completion from before the request causes an event");
		transfer();
		take_event();
		take_completion();
	}
	take_completion();
	if (has_event())
		die("an event without a completion");
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_destroy_comp_channel(channel));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	return 0;
}
