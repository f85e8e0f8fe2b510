/*
 * What the rig watches in a guest: one static program, the guest's process 1 after its init script.
 *
 * It speaks by lines on the console, each written at once so that no two are mixed:
 *
 *   hb NUMBER MS             every 100 ms: a number that rises by one, and the monotonic clock
 *   mem FREE AVAIL INFL DEFL every second: kB free and available, pages that the balloon has taken and given back
 *   pattern PASS PAGES MS    the whole pattern was read and is right; it was begun at MS
 *   bitmap REQ ANS FREE HOLDS HELD LONGEST LONG TOOK
 *                            (our balloon driver) when it has been asked or has answered: requests and answers until
 *                            now, and of the latest answer the pages free, how often a zone's lock was held, for how
 *                            long in all, the longest hold, how many were of 100 us or more, and the time that the
 *                            answer took; times in ns
 *   unloaded REQ ANS MS      (rig.unload=1) our balloon driver was unloaded while a request was open, which took MS
 *   loaded MS                (rig.unload=1) it is loaded again, at MS
 *   suspended REQ ANS SUSPENDS ERRNO MS ASLEEP
 *                            (rig.suspend=1) hibernation was tried while a request was open: how often the driver was
 *                            suspended, what the kernel said at the end, how long it took, and for how much of that the
 *                            monotonic clock stood still
 *   churned REQ ANS AFTER ROUNDS MS
 *                            (rig.hotadd=MIB) memory was added, put online and taken away ROUNDS times while a request was
 *                            open, and added again to stay; requests and answers before that, answers after it
 *   hogged FIRST LEFT GIVEN KILLED LONGEST
 *                            (rig.hog=MIB) once the balloon was at rest with FIRST pages in it, as much memory was touched,
 *                            and given back: the pages left in it, those that it gave because memory had run out, the
 *                            processes that were killed, and the longest time that one MiB took, in ms
 *   busy ROUND MS            (busy) data was made, compressed, taken apart, compared and deleted, for the ROUNDth time
 *   facts NAME VALUE         once each, before ready
 *   rig: ready               the guest is as the scenario wants it: idle ones have come to rest
 *   rig: failed: TEXT        something is wrong; the scenario fails
 *
 * The pattern: each 64-bit word of a page is computed from the page's number, its generation and the word's place, so a
 * page that is lost, stale or in a wrong place is seen, and said with what was found. A window of pages moves over it
 * and is rewritten with the next generation, so the guest is never fully still.
 *
 * The kernel's command line says what to do: rig.mode=idle|busy, rig.pattern=MIB, rig.fill=MIB (touched and given back
 * before ready), rig.balloon=bitmap (our balloon driver in place of the stock one, by guest-init), rig.walk_pause_us=US
 * (its pause between holds of a lock, until it is loaded again, or what was to happen in a request has), rig.unload=1, rig.suspend=1,
 * rig.hog=MIB, rig.hotadd=MIB (from 2 GiB on; mem=2048M keeps the kernel from it at boot).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define PAGE_BYTES 4096
#define PAGE_WORDS (PAGE_BYTES / sizeof(uint64_t))
#define MIB (1u << 20)
#define BEAT_MS 100
#define BEATS_A_MEM_LINE 10
#define SLICE_MS 50		/* the pattern's process wakes this often ... */
#define SLICES_A_PASS 40	/* ... and so often for one pass */
#define WINDOW_PAGES 16		/* rewritten a slice */
#define SETTLE_MAX_S 20
#define SETTLE_KB 256
#define REQUEST_POLL_MS 20
#define CHURN_MOST 2000
#define HOTADD_START (2048ul * MIB)
#define UNLOADED_MS 2000
#define HOG_POLL_MS 1000
#define HOG_RESTS 3
#define BALLOON_DRIVER "virtio_balloon_bitmap"
#define MOST_DEVICES 8

