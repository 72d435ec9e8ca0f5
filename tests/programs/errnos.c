/* Wrong arguments, one per line: the error number of the call, and the one in its man page. */
#include "rc.h"

static int wrong;

static void expect(const char *what, int got, int want)
{
	bool good = got == want;
	wrong += !good;
	printf("%s %s: %s%s%s\n", good ? "ok" : "WRONG", what, got ? strerror(got) : "no error", good ? "" : ", not ",
	       good ? "" : (want ? strerror(want) : "no error"));
}

/* The errno of a call that returns a pointer. */
#define NONE(call)                                                                                                    \
	({                                                                                                            \
		errno = 0;                                                                                            \
		(call) ? 0 : errno;                                                                                   \
	})

static int create(struct ibv_pd *pd, struct ibv_qp_init_attr init)
{
	struct ibv_qp *qp;
	int error = NONE(qp = ibv_create_qp(pd, &init));
	if (!error)
		ibv_destroy_qp(qp);
	return error;
}

static int modify(struct ibv_qp *qp, enum ibv_qp_state state, int mask)
{
	struct ibv_qp_attr attr = { .qp_state = state, .port_num = 1, .path_mtu = IBV_MTU_1024 };
	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | mask);
}

/* As many address handles as the device says can be created, and no more. */
static void address_handles(struct ibv_context *context, struct ibv_pd *pd, int max)
{
	struct ibv_ah **made = SOME(calloc(max + 1, sizeof *made));
	struct ibv_ah_attr to = { .is_global = 1, .port_num = 1, .grh = { .hop_limit = 1 } };
	int n = 0, error;
	ZERO(ibv_query_gid(context, 1, 0, &to.grh.dgid));
	while (!(error = NONE(made[n] = ibv_create_ah(pd, &to))) && n < max)
		n++;
	expect("ibv_create_ah beyond max_ah", error, ENOMEM);
	expect("... only then", n == max, 1);
	ZERO(ibv_destroy_ah(made[--n]));
	expect("ibv_create_ah after ibv_destroy_ah", NONE(made[n++] = ibv_create_ah(pd, &to)), 0);
	while (n > 0)
		ZERO(ibv_destroy_ah(made[--n]));
	free(made);
}

