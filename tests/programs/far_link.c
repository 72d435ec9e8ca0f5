/* far_link -d MICROSECONDS -l N [-r N] [-t N] PID PID: joins the network namespaces of two
 * processes by an interface `far0` in each. A packet arrives after the given time at the other end,
 * and each Nth packet of a direction is lost (-l), overtakes the one before it (-r), or arrives
 * twice (-t): so often that two programs with the same traffic have the same. Prints a line when
 * both interfaces exist, and ends, with them, when its input ends. The kernel's netem does the same
 * where it is built. */
#define _GNU_SOURCE
#include "rc.h"

#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>

/* The MTU of an interface is 1500. */
#define LARGEST 1600
/* Packets on their way in a direction; more are lost, too. */
#define ROOM (1 << 15)

struct packet {
	double due;
	size_t length;
	uint8_t bytes[LARGEST];
};

struct direction {
	struct packet *packets;
	unsigned long begin, end, seen;
	int from, to;
};

/* An interface in the namespace of this process. */
static int interface_of(const char *process)
{
	char path[64];
	snprintf(path, sizeof path, "/proc/%s/ns/net", process);
	int netns = open(path, O_RDONLY | O_CLOEXEC);
	if (netns < 0 || setns(netns, CLONE_NEWNET))
		die("%s: %s", path, strerror(errno));
	close(netns);
	int tun = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	if (tun < 0)
		die("/dev/net/tun: %s", strerror(errno));
	struct ifreq request = { .ifr_flags = IFF_TUN | IFF_NO_PI, .ifr_name = "far0" };
	if (ioctl(tun, TUNSETIFF, &request))
		die("TUNSETIFF: %s", strerror(errno));
	return tun;
}

/* How often a packet has a fault; 0 is never. */
struct faults {
	unsigned long loss, reorder, twice;
};

static bool strikes(unsigned long every, unsigned long packet)
{
	return every && packet % every == 0;
}

static void take(struct direction *way, double delay, const struct faults *faults)
{
	for (;;) {
		struct packet *packet = &way->packets[way->end % ROOM];
		static uint8_t lost[LARGEST];
		/* A packet may need two places. */
		bool full = way->end - way->begin > ROOM - 2, loses = full || strikes(faults->loss, way->seen + 1);
		ssize_t n = read(way->from, loses ? lost : packet->bytes, LARGEST);
		if (n <= 0)
			return;
		way->seen++;
		if (loses)
			continue;
		packet->due = now_us() + delay;
		packet->length = n;
		/* The one before can be overtaken while it waits. */
		struct packet *before = &way->packets[(way->end - 1) % ROOM];
		if (strikes(faults->reorder, way->seen) && way->end > way->begin) {
			struct packet later = *before;
			*before = *packet;
			*packet = later;
			before->due = later.due;
		}
		way->end++;
		if (strikes(faults->twice, way->seen))
			way->packets[way->end++ % ROOM] = *packet;
	}
}

static void pass(struct direction *way)
{
	for (; way->begin < way->end; way->begin++) {
		struct packet *packet = &way->packets[way->begin % ROOM];
		if (packet->due > now_us())
			return;
		/* An interface that takes nothing, because it is down, loses packets. */
		if (write(way->to, packet->bytes, packet->length) < 0 && errno == EBADF)
			die("write: %s", strerror(errno));
	}
}

int main(int argc, char **argv)
{
	double delay = 0;
	struct faults faults = { 0 };
	int option;
	while ((option = getopt(argc, argv, "d:l:r:t:")) != -1)
		switch (option) {
		case 'd': delay = atof(optarg); break;
		case 'l': faults.loss = strtoul(optarg, NULL, 0); break;
		case 'r': faults.reorder = strtoul(optarg, NULL, 0); break;
		case 't': faults.twice = strtoul(optarg, NULL, 0); break;
		}
	if (optind + 2 != argc || faults.loss < 1)
		die("far_link -d MICROSECONDS -l N [-r N] [-t N] PID PID");
	int ends[] = { interface_of(argv[optind]), interface_of(argv[optind + 1]) };
	struct direction ways[2];
	for (int i = 0; i < 2; i++)
		ways[i] = (struct direction){
			.packets = SOME(calloc(ROOM, sizeof(struct packet))), .from = ends[i], .to = ends[!i]
		};
	printf("joined\n");
	fflush(stdout);
	struct pollfd ready[] = {
		{ .fd = ends[0], .events = POLLIN },
		{ .fd = ends[1], .events = POLLIN },
		{ .fd = STDIN_FILENO, .events = POLLIN },
	};
	do {
		double wait = 1e6;
		for (int i = 0; i < 2; i++) {
			take(&ways[i], delay, &faults);
			pass(&ways[i]);
			if (ways[i].begin < ways[i].end) {
				double left = ways[i].packets[ways[i].begin % ROOM].due - now_us();
				wait = left < wait ? left : wait;
			}
		}
		struct timespec time = { .tv_sec = wait / 1e6, .tv_nsec = wait > 0 ? (long)(wait * 1e3) % 1000000000 : 0 };
		if (wait > 0)
			ppoll(ready, 3, &time, NULL);
	} while (!ready[2].revents);
	return 0;
}
