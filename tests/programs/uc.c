/* uc [-p PORT] [-o] [HOST], -o for on-demand paging: a pair of UC queue pairs. What finds no
 * receive, is too long or may not go where it should is dropped; the queue pairs stay as they are;
 * a client that was reset connects again; sends to a server that is gone complete. Prints
 * "done". */
#include "rc.h"

enum { LEN = 4096, FLAG = 0, INBOX = 1024, OUTBOX = 2048 };

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static volatile uint8_t buffer[LEN];
static struct end mine, theirs;
static bool is_client;
static int sock;

static void to_init(struct ibv_qp *qp)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = IBV_ACCESS_REMOTE_WRITE };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
}

static void connect_uc(struct ibv_qp *qp)
{
	struct ibv_qp_attr rtr = {
		.qp_state = IBV_QPS_RTR,
		.path_mtu = IBV_MTU_1024,
		.dest_qp_num = theirs.qpn,
		.rq_psn = theirs.psn,
		.ah_attr = { .is_global = 1, .port_num = 1, .grh = { .dgid = theirs.gid, .hop_limit = 1 } },
	};
	int needed = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
	if (ibv_modify_qp(qp, &rtr, needed | IBV_QP_MIN_RNR_TIMER) != EINVAL)
		die("UC has no RNR timer");
	ZERO(ibv_modify_qp(qp, &rtr, needed));
	struct ibv_qp_attr rts = { .qp_state = IBV_QPS_RTS, .sq_psn = mine.psn };
	if (ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT) != EINVAL)
		die("UC has no timeout");
	ZERO(ibv_modify_qp(qp, &rts, IBV_QP_STATE | IBV_QP_SQ_PSN));
}

static void to_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state };
	ZERO(ibv_modify_qp(qp, &attr, IBV_QP_STATE));
}

static void is_in(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	ZERO(ibv_query_qp(qp, &attr, IBV_QP_STATE, &init));
	if (attr.qp_state != state || init.qp_type != IBV_QPT_UC)
		die("state %d, not %d; type %d", attr.qp_state, state, init.qp_type);
}

/* Sends, and waits for the completion. */
static void emit(struct ibv_qp *qp, enum ibv_wr_opcode opcode, size_t len, uint32_t rkey, size_t to)
{
	struct ibv_sge sge = { .addr = mine.address + OUTBOX, .length = len, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = opcode, .send_flags = IBV_SEND_SIGNALED, .imm_data = 7 };
	struct ibv_send_wr *bad;
	wr.wr.rdma.remote_addr = theirs.address + to;
	wr.wr.rdma.rkey = rkey;
	ZERO(ibv_post_send(qp, &wr, &bad));
	good_wc(cq);
}

/* The client writes `value` after its messages, and the server waits for it: all before is
 * processed. */
static void in_step(struct ibv_qp *qp, uint8_t value)
{
	if (is_client) {
		buffer[OUTBOX] = value;
		emit(qp, IBV_WR_RDMA_WRITE, 1, theirs.rkey, FLAG);
	} else {
		while (buffer[FLAG] != value)
			;
	}
	barrier(sock);
}

static void received(uint64_t id, uint32_t len, enum ibv_wc_opcode opcode)
{
	struct ibv_wc wc = good_wc(cq);
	if (wc.wr_id != id || wc.byte_len != len || wc.opcode != opcode)
		die("receive %" PRIu64 " of %u bytes, opcode %d; expected %" PRIu64 ", %u, %d", wc.wr_id, wc.byte_len,
		    wc.opcode, id, len, opcode);
}

static void drops(struct ibv_qp *qp)
{
	if (is_client) {
		emit(qp, IBV_WR_SEND, 3, 0, 0);
		emit(qp, IBV_WR_SEND_WITH_IMM, 1000, 0, 0);
		emit(qp, IBV_WR_RDMA_WRITE_WITH_IMM, 5, theirs.rkey, INBOX);
	}
	in_step(qp, 1);
	if (!is_client) {
		post_recv(qp, mr, INBOX, 64, 10);
		post_recv(qp, mr, INBOX, 64, 11);
		post_recv(qp, mr, INBOX, 64, 12);
	}
	barrier(sock);
	if (is_client) {
		emit(qp, IBV_WR_SEND, 4, 0, 0);
		emit(qp, IBV_WR_SEND, 65, 0, 0);
		emit(qp, IBV_WR_SEND, 64, 0, 0);
		emit(qp, IBV_WR_RDMA_WRITE_WITH_IMM, 8, theirs.rkey ^ 0x5500, INBOX);
		emit(qp, IBV_WR_RDMA_WRITE_WITH_IMM, 9, theirs.rkey, INBOX);
	} else {
		received(10, 4, IBV_WC_RECV);
		received(11, 64, IBV_WC_RECV);
		received(12, 9, IBV_WC_RECV_RDMA_WITH_IMM);
	}
	in_step(qp, 2);
	is_in(qp, IBV_QPS_RTS);
}

