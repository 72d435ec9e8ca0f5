/* Events of a thread that waits for events. The argument selects the scene:
 *
 *   signals   a handler ends the wait with EINTR, or not at all if it was set up with SA_RESTART
 *   jumps     after a handler with a long jump the channel and the device work
 *   closes    another thread closes the channel: the wait lasts until its thread is cancelled
 *   rests     no event comes: no thread of the process runs
 *   stops     the process is stopped and resumed any number of times: waits of every kind last
 *             until their event comes
 */
#define _GNU_SOURCE
#include "rc.h"
#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <setjmp.h>
#include <stdatomic.h>
#include <sys/time.h>

#define ROUNDS 100

static struct rdma_event_channel *channel;
static pthread_t waiter;
static atomic_uint handled, round_number;

static void pause_us(long us)
{
	struct timespec pause = { .tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000 };
	while (nanosleep(&pause, &pause) && errno == EINTR)
		;
}

static void handle(void (*handler)(int), int flags)
{
	struct sigaction action = { .sa_handler = handler, .sa_flags = flags };
	ZERO(sigaction(SIGUSR1, &action, NULL));
}

static void note(int signal)
{
	(void)signal;
	handled++;
}

static void *start(void *(*run)(void *))
{
	static pthread_t thread;
	ZERO(pthread_create(&thread, NULL, run, NULL));
	return &thread;
}

