/* RDMA Reads into lists of elements, up to as many as the device allows: every byte comes to its
 * place, and no other byte changes. Completions of Reads and of Sends report their lengths. */
#include "rc.h"

#define SOURCE 1000003
#define GAP 13

int main(int argc, char **argv)
{
	int port = 0, option;
	while ((option = getopt(argc, argv, "p:")) != -1)
		if (option == 'p')
			port = atoi(optarg);
	const char *host = argv[optind];
	int sock = meet(host, port);
	struct ibv_context *context = open_device();
	struct ibv_device_attr attr;
	ZERO(ibv_query_device(context, &attr));
	int most = attr.max_sge_rd;
	if (most < 2)
		die("max_sge_rd is %d", most);
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	size_t size = SOURCE + (most + 1) * GAP;
	uint8_t *buffer = SOME(malloc(size));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, size, EVERY_ACCESS));
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = 8, .max_send_sge = most, .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = SOME(ibv_create_qp(pd, &init));
	struct ibv_qp_attr start = { .qp_state = IBV_QPS_INIT, .port_num = 1, .qp_access_flags = EVERY_ACCESS };
	ZERO(ibv_modify_qp(qp, &start, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
	if (!host) {
		fill(buffer, size, 7);
		post_recv(qp, mr, 0, 0, 1);
		post_recv(qp, mr, 0, size, 2);
	}
	struct end mine = end_of(qp, 0, mr), theirs;
	swap(sock, &mine, &theirs, sizeof mine);
	connect_qp(qp, &mine, 0, &theirs);
	barrier(sock);
	for (int count = 1; host && count <= most; count++) {
		memset(buffer, 0xee, size);
		struct ibv_sge list[most];
		uint8_t *places[most];
		size_t left = SOURCE, at = GAP;
		for (int n = 0; n < count; n++) {
			/* One element is empty, the last takes the rest. */
			size_t len = n == count - 1 ? left : n == 1 ? 0 : left / 3 + n;
			places[n] = buffer + at;
			list[n] = (struct ibv_sge){ .addr = (uintptr_t)places[n], .length = len, .lkey = mr->lkey };
			at += len + GAP;
			left -= len;
		}
		struct ibv_send_wr *bad, read = {
			.wr_id = count,
			.sg_list = list,
			.num_sge = count,
			.opcode = IBV_WR_RDMA_READ,
			.send_flags = IBV_SEND_SIGNALED,
			.wr.rdma = { .remote_addr = theirs.address, .rkey = theirs.rkey },
		};
		ZERO(ibv_post_send(qp, &read, &bad));
		struct ibv_wc wc = good_wc(cq);
		if (wc.byte_len != SOURCE || wc.wr_id != (uint64_t)count)
			die("a Read of %d elements reports %u bytes", count, wc.byte_len);
		uint8_t *expected = SOME(malloc(size)), *source = SOME(malloc(size));
		fill(source, size, 7);
		memset(expected, 0xee, size);
		size_t from = 0;
		for (int n = 0; n < count; n++) {
			memcpy(expected + (places[n] - buffer), source + from, list[n].length);
			from += list[n].length;
		}
		if (memcmp(buffer, expected, size))
			die("a Read of %d elements has bytes in the wrong places", count);
		free(expected);
		free(source);
	}
	if (host) {
		struct ibv_sge too_many[most + 1];
		for (int n = 0; n <= most; n++)
			too_many[n] = (struct ibv_sge){ .addr = (uintptr_t)buffer, .length = 1, .lkey = mr->lkey };
		struct ibv_send_wr *bad, read = {
			.sg_list = too_many,
			.num_sge = most + 1,
			.opcode = IBV_WR_RDMA_READ,
			.wr.rdma = { .remote_addr = theirs.address, .rkey = theirs.rkey },
		};
		int refused = ibv_post_send(qp, &read, &bad);
		if (refused != EINVAL)
			die("%d elements: %s", most + 1, strerror(refused));
		post_send(qp, IBV_WR_SEND, mr, 0, 0, &theirs, 0, 99);
		struct ibv_wc wc = good_wc(cq);
		if (wc.byte_len != 0)
			die("an empty Send reports %u bytes", wc.byte_len);
		post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, 333, &theirs, 0, 100);
		wc = good_wc(cq);
		if (wc.byte_len != 333)
			die("a Write of 333 bytes reports %u", wc.byte_len);
		post_send(qp, IBV_WR_SEND, mr, 0, 77, &theirs, 0, 101);
		wc = good_wc(cq);
		if (wc.byte_len != 77)
			die("a Send of 77 bytes reports %u", wc.byte_len);
		printf("%d elements\n", most);
	} else {
		for (unsigned len = 0; len <= 77; len += 77) {
			struct ibv_wc wc = good_wc(cq);
			if (wc.byte_len != len)
				die("%u bytes came in place of %u", wc.byte_len, len);
		}
	}
	barrier(sock);
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_dereg_mr(mr));
	return 0;
}
