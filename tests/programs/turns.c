/* Preloaded into the two ends of a connection, each under callgrind: lets them run in turn, and
 * counts the instructions of some messages.
 *
 * A program that polls executes more instructions the longer it waits. Here it does not wait:
 * an end whose poll finds nothing has no more to do, so it stops itself (SIGSTOP, with all its
 * threads), and the program that started both resumes the other end. What an end executes for a
 * message then depends on the message alone. A program that knows that it would poll in vain
 * calls `pass_turn` instead.
 *
 * TURNS_FILE is a file of 4096 zeroes that both ends map, TURNS_END is `client` or `server`.
 * The client counts the messages that it posts. At the beginning of a block of messages both
 * ends set their counters to zero, at its end both dump them (callgrind's
 * `--callgrind-out-file`, one file for each thread and block). Of the instructions of this file
 * only the wrappers' own, some 40 for a message, are counted. When all blocks are dumped, both
 * ends run freely. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <valgrind/callgrind.h>

/* Messages of a block: a multiple of 64, because a poller of urnic looks at all its work after
 * 64 polls. Before each block are some that are not counted, because a dump takes a while. */
#define BLOCK 256
#define BEFORE 64
#define BLOCKS 5
/* Messages before the first turn, and before each try to have the background threads leave the
 * messages to the programs. */
#define FREE 64
/* Most tries: not every exchange of messages makes them do that. */
#define TRIES 20

enum { SERVER, CLIENT };

struct shared {
	/* Whether the ends run in turn. */
	atomic_bool in_turn;
	/* Whether the background thread of each end leaves messages to the program. */
	atomic_bool left[2];
	/* Steps that the client has requested, and that the server has made. */
	atomic_uint wanted, made;
	/* How many of these were tries; 0: they are not over. */
	atomic_uint tries;
};

static struct shared *shared;
static unsigned end;

/* glibc's `struct rseq` of a thread, for programs that look for it by these names: valgrind
 * cannot register the real one, and without one the plug-in would not write to its peer's
 * memory itself. Nothing revokes memory here, so nobody misses the restart of an interrupted
 * sequence. */
static __thread __attribute__((aligned(32), tls_model("initial-exec"))) struct {
	uint32_t cpu_id_start, cpu_id;
	uint64_t rseq_cs;
	uint32_t flags, unused[3];
} area;
ptrdiff_t __rseq_offset;
unsigned int __rseq_size = 20;

static bool is_over(void)
{
	return !shared || (shared->tries && shared->wanted == shared->tries + 2 * BLOCKS);
}

/* The background thread of the device (0: none). It looks at the program's polls every
 * millisecond of time, not of instructions. So it is held in a signal handler while the ends
 * run in turn. */
static pid_t background;
static atomic_int held;
static int gate[2];

static void hold(int signal)
{
	char byte;
	(void)signal;
	held = 1;
	while (read(gate[0], &byte, 1) < 0)
		;
	held = 0;
}

struct start {
	void *(*routine)(void *);
	void *argument;
};

/* The threads of a device begin with all signals blocked. */
static void *begin_thread(void *argument)
{
	struct start start = *(struct start *)argument;
	sigset_t set;
	free(argument);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR2);
	pthread_sigmask(SIG_UNBLOCK, &set, NULL);
	return start.routine(start.argument);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*routine)(void *), void *argument)
{
	int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
	struct start *start = malloc(sizeof *start);
	if (!start)
		return EAGAIN;
	*start = (struct start){ routine, argument };
	return create(thread, attributes, begin_thread, start);
}

static void find_background(void)
{
	char path[300], name[32] = "";
	DIR *tasks = opendir("/proc/self/task");
	for (struct dirent *task; tasks && !background && (task = readdir(tasks));) {
		snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
		FILE *file = fopen(path, "r");
		if (file && fgets(name, sizeof name, file) && !strcmp(name, "urnic-device\n"))
			background = atoi(task->d_name);
		if (file)
			fclose(file);
	}
	if (tasks)
		closedir(tasks);
}

/* What the background thread does: it may hold a lock, or waits for messages, or leaves these
 * to the program and looks from time to time whether that still polls (it waits for its eventfd
 * alone). */
enum { WORKS, WAITS, LEAVES };

static int background_state(void)
{
	char path[64], target[64] = "";
	long call;
	struct pollfd *polled;
	snprintf(path, sizeof path, "/proc/self/task/%d/syscall", background);
	FILE *file = fopen(path, "r");
	int words = file ? fscanf(file, "%ld %p", &call, (void **)&polled) : 0;
	if (file)
		fclose(file);
	if (words == 2 && (call == SYS_epoll_wait || call == SYS_epoll_pwait))
		return WAITS;
	if (words != 2 || (call != SYS_poll && call != SYS_ppoll))
		return WORKS;
	snprintf(path, sizeof path, "/proc/self/fd/%d", polled->fd);
	if (readlink(path, target, sizeof target - 1) < 0)
		return WORKS;
	return strstr(target, "eventfd") ? LEAVES : WAITS;
}

static void hold_background(void)
{
	static bool searched;
	if (!searched)
		find_background();
	searched = true;
	if (!background || held)
		return;
	signal(SIGUSR2, hold);
	while (background_state() == WORKS)
		sched_yield();
	tgkill(getpid(), background, SIGUSR2);
	while (!held)
		sched_yield();
}

