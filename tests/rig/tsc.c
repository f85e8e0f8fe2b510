/*
 * Prints the frequency of this machine's time-stamp counter in kHz: an emulated host counts by it.
 *
 * Each end is the pair of counter and clock that was read in the least time of many, so that being scheduled away, or an
 * interrupt, does not count.
 */
#include <stdint.h>
#include <stdio.h>
#include <time.h>
#include <x86intrin.h>

#define TRIES 200
#define APART_MS 300

struct pair {
	uint64_t ticks;
	double seconds;
};

static struct pair look(void)
{
	struct pair best = { 0, 0 };
	uint64_t least = UINT64_MAX;

	for (int i = 0; i < TRIES; i++) {
		struct timespec now;
		uint64_t before = __rdtsc(), after;

		clock_gettime(CLOCK_MONOTONIC_RAW, &now);
		after = __rdtsc();
		if (after - before < least) {
			least = after - before;
			best.ticks = before + least / 2;
			best.seconds = (double)now.tv_sec + (double)now.tv_nsec / 1e9;
		}
	}
	return best;
}

int main(void)
{
	struct timespec apart = { 0, APART_MS * 1000000L };
	struct pair begin = look(), end;

	nanosleep(&apart, NULL);
	end = look();
	printf("%.0f\n", (double)(end.ticks - begin.ticks) / (end.seconds - begin.seconds) / 1000);
	return 0;
}
