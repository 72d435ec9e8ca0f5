/* Is in the middle of transfers ("flowing") when its device is lost: each posted request
 * completes once and in order, as flushed where the device had not processed it, the loss is an
 * event, and later requests are flushed too. Prints how many were flushed. */
#include "rc.h"

#define DEPTH 16
#define LEN 4096
/* More messages than the device sends to a receiver that is not ready. */
#define LONG (4 << 20)

/* A queue pair that is its own peer, with its posted requests that are not complete. */
struct line {
	struct ibv_qp *qp;
	struct end end;
	uint64_t posted, completed, flushed;
};

static uint8_t bytes[LONG];
static struct ibv_mr *mr;

static struct line line_on(struct ibv_cq *cq)
{
	struct line line = { .qp = create_qp(mr->pd, cq, DEPTH) };
	line.end = end_of(line.qp, 0, mr);
	connect_qp(line.qp, &line.end, 0, &line.end);
	return line;
}

static void writes(struct line *line)
{
	while (line->posted - line->completed < DEPTH)
		post_send(line->qp, IBV_WR_RDMA_WRITE, mr, 0, LEN, &line->end, LEN, line->posted++);
}

static void sends(struct line *line)
{
	while (line->posted - line->completed < DEPTH)
		post_send(line->qp, IBV_WR_SEND, mr, 0, LONG, NULL, 0, line->posted++);
}

static void receives(struct line *line)
{
	while (line->posted - line->completed < DEPTH)
		post_recv(line->qp, mr, LEN, LEN, line->posted++);
}

/* The next completion is for the oldest request, and may be a success only before the first
 * flushed one. */
static void complete(struct line *line, const struct ibv_wc *wc)
{
	if (wc->wr_id != line->completed++)
		die("completion %" PRIu64 " of QP %#x (%s) comes as number %" PRIu64, wc->wr_id, wc->qp_num,
		    ibv_wc_status_str(wc->status), line->completed - 1);
	if (wc->status == IBV_WC_WR_FLUSH_ERR)
		line->flushed++;
	else if (wc->status != IBV_WC_SUCCESS || line->flushed)
		die("completion %" PRIu64 " of QP %#x after %" PRIu64 " flushed ones: %s", wc->wr_id, wc->qp_num,
		    line->flushed, ibv_wc_status_str(wc->status));
}

static void drain(struct ibv_cq *cq, struct line *one, struct line *other)
{
	while (one->completed != one->posted || other->completed != other->posted) {
		struct ibv_wc wc = next_wc(cq);
		complete(wc.qp_num == one->qp->qp_num ? one : other, &wc);
	}
}

int main(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	mr = SOME(ibv_reg_mr(pd, bytes, sizeof bytes, EVERY_ACCESS));
	struct ibv_comp_channel *channel = SOME(ibv_create_comp_channel(context));
	struct ibv_cq *polled = SOME(ibv_create_cq(context, 4 * DEPTH, NULL, NULL, 0));
	struct ibv_cq *slept_on = SOME(ibv_create_cq(context, 4 * DEPTH, NULL, channel, 0));
	struct line busy = line_on(polled), stalled = line_on(polled), waiting = line_on(slept_on);
	ZERO(ibv_req_notify_cq(slept_on, 0));
	/* No queue pair sends the messages that `waiting` expects, and none receives those of
	 * `stalled`. */
	receives(&waiting);
	sends(&stalled);
	while (!busy.flushed) {
		writes(&busy);
		struct ibv_wc wc = next_wc(polled);
		complete(wc.qp_num == busy.qp->qp_num ? &busy : &stalled, &wc);
		if (stalled.completed > stalled.flushed)
			die("a Send without a receive completed");
		if (busy.completed == 100) {
			puts("flowing");
			fflush(stdout);
		}
	}
	drain(polled, &busy, &stalled);

	/* A thread that sleeps must be woken. */
	struct ibv_cq *woken;
	void *unused;
	ZERO(ibv_get_cq_event(channel, &woken, &unused));
	ibv_ack_cq_events(woken, 1);
	drain(slept_on, &waiting, &waiting);

	struct ibv_async_event event = {};
	while (event.event_type != IBV_EVENT_DEVICE_FATAL) {
		ZERO(ibv_get_async_event(context, &event));
		ibv_ack_async_event(&event);
	}
	uint64_t flushed = busy.flushed + stalled.flushed + waiting.flushed;
	writes(&busy);
	sends(&stalled);
	receives(&waiting);
	drain(polled, &busy, &stalled);
	drain(slept_on, &waiting, &waiting);
	if (busy.flushed + stalled.flushed + waiting.flushed != flushed + 3 * DEPTH)
		die("a later request was not flushed");

	ZERO(ibv_destroy_qp(busy.qp));
	ZERO(ibv_destroy_qp(stalled.qp));
	ZERO(ibv_destroy_qp(waiting.qp));
	ZERO(ibv_destroy_cq(polled));
	ZERO(ibv_destroy_cq(slept_on));
	ZERO(ibv_destroy_comp_channel(channel));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	printf("%" PRIu64 " flushed\n", flushed);
	return 0;
}
