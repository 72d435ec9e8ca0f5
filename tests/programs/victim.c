/* A program whose peer is a test that speaks TCP by hand. It waits at -p PORT for the test, tells it about a queue pair and a buffer of 4096
 * bytes, is told about the other end, connects, posts RECEIVES receives, and then does what single letters ask for:
 *   h  a hundred exchanges on another queue pair, which is its own peer; answers h
 *   m  answers with the buffer
 *   w  waits for the next completion; answers status, opcode, length, wr_id
 *   p  polls once; answers as w, with status -1 when there is none
 *   s  posts a Send of five bytes, wr_id 1000, 1001, …
 *   d  deregisters the buffer's region; answers d
 *   q  leaves in good order
 * All numbers are the machine's own. */
#include "rc.h"

#define BUFFER 4096

struct introduction {
	struct end end;
	uint32_t read_only_rkey, other_pd_rkey;
};

int main(int argc, char **argv)
{
	int port = 0, option, receives = 4;
	while ((option = getopt(argc, argv, "p:r:")) != -1) {
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'r': receives = atoi(optarg); break;
		default: die("victim -p PORT [-r RECEIVES]");
		}
	}
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context)), *other_pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 256, NULL, NULL, 0));
	struct ibv_cq *healthy_cq = SOME(ibv_create_cq(context, 16, NULL, NULL, 0));
	static uint8_t buffer[BUFFER], other[BUFFER], inbox[64][BUFFER], healthy[128];
	fill(buffer, BUFFER, 3);
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, BUFFER, EVERY_ACCESS));
	struct ibv_mr *read_only = SOME(ibv_reg_mr(pd, buffer, BUFFER, IBV_ACCESS_REMOTE_READ));
	struct ibv_mr *other_mr = SOME(ibv_reg_mr(other_pd, other, BUFFER, EVERY_ACCESS));
	struct ibv_mr *inbox_mr = SOME(ibv_reg_mr(pd, inbox, sizeof inbox, IBV_ACCESS_LOCAL_WRITE));
	struct ibv_mr *healthy_mr = SOME(ibv_reg_mr(pd, healthy, sizeof healthy, IBV_ACCESS_LOCAL_WRITE));

	struct ibv_qp *healthy_qp = create_qp(pd, healthy_cq, 8);
	struct end self = end_of(healthy_qp, 0, NULL);
	connect_qp(healthy_qp, &self, 0, &self);

	struct ibv_qp *qp = create_qp(pd, cq, 64);
	struct introduction mine = { .end = end_of(qp, 0, mr), .read_only_rkey = read_only->rkey, .other_pd_rkey = other_mr->rkey };
	struct end theirs;
	int sock = meet(NULL, port);
	sock_write(sock, &mine, sizeof mine);
	if (!sock_read(sock, &theirs, sizeof theirs))
		die("the test is gone");
	connect_qp(qp, &mine.end, 0, &theirs);
	for (int i = 0; i < receives; i++)
		post_recv(qp, inbox_mr, (size_t)i * BUFFER, BUFFER, i);
	sock_write(sock, "r", 1);

	char letter;
	uint64_t sends = 1000;
	while (sock_read(sock, &letter, 1) && letter != 'q') {
		struct ibv_wc wc = { .status = -1 };
		switch (letter) {
		case 'h':
			for (int i = 0; i < 100; i++) {
				healthy[0] = i;
				post_recv(healthy_qp, healthy_mr, 64, 64, 1);
				post_send(healthy_qp, IBV_WR_SEND, healthy_mr, 0, 64, NULL, 0, 2);
				good_wc(healthy_cq);
				good_wc(healthy_cq);
				if (healthy[64] != i)
					die("the healthy queue pair lost message %d", i);
			}
			sock_write(sock, "h", 1);
			break;
		case 'm': sock_write(sock, buffer, BUFFER); break;
		case 's': post_send(qp, IBV_WR_SEND, mr, 0, 5, NULL, 0, sends++); break;
		case 'd':
			ZERO(ibv_dereg_mr(mr));
			mr = NULL;
			sock_write(sock, "d", 1);
			break;
		case 'w':
			wc = next_wc(cq);
			__attribute__((fallthrough));
		case 'p': {
			if (letter == 'p' && ibv_poll_cq(cq, 1, &wc) < 0)
				die("ibv_poll_cq failed");
			int32_t answer[4] = { wc.status, wc.opcode, wc.byte_len, wc.wr_id };
			sock_write(sock, answer, sizeof answer);
			break;
		}
		default: die("no such letter: %c", letter);
		}
	}
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_qp(healthy_qp));
	if (mr)
		ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_dereg_mr(read_only));
	ZERO(ibv_dereg_mr(other_mr));
	ZERO(ibv_dereg_mr(inbox_mr));
	ZERO(ibv_dereg_mr(healthy_mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_destroy_cq(healthy_cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_dealloc_pd(other_pd));
	ZERO(ibv_close_device(context));
	puts("left in good order");
	return 0;
}
