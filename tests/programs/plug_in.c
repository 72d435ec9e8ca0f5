/* Actions of programs that a preloaded plug-in must survive, one per argument. Prints "ok" at
 * its end; any unexpected result ends it with one line and status 1. */
#define _GNU_SOURCE
#include "rc.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>

extern char **environ;

#define CHECK(condition)                                                                                              \
	do {                                                                                                          \
		if (!(condition))                                                                                     \
			die("%s:%d: not so: %s (errno %d)", __func__, __LINE__, #condition, errno);                   \
	} while (0)

struct use {
	struct ibv_context *context;
	struct ibv_comp_channel *channel;
};

static struct use use_device(void)
{
	struct use d = {.context = open_device()};
	d.channel = SOME(ibv_create_comp_channel(d.context));
	return d;
}

static void leave(struct use d)
{
	CHECK(ibv_destroy_comp_channel(d.channel) == 0);
	CHECK(ibv_close_device(d.context) == 0);
}

/* Sockets and other fds with high numbers: those that the program did not open. */
static int internal_fds(void)
{
	int count = 0;
	for (int fd = 512; fd < 4096; fd++)
		count += fcntl(fd, F_GETFD) != -1;
	return count;
}

static int open_fds(void)
{
	int count = 0;
	DIR *dir = SOME(opendir("/proc/self/fd"));
	while (readdir(dir))
		count++;
	closedir(dir);
	return count;
}

/* Blocking calls that pthread_cancel must be able to end, also inside the functions that the
 * plug-in interposes. */
static char fifo[64];
static int full[2];
static volatile int blocked_in;

static void *open_for_ever(void *unused)
{
	(void)unused;
	blocked_in = gettid();
	open(fifo, O_RDONLY);
	return NULL;
}

static void *write_for_ever(void *unused)
{
	static char bytes[1 << 16];
	(void)unused;
	blocked_in = gettid();
	for (;;)
		if (write(full[1], bytes, sizeof bytes) < 0)
			return NULL;
}

/* Waits until the thread sleeps in a system call. */
static void wait_until_blocked(void)
{
	char path[64], state = 'R';
	while (!blocked_in)
		sched_yield();
	snprintf(path, sizeof path, "/proc/self/task/%d/stat", blocked_in);
	while (state != 'S') {
		char line[512], *end;
		FILE *f = SOME(fopen(path, "r"));
		SOME(fgets(line, sizeof line, f));
		fclose(f);
		end = strrchr(line, ')');
		state = end[2];
		sched_yield();
	}
}

static void cancel(void *(*body)(void *))
{
	pthread_t thread;
	void *result;
	blocked_in = 0;
	CHECK(pthread_create(&thread, NULL, body, NULL) == 0);
	wait_until_blocked();
	CHECK(pthread_cancel(thread) == 0);
	CHECK(pthread_join(thread, &result) == 0);
	CHECK(result == PTHREAD_CANCELED);
}

/* Calls with a cancellation pending: each either ends the thread or has done all of its work. */
static volatile int is_cancelled;

static void *open_a_counter(void *unused)
{
	open("/sys/class/infiniband/urnic0/ports/1/hw_counters/cq_overflows", O_RDONLY | O_CLOEXEC);
	return unused;
}

static void *fopen_a_counter(void *unused)
{
	SOME(fopen("/sys/class/infiniband/urnic0/ports/1/hw_counters/cq_overflows", "r"));
	return unused;
}

static void *open_a_manager(void *unused)
{
	open("/dev/infiniband/rdma_cm", O_RDWR | O_CLOEXEC);
	return unused;
}

static void *open_a_node(void *unused)
{
	open("/dev/infiniband/uverbs0", O_RDWR | O_CLOEXEC);
	return unused;
}

static void *cancelled_before(void *body)
{
	int state;
	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	blocked_in = gettid();
	while (!is_cancelled)
		sched_yield();
	pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, &state);
	(*(void *(**)(void *))body)(NULL);
	pthread_testcancel();
	return NULL;
}

static void cancel_before(void *(*body)(void *))
{
	pthread_t thread;
	void *result;
	blocked_in = is_cancelled = 0;
	CHECK(pthread_create(&thread, NULL, cancelled_before, &body) == 0);
	while (!blocked_in)
		sched_yield();
	CHECK(pthread_cancel(thread) == 0);
	is_cancelled = 1;
	CHECK(pthread_join(thread, &result) == 0);
	CHECK(result == PTHREAD_CANCELED);
}

static void cancelled_threads_end(void)
{
	struct use d = use_device();
	cancel_before(open_a_counter);
	cancel_before(fopen_a_counter);
	cancel_before(open_a_manager);
	cancel_before(open_a_node);
	leave(d);
	char folder[] = "/tmp/plug-in-XXXXXX";
	SOME(mkdtemp(folder));
	snprintf(fifo, sizeof fifo, "%s/fifo", folder);
	CHECK(mkfifo(fifo, 0600) == 0);
	cancel(open_for_ever);
	unlink(fifo);
	rmdir(folder);
	CHECK(pipe(full) == 0);
	cancel(write_for_ever);
	close(full[0]);
	close(full[1]);
}

