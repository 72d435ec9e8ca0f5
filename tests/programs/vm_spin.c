/* What the kernel's copies between two processes cost: vm_spin -n COUNT write|read. By "write", two
 * processes write 8 bytes into each other's memory in turn (process_vm_writev), and watch their
 * own; by "read", one reads 8 bytes of the other's. Prints, like perftest: bytes, count, then
 * least, greatest and median time in microseconds: of half a round trip, or of a read. */
#define _GNU_SOURCE
#include "rc.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <sys/wait.h>

/* Both processes have it at this address: it is copied when one forks the other. */
static volatile uint64_t word;

static void copy(pid_t process, uint64_t *mine, bool writes)
{
	struct iovec local = { mine, sizeof *mine }, remote = { (void *)&word, sizeof word };
	ssize_t n = writes ? process_vm_writev(process, &local, 1, &remote, 1, 0)
			   : process_vm_readv(process, &local, 1, &remote, 1, 0);
	if (n != sizeof *mine)
		die("process_vm: %s", strerror(errno));
}

int main(int argc, char **argv)
{
	int count = 0, option;
	while ((option = getopt(argc, argv, "n:")) != -1)
		if (option == 'n')
			count = atoi(optarg);
	if (count < 1 || optind + 1 != argc)
		die("usage: vm_spin -n COUNT write|read");
	bool writes = !strcmp(argv[optind], "write");
	pid_t parent = getpid(), child = fork();
	double *took = SOME(calloc(count, sizeof *took));
	if (!child) {
		prctl(PR_SET_PDEATHSIG, SIGKILL);
		for (uint64_t n = 1; writes && n <= (uint64_t)count; n++) {
			while (word != n)
				;
			copy(parent, &n, true);
		}
		pause();
	}
	for (uint64_t n = 1; n <= (uint64_t)count; n++) {
		uint64_t bytes = n;
		double begun = now_us();
		copy(child, &bytes, writes);
		while (writes && word != n)
			;
		took[n - 1] = (now_us() - begun) / (writes ? 2 : 1);
	}
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
	qsort(took, count, sizeof *took, by_value);
	printf("8 %d %.2f %.2f %.2f\n", count, took[0], took[count - 1], took[count / 2]);
	return 0;
}