static void say(const char *format, ...) __attribute__((format(printf, 1, 2)));
static _Noreturn void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* One line by one write(), which the terminal takes as a whole. */
static void say_v(const char *before, const char *format, va_list args)
{
	char line[512];
	int used = snprintf(line, sizeof(line), "%s", before);
	ssize_t written;

	used += vsnprintf(line + used, sizeof(line) - (size_t)used - 1, format, args);
	if (used > (int)sizeof(line) - 2)
		used = (int)sizeof(line) - 2;
	line[used++] = '\n';
	do
		written = write(STDOUT_FILENO, line, (size_t)used);
	while (written < 0 && errno == EINTR);
	if (written != used)
		_exit(3); /* without a console nobody watches; the kernel says that process 1 is gone */
}

static void say(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	say_v("", format, args);
	va_end(args);
}

/* Says what failed, and stays: the console shows no more of this process, and the rig stops waiting. */
static _Noreturn void fail(const char *format, ...)
{
	va_list args;

	va_start(args, format);
	say_v("rig: failed: ", format, args);
	va_end(args);
	for (;;)
		pause();
}

static uint64_t now_ms(void)
{
	struct timespec now;

	if (clock_gettime(CLOCK_MONOTONIC, &now) != 0)
		fail("reading the clock: %s", strerror(errno));
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000;
}

/* For how long the machine has been suspended: the monotonic clock stands still meanwhile. */
static uint64_t asleep_ms(void)
{
	struct timespec now;
	uint64_t awake = now_ms();

	if (clock_gettime(CLOCK_BOOTTIME, &now) != 0)
		fail("reading the clock: %s", strerror(errno));
	return (uint64_t)now.tv_sec * 1000 + (uint64_t)now.tv_nsec / 1000000 - awake;
}

static void sleep_ms(unsigned int ms)
{
	struct timespec time = { ms / 1000, (long)(ms % 1000) * 1000000 };

	while (nanosleep(&time, &time) != 0)
		if (errno != EINTR)
			fail("sleeping: %s", strerror(errno));
}

/* The start of a small file of /proc or /sys as a string; an empty one when it cannot be read. */
static char *read_file(const char *path)
{
	static char text[16384];
	int fd = open(path, O_RDONLY);
	ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof(text) - 1);

	if (fd >= 0)
		close(fd);
	text[got > 0 ? got : 0] = '\0';
	return text;
}

/* The number after `name` in a file of /proc; 0 when it is not there. */
static unsigned long number_of(const char *path, const char *name)
{
	const char *found = strstr(read_file(path), name);

	return found ? strtoul(found + strlen(name), NULL, 10) : 0;
}

/* The counters of our balloon driver; NULL where another one, or none, is loaded. */
static const char *balloon_counters(void)
{
	static char path[96];

	for (int device = 0; device < MOST_DEVICES; device++) {
		snprintf(path, sizeof(path), "/sys/kernel/debug/" BALLOON_DRIVER "/virtio%d", device);
		if (access(path, R_OK) == 0)
			return path;
	}
	return NULL;
}

static const char *parameter(const char *name, const char *otherwise);
static void *take(size_t bytes, const char *what);

static void go_to_cpu(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	if (sched_setaffinity(0, sizeof(set), &set) != 0)
		fail("going to CPU %d: %s", cpu, strerror(errno));
}

/* A process of its own for one duty, on one vCPU. */
static void start(void (*duty)(void), int cpu)
{
	pid_t child = fork();

	if (child < 0)
		fail("starting a process: %s", strerror(errno));
	if (child > 0)
		return;
	go_to_cpu(cpu);
	duty();
}

/* ---- our balloon driver ---- */

/* Says how the driver has answered, when that has changed. */
static void say_answers(void)
{
	static unsigned long requests, answers;
	const char *path = balloon_counters();
	unsigned long asked, answered;

	if (!path)
		return;
	asked = number_of(path, "\nrequests ");
	answered = number_of(path, "\nanswers ");
	if (asked == requests && answered == answers)
		return;
	requests = asked;
	answers = answered;
	say("bitmap %lu %lu %lu %lu %lu %lu %lu %lu", asked, answered, number_of(path, "\nlast_free_pages "),
	    number_of(path, "\nlast_lock_holds "), number_of(path, "\nlast_lock_hold_total_ns "),
	    number_of(path, "\nlast_lock_hold_max_ns "), number_of(path, "\nlast_lock_holds_over_100us "),
	    number_of(path, "\nlast_answer_ns "));
}