/* Daemons close every possible descriptor number. */
static void closing_every_fd(void (*close_all)(void))
{
	struct use d = use_device();
	int before = internal_fds();
	CHECK(before >= 2);
	close_all();
	CHECK(fcntl(d.channel->fd, F_GETFD) == -1);
	/* No sender to the channel is left, so its other end was closed, too. The open device
	 * keeps its descriptors. */
	CHECK(internal_fds() == before - 1);
	struct use again = use_device();
	leave(again);
}

static void close_loop(void)
{
	for (int fd = 3; fd < 4096; fd++)
		close(fd);
}

static void close_by_range(void)
{
	CHECK(close_range(3, ~0U, 0) == 0);
}

static void close_from(void)
{
	closefrom(3);
}

static void device_fds_stay(void)
{
	struct use d = use_device();
	int before = internal_fds();
	for (int fd = 512; fd < 4096; fd++)
		CHECK(close(fd) == -1 && errno == EBADF);
	CHECK(internal_fds() == before);
	leave(d);
}

static void dup2_replaces_a_channel(void)
{
	struct use d = use_device();
	int before = internal_fds(), null = open("/dev/null", O_RDONLY);
	CHECK(dup2(-1, d.channel->fd) == -1 && errno == EBADF);
	CHECK(internal_fds() == before);
	CHECK(dup2(null, d.channel->fd) == d.channel->fd);
	CHECK(internal_fds() == before - 1);
	close(null);
	leave(d);
}

/* A channel's end that a child kept open would hide the parent's death from it; a child's own
 * device works. */
static void forked_children(void)
{
	struct use d = use_device();
	int before = internal_fds(), status;
	pid_t child = fork();
	if (child == 0) {
		struct pollfd poll_channel = {.fd = d.channel->fd, .events = POLLIN};
		/* The lock on the presence tree stays. */
		CHECK(internal_fds() == 1);
		CHECK(poll(&poll_channel, 1, 0) == 0);
		struct use own = use_device();
		leave(own);
		leave(d);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child);
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	CHECK(internal_fds() == before);
	leave(d);
}

static void *open_and_close(void *unused)
{
	(void)unused;
	for (int i = 0; i < 50; i++)
		leave(use_device());
	return NULL;
}

static void forks_beside_threads_that_open(void)
{
	pthread_t thread;
	CHECK(pthread_create(&thread, NULL, open_and_close, NULL) == 0);
	for (int i = 0; i < 50; i++) {
		int status;
		pid_t child = fork();
		if (child == 0)
			_exit(0);
		CHECK(waitpid(child, &status, 0) == child && status == 0);
	}
	CHECK(pthread_join(thread, NULL) == 0);
}

/* Children that share our memory until exec must not change our tables. */
__attribute__((noinline)) static pid_t vforked_that_closes(int fd)
{
	pid_t child = vfork();
	if (child == 0) {
		close(fd);
		close_range(3, ~0U, 0);
		_exit(0);
	}
	return child;
}

static void spawned_children(void)
{
	struct use d = use_device();
	int before = internal_fds(), status;
	pid_t child = vforked_that_closes(d.channel->fd);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(internal_fds() == before);
	CHECK(fcntl(d.channel->fd, F_GETFD) != -1);

	char *argv[] = {"true", NULL};
	CHECK(posix_spawnp(&child, "true", NULL, NULL, argv, environ) == 0);
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(internal_fds() == before);
	leave(d);
}

static void rounds_leave_nothing(void)
{
	leave(use_device());
	int before = open_fds();
	for (int i = 0; i < 1000; i++)
		leave(use_device());
	CHECK(open_fds() == before);
}

