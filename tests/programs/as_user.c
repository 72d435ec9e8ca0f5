/* as_user UID PROGRAM [ARGUMENT...]: runs a program as this user, where there is no setpriv(1). */
#include <errno.h>
#include <grp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 3) {
		fputs("usage: as_user UID PROGRAM [ARGUMENT...]\n", stderr);
		return 2;
	}
	uid_t user = strtoul(argv[1], NULL, 10);
	if (setgroups(0, NULL) || setgid(user) || setuid(user)) {
		fprintf(stderr, "as_user: %s\n", strerror(errno));
		return 1;
	}
	execvp(argv[2], argv + 2);
	fprintf(stderr, "as_user: %s: %s\n", argv[2], strerror(errno));
	return 127;
}