/* Waits until our driver is at work on an answer; returns its counters. */
static const char *wait_for_request(unsigned long *requests, unsigned long *answers)
{
	const char *path = balloon_counters();

	if (!path)
		fail("%s is to be asked, and is not there", BALLOON_DRIVER);
	do {
		sleep_ms(REQUEST_POLL_MS);
		*requests = number_of(path, "\nrequests ");
		*answers = number_of(path, "\nanswers ");
	} while (*requests == *answers);
	return path;
}

static _Noreturn void unload_in_a_request(void)
{
	static const char file[] = "/modules/" BALLOON_DRIVER ".ko";
	unsigned long requests, answers;
	uint64_t begun;
	int fd;

	wait_for_request(&requests, &answers);
	begun = now_ms();
	if (syscall(SYS_delete_module, BALLOON_DRIVER, O_NONBLOCK) != 0)
		fail("unloading %s: %s", BALLOON_DRIVER, strerror(errno));
	say("unloaded %lu %lu %" PRIu64, requests, answers, now_ms() - begun);
	sleep_ms(UNLOADED_MS);
	fd = open(file, O_RDONLY);
	if (fd < 0 || syscall(SYS_finit_module, fd, "", 0) != 0)
		fail("loading %s again: %s", file, strerror(errno));
	close(fd);
	say("loaded %" PRIu64, now_ms());
	for (;;)
		sleep_ms(BEAT_MS);
}

/* Writes a word to a file of /sys; returns 0, or why not. */
static int write_word(const char *path, const char *word)
{
	int fd = open(path, O_WRONLY), error = 0;

	if (fd < 0)
		return errno;
	if (write(fd, word, strlen(word)) < 0)
		error = errno;
	close(fd);
	return error;
}

/*
 * Hibernation without anywhere to write to: devices are suspended, memory is copied, devices are resumed to write it, and
 * then it fails.
 */
static _Noreturn void suspend_in_a_request(void)
{
	unsigned long requests, answers;
	const char *path = wait_for_request(&requests, &answers);
	uint64_t begun = now_ms(), asleep = asleep_ms();
	int error = write_word("/sys/power/state", "disk");

	asleep = asleep_ms() - asleep;
	say("suspended %lu %lu %lu %d %" PRIu64 " %" PRIu64, requests, answers, number_of(path, "\nsuspends "), error,
	    now_ms() - begun + asleep, asleep);
	write_word("/sys/module/" BALLOON_DRIVER "/parameters/walk_pause_us", "0");
	for (;;)
		sleep_ms(BEAT_MS);
}

/* Puts the blocks of memory from `first` on online. */
static void memory_online(unsigned long first, unsigned long blocks, const char *how)
{
	char path[64];

	for (unsigned long block = first; block < first + blocks; block++) {
		int error;

		snprintf(path, sizeof(path), "/sys/devices/system/memory/memory%lu/state", block);
		error = write_word(path, how);
		if (error)
			fail("putting block %lu %s: %s", block, how, strerror(error));
	}
}

static void memory_add(unsigned long mib)
{
	char options[96];
	int fd = open("/modules/rig_hotadd.ko", O_RDONLY);

	snprintf(options, sizeof(options), "start=%lu bytes=%lu", HOTADD_START, mib * MIB);
	if (fd < 0 || syscall(SYS_finit_module, fd, options, 0) != 0)
		fail("adding %lu MiB of memory: %s", mib, strerror(errno));
	close(fd);
}

