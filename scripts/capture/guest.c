/*
 * The guest's side of a capture: one static program, run by the guest's init script.
 *
 *   capture-guest fill FILE MIB   write MIB mebibytes of random data to FILE
 *   capture-guest look TTY        tell the host over TTY which pages are free, three times
 *   capture-guest churn MIB RATE  fill MIB mebibytes, then write to RATE pages of them a second, in order, for ever
 *
 * What crosses TTY is frames, little-endian: the magic, a kind, the length of the payload, the payload, and its CRC-32.
 * frames.py reads them.
 *
 *   kind 1, text:  the guest's own view of its memory map, then its kernel version and command line
 *   kind 2, looks: free pages by the kernel's counter before and after the look, number of runs, (pfn, pages) pairs
 *
 * The first look is a rehearsal: it makes the kernel allocate all that a look and its sending need (terminal buffers,
 * file structures), so that the second look finds the memory as it will be when the host pauses the guest a moment
 * later. After the second look this program allocates nothing and sleeps in read() until the host has resumed the guest
 * and sent a byte. The third look then shows which pages were taken around the pause.
 *
 * A page counts as free when it lies in the buddy allocator: KPF_BUDDY in /proc/kpageflags. Linux 6.1 sets it for every
 * page of a free block (stable_page_flags in fs/proc/page.c: PageBuddy for the first, is_free_buddy_page for the rest).
 * A kernel that sets it for the first alone reports far fewer pages than its own counter, and the host refuses that.
 * Pages on per-CPU lists are not in the buddy allocator and count as used, though nobody uses them.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sysinfo.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#define KPF_BUDDY 10
#define PAGE_BYTES 4096
#define MIB (1u << 20)
#define PROGRESS_MIB 512
#define SETTLE_MAX_S 60
#define SETTLE_PAGES 32 /* two counts this close, a second apart, are an idle guest */

enum { KIND_TEXT = 1, KIND_LOOK = 2 };

static const char magic[8] = "PFCAPT01";

static _Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Says what failed on the console, where the host looks for this prefix, and stays: an init that exits is a panic. */
static _Noreturn void fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	printf("capture: failed: ");
	vprintf(format, args);
	printf("\n");
	va_end(args);
	for (;;)
		pause();
}

static void write_all(int fd, const void *data, size_t length, const char *what)
{
	const char *next = data;

	while (length > 0) {
		ssize_t written = write(fd, next, length);

		if (written < 0 && errno == EINTR)
			continue;
		if (written <= 0)
			fail("writing %s: %s", what, written < 0 ? strerror(errno) : "nothing was taken");
		next += written;
		length -= (size_t)written;
	}
}

/* ---- fill ---- */

static uint64_t random_next(uint64_t *state)
{
	*state ^= *state << 13;
	*state ^= *state >> 7;
	*state ^= *state << 17;
	return *state;
}

static void fill(const char *path, unsigned long mib)
{
	static uint64_t block[MIB / sizeof(uint64_t)];
	uint64_t state = 0x9e3779b97f4a7c15u;
	int fd = open(path, O_CREAT | O_TRUNC | O_WRONLY, 0600);

	if (fd < 0)
		fail("creating %s: %s", path, strerror(errno));
	for (unsigned long done = 0; done < mib; done++) {
		for (size_t i = 0; i < sizeof(block) / sizeof(block[0]); i++)
			block[i] = random_next(&state);
		write_all(fd, block, sizeof(block), path);
		if ((done + 1) % PROGRESS_MIB == 0)
			printf("capture: filled %lu of %lu MiB\n", done + 1, mib);
	}
	if (close(fd) != 0)
		fail("closing %s: %s", path, strerror(errno));
}

/* ---- churn ---- */

