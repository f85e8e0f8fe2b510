// SPDX-License-Identifier: GPL-2.0
/*
 * Pages into the balloon and out of it, in bulk: memory is taken in blocks as large as there are, up to 256 MiB are told
 * in one buffer, and the host is waited for once a buffer.
 *
 * The order that keeps memory whole: a page is told before it counts as in the balloon, and the host has used the buffer
 * that takes it out before anybody else may have it. A host that does not use buffers any more gets none, and what is in
 * the balloon then stays there until it uses the last one after all, or the device is reset.
 *
 * Memory that runs out comes first: the notifier is held up for a second at most, whatever the host does, nothing goes
 * into the balloon for some seconds afterwards, and what was just taken and not told goes back. Pages that are taken and
 * not yet in the balloon are out of the notifier's reach, so they are few where free memory is.
 *
 * Pages do not move while they are in the balloon (no compaction): a page that moved would have to be told twice, and
 * the 2016 driver told stale bitmaps then.
 */

#include <linux/bitmap.h>
#include <linux/gfp.h>
#include <linux/jiffies.h>
#include <linux/lockdep.h>
#include <linux/log2.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/page-flags.h>
#include <linux/scatterlist.h>
#include <linux/sched.h>
#include <linux/vmstat.h>

#include "balloon.h"

/* Blocks must not cost anybody else anything: no reclaim for them. */
#define GFP_BLOCK ((GFP_HIGHUSER | __GFP_NOMEMALLOC | __GFP_NORETRY | __GFP_NOWARN) & ~__GFP_RECLAIM)
/* For single pages, what is easily had is reclaimed; nobody is killed for them. */
#define GFP_SINGLE (GFP_HIGHUSER | __GFP_NOMEMALLOC | __GFP_NORETRY | __GFP_NOWARN)

/* The most pages that are handled under one hold of the lock. */
#define BATCH_PAGES (1UL << 16)

/* The most of free memory that is taken before it is told: one part in so many, and not less than a small batch. */
#define BATCH_SHARE 8
/* The most where large blocks have run out, and memory is reclaimed. */
#define SMALL_BATCH_PAGES (1UL << 10)

/* A host that uses nothing for this long is waited for no more where the driver leaves, or memory has run out. */
#define SILENT_TIMEOUT (5 * HZ)

/* The longest that the notifier waits in all, for the lock and for the host. */
#define OOM_TIMEOUT HZ

/* After memory has run out, nothing goes into the balloon for this long. */
#define CALM_TIME (5 * HZ)

/* How soon a target that was not reached is tried again. */
#define RETRY_DELAY (HZ / 5)

static unsigned int oom_pages = 256;
module_param(oom_pages, uint, 0644);
MODULE_PARM_DESC(oom_pages, "pages taken out of the balloon each time that memory runs out (default 256)");

/* Blocks on their way in or out. */
struct batch {
	struct list_head blocks;
	unsigned long pages;
};

static void batch_add(struct batch *batch, struct page *page, unsigned int order)
{
	set_page_private(page, order);
	list_add_tail(&page->lru, &batch->blocks);
	batch->pages += 1UL << order;
}

/* Whether nothing is to be taken now. */
static bool hands_off(struct bb *bb)
{
	return READ_ONCE(bb->stopped) || time_before(jiffies, READ_ONCE(bb->calm_until));
}

/*
 * Takes up to @want pages from the allocator. Without the lock. Returns whether more may be had at once: false where
 * memory is short, or nothing is to be taken any more.
 */
static bool batch_alloc(struct bb *bb, struct batch *batch, unsigned long want)
{
	unsigned int order = min_t(unsigned int, BB_MAX_ORDER, ilog2(want));

	while (batch->pages < want) {
		struct page *page;

		if (hands_off(bb))
			return false;
		while (1UL << order > want - batch->pages)
			order--;
		page = alloc_pages(order ? GFP_BLOCK : GFP_SINGLE, order);
		if (page) {
			batch_add(batch, page, order);
		} else if (!order) {
			return false;
		} else if (--order == 0) {
			/* There are no larger ones for now. Single pages may take long: what is here is told first. */
			if (batch->pages >= SMALL_BATCH_PAGES)
				return true;
			want = min(want, SMALL_BATCH_PAGES);
		}
		cond_resched();
	}
	return true;
}