static void free_background(void)
{
	if (held && write(gate[1], "", 1) != 1)
		abort();
	while (held)
		sched_yield();
}

/* Lets the background thread look at the polls so far. */
static void try_background(void)
{
	hold_background();
	bool leaves = !background;
	free_background();
	for (int looks = 0; looks < 200 && !leaves; looks++) {
		sched_yield();
		leaves = background_state() == LEAVES;
	}
	hold_background();
	shared->left[end] = leaves;
}

__attribute__((constructor)) static void begin(void)
{
	const char *path = getenv("TURNS_FILE"), *name = getenv("TURNS_END");
	__rseq_offset = (char *)&area - (char *)__builtin_thread_pointer();
	int file = path && name && RUNNING_ON_VALGRIND ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (file < 0)
		return;
	void *at = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	close(file);
	if (at != MAP_FAILED && !pipe(gate)) {
		shared = at;
		end = strcmp(name, "client") ? SERVER : CLIENT;
	}
}

/* The next step: a try, or when these are over, zero, dump, zero, ... */
static void step(unsigned number)
{
	if (!shared->tries)
		try_background();
	else if ((number - shared->tries) % 2)
		CALLGRIND_ZERO_STATS;
	else
		CALLGRIND_DUMP_STATS;
}

/* Lets the other end run. */
static void stop(void)
{
	raise(SIGSTOP);
}

/* Lets the other end run, until the turn is back. */
static void wait_for_turn(void)
{
	hold_background();
	stop();
	for (unsigned wanted; end == SERVER && (wanted = shared->wanted) != shared->made;) {
		step(wanted);
		shared->made = wanted;
		if (!is_over())
			stop();
	}
	if (is_over())
		free_background();
}

void pass_turn(void)
{
	if (is_over() || !shared->in_turn)
		return;
	CALLGRIND_TOGGLE_COLLECT;
	wait_for_turn();
	CALLGRIND_TOGGLE_COLLECT;
}

/* Both ends make the next step. */
static void both_step(void)
{
	unsigned next = shared->made + 1;
	step(next);
	shared->wanted = next;
	while (shared->made != next)
		stop();
}

/* The client's message of this number, in turn, is about to be posted. */
static void try_again(unsigned number)
{
	if (number % FREE)
		return;
	both_step();
	if ((shared->left[0] && shared->left[1]) || shared->made == TRIES)
		shared->tries = shared->made;
}

static void begin_or_end_block(unsigned number)
{
	unsigned at = number % (BEFORE + BLOCK);
	if (at != BEFORE && (at || !number))
		return;
	both_step();
	if (at == 0)
		fprintf(stderr, "block %u: %u messages\n", (shared->made - shared->tries) / 2, BLOCK);
	if (is_over())
		free_background();
}

/* The client is about to post a message. */
static void note_message(void)
{
	static unsigned before, number;
	if (end != CLIENT || is_over())
		return;
	CALLGRIND_TOGGLE_COLLECT;
	if (shared->tries) {
		begin_or_end_block(number++);
	} else if (++before > FREE) {
		shared->in_turn = true;
		try_again(before);
	}
	CALLGRIND_TOGGLE_COLLECT;
}

/* verbs: the device's own functions, which a context of libibverbs has. */
static int (*poll_cq)(struct ibv_cq *, int, struct ibv_wc *);
static int (*post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);

static int poll_in_turn(struct ibv_cq *cq, int number, struct ibv_wc *wc)
{
	int found = poll_cq(cq, number, wc);
	if (!found)
		pass_turn();
	return found;
}

static int post_and_note(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	note_message();
	return post_send(qp, wr, bad);
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct ibv_context *(*open_device)(struct ibv_device *) = dlsym(RTLD_NEXT, "ibv_open_device");
	struct ibv_context *context = open_device(device);
	if (context && shared) {
		poll_cq = context->ops.poll_cq;
		post_send = context->ops.post_send;
		context->ops.poll_cq = poll_in_turn;
		context->ops.post_send = post_and_note;
	}
	return context;
}

/* UCX. This file is compiled without its headers, so pointers have no types. */
#define NEXT(result, name, ...)                                                                                       \
	static result (*next)(__VA_ARGS__);                                                                          \
	if (!next)                                                                                                    \
		next = dlsym(RTLD_NEXT, #name)

unsigned ucp_worker_progress(void *worker)
{
	NEXT(unsigned, ucp_worker_progress, void *);
	unsigned found = next(worker);
	if (!found)
		pass_turn();
	return found;
}

void *ucp_tag_send_nbx(void *ep, const void *buffer, size_t count, uint64_t tag, const void *param)
{
	NEXT(void *, ucp_tag_send_nbx, void *, const void *, size_t, uint64_t, const void *);
	note_message();
	return next(ep, buffer, count, tag, param);
}

void *ucp_put_nbx(void *ep, const void *buffer, size_t count, uint64_t address, void *rkey, const void *param)
{
	NEXT(void *, ucp_put_nbx, void *, const void *, size_t, uint64_t, void *, const void *);
	note_message();
	return next(ep, buffer, count, address, rkey, param);
}
