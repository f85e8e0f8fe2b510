/*
 * A link with a rate and a delay between two network namespaces: link NAME NAME BYTES_PER_S DELAY_NS [LOSS]
 *
 * A TUN device named pfb0 in each. What one end sends is read here whole, packet by packet, waits for those before it to
 * have left at the link's rate, then for the delay, and is written to the other end. A queue that holds more than the
 * link carries in LATENCY_NS beyond its delay drops what comes, as a router's does. Each way is paced by itself.
 * With LOSS one packet in so many is lost, by a sequence of its own that is the same each time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define MTU 9000
#define LATENCY_NS 50000000
#define SECOND_NS 1000000000u
#define BATCH 64

struct packet {
	uint64_t due_ns;
	uint32_t length;
	unsigned char bytes[MTU];
};

/* One way: a ring of packets that have been read at `from` and are to be written at `to`. */
struct way {
	int from, to;
	uint64_t rate, delay_ns, idle_from_ns; /* when the last packet has left at the link's rate */
	struct packet *ring;
	size_t room, first, held;
};

static void fail(const char *format, ...)
{
	va_list arguments;

	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	printf("\n");
	exit(1);
}

static uint64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * SECOND_NS + (uint64_t)now.tv_nsec;
}

/* Makes the device in a namespace that ip(8) has named. This process stays in the last one it was in. */
static int device_in(const char *name)
{
	struct ifreq request = { .ifr_flags = IFF_TUN | IFF_NO_PI };
	char path[256];
	int space, device, control;

	snprintf(path, sizeof(path), "/run/netns/%s", name);
	space = open(path, O_RDONLY | O_CLOEXEC);
	if (space < 0 || setns(space, CLONE_NEWNET) != 0)
		fail("entering %s: %s", path, strerror(errno));
	close(space);
	device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
	if (device < 0)
		fail("opening /dev/net/tun: %s", strerror(errno));
	snprintf(request.ifr_name, sizeof(request.ifr_name), "pfb0");
	if (ioctl(device, TUNSETIFF, &request) != 0)
		fail("making a TUN device: %s", strerror(errno));
	control = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	request.ifr_mtu = MTU;
	if (control < 0 || ioctl(control, SIOCSIFMTU, &request) != 0)
		fail("setting packets of %d bytes: %s", MTU, strerror(errno));
	request.ifr_qlen = 4000;
	if (ioctl(control, SIOCSIFTXQLEN, &request) != 0)
		fail("setting the device's queue: %s", strerror(errno));
	close(control);
	return device;
}

static void prepare(struct way *way, int from, int to, uint64_t rate, uint64_t delay_ns)
{
	uint64_t bytes = (uint64_t)((double)rate * (double)(delay_ns + LATENCY_NS) / SECOND_NS);

	*way = (struct way){ .from = from, .to = to, .rate = rate, .delay_ns = delay_ns };
	/* Small packets, acknowledgements, fill a ring by number. */
	way->room = (size_t)(bytes / MTU) + 4096;
	way->ring = malloc(way->room * sizeof(*way->ring));
	if (!way->ring)
		fail("taking memory for %zu packets", way->room);
}

static uint64_t loss; /* one packet in so many; 0: none */

/* Whether the next packet is lost. */
static int lost(void)
{
	static uint64_t state = 1;

	state = state * 6364136223846793005u + 1442695040888963407u;
	return loss && (state >> 33) % loss == 0;
}

/* Reads what has come, a batch at most. A packet that finds no room is read and dropped. */
static void take(struct way *way, uint64_t now)
{
	static unsigned char dropped[MTU];

	for (int i = 0; i < BATCH; i++) {
		int full = way->held == way->room ||
			   way->idle_from_ns > now + LATENCY_NS;
		struct packet *packet = &way->ring[(way->first + way->held) % way->room];
		ssize_t got = read(way->from, full ? dropped : packet->bytes, MTU);

		if (got <= 0)
			return;
		if (full || lost())
			continue;
		if (way->idle_from_ns < now)
			way->idle_from_ns = now;
		way->idle_from_ns += (uint64_t)((double)got * SECOND_NS / (double)way->rate);
		packet->due_ns = way->idle_from_ns + way->delay_ns;
		packet->length = (uint32_t)got;
		way->held++;
	}
}

/* Writes what is due; returns when the next packet will be, or 0 when there is none. A device that is down takes none. */
static uint64_t give(struct way *way, uint64_t now)
{
	while (way->held > 0) {
		struct packet *packet = &way->ring[way->first];

		if (packet->due_ns > now)
			return packet->due_ns;
		if (write(way->to, packet->bytes, packet->length) < 0 && errno == EAGAIN)
			return now + 50000;
		way->first = (way->first + 1) % way->room;
		way->held--;
	}
	return 0;
}

int main(int argc, char **argv)
{
	struct way ways[2];
	int ends[2];

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 5 && argc != 6)
		fail("usage: link NAME NAME BYTES_PER_S DELAY_NS [LOSS]");
	loss = argc == 6 ? strtoull(argv[5], NULL, 10) : 0;
	for (int i = 0; i < 2; i++)
		ends[i] = device_in(argv[1 + i]);
	for (int i = 0; i < 2; i++)
		prepare(&ways[i], ends[i], ends[1 - i], strtoull(argv[3], NULL, 10), strtoull(argv[4], NULL, 10));
	printf("ready\n");
	for (;;) {
		struct pollfd waits[2] = { { ends[0], POLLIN, 0 }, { ends[1], POLLIN, 0 } };
		uint64_t now = now_ns(), next = now + SECOND_NS, due[2];
		struct timespec nap = { 0, 0 };

		for (int i = 0; i < 2; i++) {
			take(&ways[i], now);
			due[i] = give(&ways[i], now);
			if (due[i] && due[i] < next)
				next = due[i];
		}
		now = now_ns();
		if (next > now)
			nap.tv_nsec = next - now < SECOND_NS ? (long)(next - now) : SECOND_NS - 1;
		if (ppoll(waits, 2, &nap, NULL) < 0 && errno != EINTR)
			fail("waiting for packets: %s", strerror(errno));
	}
}
