/* A queue pair that is its own peer: from the post of a Send to the receive's completion there
 * is no wire. Prints the median and the 99th percentile in microseconds. */
#include "rc.h"

#define MOST 200000

int main(int argc, char **argv)
{
	static double times[MOST];
	int count = argc > 1 ? atoi(argv[1]) : MOST;
	if (count < 1 || count > MOST)
		die("selfpost [COUNT], at most %d", MOST);
	static uint8_t buffer[128];
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *sent = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_cq *received = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	struct ibv_qp_init_attr init = {
		.send_cq = sent,
		.recv_cq = received,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	struct end me = end_of(qp, 0, mr);
	connect_qp(qp, &me, 0, &me);
	for (int i = 0; i < count; i++) {
		struct timespec start, end;
		post_recv(qp, mr, 64, 8, 1);
		clock_gettime(CLOCK_MONOTONIC, &start);
		post_send(qp, IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
		good_wc(received);
		clock_gettime(CLOCK_MONOTONIC, &end);
		good_wc(sent);
		times[i] = (end.tv_sec - start.tv_sec) * 1e6 + (end.tv_nsec - start.tv_nsec) / 1e3;
	}
	qsort(times, count, sizeof *times, by_value);
	printf("%f %f\n", times[count / 2], times[count - 1 - count / 100]);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	return 0;
}
