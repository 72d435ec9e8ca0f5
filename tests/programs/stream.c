/* QPS queue pairs between two processes; each carries COUNT numbered messages of SIZE bytes from
 * the initiator to the responder, which checks that none is lost, duplicated or out of order. -d
 * destroy|exit: the initiator leaves in this way right after its last completion, and the responder
 * begins to receive only then. -f: send until an end with an error; the responder prints
 * "flowing" once messages come, and the status of the first bad completion. -k: fork a child
 * first that keeps all descriptors and sleeps. */
#include "rc.h"

#define WINDOW 256

struct lane {
	struct ibv_qp *qp;
	struct end mine, theirs;
	uint64_t posted, done;
};

int main(int argc, char **argv)
{
	int port = 0, option, qps = 1;
	uint64_t count = 100000;
	size_t size = 16;
	const char *departure = "";
	bool forever = false, forks = false;
	while ((option = getopt(argc, argv, "p:q:n:s:d:fk")) != -1) {
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'q': qps = atoi(optarg); break;
		case 'n': count = strtoull(optarg, NULL, 0); break;
		case 's': size = strtoull(optarg, NULL, 0); break;
		case 'd': departure = optarg; break;
		case 'f': forever = true; break;
		case 'k': forks = true; break;
		default: die("stream -p PORT [-q QPS] [-n COUNT] [-s SIZE] [-d destroy|exit] [-f] [-k] [HOST]");
		}
	}
	if (size < 16)
		die("a message has room for its two numbers: SIZE is at least 16");
	bool client = optind < argc;
	uint64_t window = qps > 16 ? 16 : WINDOW;
	if (forever)
		count = UINT64_MAX;
	if (*departure && count > window)
		die("-d: at most %" PRIu64 " messages, all posted beforehand", window);

	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, qps * window + 1, NULL, NULL, 0));
	uint8_t *buffer = SOME(calloc(qps * window, size));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, qps * window * size, EVERY_ACCESS));
	struct lane *lanes = SOME(calloc(qps, sizeof *lanes));
	int sock = meet(argv[optind], port);
	for (int i = 0; i < qps; i++) {
		lanes[i].qp = create_qp(pd, cq, window);
		lanes[i].mine = end_of(lanes[i].qp, 0, mr);
		swap(sock, &lanes[i].mine, &lanes[i].theirs, sizeof(struct end));
		connect_qp(lanes[i].qp, &lanes[i].mine, 0, &lanes[i].theirs);
	}
	if (forks && fork() == 0) {
		/* The child outlives its parent, and ends soon after the test. */
		alarm(60);
		pause();
		_exit(0);
	}

	/* wr_id: the lane in the high half, the slot in the low one. */
	if (!client) {
		for (int i = 0; i < qps; i++)
			for (; lanes[i].posted < window && lanes[i].posted < count; lanes[i].posted++)
				post_recv(lanes[i].qp, mr, (i * window + lanes[i].posted) * size, size,
					  (uint64_t)i << 32 | lanes[i].posted);
		char byte;
		if (*departure && sock_read(sock, &byte, 1))
			die("the client did not end");
	}
	uint64_t left = qps * count;
	if (forever)
		left = UINT64_MAX;
	while (left > 0) {
		for (int i = 0; client && i < qps; i++) {
			for (; lanes[i].posted < count && lanes[i].posted - lanes[i].done < window; lanes[i].posted++) {
				uint64_t slot = lanes[i].posted % window, number = lanes[i].posted;
				uint8_t *message = buffer + (i * window + slot) * size;
				memcpy(message, &number, 8);
				memcpy(message + size - 8, &(uint64_t){ number ^ i }, 8);
				post_send(lanes[i].qp, IBV_WR_SEND, mr, (i * window + slot) * size, size, NULL, 0,
					  (uint64_t)i << 32 | slot);
			}
		}
		struct ibv_wc wc = next_wc(cq);
		struct lane *lane = &lanes[wc.wr_id >> 32];
		uint64_t slot = wc.wr_id & 0xffffffff;
		if (wc.status != IBV_WC_SUCCESS) {
			if (!forever)
				die("message %" PRIu64 " of lane %" PRIu64 ": %s", lane->done, wc.wr_id >> 32,
				    ibv_wc_status_str(wc.status));
			printf("the end after %" PRIu64 ": %s\n", lane->done, ibv_wc_status_str(wc.status));
			return 0;
		}
		if (slot != lane->done % window)
			die("slot %" PRIu64 " completed in place of %" PRIu64, slot, lane->done % window);
		if (!client) {
			uint64_t numbers[2];
			uint8_t *message = buffer + ((wc.wr_id >> 32) * window + slot) * size;
			memcpy(&numbers[0], message, 8);
			memcpy(&numbers[1], message + size - 8, 8);
			if (wc.byte_len != size || numbers[0] != lane->done || (numbers[1] ^ (wc.wr_id >> 32)) != lane->done)
				die("message %" PRIu64 " (%u bytes) came in place of %" PRIu64, numbers[0], wc.byte_len,
				    lane->done);
			memset(message, 0xee, size);
			if (lane->posted < count) {
				post_recv(lane->qp, mr, ((wc.wr_id >> 32) * window + slot) * size, size, wc.wr_id);
				lane->posted++;
			}
		}
		lane->done++;
		left--;
		if (forever && !client && lane->done == 1000) {
			puts("flowing");
			fflush(stdout);
		}
	}
	if (!strcmp(departure, "exit") && client)
		_exit(0);
	if (!*departure)
		barrier(sock);
	for (int i = 0; i < qps; i++)
		ZERO(ibv_destroy_qp(lanes[i].qp));
	ZERO(ibv_dereg_mr(mr));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dealloc_pd(pd));
	ZERO(ibv_close_device(context));
	free(buffer);
	free(lanes);
	printf("%d x %" PRIu64 " messages of %zu\n", qps, count, size);
	return 0;
}