static _Noreturn void churn_memory(void)
{
	unsigned long mib = strtoul(parameter("rig.hotadd", "0"), NULL, 10), block, blocks, requests, answers, round = 0;
	const char *path = wait_for_request(&requests, &answers);
	uint64_t begun = now_ms();
	char state[64];

	block = strtoul(read_file("/sys/devices/system/memory/block_size_bytes"), NULL, 16);
	if (!block || HOTADD_START % block || mib * MIB % block || mib * MIB < block)
		fail("blocks of memory are %lu bytes", block);
	blocks = mib * MIB / block;
	block = HOTADD_START / block;
	write_word("/sys/devices/system/memory/auto_online_blocks", "offline");
	snprintf(state, sizeof(state), "/sys/devices/system/memory/memory%lu/state", block);
	while (round < CHURN_MOST && number_of(path, "\nanswers ") == answers) {
		memory_add(mib);
		memory_online(block, blocks, "online_movable");
		if (syscall(SYS_delete_module, "rig_hotadd", O_NONBLOCK) != 0)
			fail("taking memory away: %s", strerror(errno));
		if (access(state, F_OK) == 0)
			fail("memory that was to be taken away is still there");
		round++;
	}
	memory_add(mib);
	memory_online(block, blocks, "online_kernel");
	say("churned %lu %lu %lu %lu %" PRIu64, requests, answers, number_of(path, "\nanswers "), round, now_ms() - begun);
	write_word("/sys/module/" BALLOON_DRIVER "/parameters/walk_pause_us", "0");
	for (;;)
		sleep_ms(BEAT_MS);
}

/* ---- heartbeat ---- */

static _Noreturn void beat(void)
{
	uint64_t before = 0;

	for (uint64_t number = 1;; number++) {
		uint64_t ms = now_ms();

		if (ms < before)
			fail("the clock went back from %" PRIu64 " to %" PRIu64 " ms", before, ms);
		before = ms;
		say("hb %" PRIu64 " %" PRIu64, number, ms);
		say_answers();
		if (number % BEATS_A_MEM_LINE == 0) {
			unsigned long free = number_of("/proc/meminfo", "MemFree:");
			unsigned long available = number_of("/proc/meminfo", "MemAvailable:");
			unsigned long inflated = number_of("/proc/vmstat", "balloon_inflate ");
			unsigned long deflated = number_of("/proc/vmstat", "balloon_deflate ");

			say("mem %lu %lu %lu %lu", free, available, inflated, deflated);
		}
		sleep_ms(BEAT_MS);
	}
}

/* ---- pattern ---- */

static uint64_t pattern_pages;
static uint64_t (*pattern)[PAGE_WORDS];
static uint32_t *generations;

