/* denied CALL ERRNO PROGRAM [ARGUMENT ...]: runs a program in which the system call CALL
 * fails with ERRNO, as in a sandbox. "netlink" is socket(2) for AF_NETLINK. */
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static const struct {
	const char *name;
	unsigned number;
} calls[] = {
	{ "epoll_create1", __NR_epoll_create1 },
	{ "eventfd2", __NR_eventfd2 },
	{ "socketpair", __NR_socketpair },
	{ "epoll_ctl", __NR_epoll_ctl },
	{ "memfd_create", __NR_memfd_create },
	{ "netlink", __NR_socket },
	{ "pidfd_open", __NR_pidfd_open },
	{ "process_vm_readv", __NR_process_vm_readv },
	{ "process_vm_writev", __NR_process_vm_writev },
	{ "socket", __NR_socket },
};

int main(int argc, char **argv)
{
	unsigned number = -1u;
	for (size_t i = 0; argc > 3 && i < sizeof calls / sizeof *calls; i++)
		if (!strcmp(calls[i].name, argv[1]))
			number = calls[i].number;
	if (number == -1u) {
		fprintf(stderr, "denied CALL ERRNO PROGRAM [ARGUMENT ...]\n");
		return 125;
	}
	/* One family, or any: of other calls the first argument does not count. */
	bool one_family = !strcmp(argv[1], "netlink");
	struct sock_filter rules[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args)),
		BPF_JUMP(BPF_JMP | (one_family ? BPF_JEQ : BPF_JGE) | BPF_K, one_family ? AF_NETLINK : 0, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (atoi(argv[2]) & SECCOMP_RET_DATA)),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog program = { .len = sizeof rules / sizeof *rules, .filter = rules };
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) {
		fprintf(stderr, "seccomp: %s\n", strerror(errno));
		return 125;
	}
	execvp(argv[3], argv + 3);
	fprintf(stderr, "%s: %s\n", argv[3], strerror(errno));
	return 127;
}
