// SPDX-License-Identifier: GPL-2.0
/*
 * Pages into the balloon and out of it, in bulk: memory is taken in blocks as large as there are, up to 256 MiB are told
 * in one buffer, and the host is waited for once a buffer.
 *
 * The order that keeps memory whole: a page is told before it counts as in the balloon, and the host has used the buffer
 * that takes it out before anybody else may have it. A host that does not use buffers any more gets none, and what is in
 * the balloon then stays there until the device is reset.
 *
 * Pages do not move while they are in the balloon (no compaction): a page that moved would have to be told twice, and
 * the 2016 driver told stale bitmaps then.
 */

#include <linux/bitmap.h>
#include <linux/gfp.h>
#include <linux/log2.h>
#include <linux/minmax.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/vmstat.h>

#include "balloon.h"

/* Blocks must not cost anybody else anything: no reclaim for them. */
#define GFP_BLOCK ((GFP_HIGHUSER | __GFP_NOMEMALLOC | __GFP_NORETRY | __GFP_NOWARN) & ~__GFP_RECLAIM)
/* For single pages, what is easily had is reclaimed; nobody is killed for them. */
#define GFP_SINGLE (GFP_HIGHUSER | __GFP_NOMEMALLOC | __GFP_NORETRY | __GFP_NOWARN)

/* The most pages that are handled under one hold of the lock. */
#define BATCH_PAGES (1UL << 16)

/* While a driver leaves, a host that uses nothing for this long is taken for dead. */
#define LEAVE_TIMEOUT (5 * HZ)

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

/* Takes up to @want pages from the allocator. Without the lock. */
static void batch_alloc(struct batch *batch, unsigned long want)
{
	unsigned int order = min_t(unsigned int, BB_MAX_ORDER, ilog2(want));

	while (batch->pages < want) {
		struct page *page;

		while (1UL << order > want - batch->pages)
			order--;
		page = alloc_pages(order ? GFP_BLOCK : GFP_SINGLE, order);
		if (page) {
			batch_add(batch, page, order);
		} else if (order) {
			/* There are no larger ones for now. */
			order--;
		} else {
			break;
		}
		cond_resched();
	}
}