static uint64_t mix(uint64_t value)
{
	value = (value ^ value >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
	value = (value ^ value >> 27) * UINT64_C(0x94d049bb133111eb);
	return value ^ value >> 31;
}

#define STEP UINT64_C(0x9e3779b97f4a7c15)

/* Word 0 tells page and generation in the clear, for the message when a page is wrong. */
static void write_page(uint64_t page)
{
	uint64_t value = mix(page << 32 | generations[page]);

	pattern[page][0] = page << 32 | generations[page];
	for (size_t i = 1; i < PAGE_WORDS; i++)
		pattern[page][i] = value += STEP;
}

static void check_page(uint64_t page)
{
	uint64_t name = page << 32 | generations[page];
	uint64_t value = mix(name);
	uint64_t wrong = pattern[page][0] ^ name;
	size_t i;

	for (i = 1; i < PAGE_WORDS; i++)
		wrong |= pattern[page][i] ^ (value += STEP);
	if (wrong == 0)
		return;
	value = mix(name);
	for (i = 1; i < PAGE_WORDS && pattern[page][i] == (value += STEP); i++)
		;
	fail("page %" PRIu64 " of the pattern, generation %" PRIu32 ", is wrong: its head says page %" PRIu64
	     " generation %" PRIu64 ", and word %zu is %#" PRIx64,
	     page, generations[page], pattern[page][0] >> 32, pattern[page][0] & UINT32_MAX,
	     i < PAGE_WORDS ? i : 0, pattern[page][i < PAGE_WORDS ? i : 0]);
}

static _Noreturn void watch_pattern(void)
{
	uint64_t slice = (pattern_pages + SLICES_A_PASS - 1) / SLICES_A_PASS;
	uint64_t window = 0;

	for (uint64_t pass = 1;; pass++) {
		uint64_t begun = now_ms();

		for (uint64_t first = 0; first < pattern_pages; first += slice) {
			for (uint64_t page = first; page < first + slice && page < pattern_pages; page++)
				check_page(page);
			for (int i = 0; i < WINDOW_PAGES; i++) {
				check_page(window);
				generations[window]++;
				write_page(window);
				window = (window + 1) % pattern_pages;
			}
			sleep_ms(SLICE_MS);
		}
		say("pattern %" PRIu64 " %" PRIu64 " %" PRIu64, pass, pattern_pages, begun);
	}
}

static void *take(size_t bytes, const char *what)
{
	void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (memory == MAP_FAILED)
		fail("taking %zu bytes for %s: %s", bytes, what, strerror(errno));
	return memory;
}

/* No process started later shares it: copies on write would eat memory all the time. */
static void make_pattern(unsigned long mib)
{
	pattern_pages = (uint64_t)mib * MIB / PAGE_BYTES;
	pattern = take(pattern_pages * PAGE_BYTES, "the pattern");
	generations = take(pattern_pages * sizeof(*generations), "the pattern's generations");
	if (madvise(pattern, pattern_pages * PAGE_BYTES, MADV_DONTFORK) != 0)
		fail("keeping the pattern to one process: %s", strerror(errno));
	for (uint64_t page = 0; page < pattern_pages; page++) {
		generations[page] = 1;
		write_page(page);
	}
}

/* ---- memory that runs out ---- */

static _Noreturn void hog_memory(void)
{
	unsigned long mib = strtoul(parameter("rig.hog", "0"), NULL, 10), first = 0, now;
	const char *path = balloon_counters();
	uint64_t longest = 0;
	char *memory;

	if (!path)
		fail("%s is to give memory back, and is not there", BALLOON_DRIVER);
	for (int rests = 0; rests < HOG_RESTS; first = now) {
		sleep_ms(HOG_POLL_MS);
		now = number_of(path, "pages_in_balloon ");
		rests = now && now == first ? rests + 1 : 0;
	}
	memory = take((size_t)mib * MIB, "the hog");
	for (unsigned long i = 0; i < mib; i++) {
		uint64_t begun = now_ms(), took;

		memset(memory + i * MIB, 1, MIB);
		took = now_ms() - begun;
		longest = took > longest ? took : longest;
	}
	if (munmap(memory, (size_t)mib * MIB) != 0)
		fail("giving the hog's memory back: %s", strerror(errno));
	now = number_of(path, "pages_in_balloon ");
	say("hogged %lu %lu %lu %lu %" PRIu64, first, now, number_of(path, "\noom_pages "),
	    number_of("/proc/vmstat", "\noom_kill "), longest);
	for (;;)
		sleep_ms(BEAT_MS);
}

/* ---- memory that was in use ---- */

static void fill_and_free(unsigned long mib)
{
	size_t bytes = (size_t)mib * MIB, pages = 0;
	uint64_t *memory = take(bytes, "the fill");

	for (size_t at = 0; at < bytes / sizeof(*memory); at += PAGE_WORDS)
		memory[at] = mix(at) | 1;
	for (size_t at = 0; at < bytes / sizeof(*memory); at += PAGE_WORDS)
		pages += memory[at] == (mix(at) | 1);
	say("facts filled_mib %zu", pages * PAGE_BYTES / MIB);
	if (munmap(memory, bytes) != 0)
		fail("giving the fill back: %s", strerror(errno));
}

/* ---- busy ---- */

static _Noreturn void busy(void)
{
	for (uint64_t round = 1;; round++) {
		uint64_t begun = now_ms();
		int status = system("set -e; cd /tmp; head -c 200000 /dev/urandom | hexdump >data; gzip -c data >data.gz; "
				    "gunzip -c data.gz >again; cmp data again; cp again third; rm data data.gz again third");

		if (status != 0)
			fail("round %" PRIu64 " of the busy loop ended with %d", round, status);
		say("busy %" PRIu64 " %" PRIu64, round, begun);
	}
}

/* ---- start ---- */

/* The value of `name=` on the kernel's command line, or `otherwise`. */
static const char *parameter(const char *name, const char *otherwise)
{
	static char line[4096];
	char *word;
	size_t length = strlen(name);

	snprintf(line, sizeof(line), "%s", read_file("/proc/cmdline"));
	for (word = strtok(line, " \n"); word; word = strtok(NULL, " \n"))
		if (strncmp(word, name, length) == 0 && word[length] == '=')
			return word + length + 1;
	return otherwise;
}

static unsigned long mib_of(const char *name, const char *otherwise)
{
	return strtoul(parameter(name, otherwise), NULL, 10);
}

/* Waits until free memory stands still. A guest that never comes to rest is ready all the same. */
static void settle(void)
{
	unsigned long before = number_of("/proc/meminfo", "MemFree:");

	for (int calm = 0, tries = 0; calm < 2 && tries < SETTLE_MAX_S * 2; tries++) {
		unsigned long after;

		sleep_ms(500);
		after = number_of("/proc/meminfo", "MemFree:");
		calm = after - before + SETTLE_KB <= 2 * SETTLE_KB ? calm + 1 : 0;
		before = after;
	}
}

static char *first_line(char *text)
{
	text[strcspn(text, "\n")] = '\0';
	return text;
}

static void say_facts(void)
{
	static const char clocksource[] = "/sys/devices/system/clocksource/clocksource0/current_clocksource";
	char path[64], driver[96];

	say("facts kernel %.64s", first_line(read_file("/proc/sys/kernel/osrelease")));
	say("facts cpus %ld", sysconf(_SC_NPROCESSORS_ONLN));
	say("facts mem_total_kb %lu", number_of("/proc/meminfo", "MemTotal:"));
	say("facts clocksource %.32s", first_line(read_file(clocksource)));
	for (int device = 0; device < MOST_DEVICES; device++) {
		ssize_t length;

		snprintf(path, sizeof(path), "/sys/bus/virtio/devices/virtio%d/device", device);
		if (access(path, R_OK) != 0)
			continue;
		say("facts virtio%d_device %.16s", device, first_line(read_file(path)));
		snprintf(path, sizeof(path), "/sys/bus/virtio/devices/virtio%d/features", device);
		say("facts virtio%d_features %.64s", device, first_line(read_file(path)));
		snprintf(path, sizeof(path), "/sys/bus/virtio/devices/virtio%d/driver", device);
		length = readlink(path, driver, sizeof(driver) - 1);
		driver[length > 0 ? length : 0] = '\0';
		say("facts virtio%d_driver %s", device, strrchr(driver, '/') ? strrchr(driver, '/') + 1 : "none");
	}
}

int main(void)
{
	unsigned long fill = mib_of("rig.fill", "0");
	int is_busy = strcmp(parameter("rig.mode", "idle"), "busy") == 0;
	int last_cpu = (int)sysconf(_SC_NPROCESSORS_ONLN) - 1;

	say_facts();
	if (fill > 0)
		fill_and_free(fill);
	make_pattern(mib_of("rig.pattern", "96"));
	start(beat, last_cpu);
	if (mib_of("rig.unload", "0") != 0)
		start(unload_in_a_request, last_cpu);
	if (mib_of("rig.suspend", "0") != 0)
		start(suspend_in_a_request, last_cpu);
	if (mib_of("rig.hog", "0") != 0)
		start(hog_memory, last_cpu);
	if (mib_of("rig.hotadd", "0") != 0)
		start(churn_memory, last_cpu);
	if (is_busy)
		start(busy, last_cpu);
	else
		settle();
	say("rig: ready");
	go_to_cpu(0);
	watch_pattern();
}
