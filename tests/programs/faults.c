/* Faults of the program itself, while the device recovers from faults in its copies. Each of
 * these begins with one such recovery.
 *
 *   faults before    a handler that is installed before the device is opened
 *   faults after     a handler that is installed afterwards, in every possible way
 *   faults children  fork and vfork children handle the signal on their own
 *   faults die | bus | sent | ignored    ends by a signal
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include "rc.h"

#define PAGE 4096

static uint8_t *hole;
static uint8_t alternate[64 << 10];
static sigjmp_buf back;
static volatile int came, nested;
static siginfo_t info;
static sigset_t mask;
static bool on_alternate;

/* A Send of memory that is no longer mapped. */
static void recover(struct ibv_pd *pd)
{
	uint8_t *bytes = mmap(hole - (64 << 20), PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	struct ibv_mr *mr = SOME(ibv_reg_mr(pd, bytes, PAGE, EVERY_ACCESS));
	struct ibv_cq *cq = SOME(ibv_create_cq(pd->context, 4, NULL, NULL, 0));
	struct ibv_qp *qp = create_qp(pd, cq, 2);
	struct end end = end_of(qp, 0, mr);
	int before = came;
	connect_qp(qp, &end, 0, &end);
	ZERO(munmap(bytes, PAGE));
	post_send(qp, IBV_WR_SEND, mr, 0, 64, NULL, 0, 1);
	struct ibv_wc wc = next_wc(cq);
	if (wc.status != IBV_WC_LOC_PROT_ERR)
		die("a Send of unmapped memory: %s", ibv_wc_status_str(wc.status));
	if (came != before)
		die("the program's handler was called for the device's fault");
	ZERO(ibv_destroy_qp(qp));
	ZERO(ibv_destroy_cq(cq));
	ZERO(ibv_dereg_mr(mr));
}

static struct ibv_pd *open_and_recover(void)
{
	struct ibv_pd *pd = SOME(ibv_alloc_pd(open_device()));
	recover(pd);
	return pd;
}

static void touch(uint8_t *at)
{
	*(volatile uint8_t *)at = 1;
}

static void note(int signal, siginfo_t *came_with, void *context)
{
	uint8_t here;
	(void)context;
	came++;
	if (came_with)
		info = *came_with;
	if (signal != SIGSEGV)
		die("signal %d", signal);
	on_alternate = &here >= alternate && &here < alternate + sizeof alternate;
	pthread_sigmask(SIG_BLOCK, NULL, &mask);
	if (nested-- > 0)
		touch(hole + 2);
	siglongjmp(back, 1);
}

static void note_plainly(int signal)
{
	note(signal, NULL, NULL);
}

/* A fault at `at`, which the handler jumps out of. */
static void fault(uint8_t *at)
{
	if (!sigsetjmp(back, 1))
		touch(at);
}

static void reported(const char *what, int times)
{
	if (came != times)
		die("%s: the handler ran %d times, not %d", what, came, times);
	came = 0;
	printf("%s: reported\n", what);
}

static struct sigaction present(void)
{
	struct sigaction action;
	ZERO(sigaction(SIGSEGV, NULL, &action));
	return action;
}

static void install(int flags, int masked)
{
	struct sigaction action = { .sa_sigaction = note, .sa_flags = SA_SIGINFO | flags };
	sigemptyset(&action.sa_mask);
	sigaddset(&action.sa_mask, masked);
	ZERO(sigaction(SIGSEGV, &action, NULL));
}

/* The handler of `install(SA_ONSTACK, SIGUSR2)` gets the same arguments as from the kernel. */
static void in_every_detail(const char *what)
{
	fault(hole + 5);
	if (info.si_signo != SIGSEGV || info.si_code != SEGV_ACCERR || info.si_addr != hole + 5)
		die("%s: signal %d, code %d at %p", what, info.si_signo, info.si_code, info.si_addr);
	if (!on_alternate)
		die("%s: not on the alternate stack", what);
	if (!sigismember(&mask, SIGSEGV) || !sigismember(&mask, SIGUSR2) || sigismember(&mask, SIGUSR1))
		die("%s: another mask", what);
	pthread_sigmask(SIG_BLOCK, NULL, &mask);
	if (sigismember(&mask, SIGSEGV) || sigismember(&mask, SIGUSR2))
		die("%s: the mask stays", what);
	struct sigaction action = present();
	if (action.sa_sigaction != note || !(action.sa_flags & SA_SIGINFO) || !(action.sa_flags & SA_ONSTACK) ||
	    !sigismember(&action.sa_mask, SIGUSR2) || sigismember(&action.sa_mask, SIGUSR1))
		die("%s: the program sees another action", what);
	reported(what, 1);
}

static void before(void)
{
	install(SA_ONSTACK, SIGUSR2);
	struct ibv_pd *pd = open_and_recover();
	in_every_detail("a handler from before");
	recover(pd);
}

static void after(void)
{
	struct ibv_pd *pd = open_and_recover();
	if (present().sa_handler != SIG_DFL)
		die("a handler that the program did not install");
	install(SA_ONSTACK, SIGUSR2);
	in_every_detail("a handler from after");
	recover(pd);

	struct sigaction action = { .sa_handler = note_plainly }, old;
	ZERO(sigaction(SIGSEGV, &action, &old));
	if (old.sa_sigaction != note)
		die("another old action");
	fault(hole);
	if (on_alternate)
		die("on the alternate stack without SA_ONSTACK");
	reported("without SA_SIGINFO", 1);

	install(SA_NODEFER, SIGUSR1);
	nested = 1;
	fault(hole);
	if (sigismember(&mask, SIGSEGV))
		die("SA_NODEFER: deferred");
	reported("SA_NODEFER", 2);

	install(SA_RESETHAND, SIGUSR1);
	fault(hole);
	if (present().sa_handler != SIG_DFL)
		die("SA_RESETHAND: the handler was not reset");
	reported("SA_RESETHAND", 1);

	if (signal(SIGSEGV, note_plainly) != SIG_DFL)
		die("signal: another old handler");
	for (int n = 0; n < 2; n++)
		fault(hole);
	if (!(present().sa_flags & SA_RESTART) || !sigismember(&mask, SIGSEGV))
		die("signal: not as in BSD");
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
	ZERO(siginterrupt(SIGSEGV, 1));
#pragma GCC diagnostic pop
	if (present().sa_flags & SA_RESTART)
		die("siginterrupt");
	reported("signal", 2);

	if (sysv_signal(SIGSEGV, note_plainly) != note_plainly)
		die("sysv_signal: another old handler");
	fault(hole);
	if (present().sa_handler != SIG_DFL || sigismember(&mask, SIGSEGV))
		die("sysv_signal: not as in System V");
	reported("sysv_signal", 1);
	recover(pd);

	/* The signal is sent by kill, not caused by a fault. */
	install(0, SIGUSR1);
	if (!sigsetjmp(back, 1))
		raise(SIGSEGV);
	if (info.si_code > 0 || info.si_pid != getpid())
		die("raise: code %d of process %d", info.si_code, info.si_pid);
	reported("raise", 1);
	signal(SIGSEGV, SIG_IGN);
	raise(SIGSEGV);
	reported("ignored", 0);
	if (signal(SIGSEGV, SIG_DFL) != SIG_IGN)
		die("another old handler than SIG_IGN");
	recover(pd);
}

static int ended(pid_t child)
{
	int status;
	if (waitpid(child, &status, 0) != child)
		die("waitpid: %s", strerror(errno));
	return status;
}

static void children(void)
{
	struct ibv_pd *pd = open_and_recover();
	install(0, SIGUSR1);
	pid_t child = vfork();
	if (!child) {
		signal(SIGSEGV, SIG_DFL);
		touch(hole);
		_exit(1);
	}
	if (!WIFSIGNALED(ended(child)))
		die("the child of vfork did not end");
	if (present().sa_sigaction != note)
		die("the child of vfork changed its parent's action");
	fault(hole);
	reported("after vfork", 1);
	child = fork();
	if (!child) {
		fault(hole);
		reported("in a child of fork", 1);
		signal(SIGSEGV, SIG_DFL);
		touch(hole);
		_exit(1);
	}
	if (!WIFSIGNALED(ended(child)))
		die("the child of fork did not end");
	recover(pd);
	fault(hole);
	reported("after fork", 1);
}

int main(int argc, char **argv)
{
	const char *what = argc > 1 ? argv[1] : "";
	setvbuf(stdout, NULL, _IOLBF, 0);
	ZERO(setrlimit(RLIMIT_CORE, &(struct rlimit){ 0 }));
	stack_t stack = { .ss_sp = alternate, .ss_size = sizeof alternate };
	ZERO(sigaltstack(&stack, NULL));
	hole = mmap((void *)0x200000000000, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
	if (!strcmp(what, "before")) {
		before();
	} else if (!strcmp(what, "after")) {
		after();
	} else if (!strcmp(what, "children")) {
		children();
	} else {
		open_and_recover();
		printf("recovered\n");
		if (!strcmp(what, "die")) {
			touch(hole);
		} else if (!strcmp(what, "bus")) {
			int file = memfd_create("empty", MFD_CLOEXEC);
			touch(mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
		} else if (!strcmp(what, "sent")) {
			kill(getpid(), SIGSEGV);
		} else if (!strcmp(what, "ignored")) {
			signal(SIGSEGV, SIG_IGN);
			touch(hole);
		} else {
			die("faults before, after, children, die, bus, sent or ignored");
		}
		die("it lives");
	}
	return 0;
}
