/* The credits of rsockets: it sends one-byte messages, as many as its credits allow, to a server
 * that does not receive. Each data message takes a credit, and there are as many credits as the
 * server posted receives; but the message that gives credits to the server takes a receive without
 * a credit (rs_send_credits of rsocket.c: over iWARP, a Send after each Write). So rsockets sends
 * one message more than there are receives, and relies on the device to hold it back.
 *
 * With a host it is the client. The server continues when its standard input ends, and answers
 * when it has received all messages. */
#include "rc.h"
#include <rdma/rsocket.h>

static int receives(int socket)
{
	int count;
	socklen_t size = sizeof count;
	ZERO(rgetsockopt(socket, SOL_RDMA, RDMA_RQSIZE, &count, &size));
	return count;
}

static void serve(struct sockaddr_in *at)
{
	int listener = rsocket(AF_INET, SOCK_STREAM, 0);
	ZERO(rbind(listener, (struct sockaddr *)at, sizeof *at));
	ZERO(rlisten(listener, 1));
	int socket = raccept(listener, NULL, NULL);
	if (socket < 0)
		die("raccept: %s", strerror(errno));
	printf("posted %d receives\n", receives(socket));
	fflush(stdout);
	while (getchar() != EOF)
		;
	char byte;
	for (int i = receives(socket); i > 0; i--)
		if (rrecv(socket, &byte, 1, 0) != 1)
			die("%d bytes are missing: %s", i, strerror(errno));
	if (rsend(socket, &byte, 1, 0) != 1)
		die("rsend: %s", strerror(errno));
	/* Waits until the client has the byte, and closes. */
	rrecv(socket, &byte, 1, 0);
	rclose(socket);
	rclose(listener);
}

static void call(struct sockaddr_in *at)
{
	int socket = rsocket(AF_INET, SOCK_STREAM, 0);
	ZERO(rconnect(socket, (struct sockaddr *)at, sizeof *at));
	int credits = receives(socket), sent = 0;
	char byte = 0;
	/* The send queue fills sooner than the credits run out. */
	for (ssize_t n; (n = rsend(socket, &byte, 1, MSG_DONTWAIT)) == 1 || sent < credits;) {
		if (n == 1)
			sent++;
		else if (errno != EWOULDBLOCK)
			die("rsend: %s", strerror(errno));
	}
	printf("sent %d messages and its own credits\n", sent);
	fflush(stdout);
	if (rrecv(socket, &byte, 1, 0) != 1)
		die("rrecv: %s", strerror(errno));
	rclose(socket);
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	int option;
	while ((option = getopt(argc, argv, "p:")) != -1)
		if (option == 'p')
			at.sin_port = htons(atoi(optarg));
	if (optind < argc)
		inet_pton(AF_INET, argv[optind], &at.sin_addr);
	if (optind < argc)
		call(&at);
	else
		serve(&at);
	return 0;
}
