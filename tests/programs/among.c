/* among [-q CONNECTIONS] [-n EXCHANGES] -p PORT [HOST]: many connections between two processes; one
 * at a time, chosen at random, carries a Send of 8 bytes there and back. The initiator prints the
 * median and the 99th percentile of a Send (half of an exchange) in microseconds, and the memory of
 * a connection at this end in KiB (memory that both processes map counts by half). */
#include "rc.h"

static long proportional(void)
{
	char line[128];
	long value = 0;
	FILE *file = SOME(fopen("/proc/self/smaps_rollup", "r"));
	while (fgets(line, sizeof line, file) && sscanf(line, "Pss: %ld", &value) != 1)
		;
	fclose(file);
	return value;
}

int main(int argc, char **argv)
{
	int port = 18515, option, count = 10, exchanges = 20000;
	long used = 0;
	while ((option = getopt(argc, argv, "p:q:n:")) != -1)
		switch (option) {
		case 'p': port = atoi(optarg); break;
		case 'q': count = atoi(optarg); break;
		case 'n': exchanges = atoi(optarg); break;
		default: die("among [-q CONNECTIONS] [-n EXCHANGES] -p PORT [HOST]");
		}
	bool client = optind < argc;
	uint8_t buffer[16];
	struct ibv_qp **qps = SOME(calloc(count, sizeof *qps));
	struct end *mine = SOME(calloc(count, sizeof *mine)), *theirs = SOME(calloc(count, sizeof *theirs));
	double *times = SOME(calloc(exchanges, sizeof *times));
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_cq *cq = SOME(ibv_create_cq(context, 64, NULL, NULL, 0));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	int sock = meet(argv[optind], port);
	long before = proportional();
	/* In steps, so that no end has more waiting connections than a listener takes. */
	for (int i = 0; i < count; i++) {
		qps[i] = create_qp(pd, cq, 4);
		mine[i] = end_of(qps[i], 0, mr);
		swap(sock, &mine[i], &theirs[i], sizeof *mine);
		connect_qp(qps[i], &mine[i], 0, &theirs[i]);
		if (i % 16 == 15)
			barrier(sock);
	}
	/* A message there and back on each. */
	srandom(1);
	for (int n = 0; n < count + exchanges; n++) {
		int i = n < count ? n : random() % count;
		post_recv(qps[i], mr, 8, 8, 1);
		if (client && n == count)
			used = proportional() - before;
		if (n <= count)
			barrier(sock);
		double start = now_us();
		if (client)
			post_send(qps[i], IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
		bool sent = !client, received = false;
		while (!received || (client && !sent))
			*(good_wc(cq).wr_id == 1 ? &received : &sent) = true;
		if (!client) {
			post_send(qps[i], IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
			good_wc(cq);
		}
		if (n >= count)
			times[n - count] = (now_us() - start) / 2;
	}
	if (client) {
		qsort(times, exchanges, sizeof *times, by_value);
		printf("%f %f %f\n", times[exchanges / 2], times[exchanges * 99 / 100], (double)used / count);
	}
	barrier(sock);
	for (int i = 0; i < count; i++)
		ZERO(ibv_destroy_qp(qps[i]));
	return 0;
}