/* Gives everything back to the allocator. */
static void batch_free(struct bb *bb, struct batch *batch)
{
	struct page *page, *next;

	list_for_each_entry_safe(page, next, &batch->blocks, lru) {
		unsigned int order = page_private(page);

		list_del(&page->lru);
		set_page_private(page, 0);
		if (!virtio_has_feature(bb->vdev, VIRTIO_BALLOON_F_DEFLATE_ON_OOM))
			adjust_managed_page_count(page, 1L << order);
		__free_pages(page, order);
	}
	batch->pages = 0;
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

/* Hands one buffer to the host and waits until it has used it. Under the lock. */
static int tell(struct bb *bb, struct virtqueue *vq, void *buffer, size_t bytes)
{
	struct scatterlist sg;
	bool broken = false;
	int error;

	sg_init_one(&sg, buffer, bytes);
	/* One descriptor in an empty queue: there is room, and nothing to allocate. */
	error = virtqueue_add_outbuf(vq, &sg, 1, buffer, GFP_NOWAIT | __GFP_NOWARN);
	if (error) {
		bb->counters.queue_errors++;
		bb->mute = true;
		return error;
	}
	virtqueue_kick(vq);
	bb->counters.told_buffers++;
	while (!wait_event_timeout(bb->acked, used(bb, vq, &broken), LEAVE_TIMEOUT)) {
		if (READ_ONCE(bb->leaving)) {
			bb->mute = true;
			return -ETIMEDOUT;
		}
	}
	if (broken)
		bb->mute = true;
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
	if (bb->mute)
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

/* Inflates by up to @want pages. Returns how many it were. */
static unsigned long inflate(struct bb *bb, unsigned long want)
{
	struct batch batch = { .blocks = LIST_HEAD_INIT(batch.blocks) };
	unsigned long pages;
	struct page *page;

	batch_alloc(&batch, min(want, BATCH_PAGES));
	pages = batch.pages;
	if (!pages)
		return 0;
	mutex_lock(&bb->lock);
	if (!virtio_has_feature(bb->vdev, VIRTIO_BALLOON_F_DEFLATE_ON_OOM))
		list_for_each_entry(page, &batch.blocks, lru)
			adjust_managed_page_count(page, -(1L << page_private(page)));
	/* Where telling fails, the host may have been told of some: all of them are the balloon's. */
	tell_batch(bb, bb->inflate_vq, &batch);
	balloon_put(bb, &batch);
	count_pages(true, pages);
	mutex_unlock(&bb->lock);
	return pages;
}

/* Deflates by up to @want pages. Returns how many it were. */
static unsigned long deflate(struct bb *bb, unsigned long want)
{
	struct batch batch = { .blocks = LIST_HEAD_INIT(batch.blocks) };
	unsigned long pages;

	mutex_lock(&bb->lock);
	balloon_take(bb, &batch, min3(want, bb->pages, BATCH_PAGES));
	if (batch.pages && tell_batch(bb, bb->deflate_vq, &batch))
		balloon_put(bb, &batch);
	pages = batch.pages;
	count_pages(false, pages);
	mutex_unlock(&bb->lock);
	batch_free(bb, &batch);
	return pages;
}

/** bb_balloon_init() - an empty balloon */
void bb_balloon_init(struct bb *bb)
{
	unsigned int order;

	mutex_init(&bb->lock);
	init_waitqueue_head(&bb->acked);
	for (order = 0; order <= BB_MAX_ORDER; order++)
		INIT_LIST_HEAD(&bb->blocks[order]);
	INIT_DELAYED_WORK(&bb->size_work, bb_size_work);
}

/** bb_write_actual() - tell the host how many pages are in the balloon */
void bb_write_actual(struct bb *bb)
{
	u32 actual = READ_ONCE(bb->pages);

	virtio_cwrite_le(bb->vdev, struct virtio_balloon_config, actual, &actual);
}

/** bb_size_work() - one batch towards the host's target, and then the next one as work of its own */
void bb_size_work(struct work_struct *work)
{
	struct bb *bb = container_of(to_delayed_work(work), struct bb, size_work);
	unsigned long have, moved;
	u32 target;

	if (READ_ONCE(bb->stopped) || READ_ONCE(bb->mute))
		return;
	virtio_cread_le(bb->vdev, struct virtio_balloon_config, num_pages, &target);
	have = READ_ONCE(bb->pages);
	if (target == have)
		return;
	moved = target > have ? inflate(bb, target - have) : deflate(bb, have - target);
	if (moved)
		bb_write_actual(bb);
	if (READ_ONCE(bb->pages) != target)
		bb_queue_size(bb, moved ? 0 : RETRY_DELAY);
}

/** bb_deflate_all() - empty the balloon while the host is there to be told; what it cannot be told of stays */
void bb_deflate_all(struct bb *bb)
{
	while (deflate(bb, ULONG_MAX))
		cond_resched();
	bb_write_actual(bb);
}

/** bb_free_all() - empty the balloon after the device was reset */
void bb_free_all(struct bb *bb)
{
	struct batch batch = { .blocks = LIST_HEAD_INIT(batch.blocks) };

	mutex_lock(&bb->lock);
	balloon_take(bb, &batch, bb->pages);
	mutex_unlock(&bb->lock);
	batch_free(bb, &batch);
}

/** bb_oom_notify() - memory has run out: some pages come back before a process is killed */
int bb_oom_notify(struct notifier_block *nb, unsigned long unused, void *freed)
{
	struct bb *bb = container_of(nb, struct bb, oom);
	unsigned long *total = freed;
	unsigned long pages = deflate(bb, READ_ONCE(oom_pages));

	if (pages) {
		bb_write_actual(bb);
		bb->counters.oom_pages += pages;
		*total += pages;
	}
	return NOTIFY_OK;
}