/* Gives everything back to the allocator. */
static void batch_free(struct batch *batch)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, &batch->blocks, lru) {
		unsigned int order = page_private(page);

		list_del(&page->lru);
		set_page_private(page, 0);
		__free_pages(page, order);
		cond_resched();
	}
	batch->pages = 0;
}

/*
 * Marks pages as the balloon's (@in), or takes the mark away again. Dumps, and whoever reads the guest's memory as a
 * whole, then leave them alone: the host may have thrown away what was in them. A guest whose balloon does not give way
 * when memory is short does not count them as its own.
 */
static void batch_mark(struct bb *bb, struct batch *batch, bool in)
{
	bool counted = virtio_has_feature(bb->vdev, VIRTIO_BALLOON_F_DEFLATE_ON_OOM);
	struct page *page;

	list_for_each_entry(page, &batch->blocks, lru) {
		long i, count = 1L << page_private(page);

		for (i = 0; i < count; i++) {
			if (in)
				__SetPageOffline(page + i);
			else
				__ClearPageOffline(page + i);
		}
		if (!counted)
			adjust_managed_page_count(page, in ? -count : count);
		cond_resched();
	}
}

/* Puts a batch that the host was told of into the balloon. Under the lock. */
static void balloon_put(struct bb *bb, struct batch *batch)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, &batch->blocks, lru)
		list_move(&page->lru, &bb->blocks[page_private(page)]);
	bb->pages += batch->pages;
	batch->pages = 0;
}

/* Takes a block apart into single pages. Under the lock. */
static void balloon_split(struct bb *bb, struct page *page)
{
	unsigned int order = page_private(page);
	unsigned long i;

	list_del(&page->lru);
	split_page(page, order);
	for (i = 0; i < 1UL << order; i++) {
		set_page_private(page + i, 0);
		list_add(&page[i].lru, &bb->blocks[0]);
	}
}

/* Takes exactly @want pages out of the balloon, which has them; the largest blocks first. Under the lock. */
static void balloon_take(struct bb *bb, struct batch *batch, unsigned long want)
{
	int order = BB_MAX_ORDER;

	while (order >= 0 && batch->pages < want) {
		struct list_head *blocks = &bb->blocks[order];
		struct page *page = list_first_entry_or_null(blocks, struct page, lru);

		if (!page || 1UL << order > want - batch->pages) {
			order--;
			continue;
		}
		list_del(&page->lru);
		batch_add(batch, page, order);
	}
	/* What is left to take is less than the smallest block that there is. */
	for (order = 1; order <= BB_MAX_ORDER && batch->pages < want; order++) {
		struct page *page = list_first_entry_or_null(&bb->blocks[order], struct page, lru);

		if (!page)
			continue;
		balloon_split(bb, page);
		while (batch->pages < want) {
			page = list_first_entry(&bb->blocks[0], struct page, lru);
			list_del(&page->lru);
			batch_add(batch, page, 0);
		}
	}
	bb->pages -= batch->pages;
}

/* Whether the host has used the buffer, the only one in the queue, or never will. */
static bool used(struct bb *bb, struct virtqueue *vq, bool *broken)
{
	unsigned int len;

	if (virtqueue_get_buf(vq, &len)) {
		if (len)
			bb->counters.bad_completions++;
		return true;
	}
	*broken = virtqueue_is_broken(vq);
	return *broken;
}