/* No Reads; a request that fails stops the send queue until the program restarts it. */
static void failures(struct ibv_qp *qp)
{
	struct ibv_sge sge = { .addr = mine.address, .length = 8, .lkey = mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED }, *bad;
	wr.wr.rdma.remote_addr = theirs.address;
	wr.wr.rdma.rkey = theirs.rkey;
	enum ibv_wr_opcode absent[] = { IBV_WR_RDMA_READ, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_CMP_AND_SWP,
					IBV_WR_SEND_WITH_INV };
	for (size_t i = 0; i < sizeof absent / sizeof *absent; i++) {
		wr.opcode = absent[i];
		ZERO(ibv_post_send(qp, &wr, &bad));
		enum ibv_wc_status status = next_wc(cq).status;
		if (status != IBV_WC_LOC_QP_OP_ERR)
			die("opcode %d: %s", absent[i], ibv_wc_status_str(status));
		is_in(qp, IBV_QPS_SQE);
		to_state(qp, IBV_QPS_RTS);
	}
	if (!is_client) {
		post_recv(qp, mr, INBOX, 64, 20);
		post_recv(qp, mr, INBOX, 64, 21);
	}
	barrier(sock);
	if (is_client) {
		wr.opcode = IBV_WR_SEND;
		sge.lkey ^= 0x5500;
		ZERO(ibv_post_send(qp, &wr, &bad));
		if (next_wc(cq).status != IBV_WC_LOC_PROT_ERR)
			die("a wrong key was accepted");
		is_in(qp, IBV_QPS_SQE);
		sge.lkey = mr->lkey;
		ZERO(ibv_post_send(qp, &wr, &bad));
		if (next_wc(cq).status != IBV_WC_WR_FLUSH_ERR)
			die("state SQE sent");
		to_state(qp, IBV_QPS_RTS);
		emit(qp, IBV_WR_SEND, 8, 0, 0);
	} else {
		received(20, 8, IBV_WC_RECV);
	}
	in_step(qp, 3);
}

int main(int argc, char **argv)
{
	int port = 18515, access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE, option;
	while ((option = getopt(argc, argv, "p:o")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'o': access |= IBV_ACCESS_ON_DEMAND; break;
		default: die("usage: uc [-p PORT] [-o] [HOST]");
		}
	is_client = optind < argc;
	sock = meet(argv[optind], port);
	struct ibv_context *context = open_device();
	pd = SOME(ibv_alloc_pd(context));
	cq = SOME(ibv_create_cq(context, 64, NULL, NULL, 0));
	mr = SOME(ibv_reg_mr(pd, (void *)buffer, LEN, access));
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_UC,
		.cap = { .max_send_wr = 32, .max_recv_wr = 32, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	mine = end_of(qp, 0, mr);
	swap(sock, &mine, &theirs, sizeof mine);
	to_init(qp);
	connect_uc(qp);
	barrier(sock);

	drops(qp);
	failures(qp);
	/* The client begins anew; the server does nothing, and receive 21 is still there. */
	if (is_client) {
		to_state(qp, IBV_QPS_RESET);
		to_init(qp);
		connect_uc(qp);
		/* The server's end may not know yet that the stream is gone. */
		char answer;
		do {
			emit(qp, IBV_WR_SEND, 11, 0, 0);
			usleep(1000);
		} while (recv(sock, &answer, 1, MSG_DONTWAIT) != 1);
	} else {
		received(21, 11, IBV_WC_RECV);
		sock_write(sock, "!", 1);
	}
	in_step(qp, 4);
	is_in(qp, IBV_QPS_RTS);
	/* The server goes. */
	if (!is_client)
		ZERO(ibv_destroy_qp(qp));
	barrier(sock);
	if (is_client) {
		for (int i = 0; i < 1000; i++)
			emit(qp, IBV_WR_SEND, 100, 0, 0);
		is_in(qp, IBV_QPS_RTS);
		ZERO(ibv_destroy_qp(qp));
	}
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	printf("done\n");
	return 0;
}