static void threads_at_once(void)
{
	pthread_t threads[8];
	for (int i = 0; i < 8; i++)
		CHECK(pthread_create(&threads[i], NULL, open_and_close, NULL) == 0);
	for (int i = 0; i < 8; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
}

static volatile int alarms;

static void on_alarm(int signal)
{
	struct stat st;
	int saved = errno, fd = open("/dev/null", O_WRONLY);
	(void)signal;
	if (fd < 0 || write(fd, "x", 1) != 1 || stat("/sys/class/infiniband/urnic0", &st) || close(fd))
		_exit(3);
	alarms++;
	errno = saved;
}

static void signal_handlers(void)
{
	struct sigaction action = {.sa_handler = on_alarm, .sa_flags = SA_RESTART};
	struct itimerval every = {.it_interval.tv_usec = 200, .it_value.tv_usec = 200}, never = {0};
	/* The first use builds and allocates: not in a handler. */
	leave(use_device());
	CHECK(sigaction(SIGALRM, &action, NULL) == 0);
	CHECK(setitimer(ITIMER_REAL, &every, NULL) == 0);
	while (alarms < 200)
		leave(use_device());
	CHECK(setitimer(ITIMER_REAL, &never, NULL) == 0);
}

/* Functions that a plug-in without wrappers for them would miss. */
static void files_by_every_road(void)
{
	const char *path = "/sys/class/infiniband/urnic0/node_type";
	char line[16], resolved[4096];
	struct stat st;
	struct statx stx;
	struct dirent **names;
	FILE *f;
	int fd;

	CHECK((fd = openat(AT_FDCWD, path, O_RDONLY)) >= 0 && read(fd, line, sizeof line) == 8);
	CHECK(memcmp(line, "4: RNIC\n", 8) == 0);
	CHECK(openat(fd, "not there", O_RDONLY) == -1);
	close(fd);
	f = SOME(fopen(path, "r"));
	SOME(fgets(line, sizeof line, f));
	fclose(f);
	CHECK(stat(path, &st) == 0 && S_ISREG(st.st_mode));
	CHECK(lstat(path, &st) == 0 && fstatat(AT_FDCWD, path, &st, 0) == 0);
	CHECK(statx(AT_FDCWD, path, 0, STATX_MODE, &stx) == 0 && S_ISREG(stx.stx_mode));
	CHECK(access(path, R_OK) == 0 && faccessat(AT_FDCWD, path, R_OK, 0) == 0 && euidaccess(path, R_OK) == 0);
	CHECK(access(path, W_OK) == -1 || geteuid() == 0);
	SOME(realpath(path, resolved));
	CHECK(readlink("/dev/infiniband/uverbs0", resolved, sizeof resolved) == 9);
	CHECK(scandir("/sys/class/infiniband", &names, NULL, alphasort) == 3);
	CHECK(strcmp(names[2]->d_name, "urnic0") == 0);
	CHECK(chdir("/sys/class/infiniband") == 0 && access("urnic0/node_guid", R_OK) == 0);
	CHECK(open("/sys/class/infiniband/none", O_RDONLY) == -1 && errno == ENOENT);
	CHECK(open("/dev/infiniband/umad0", O_RDWR) == -1 && errno == ENOENT);
	CHECK(fstat(open("/dev/infiniband/rdma_cm", O_RDWR), &st) == 0);
	path = "/sys/class/infiniband/urnic0/ports/1/hw_counters/tx_bytes";
	SOME(f = fopen(path, "r"));
	CHECK(fgets(line, sizeof line, f) != NULL && line[0] >= '0' && line[0] <= '9');
	fclose(f);
	char folder[] = "/tmp/plug-in-XXXXXX", file[sizeof folder + 8];
	SOME(mkdtemp(folder));
	snprintf(file, sizeof file, "%s/mode", folder);
	umask(022);
	CHECK(open(file, O_CREAT | O_EXCL | O_WRONLY, 0640) >= 0);
	CHECK(stat(file, &st) == 0 && (st.st_mode & 0777) == 0640);
	unlink(file);
	rmdir(folder);
}

/* The device file accepts the one command that libibverbs writes, and refuses others like a
 * kernel. */
static void the_device_file(void)
{
	struct use d = use_device();
	uint32_t command[4] = {3, 0x00010004, 0, 0};
	void *volatile nowhere = NULL;
	struct stat st;
	CHECK(fstat(d.context->cmd_fd, &st) == 0 && S_ISCHR(st.st_mode));
	CHECK(write(d.context->cmd_fd, command, sizeof command) == -1 && errno == EOPNOTSUPP);
	command[0] = 17;
	CHECK(write(d.context->cmd_fd, command, 12) == -1 && errno == EINVAL);
	CHECK(write(d.context->cmd_fd, nowhere, sizeof command) == -1 && errno == EFAULT);
	CHECK(write(d.context->cmd_fd, command, sizeof command) == -1 && errno == EFAULT);
	int null = open("/dev/null", O_WRONLY);
	CHECK(write(null, command, sizeof command) == sizeof command);
	close(null);
	leave(d);
}

static void closing_by_loop(void) { closing_every_fd(close_loop); }
static void closing_by_range(void) { closing_every_fd(close_by_range); }
static void closing_from(void) { closing_every_fd(close_from); }

static const struct {
	const char *name;
	void (*run)(void);
} trials[] = {
	{"cancel", cancelled_threads_end},
	{"close-loop", closing_by_loop},
	{"close-range", closing_by_range},
	{"closefrom", closing_from},
	{"device-fds", device_fds_stay},
	{"dup2", dup2_replaces_a_channel},
	{"fork", forked_children},
	{"fork-threads", forks_beside_threads_that_open},
	{"spawn", spawned_children},
	{"rounds", rounds_leave_nothing},
	{"threads", threads_at_once},
	{"signals", signal_handlers},
	{"files", files_by_every_road},
	{"device-file", the_device_file},
};

int main(int argc, char **argv)
{
	for (size_t i = 0; i < sizeof trials / sizeof *trials; i++)
		if (argc == 2 && strcmp(argv[1], trials[i].name) == 0) {
			trials[i].run();
			puts("ok");
			return 0;
		}
	die("usage: plug_in TRIAL");
}