/* Whether buffers may be given to the host: a buffer that was not waited for may have come back. Under the lock. */
static bool host_is_there(struct bb *bb)
{
	bool broken = false;

	if (bb->owed && used(bb, bb->owed, &broken)) {
		WRITE_ONCE(bb->owed, NULL);
		WRITE_ONCE(bb->silent, false);
		WRITE_ONCE(bb->mute, broken);
		/* Bits are ours again. */
		if (bb->use_bitmap)
			bitmap_zero(bb->window.bits, bb->window.pages);
	}
	return !bb->mute;
}

/* How long the host is waited for before it is looked whether to go on waiting. Under the lock. */
static long wait_step(struct bb *bb)
{
	return bb->hurried ? clamp((long)(bb->give_up - jiffies), 1L, (long)HZ) : HZ;
}

/* Whether the host, which was given a buffer at @began, is not waited for any longer. Under the lock. */
static bool waited_enough(struct bb *bb, unsigned long began)
{
	if (bb->hurried && time_after_eq(jiffies, bb->give_up))
		return true;
	if (time_before(jiffies, began + SILENT_TIMEOUT))
		return false;
	WRITE_ONCE(bb->silent, true);
	return READ_ONCE(bb->leaving);
}

/* Hands one buffer to the host and waits until it has used it. Under the lock. */
static int tell(struct bb *bb, struct virtqueue *vq, void *buffer, size_t bytes)
{
	unsigned long began = jiffies;
	struct scatterlist sg;
	bool broken = false;
	int error;

	sg_init_one(&sg, buffer, bytes);
	/* One descriptor in an empty queue: there is room, and nothing to allocate. */
	error = virtqueue_add_outbuf(vq, &sg, 1, buffer, GFP_NOWAIT | __GFP_NOWARN);
	if (error) {
		bb->counters.queue_errors++;
		WRITE_ONCE(bb->mute, true);
		return error;
	}
	virtqueue_kick(vq);
	bb->counters.told_buffers++;
	while (!wait_event_timeout(bb->acked, used(bb, vq, &broken), wait_step(bb))) {
		if (!waited_enough(bb, began))
			continue;
		/* The callback looks at this. Where it came too early for that, the buffer is seen here. */
		WRITE_ONCE(bb->owed, vq);
		smp_mb();
		if (!used(bb, vq, &broken)) {
			WRITE_ONCE(bb->mute, true);
			return -ETIMEDOUT;
		}
		WRITE_ONCE(bb->owed, NULL);
		break;
	}
	WRITE_ONCE(bb->silent, false);
	if (broken)
		WRITE_ONCE(bb->mute, true);
	return broken ? -EIO : 0;
}

/* Tells blocks as bitmaps: one, unless they lie further apart than a window is long. Under the lock. */
static int tell_bitmaps(struct bb *bb, struct virtqueue *vq, struct list_head *blocks)
{
	struct bb_window *window = &bb->window;
	LIST_HEAD(told);
	int error = 0;

	while (!error && !list_empty(blocks)) {
		unsigned long lowest = ULONG_MAX, end = 0, origin;
		struct page *page, *next;

		list_for_each_entry(page, blocks, lru)
			lowest = min(lowest, page_to_pfn(page));
		origin = round_down(lowest, 64);
		list_for_each_entry_safe(page, next, blocks, lru) {
			unsigned long first = page_to_pfn(page) - origin;
			unsigned long count = 1UL << page_private(page);

			if (first + count > window->pages)
				continue;
			bitmap_set(window->bits, first, count);
			end = max(end, first + count);
			list_move_tail(&page->lru, &told);
		}
		end = ALIGN(end, 64);
		error = tell(bb, vq, window->header, bb_window_seal(window, 0, origin, end, BB_CONT));
		/* A buffer that the host may still read is left as it is. */
		if (!error)
			bitmap_zero(window->bits, end);
	}
	list_splice(&told, blocks);
	return error;
}