static double now_s(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

/* A page written is one word of it: what migration sees is the page. A guest that falls behind does not catch up. */
static void churn(unsigned long mib, double rate)
{
	size_t pages = (size_t)mib * MIB / PAGE_BYTES, at = 0, words = (size_t)mib * MIB / sizeof(uint64_t);
	uint64_t *words_at, state = 0x9e3779b97f4a7c15u, written = 0, reported = 0;
	double since;

	words_at = mmap(NULL, words * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (pages == 0 || rate <= 0 || words_at == MAP_FAILED)
		fail("taking %lu MiB to write to", mib);
	for (size_t i = 0; i < words; i++)
		words_at[i] = random_next(&state);
	printf("capture: churning\n");
	since = now_s();
	for (;;) {
		double passed = now_s() - since;
		struct timespec nap = { 0, 2000000 };

		while ((double)written < rate * passed && written - reported < 4096)
			words_at[at = (at + PAGE_BYTES / sizeof(uint64_t)) % words] = ++written;
		if (written - reported < 4096) {
			nanosleep(&nap, NULL);
			continue;
		}
		reported = written;
		if (passed >= 1) {
			printf("capture: churned %.0f pages/s\n", (double)written / passed);
			written = reported = 0;
			since = now_s();
		}
	}
}

/* ---- frames ---- */

static int tty;
static uint32_t crc;

static void put_payload(const void *data, size_t length)
{
	const unsigned char *bytes = data;

	for (size_t i = 0; i < length; i++) {
		crc ^= bytes[i];
		for (int bit = 0; bit < 8; bit++)
			crc = (crc >> 1) ^ (0xedb88320u & -(crc & 1u));
	}
	write_all(tty, data, length, "to the host");
}

static void frame_begin(uint64_t kind, uint64_t length)
{
	uint64_t header[2] = { kind, length };

	write_all(tty, magic, sizeof(magic), "to the host");
	write_all(tty, header, sizeof(header), "to the host");
	crc = 0xffffffffu;
}

static void frame_end(void)
{
	uint32_t sum = ~crc;

	write_all(tty, &sum, sizeof(sum), "to the host");
}

/* ---- look ---- */

static uint64_t *map; /* one bit a page, by page frame number */
static uint64_t map_pages;

static uint64_t free_by_counter(void)
{
	struct sysinfo info;

	if (sysinfo(&info) != 0)
		fail("asking for the free memory: %s", strerror(errno));
	return (uint64_t)info.freeram * info.mem_unit / PAGE_BYTES;
}

static void read_flags(int fd)
{
	static uint64_t flags[8192];
	uint64_t pfn = 0;

	memset(map, 0, (size_t)(map_pages + 63) / 64 * sizeof(*map));
	while (pfn < map_pages) {
		uint64_t want = map_pages - pfn;
		ssize_t got;

		if (want > sizeof(flags) / sizeof(flags[0]))
			want = sizeof(flags) / sizeof(flags[0]);
		got = pread(fd, flags, (size_t)want * 8, (off_t)(pfn * 8));
		if (got < 8)
			fail("reading /proc/kpageflags at page %" PRIu64 ": %s", pfn,
			     got < 0 ? strerror(errno) : "it ends early");
		for (uint64_t i = 0; i < (uint64_t)got / 8; i++, pfn++)
			if (flags[i] >> KPF_BUDDY & 1)
				map[pfn / 64] |= UINT64_C(1) << (pfn % 64);
	}
}

static int is_free(uint64_t pfn)
{
	return pfn < map_pages && (map[pfn / 64] >> (pfn % 64) & 1);
}

/* The next run of free pages at or after `pfn`; zero pages when there is none. */
static uint64_t next_run(uint64_t pfn, uint64_t *start)
{
	while (pfn < map_pages && !is_free(pfn))
		pfn++;
	*start = pfn;
	while (is_free(pfn))
		pfn++;
	return pfn - *start;
}

/* No table of runs is kept: the map is walked once to count and once to send, so each look takes the same memory. */
static void look_and_send(int flags_fd)
{
	uint64_t head[3], start, pages, pairs[256];
	size_t used = 0;

	head[0] = free_by_counter();
	read_flags(flags_fd);
	head[1] = free_by_counter();
	head[2] = 0;
	for (uint64_t at = 0; (pages = next_run(at, &start)) > 0; at = start + pages)
		head[2]++;

	frame_begin(KIND_LOOK, sizeof(head) + head[2] * 16);
	put_payload(head, sizeof(head));
	for (uint64_t at = 0; (pages = next_run(at, &start)) > 0; at = start + pages) {
		pairs[used++] = start;
		pairs[used++] = pages;
		if (used == sizeof(pairs) / sizeof(pairs[0])) {
			put_payload(pairs, sizeof(pairs));
			used = 0;
		}
	}
	put_payload(pairs, used * sizeof(pairs[0]));
	frame_end();
}

/* Appends the file at `path` to `text` of `room` bytes, of which `used` are taken. Returns the bytes then taken. */
static size_t append_file(const char *path, char *text, size_t room, size_t used)
{
	int fd = open(path, O_RDONLY);
	ssize_t got;

	if (fd < 0)
		fail("opening %s: %s", path, strerror(errno));
	while (used < room && (got = read(fd, text + used, room - used)) != 0) {
		if (got < 0)
			fail("reading %s: %s", path, strerror(errno));
		used += (size_t)got;
	}
	close(fd);
	return used;
}

/* Sends /proc/iomem, the version and the command line, and returns the end of the last RAM, in pages. */
static uint64_t send_memory_map(void)
{
	static char text[32768];
	size_t used = append_file("/proc/iomem", text, sizeof(text) - 1, 0);
	uint64_t end = 0;

	text[used] = '\0';
	for (char *line = text; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL) {
		uint64_t first, last;
		char kind[16];

		if (sscanf(line, "%" SCNx64 "-%" SCNx64 " : %15[A-Za-z ]", &first, &last, kind) == 3 &&
		    strcmp(kind, "System RAM") == 0 && last / PAGE_BYTES + 1 > end)
			end = last / PAGE_BYTES + 1;
	}
	used = append_file("/proc/version", text, sizeof(text), used);
	used = append_file("/proc/cmdline", text, sizeof(text), used);
	frame_begin(KIND_TEXT, used);
	put_payload(text, used);
	frame_end();
	return end;
}

static void open_terminal(const char *path)
{
	struct termios raw;

	tty = open(path, O_RDWR | O_NOCTTY);
	if (tty < 0)
		fail("opening %s: %s", path, strerror(errno));
	if (tcgetattr(tty, &raw) != 0)
		fail("reading the settings of %s: %s", path, strerror(errno));
	cfmakeraw(&raw);
	raw.c_cflag |= CLOCAL | CREAD;
	raw.c_cc[VMIN] = 1;
	raw.c_cc[VTIME] = 0;
	if (tcsetattr(tty, TCSANOW, &raw) != 0)
		fail("setting %s to raw: %s", path, strerror(errno));
}

/* Waits until the guest's free memory stands still. A guest that never does is looked at all the same. */
static void settle(void)
{
	uint64_t before = free_by_counter();
	int calm = 0;

	for (int second = 0; second < SETTLE_MAX_S && calm < 3; second++) {
		uint64_t after;

		sleep(1);
		after = free_by_counter();
		calm = after - before + SETTLE_PAGES <= 2 * SETTLE_PAGES ? calm + 1 : 0;
		before = after;
	}
	printf("capture: %s, %" PRIu64 " MiB free\n", calm >= 3 ? "idle" : "did not come to rest",
	       before * PAGE_BYTES / MIB);
}

static void look(const char *path)
{
	char go;
	int fd;

	open_terminal(path);
	settle();
	map_pages = send_memory_map();
	if (map_pages == 0)
		fail("/proc/iomem names no System RAM");
	map = mmap(NULL, (size_t)(map_pages + 63) / 64 * sizeof(*map), PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (map == MAP_FAILED)
		fail("taking memory for a map of %" PRIu64 " pages: %s", map_pages, strerror(errno));
	if (mlockall(MCL_CURRENT | MCL_FUTURE) != 0)
		fail("locking the program's memory: %s", strerror(errno));
	fd = open("/proc/kpageflags", O_RDONLY);
	if (fd < 0)
		fail("opening /proc/kpageflags: %s", strerror(errno));

	look_and_send(fd);
	look_and_send(fd);
	if (read(tty, &go, 1) != 1)
		fail("waiting for the host: %s", strerror(errno));
	look_and_send(fd);
	for (;;)
		pause();
}

int main(int argc, char **argv)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc == 4 && strcmp(argv[1], "fill") == 0)
		fill(argv[2], strtoul(argv[3], NULL, 10));
	else if (argc == 3 && strcmp(argv[1], "look") == 0)
		look(argv[2]);
	else if (argc == 4 && strcmp(argv[1], "churn") == 0)
		churn(strtoul(argv[2], NULL, 10), strtod(argv[3], NULL));
	else
		fail("usage: capture-guest fill FILE MIB | look TTY | churn MIB RATE");
	return 0;
}
