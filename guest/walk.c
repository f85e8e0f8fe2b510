// SPDX-License-Identifier: GPL-2.0
/*
 * Finds free pages without allocating them: page frame by page frame, node by node and zone by zone.
 *
 * A page that heads a free block carries the buddy flag, and its private field holds the block's order. Both change under
 * the zone's lock only, so they are read under it: an order read without it can be stale and would name used pages. The
 * lock is held for a bounded number of looks at a time (walk_chunk_pages), with interrupts off, and is given up in
 * between. So the answer is no snapshot: what it says of each page held at one moment during the walk. That is all that
 * the host may rely on, and it does rely on no more: it tracks writes since before it asked.
 *
 * Frames step by the block's order: free memory is walked block by block, used memory page by page. Pages that wait in
 * the lists of a CPU, and those that are cut off from the allocator, do not carry the flag, and count as used.
 *
 * Memory that goes away: offlining takes the section's online mark away, then takes the zone's lock to remove the free
 * blocks, and frees the struct pages much later. So whoever sees the mark under the lock of the zone that the section is
 * in may read its struct pages until the lock is released. A zone's span may hold sections of other zones; their flag is
 * looked at without their lock, and believed in nothing but the zone's number. The notifier makes offlining wait for
 * such looks too: they run with interrupts off, which a grace period waits for.
 */

#include <linux/align.h>
#include <linux/bitmap.h>
#include <linux/delay.h>
#include <linux/ktime.h>
#include <linux/memory.h>
#include <linux/memory_hotplug.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/mmzone.h>
#include <linux/nodemask.h>
#include <linux/page-flags.h>
#include <linux/rcupdate.h>
#include <linux/sched.h>
#include <linux/spinlock.h>

#include "balloon.h"

/* A subsection of 2 MiB: its struct pages are there as a whole or not at all. */
#define ONLINE_STEP 512UL

#define LEAST_CHUNK 16U
#define MOST_CHUNK 4096U
#define MOST_PAUSE_US 100000U

#define LONG_HOLD_NS 100000U

static unsigned int walk_chunk_pages = 64;
module_param(walk_chunk_pages, uint, 0644);
MODULE_PARM_DESC(walk_chunk_pages, "struct pages looked at each time that a zone's lock is held (16 to 4096, default 64)");

static unsigned int walk_pause_us;
module_param(walk_pause_us, uint, 0644);
MODULE_PARM_DESC(walk_pause_us, "pause between two holds, microseconds (0 to 100000, default 0)");

static unsigned long lock_hold_max_ns;
module_param(lock_hold_max_ns, ulong, 0644);
MODULE_PARM_DESC(lock_hold_max_ns, "the longest time that a zone's lock was held, nanoseconds; write 0 to start over");

/* A part of guest-physical memory that is walked, and where what is free is noted. */
struct span {
	struct zone *zone;
	/* Bit 0 of @bits. */
	unsigned long origin;
	unsigned long end;
	unsigned long *bits;
	struct bb_walk *seen;
};

/* The order of the free block of this zone that @page heads, or -1. Under the zone's lock. */
static int block_order(const struct zone *zone, struct page *page)
{
	unsigned long order;

	if (!PageBuddy(page) || page_zone(page) != zone)
		return -1;
	order = page_private(page);
	return order <= BB_MAX_ORDER ? (int)order : -1;
}

/*
 * While the lock was not held, blocks may have merged over @pfn. Returns the head of the block that it lies in, or @pfn.
 * Under the zone's lock.
 */
static unsigned long block_head(const struct zone *zone, unsigned long pfn)
{
	unsigned int order;

	for (order = 1; order <= BB_MAX_ORDER; order++) {
		unsigned long head = round_down(pfn, 1UL << order);
		struct page *page;

		if (head == pfn)
			continue;
		page = pfn_to_online_page(head);
		if (page && block_order(zone, page) >= (int)order)
			return head;
	}
	return pfn;
}

static void note_free(struct span *span, unsigned long first, unsigned long end)
{
	end = min(end, span->end);
	bitmap_set(span->bits, first - span->origin, end - first);
	span->seen->free_pages += end - first;
}