/* Tells blocks as arrays of page frame numbers. Under the lock. */
static int tell_pfns(struct bb *bb, struct virtqueue *vq, struct list_head *blocks)
{
	unsigned int count = 0;
	struct page *page;
	int error;

	list_for_each_entry(page, blocks, lru) {
		unsigned long pfn = page_to_pfn(page);
		unsigned long end = pfn + (1UL << page_private(page));

		for (; pfn < end; pfn++) {
			/* 16 TiB on, pages have no number here; the host need not know of them. */
			if (pfn > U32_MAX)
				continue;
			bb->pfns[count++] = cpu_to_virtio32(bb->vdev, pfn);
			if (count < BB_MOST_PFNS)
				continue;
			error = tell(bb, vq, bb->pfns, count * sizeof(*bb->pfns));
			if (error)
				return error;
			count = 0;
		}
	}
	return count ? tell(bb, vq, bb->pfns, count * sizeof(*bb->pfns)) : 0;
}

static int tell_batch(struct bb *bb, struct virtqueue *vq, struct batch *batch)
{
	if (!host_is_there(bb))
		return -EIO;
	return bb->use_bitmap ? tell_bitmaps(bb, vq, &batch->blocks) : tell_pfns(bb, vq, &batch->blocks);
}

/* What /proc/vmstat tells of balloons. */
static void count_pages(bool in, unsigned long pages)
{
#ifdef CONFIG_MEMORY_BALLOON
	count_vm_events(in ? BALLOON_INFLATE : BALLOON_DEFLATE, pages);
#endif
}

/** bb_write_actual() - tell the host how many pages are in the balloon; under the lock */
void bb_write_actual(struct bb *bb)
{
	u32 actual = bb->pages;

	lockdep_assert_held(&bb->lock);
	virtio_cwrite_le(bb->vdev, struct virtio_balloon_config, actual, &actual);
}

/* The most pages of @want that are taken in one go: of the largest blocks, whole ones. */
static unsigned long batch_limit(unsigned long want)
{
	unsigned long share = round_down(global_zone_page_state(NR_FREE_PAGES) / BATCH_SHARE, 1UL << BB_MAX_ORDER);

	return min(want, clamp(share, SMALL_BATCH_PAGES, BATCH_PAGES));
}

/* Inflates by up to @want pages. Returns whether it may go on at once. */
static bool inflate(struct bb *bb, unsigned long want)
{
	struct batch batch = { .blocks = LIST_HEAD_INIT(batch.blocks) };
	bool more = batch_alloc(bb, &batch, batch_limit(want));
	unsigned long pages = batch.pages;

	mutex_lock(&bb->lock);
	if (!pages || hands_off(bb) || !host_is_there(bb)) {
		mutex_unlock(&bb->lock);
		batch_free(&batch);
		return false;
	}
	batch_mark(bb, &batch, true);
	/* Where telling fails, the host may have been told of some: all of them are the balloon's. */
	tell_batch(bb, bb->inflate_vq, &batch);
	balloon_put(bb, &batch);
	count_pages(true, pages);
	bb_write_actual(bb);
	mutex_unlock(&bb->lock);
	return more;
}

/* Moves up to @want pages out of the balloon to @batch. Returns how many it were. Under the lock. */
static unsigned long take_out(struct bb *bb, struct batch *batch, unsigned long want)
{
	balloon_take(bb, batch, min3(want, bb->pages, BATCH_PAGES));
	if (batch->pages && tell_batch(bb, bb->deflate_vq, batch))
		balloon_put(bb, batch);
	if (batch->pages) {
		batch_mark(bb, batch, false);
		count_pages(false, batch->pages);
		bb_write_actual(bb);
	}
	return batch->pages;
}

/* Deflates by up to @want pages. Returns how many it were. */
static unsigned long deflate(struct bb *bb, unsigned long want)
{
	struct batch batch = { .blocks = LIST_HEAD_INIT(batch.blocks) };
	unsigned long pages;

	mutex_lock(&bb->lock);
	pages = take_out(bb, &batch, want);
	mutex_unlock(&bb->lock);
	batch_free(&batch);
	return pages;
}

