/* Many connections of rdma_cm at once, on any device: made one after the other; each sends its
 * number and gets it back, and all end. */
#include "cm.h"

static struct ibv_pd *pd;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static uint64_t *words;

/* libsiw treats a mapping at page 144 of a process as none (docs/reference/siw.md): none of
 * these mappings begins there, with 9 pages for completions, and 4 and 2 for each queue pair. */
static void set_up(struct rdma_cm_id *id, int count, int n)
{
	if (!pd) {
		pd = SOME(ibv_alloc_pd(id->verbs));
		cq = SOME(ibv_create_cq(id->verbs, 1024, NULL, NULL, 0));
		words = SOME(calloc(2 * count, sizeof *words));
		mr = SOME(ibv_reg_mr(pd, words, 2 * count * sizeof *words, EVERY_ACCESS));
	}
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 128, .max_recv_wr = 64, .max_send_sge = 1, .max_recv_sge = 1 },
	};
	ZERO(rdma_create_qp(id, pd, &init));
	post_recv(id->qp, mr, (2 * n + 1) * sizeof *words, sizeof *words, n);
}

static void send_word(struct rdma_cm_id *id, int count, int n, uint64_t word)
{
	words[2 * n] = word;
	post_send(id->qp, IBV_WR_SEND, mr, 2 * n * sizeof *words, sizeof *words, NULL, 0, count + n);
}

int main(int argc, char **argv)
{
	char *port = NULL;
	int option, count = 200;
	while ((option = getopt(argc, argv, "p:c:")) != -1) {
		switch (option) {
		case 'p': port = optarg; break;
		case 'c': count = atoi(optarg); break;
		default: port = NULL; optind = argc;
		}
	}
	if (!port || count < 1 || count > 512)
		die("cm_many -p PORT [-c CONNECTIONS] [HOST]");
	bool client = optind < argc;
	struct rdma_event_channel *channel = SOME(rdma_create_event_channel());
	struct rdma_conn_param param = { .responder_resources = 1, .initiator_depth = 1 };
	struct rdma_cm_id **ids = SOME(calloc(count, sizeof *ids));
	if (!client)
		listener(channel, port);
	for (int n = 0; client && n < count; n++) {
		ids[n] = resolved(channel, argv[optind], port);
		set_up(ids[n], count, n);
		ZERO(rdma_connect(ids[n], &param));
		next_event(channel, RDMA_CM_EVENT_ESTABLISHED, NULL);
	}
	/* The next initiator may connect before this end has its ESTABLISHED event for the last. */
	for (int asked = 0, established = 0; !client && established < count;) {
		struct rdma_cm_event *event;
		ZERO(rdma_get_cm_event(channel, &event));
		if (event->event == RDMA_CM_EVENT_ESTABLISHED) {
			established++;
		} else if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST && asked < count) {
			ids[asked] = event->id;
			set_up(event->id, count, asked++);
			ZERO(rdma_accept(event->id, &param));
		} else {
			die("%s (%d)", rdma_event_str(event->event), event->status);
		}
		ZERO(rdma_ack_cm_event(event));
	}
	/* All connections are established. */
	for (int n = 0; client && n < count; n++)
		send_word(ids[n], count, n, 1000 + n);
	for (int left = count; left > 0;) {
		struct ibv_wc wc = next_wc(cq);
		/* A Send: its answer, or the end of the connection, gives more information. */
		if (wc.wr_id >= (uint64_t)count)
			continue;
		if (wc.status != IBV_WC_SUCCESS)
			die("connection %" PRIu64 ": %s", wc.wr_id, ibv_wc_status_str(wc.status));
		uint64_t word = words[2 * wc.wr_id + 1];
		if (word != 1000 + wc.wr_id)
			die("connection %" PRIu64 ": %" PRIu64, wc.wr_id, word);
		if (!client)
			send_word(ids[wc.wr_id], count, wc.wr_id, word);
		left--;
	}
	for (int n = 0; client && n < count; n++)
		ZERO(rdma_disconnect(ids[n]));
	/* Later events of one connection may come before the end of another. */
	for (int n = 0; n < count;) {
		struct rdma_cm_event *event;
		ZERO(rdma_get_cm_event(channel, &event));
		if (event->event != RDMA_CM_EVENT_DISCONNECTED && event->event != RDMA_CM_EVENT_TIMEWAIT_EXIT)
			die("%s (%d)", rdma_event_str(event->event), event->status);
		n += event->event == RDMA_CM_EVENT_DISCONNECTED;
		ZERO(rdma_ack_cm_event(event));
	}
	printf("%d connections\n", count);
	return 0;
}
