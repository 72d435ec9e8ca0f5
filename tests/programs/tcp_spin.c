/* A ping-pong over plain TCP whose ends never sleep, and poll like a busy-polling program of
 * urnic: tcp_spin -n COUNT -p PORT [ADDRESS]. The initiator prints, like perftest: bytes, count,
 * then least, greatest and median half round trip in microseconds. */
#include "rc.h"

/* An FPDU with two bytes in it. */
#define LENGTH 28

static void send_all(int fd, const uint8_t *bytes)
{
	if (send(fd, bytes, LENGTH, MSG_NOSIGNAL) != LENGTH)
		die("send: %s", strerror(errno));
}

static void receive_all(int fd, uint8_t *bytes)
{
	for (ssize_t have = 0; have < LENGTH;) {
		ssize_t n = recv(fd, bytes + have, LENGTH - have, MSG_DONTWAIT);
		if (n == 0 || (n < 0 && errno != EAGAIN))
			die("recv: %s", n ? strerror(errno) : "the end");
		have += n > 0 ? n : 0;
	}
}

int main(int argc, char **argv)
{
	int count = 0, on = 1, option;
	struct sockaddr_in address = {.sin_family = AF_INET};
	while ((option = getopt(argc, argv, "n:p:")) != -1) {
		if (option == 'n')
			count = atoi(optarg);
		else if (option == 'p')
			address.sin_port = htons(atoi(optarg));
		else
			return 2;
	}
	bool calls = optind < argc;
	if (count < 1 || (calls && inet_pton(AF_INET, argv[optind], &address.sin_addr) != 1))
		die("usage: tcp_spin -n COUNT -p PORT [ADDRESS]");
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	if (calls) {
		ZERO(connect(fd, (struct sockaddr *)&address, sizeof address));
	} else {
		ZERO(setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on));
		ZERO(bind(fd, (struct sockaddr *)&address, sizeof address));
		ZERO(listen(fd, 1));
		fd = accept(fd, NULL, NULL);
	}
	ZERO(setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on));
	uint8_t bytes[LENGTH] = {0};
	double *took = SOME(calloc(count, sizeof *took));
	for (int i = 0; i < count; i++) {
		double begun = now_us();
		if (calls)
			send_all(fd, bytes);
		receive_all(fd, bytes);
		if (!calls)
			send_all(fd, bytes);
		took[i] = (now_us() - begun) / 2;
	}
	if (calls) {
		qsort(took, count, sizeof *took, by_value);
		printf("%d %d %.2f %.2f %.2f\n", LENGTH, count, took[0], took[count - 1], took[count / 2]);
	}
	return 0;
}
