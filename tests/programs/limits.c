/* limits: creates and changes objects with arguments beyond each limit. Prints a line for each,
 * with the error number, and last the memory that this took at its peak. The table is in
 * docs/reference/attributes.md. With "probe" it only looks for the longest inline data, as programs
 * do. */
#include "rc.h"

#include <sys/resource.h>

static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_srq *srq;
static struct ibv_device_attr device;

static void said(const char *what, int failed)
{
	printf("%s: %d\n", what, failed);
}

/* The error number of a call that returns a pointer. */
#define FAILED(call) (errno = 0, (call) ? 0 : errno)

static int with(struct ibv_qp_cap more, struct ibv_srq *shared)
{
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .srq = shared, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1 + more.max_send_wr, .max_recv_wr = 1 + more.max_recv_wr,
			.max_send_sge = 1 + more.max_send_sge, .max_recv_sge = 1 + more.max_recv_sge,
			.max_inline_data = more.max_inline_data } };
	struct ibv_qp *qp;
	int failed = FAILED(qp = ibv_create_qp(pd, &init));
	if (qp)
		ZERO(ibv_destroy_qp(qp));
	return failed;
}

static int of_type(enum ibv_qp_type type, struct ibv_cq *sends, struct ibv_cq *receives)
{
	struct ibv_qp_init_attr init = { .send_cq = sends, .recv_cq = receives, .qp_type = type,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp;
	int failed = FAILED(qp = ibv_create_qp(pd, &init));
	if (qp)
		ZERO(ibv_destroy_qp(qp));
	return failed;
}

static int new_srq(struct ibv_srq_attr attr)
{
	struct ibv_srq_init_attr init = { .attr = attr };
	struct ibv_srq *made;
	int failed = FAILED(made = ibv_create_srq(pd, &init));
	if (made)
		ZERO(ibv_destroy_srq(made));
	return failed;
}

static void queue_pairs(void)
{
	said("create_qp send_cq", of_type(IBV_QPT_RC, NULL, cq));
	said("create_qp recv_cq", of_type(IBV_QPT_RC, cq, NULL));
	said("create_qp qp_type 99", of_type(99, cq, cq));
	said("create_qp UD", of_type(IBV_QPT_UD, cq, cq));
	said("create_qp UC", of_type(IBV_QPT_UC, cq, cq));
	said("create_qp max_send_wr", with((struct ibv_qp_cap){ .max_send_wr = device.max_qp_wr }, NULL));
	said("create_qp max_recv_wr", with((struct ibv_qp_cap){ .max_recv_wr = device.max_qp_wr }, NULL));
	said("create_qp max_recv_wr with an SRQ", with((struct ibv_qp_cap){ .max_recv_wr = device.max_qp_wr }, srq));
	said("create_qp max_send_sge", with((struct ibv_qp_cap){ .max_send_sge = device.max_sge }, NULL));
	said("create_qp max_recv_sge", with((struct ibv_qp_cap){ .max_recv_sge = device.max_sge }, NULL));
	said("create_qp max_recv_sge with an SRQ", with((struct ibv_qp_cap){ .max_recv_sge = device.max_sge }, srq));
	said("create_qp max_inline_data", with((struct ibv_qp_cap){ .max_inline_data = 1 << 20 }, NULL));
}

static void queues(void)
{
	said("create_cq cqe 0", FAILED(ibv_create_cq(context, 0, NULL, NULL, 0)));
	said("create_cq cqe", FAILED(ibv_create_cq(context, device.max_cqe + 1, NULL, NULL, 0)));
	said("create_cq comp_vector", FAILED(ibv_create_cq(context, 1, NULL, NULL, context->num_comp_vectors)));
	struct ibv_comp_channel closed = { .context = context, .fd = 0 };
	said("create_cq channel", FAILED(ibv_create_cq(context, 1, NULL, &closed, 0)));
	said("resize_cq cqe 0", ibv_resize_cq(cq, 0));
	said("resize_cq cqe", ibv_resize_cq(cq, device.max_cqe + 1));
	said("create_srq max_wr 0", new_srq((struct ibv_srq_attr){ .max_wr = 0, .max_sge = 1 }));
	said("create_srq max_wr", new_srq((struct ibv_srq_attr){ .max_wr = device.max_srq_wr + 1, .max_sge = 1 }));
	said("create_srq max_sge", new_srq((struct ibv_srq_attr){ .max_wr = 1, .max_sge = device.max_srq_sge + 1 }));
	said("create_srq srq_limit", new_srq((struct ibv_srq_attr){ .max_wr = 1, .max_sge = 1, .srq_limit = 9 }));
	struct ibv_srq_attr attr = { .max_wr = 8, .srq_limit = 1 << 20 };
	said("modify_srq srq_limit", ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
	said("modify_srq max_wr", ibv_modify_srq(srq, &attr, IBV_SRQ_MAX_WR));
	said("modify_srq mask", ibv_modify_srq(srq, &attr, 1 << 5));
}

static void queue_pair(void)
{
	static uint8_t bytes[4096];
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 } };
	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 2 };
	int names = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	said("modify_qp port_num 2", ibv_modify_qp(qp, &attr, names));
	attr.port_num = 1;
	said("modify_qp without the port", ibv_modify_qp(qp, &attr, names & ~IBV_QP_PORT));
	said("modify_qp with a timeout", ibv_modify_qp(qp, &attr, names | IBV_QP_TIMEOUT));
	said("modify_qp rate limit", ibv_modify_qp(qp, &attr, names | IBV_QP_RATE_LIMIT));
	said("modify_qp to INIT", ibv_modify_qp(qp, &attr, names));
	attr = (struct ibv_qp_attr){ .qp_state = IBV_QPS_RTR, .path_mtu = IBV_MTU_1024, .ah_attr = { .port_num = 2 } };
	int rtr = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC;
	said("modify_qp without min_rnr_timer", ibv_modify_qp(qp, &attr, rtr));
	said("modify_qp to the port 2", ibv_modify_qp(qp, &attr, rtr | IBV_QP_MIN_RNR_TIMER));
	struct ibv_send_wr send = { .opcode = IBV_WR_SEND }, *bad_send;
	said("post_send in INIT", ibv_post_send(qp, &send, &bad_send));
	struct ibv_recv_wr receive = { .num_sge = 1000 }, *bad;
	said("post_recv num_sge", ibv_post_recv(qp, &receive, &bad));
	said("post_srq_recv num_sge", ibv_post_srq_recv(srq, &receive, &bad));
	said("reg_mr remote write", FAILED(ibv_reg_mr(pd, bytes, sizeof bytes, IBV_ACCESS_REMOTE_WRITE)));
	said("reg_mr unmapped", FAILED(ibv_reg_mr(pd, (void *)4096, 4096, IBV_ACCESS_LOCAL_WRITE)));
	said("destroy_cq in use", ibv_destroy_cq(cq));
	struct ibv_ah_attr address = { .is_global = 1, .port_num = 2 };
	said("create_ah port 2", FAILED(ibv_create_ah(pd, &address)));
	ZERO(ibv_destroy_qp(qp));
}

/* As libfabric does. */
static void probe(void)
{
	unsigned length = 1;
	while (!with((struct ibv_qp_cap){ .max_inline_data = length }, NULL))
		length *= 2;
	if (length < 16 || length > 1 << 16)
		die("inline data up to %u", length);
}

/* The most memory that the process has had, in KiB. */
static long peak(void)
{
	struct rusage usage;
	ZERO(getrusage(RUSAGE_SELF, &usage));
	return usage.ru_maxrss;
}

int main(int argc, char **argv)
{
	context = open_device();
	ZERO(ibv_query_device(context, &device));
	pd = SOME(ibv_alloc_pd(context));
	cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	struct ibv_srq_init_attr init = { .attr = { .max_wr = 8, .max_sge = 1 } };
	srq = SOME(ibv_create_srq(pd, &init));
	if (argc > 1) {
		if (strcmp(argv[1], "probe"))
			die("usage: limits [probe]");
		probe();
		return 0;
	}
	long before = peak();
	for (int round = 0; round < 2; round++) {
		queue_pairs();
		queues();
		queue_pair();
	}
	printf("KiB: %ld\n", peak() - before);
	return 0;
}