/* Walks from @pfn on, @looks struct pages. Returns where to go on. Under the zone's lock. */
static unsigned long walk_locked(struct span *span, unsigned long pfn, unsigned int looks)
{
	unsigned long begin = pfn;
	bool online = false;

	pfn = block_head(span->zone, pfn);
	for (; pfn < span->end && looks; looks--) {
		struct page *page;
		int order;

		span->seen->looked_at++;
		/* Blocks are aligned to their size, so whatever was stepped over, a new subsection is entered at its start. */
		if (!online || IS_ALIGNED(pfn, ONLINE_STEP)) {
			online = pfn_to_online_page(pfn);
			if (!online) {
				pfn = ALIGN(pfn + 1, ONLINE_STEP);
				continue;
			}
		}
		page = pfn_to_page(pfn);
		order = block_order(span->zone, page);
		if (order < 0) {
			pfn++;
			continue;
		}
		/* Of a block that has grown over where the walk goes on, the part before was looked at already. */
		note_free(span, max(pfn, begin), pfn + (1UL << order));
		pfn += 1UL << order;
	}
	return pfn;
}

/* One hold of the lock. Returns where to go on. */
static unsigned long walk_chunk(struct span *span, unsigned long pfn)
{
	unsigned int looks = clamp(READ_ONCE(walk_chunk_pages), LEAST_CHUNK, MOST_CHUNK);
	unsigned long flags;
	u64 began, held;

	spin_lock_irqsave(&span->zone->lock, flags);
	/* Nobody waits for us while we wait. */
	began = ktime_get_ns();
	pfn = walk_locked(span, pfn, looks);
	held = ktime_get_ns() - began;
	spin_unlock_irqrestore(&span->zone->lock, flags);

	span->seen->holds++;
	span->seen->hold_max_ns = max(span->seen->hold_max_ns, held);
	span->seen->hold_total_ns += held;
	span->seen->long_holds += held >= LONG_HOLD_NS;
	if (held > READ_ONCE(lock_hold_max_ns))
		WRITE_ONCE(lock_hold_max_ns, held);
	return pfn;
}

/* Between two holds. */
static void pause(void)
{
	unsigned int us = min(READ_ONCE(walk_pause_us), MOST_PAUSE_US);

	if (us)
		usleep_range(us, 2 * us);
	else
		cond_resched();
}

/**
 * bb_walk() - note which pages are free
 * @bb: is handed to @interrupted
 * @start: the page of the first bit
 * @end: behind the last page
 * @bits: all zero before; a bit that is set afterwards is a page that was free at one moment
 * @interrupted: is called between two chunks, where it may sleep; the walk ends where it returns true
 * @seen: is added to
 *
 * Return: 0, or -EINTR where it was interrupted: @bits are then worth nothing.
 */
int bb_walk(struct bb *bb, unsigned long start, unsigned long end, unsigned long *bits, bool (*interrupted)(struct bb *bb),
	    struct bb_walk *seen)
{
	int node, i;

	for_each_online_node(node) {
		for (i = 0; i < MAX_NR_ZONES; i++) {
			struct zone *zone = &NODE_DATA(node)->node_zones[i];
			struct span span = { .zone = zone, .origin = start, .bits = bits, .seen = seen };
			unsigned long pfn;

			if (!populated_zone(zone))
				continue;
			/* A zone may grow meanwhile. What it grew by counts as used in this window. */
			pfn = max(start, READ_ONCE(zone->zone_start_pfn));
			span.end = min(end, zone_end_pfn(zone));
			while (pfn < span.end) {
				if (interrupted(bb))
					return -EINTR;
				pfn = walk_chunk(&span, pfn);
				pause();
			}
		}
	}
	return 0;
}

/** bb_end_pfn() - where memory ends at this moment, rounded up to a multiple of 64 */
unsigned long bb_end_pfn(void)
{
	unsigned long end = 0;
	int node, i;

	for_each_online_node(node) {
		for (i = 0; i < MAX_NR_ZONES; i++) {
			struct zone *zone = &NODE_DATA(node)->node_zones[i];

			if (populated_zone(zone))
				end = max(end, zone_end_pfn(zone));
		}
	}
	return ALIGN(end, 64);
}

static int hotplug_notify(struct notifier_block *nb, unsigned long action, void *arg)
{
	if (action == MEM_OFFLINE)
		synchronize_rcu();
	return NOTIFY_OK;
}

static struct notifier_block memory_nb = { .notifier_call = hotplug_notify };

/** bb_walk_init() - before the first walk */
int bb_walk_init(void)
{
	return register_memory_notifier(&memory_nb);
}

/** bb_walk_exit() - after the last walk */
void bb_walk_exit(void)
{
	unregister_memory_notifier(&memory_nb);
}