/* Causes an event on the channel. */
static struct rdma_cm_id *resolve(void)
{
	struct sockaddr_in here = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct rdma_cm_id *id;
	ZERO(rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	ZERO(rdma_resolve_addr(id, NULL, (void *)&here, 2000));
	return id;
}

static void *take_event(void *unused)
{
	struct rdma_cm_event *event;
	(void)unused;
	ZERO(rdma_get_cm_event(channel, &event));
	ZERO(event->status);
	ZERO(rdma_ack_cm_event(event));
	return NULL;
}

/* Checks that the channel works. */
static void make_use(void)
{
	struct rdma_cm_id *id = resolve();
	take_event(NULL);
	ZERO(rdma_destroy_id(id));
}

/* A signal may come just before a wait, which it then does not interrupt: so signals are sent
 * until this round is over. */
static void *disturb(void *unused)
{
	(void)unused;
	for (unsigned round = 0; round < ROUNDS; round++) {
		while (round_number == round) {
			ZERO(pthread_kill(waiter, SIGUSR1));
			pause_us(round % 40 * 10);
		}
	}
	return NULL;
}

static void *resolve_later(void *unused)
{
	(void)unused;
	for (unsigned n = 0; n < ROUNDS; n++) {
		unsigned before = handled;
		ZERO(pthread_kill(waiter, SIGUSR1));
		while (handled == before)
			pause_us(10);
		pause_us(n % 40 * 10);
	}
	return resolve();
}

static void signals(void)
{
	struct rdma_cm_event *event;
	handle(note, 0);
	pthread_t *other = start(disturb);
	while (round_number < ROUNDS) {
		unsigned before = handled;
		errno = 0;
		if (rdma_get_cm_event(channel, &event) == 0)
			die("an event without a cause");
		if (errno != EINTR)
			die("after a signal: %s", strerror(errno));
		if (handled == before)
			die("interrupted without a signal");
		round_number++;
	}
	ZERO(pthread_join(*other, NULL));
	make_use();

	handle(note, SA_RESTART);
	void *id;
	other = start(resolve_later);
	take_event(NULL);
	ZERO(pthread_join(*other, &id));
	ZERO(rdma_destroy_id(id));
}

static sigjmp_buf out;

static void jump(int signal)
{
	(void)signal;
	siglongjmp(out, 1);
}

/* Requests an event like librdmacm, but without its allocation, which a jump would leave half
 * done. */
static void ask_for_event(void)
{
	static uint8_t answer[512];
	/* RDMA_USER_CM_CMD_GET_EVENT of <rdma/rdma_user_cm.h>, which cannot be included with
	 * <rdma/rdma_cma.h> */
	struct {
		uint32_t cmd;
		uint16_t in, out;
		uint64_t response;
	} command = { .cmd = 12, .in = 8, .out = sizeof answer, .response = (uintptr_t)answer };
	if (write(channel->fd, &command, sizeof command) != -1)
		die("an event without a cause");
	die("the wait ended: %s", strerror(errno));
}

static void jumps(void)
{
	struct sigaction action = { .sa_handler = jump };
	ZERO(sigaction(SIGALRM, &action, NULL));
	make_use();
	for (volatile int round = 0; round < ROUNDS; round++) {
		if (!sigsetjmp(out, 1)) {
			struct itimerval soon = { .it_value.tv_usec = 1 + round % 40 * 10 };
			ZERO(setitimer(ITIMER_REAL, &soon, NULL));
			ask_for_event();
		}
		/* After a wait that succeeded, the thread polls awake in its next wait. */
		make_use();
	}
}

static void *wait_for_ever(void *unused)
{
	struct rdma_cm_event *event;
	(void)unused;
	round_number++;
	if (rdma_get_cm_event(channel, &event) == 0)
		die("an event without a cause");
	/* The channel was closed before the call. */
	if (errno != EBADF)
		die("after a close: %s", strerror(errno));
	return NULL;
}

static void closes(void)
{
	for (unsigned round = 0; round < ROUNDS; round++) {
		make_use();
		pthread_t *other = start(wait_for_ever);
		while (round_number == round)
			sched_yield();
		pause_us(round % 40 * 10);
		ZERO(close(channel->fd));
		ZERO(pthread_cancel(*other));
		ZERO(pthread_join(*other, NULL));
		channel->fd = open("/dev/null", O_RDONLY);
		rdma_destroy_event_channel(channel);
		channel = SOME(rdma_create_event_channel());
	}
}

/* Nanoseconds that the threads have run, except this one. */
static unsigned long long run_time_of_others(void)
{
	unsigned long long sum = 0, one;
	DIR *threads = SOME(opendir("/proc/self/task"));
	for (struct dirent *entry; (entry = readdir(threads));) {
		char path[300];
		if (entry->d_name[0] == '.' || atoi(entry->d_name) == gettid())
			continue;
		snprintf(path, sizeof path, "/proc/self/task/%s/schedstat", entry->d_name);
		FILE *file = fopen(path, "r");
		if (file && fscanf(file, "%llu", &one) == 1)
			sum += one;
		if (file)
			fclose(file);
	}
	closedir(threads);
	return sum;
}

static void *wait_in_vain(void *unused)
{
	struct rdma_cm_event *event;
	(void)unused;
	rdma_get_cm_event(channel, &event);
	die("the wait ended: %s", strerror(errno));
}

static void rests(void)
{
	if (access("/proc/self/schedstat", R_OK))
		die("/proc/self/schedstat: %s", strerror(errno));
	make_use();
	start(wait_in_vain);
	unsigned long long before, after = 0;
	do {
		before = run_time_of_others();
		pause_us(100000);
		after = run_time_of_others();
	} while (after != before);
}

static struct ibv_context *context;
static struct ibv_comp_channel *completions;
static struct ibv_cq *cq;

static void *wait_for_completion(void *unused)
{
	struct ibv_cq *which;
	void *its_context;
	(void)unused;
	ZERO(ibv_get_cq_event(completions, &which, &its_context));
	ibv_ack_cq_events(which, 1);
	return NULL;
}

static void *wait_for_async_event(void *unused)
{
	struct ibv_async_event event;
	(void)unused;
	ZERO(ibv_get_async_event(context, &event));
	ibv_ack_async_event(&event);
	return NULL;
}

static void *wait_for_readiness(void *unused)
{
	struct pollfd fd = { .fd = channel->fd, .events = POLLIN };
	(void)unused;
	int ready = poll(&fd, 1, 600000);
	if (ready != 1)
		die("poll: %d, %s", ready, strerror(errno));
	return NULL;
}

static void stops(void)
{
	static uint8_t buffer[64];
	pthread_t threads[4];
	context = open_device();
	struct ibv_pd *pd = SOME(ibv_alloc_pd(context));
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, buffer, sizeof buffer, EVERY_ACCESS));
	completions = SOME(ibv_create_comp_channel(context));
	cq = SOME(ibv_create_cq(context, 16, NULL, completions, 0));
	struct ibv_qp *qp = create_qp(pd, cq, 8);
	struct end me = end_of(qp, 0, mr);
	connect_qp(qp, &me, 0, &me);
	ZERO(ibv_req_notify_cq(cq, 0));

	/* A thread that only checks whether there is an event; the other thread takes the event. */
	ZERO(pthread_create(&threads[0], NULL, wait_for_readiness, NULL));
	ZERO(pthread_create(&threads[1], NULL, wait_for_completion, NULL));
	ZERO(pthread_create(&threads[2], NULL, wait_for_async_event, NULL));
	puts("waiting");
	fflush(stdout);
	if (getchar() != 'r')
		die("nothing to do");

	struct rdma_cm_id *id = resolve();
	ZERO(pthread_join(threads[0], NULL));
	take_event(NULL);
	ZERO(pthread_create(&threads[3], NULL, take_event, NULL));
	puts("event");
	fflush(stdout);
	if (getchar() != 'r')
		die("nothing to do");
	ZERO(rdma_resolve_route(id, 2000));
	ZERO(pthread_join(threads[3], NULL));
	ZERO(rdma_destroy_id(id));

	post_recv(qp, mr, 32, 32, 1);
	post_send(qp, IBV_WR_SEND, mr, 0, 8, NULL, 0, 2);
	ZERO(pthread_join(threads[1], NULL));
	good_wc(cq);
	good_wc(cq);
	/* A Write to an invalid address is an error of the queue pair that is its target. */
	struct end nowhere = { .address = me.address, .rkey = ~me.rkey };
	post_send(qp, IBV_WR_RDMA_WRITE, mr, 0, 8, &nowhere, 0, 3);
	ZERO(pthread_join(threads[2], NULL));
}

int main(int argc, char **argv)
{
	const struct {
		const char *name;
		void (*run)(void);
	} scenes[] = { { "signals", signals }, { "jumps", jumps }, { "closes", closes }, { "rests", rests }, { "stops", stops } };
	channel = SOME(rdma_create_event_channel());
	waiter = pthread_self();
	for (size_t i = 0; argc == 2 && i < sizeof scenes / sizeof *scenes; i++) {
		if (strcmp(argv[1], scenes[i].name))
			continue;
		scenes[i].run();
		puts("done");
		return 0;
	}
	die("cm_waits signals|jumps|closes|rests|stops");
}