/** bb_balloon_init() - an empty balloon */
void bb_balloon_init(struct bb *bb)
{
	unsigned int order;

	mutex_init(&bb->lock);
	init_waitqueue_head(&bb->acked);
	bb->calm_until = jiffies;
	for (order = 0; order <= BB_MAX_ORDER; order++)
		INIT_LIST_HEAD(&bb->blocks[order]);
	INIT_DELAYED_WORK(&bb->size_work, bb_size_work);
}

/** bb_size_work() - one batch towards the host's target, and then the next one as work of its own */
void bb_size_work(struct work_struct *work)
{
	struct bb *bb = container_of(to_delayed_work(work), struct bb, size_work);
	unsigned long have;
	bool there, more;
	u32 target;

	if (READ_ONCE(bb->stopped))
		return;
	mutex_lock(&bb->lock);
	there = host_is_there(bb);
	have = bb->pages;
	mutex_unlock(&bb->lock);
	/* The callback queues this again. */
	if (!there)
		return;
	virtio_cread_le(bb->vdev, struct virtio_balloon_config, num_pages, &target);
	if (target == have)
		return;
	more = target > have ? inflate(bb, target - have) : deflate(bb, have - target) != 0;
	if (READ_ONCE(bb->pages) != target)
		bb_queue_size(bb, more ? 0 : RETRY_DELAY);
}

/** bb_deflate_all() - empty the balloon while the host is there to be told; what it cannot be told of stays */
void bb_deflate_all(struct bb *bb)
{
	while (deflate(bb, ULONG_MAX))
		cond_resched();
	/* The device is about to be reset: the notifier is to give it nothing any more. */
	mutex_lock(&bb->lock);
	WRITE_ONCE(bb->owed, NULL);
	WRITE_ONCE(bb->mute, true);
	mutex_unlock(&bb->lock);
}

/** bb_free_all() - empty the balloon after the device was reset */
void bb_free_all(struct bb *bb)
{
	struct batch batch = { .blocks = LIST_HEAD_INIT(batch.blocks) };
	bool more;

	do {
		mutex_lock(&bb->lock);
		balloon_take(bb, &batch, min(bb->pages, BATCH_PAGES));
		batch_mark(bb, &batch, false);
		more = bb->pages;
		mutex_unlock(&bb->lock);
		batch_free(&batch);
	} while (more);
}

/* Takes the lock, unless it is not to be had until @give_up or whoever has it waits for a silent host. */
static bool lock_until(struct bb *bb, unsigned long give_up)
{
	while (!mutex_trylock(&bb->lock)) {
		if (READ_ONCE(bb->silent) || time_after_eq(jiffies, give_up))
			return false;
		schedule_timeout_uninterruptible(1);
	}
	return true;
}

/*
 * All of the guest waits meanwhile. A host that does not use the buffer soon gets no other one until it has: pages stay in
 * the balloon then, which does no harm if it reads the buffer later.
 */
/** bb_oom_notify() - memory has run out: some pages come back before a process is killed */
int bb_oom_notify(struct notifier_block *nb, unsigned long unused, void *freed)
{
	struct bb *bb = container_of(nb, struct bb, oom);
	struct batch batch = { .blocks = LIST_HEAD_INIT(batch.blocks) };
	unsigned long give_up = jiffies + OOM_TIMEOUT;
	unsigned long *total = freed;

	WRITE_ONCE(bb->calm_until, jiffies + CALM_TIME);
	if (!lock_until(bb, give_up))
		return NOTIFY_OK;
	bb->give_up = give_up;
	bb->hurried = true;
	*total += take_out(bb, &batch, READ_ONCE(oom_pages));
	bb->counters.oom_pages += batch.pages;
	bb->hurried = false;
	mutex_unlock(&bb->lock);
	batch_free(&batch);
	return NOTIFY_OK;
}