int main(void)
{
	struct ibv_context *context = open_device();
	struct ibv_device_attr device;
	ZERO(ibv_query_device(context, &device));
	struct ibv_port_attr port;
	ZERO(ibv_query_port(context, 1, &port));
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 64, NULL, NULL, 0));
	uint8_t *buffer = SOME(calloc(1, 4096));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, 4096, EVERY_ACCESS));

	expect("ibv_query_port(0)", ibv_query_port(context, 0, &port), EINVAL);
	expect("ibv_query_port(2)", ibv_query_port(context, 2, &port), EINVAL);
	ZERO(ibv_query_port(context, 1, &port));
	union ibv_gid gid;
	expect("ibv_query_gid beyond the table", ibv_query_gid(context, 1, port.gid_tbl_len, &gid) != 0, 1);

	expect("ibv_reg_mr: remote write without local write",
	       NONE(ibv_reg_mr(pd, buffer, 64, IBV_ACCESS_REMOTE_WRITE)), EINVAL);
	expect("ibv_create_cq(0 entries)", NONE(ibv_create_cq(context, 0, NULL, NULL, 0)), EINVAL);
	expect("ibv_create_cq(-1 entries)", NONE(ibv_create_cq(context, -1, NULL, NULL, 0)), EINVAL);
	expect("ibv_create_cq(too many entries)", NONE(ibv_create_cq(context, device.max_cqe + 1, NULL, NULL, 0)), EINVAL);
	expect("ibv_create_cq(no such vector)",
	       NONE(ibv_create_cq(context, 4, NULL, NULL, context->num_comp_vectors)), EINVAL);

	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 4, .max_send_sge = 2, .max_recv_sge = 2, .max_inline_data = 16 },
	}, bad = init;
	bad.cap.max_send_wr = device.max_qp_wr + 1;
	expect("ibv_create_qp(too many sends)", create(pd, bad), EINVAL);
	bad = init, bad.cap.max_recv_wr = device.max_qp_wr + 1;
	expect("ibv_create_qp(too many receives)", create(pd, bad), EINVAL);
	bad = init, bad.cap.max_send_sge = device.max_sge + 1;
	expect("ibv_create_qp(too many pieces)", create(pd, bad), EINVAL);
	bad = init, bad.cap.max_inline_data = 1u << 30;
	expect("ibv_create_qp(too much inline)", create(pd, bad), EINVAL);
	bad = init, bad.qp_type = IBV_QPT_UD;
	expect("ibv_create_qp(UD)", create(pd, bad), EOPNOTSUPP);

	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	expect("ibv_destroy_cq in use", ibv_destroy_cq(cq), EBUSY);
	expect("ibv_dealloc_pd in use", ibv_dealloc_pd(pd), EBUSY);

	struct ibv_sge sge[3] = { { .addr = (uintptr_t)buffer, .length = 8, .lkey = mr->lkey } };
	struct ibv_recv_wr recv = { .sg_list = sge, .num_sge = 1 }, *bad_recv = NULL;
	struct ibv_send_wr send = { .sg_list = sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad_send = NULL;
	expect("ibv_post_send in RESET", ibv_post_send(qp, &send, &bad_send), EINVAL);
	expect("... names the request", bad_send == &send, 1);
	expect("ibv_modify_qp(RESET to RTS)", modify(qp, IBV_QPS_RTS, 0), EINVAL);
	expect("ibv_modify_qp(RESET to INIT, no port)", modify(qp, IBV_QPS_INIT, IBV_QP_PKEY_INDEX), EINVAL);

	struct ibv_qp_attr to_init = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	int init_mask = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
	to_init.port_num = 2;
	expect("ibv_modify_qp(INIT, port 2)", ibv_modify_qp(qp, &to_init, init_mask), EINVAL);
	to_init.port_num = 1;
	expect("ibv_modify_qp(INIT)", ibv_modify_qp(qp, &to_init, init_mask), 0);
	expect("ibv_post_send in INIT", ibv_post_send(qp, &send, &bad_send), EINVAL);
	expect("ibv_modify_qp(INIT to RTR, no address)", modify(qp, IBV_QPS_RTR, IBV_QP_PATH_MTU), EINVAL);
	expect("ibv_modify_qp(INIT to RTS)", modify(qp, IBV_QPS_RTS, 0), EINVAL);

	struct ibv_qp_init_attr made;
	struct ibv_qp_attr queried;
	ZERO(ibv_query_qp(qp, &queried, IBV_QP_STATE | IBV_QP_CAP, &made));
	recv.num_sge = made.cap.max_recv_sge + 1;
	expect("ibv_post_recv(too many pieces)", ibv_post_recv(qp, &recv, &bad_recv), EINVAL);
	recv.num_sge = 1;
	int posted = 0, error;
	while (!(error = ibv_post_recv(qp, &recv, &bad_recv)) && posted <= (int)made.cap.max_recv_wr)
		posted++;
	expect("ibv_post_recv into a full queue", error, ENOMEM);
	expect("... only then", posted >= 4 && posted == (int)made.cap.max_recv_wr, 1);

	struct end me = end_of(qp, 0, mr);
	connect_qp(qp, &me, 0, &me);
	send.num_sge = made.cap.max_send_sge + 1;
	expect("ibv_post_send(too many pieces)", ibv_post_send(qp, &send, &bad_send), EINVAL);
	send.num_sge = 1;
	send.send_flags = IBV_SEND_INLINE;
	sge[0].length = made.cap.max_inline_data + 1;
	expect("ibv_post_send(too much inline)", ibv_post_send(qp, &send, &bad_send), EINVAL);
	send.send_flags = 0;
	sge[0].length = 8;
	send.opcode = 77;
	expect("ibv_post_send(no such operation)", ibv_post_send(qp, &send, &bad_send), EINVAL);
	struct ibv_send_wr second = send, first = send;
	first.opcode = IBV_WR_SEND;
	first.next = &second;
	bad_send = NULL;
	expect("ibv_post_send(good, bad)", ibv_post_send(qp, &first, &bad_send), EINVAL);
	expect("... names the second", bad_send == &second, 1);

	struct ibv_ah_attr ah = { .port_num = 1 };
	expect("ibv_create_ah", NONE(ibv_create_ah(pd, &ah)) != 0, 1);
	address_handles(context, pd, device.max_ah);

	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	expect("ibv_destroy_cq", ibv_destroy_cq(cq), 0);
	expect("ibv_dealloc_pd", ibv_dealloc_pd(pd), 0);
	expect("ibv_close_device", ibv_close_device(context), 0);
	return wrong != 0;
}
