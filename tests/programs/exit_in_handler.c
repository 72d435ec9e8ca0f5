/* Ends in the handler of a signal that may come at any point: most often in the device, which
 * runs in this thread, at a queue pair that is its own peer. */
#include "rc.h"
#include <sys/time.h>

static void leave(int signal)
{
	(void)signal;
	exit(0);
}

int main(void)
{
	static uint8_t buffer[128];
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	struct ibv_qp *qp = create_qp(pd, cq, 8);
	struct end me = end_of(qp, 0, mr);
	connect_qp(qp, &me, 0, &me);
	signal(SIGALRM, leave);
	struct itimerval soon = { .it_value.tv_usec = 2000 + getpid() % 5000 };
	ZERO(setitimer(ITIMER_REAL, &soon, NULL));
	for (;;) {
		post_recv(qp, mr, 64, 8, 1);
		post_send(qp, IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
		good_wc(cq);
		good_wc(cq);
	}
}
