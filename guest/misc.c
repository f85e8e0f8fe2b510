// SPDX-License-Identifier: GPL-2.0
/*
 * The misc queue: the host asks which pages are free, and the guest answers window by window.
 *
 *        +------- request ------+        window used, more to say
 *        |                      v       +----------------+
 *      idle                  walking ---+--> in flight --+
 *        ^                      |
 *        +-------- DONE sent ---+
 *
 * Everything happens in one work item, which never waits for the host: it takes what the host has used, then walks one
 * window if one is due and its buffer is ours. The callback queues it. So a host that stops answering holds nobody up,
 * and neither does removing the driver in the middle. What comes during a walk is taken between two chunks, and the walk
 * goes on where it was: only a newer request ends it.
 *
 * There is one buffer for windows. It is not touched from when the host has it until the host has used it.
 *
 * The request buffer is posted again as soon as a request was copied out of it, whatever the request was: so a request
 * that makes no sense is lost but not the buffer, and a newer request may come while an older one is answered. The older
 * answer then ends where it is: the host asked again because it does not want it any more.
 *
 * Where memory ends is read once a request. Memory that is added meanwhile at or above that counts as used; what is added
 * below, in a hole, is walked like the rest if its turn is still to come. DONE always comes.
 */

#include <linux/bitmap.h>
#include <linux/ktime.h>
#include <linux/mm.h>
#include <linux/module.h>
#include <linux/scatterlist.h>
#include <linux/slab.h>

#include "balloon.h"

/* More completions than this, in one go, come from a host that does not keep to the rules: others get their turn. */
#define MOST_COMPLETIONS 16

static bool log_answers;
module_param(log_answers, bool, 0644);
MODULE_PARM_DESC(log_answers, "one line in the kernel's log for each answered request (default off)");

/* Hands the request buffer to the host. */
static void post_request(struct bb *bb)
{
	struct bb_misc *misc = &bb->misc;
	struct scatterlist sg;

	/* What the host does not write is no request. */
	memset(misc->request, 0xff, sizeof(*misc->request));
	sg_init_one(&sg, misc->request, sizeof(*misc->request));
	if (virtqueue_add_inbuf(misc->vq, &sg, 1, misc->request, GFP_KERNEL)) {
		bb->counters.queue_errors++;
		return;
	}
	virtqueue_kick(misc->vq);
}

/*
 * Free pages are filled with a pattern that is looked for when they are allocated (page_poison=1): a page that was left
 * behind would come back as zeros. Where they are zeroed when they are freed, nothing is looked for.
 */
static bool may_leave_pages_behind(void)
{
	return !page_poisoning_enabled_static() || want_init_on_free();
}

static void take_request(struct bb *bb, unsigned int len)
{
	struct bb_misc *misc = &bb->misc;
	struct bb_request request = *misc->request;
	u64 id = le64_to_cpu(request.param);

	post_request(bb);
	if (len != sizeof(request) || request.cmd != cpu_to_le16(BB_GET_FREE_PAGES) || request.reserved[0] ||
	    request.reserved[1] || request.reserved[2] || !id) {
		bb->counters.bad_requests++;
		return;
	}
	if (misc->open) {
		if (misc->id == id) {
			bb->counters.repeated++;
			return;
		}
		bb->counters.superseded++;
	}
	bb->counters.requests++;
	misc->open = true;
	misc->renewed = true;
	misc->id = id;
	misc->next = 0;
	misc->end = may_leave_pages_behind() ? bb_end_pfn() : 0;
	misc->began = ktime_get();
	memset(&misc->walk, 0, sizeof(misc->walk));
}

/* Takes what the host has used. Returns false where more may be there than is taken in one go. */
static bool take_completions(struct bb *bb)
{
	struct bb_misc *misc = &bb->misc;
	unsigned int i, len;

	for (i = 0; i < MOST_COMPLETIONS; i++) {
		void *buffer = virtqueue_get_buf(misc->vq, &len);

		if (!buffer)
			return true;
		if (buffer == misc->request) {
			take_request(bb, len);
		} else {
			misc->in_flight = false;
			if (len)
				bb->counters.bad_completions++;
		}
	}
	return false;
}

static void answered(struct bb *bb)
{
	struct bb_misc *misc = &bb->misc;
	u64 took = ktime_to_ns(ktime_sub(ktime_get(), misc->began));

	misc->open = false;
	bb->counters.answers++;
	bb->counters.last = misc->walk;
	bb->counters.last_answer_ns = took;
	if (READ_ONCE(log_answers))
		dev_info(&bb->vdev->dev,
			 "request %llu: %llu pages free of %lu, %llu looked at, in %llu us, zone lock held %llu times for %llu us, longest %llu ns, %llu of 100 us or more\n",
			 misc->id, misc->walk.free_pages, misc->end, misc->walk.looked_at, took / NSEC_PER_USEC,
			 misc->walk.holds, misc->walk.hold_total_ns / NSEC_PER_USEC, misc->walk.hold_max_ns,
			 misc->walk.long_holds);
}

/* Between two chunks of a walk: whether it ends here. */
static bool interrupted(struct bb *bb)
{
	struct bb_misc *misc = &bb->misc;

	if (READ_ONCE(bb->stopped))
		return true;
	/* Before taking: what comes after that rings again. What is left over is taken after the next chunk. */
	if (atomic_xchg(&misc->rang, 0) && !take_completions(bb))
		atomic_set(&misc->rang, 1);
	return misc->renewed;
}

/* Walks the window that is due and hands it to the host. */
static void send_window(struct bb *bb)
{
	struct bb_misc *misc = &bb->misc;
	struct bb_window *window = &misc->window;
	unsigned long pages = min(misc->end - misc->next, window->pages);
	bool last = misc->next + pages == misc->end;
	struct scatterlist sg;
	size_t bytes;

	misc->renewed = false;
	bitmap_zero(window->bits, pages);
	if (bb_walk(bb, misc->next, misc->next + pages, window->bits, interrupted, &misc->walk)) {
		/* A newer request is begun in its turn, unless all work ends. */
		bb_queue(bb, &misc->work);
		return;
	}
	bytes = bb_window_seal(window, misc->id, misc->next, pages, last ? BB_DONE : BB_CONT);
	sg_init_one(&sg, window->header, bytes);
	if (virtqueue_add_outbuf(misc->vq, &sg, 1, window, GFP_KERNEL)) {
		/* The host's time-out ends what is not answered. */
		bb->counters.queue_errors++;
		misc->open = false;
		return;
	}
	misc->in_flight = true;
	misc->next += pages;
	bb->counters.windows++;
	virtqueue_kick(misc->vq);
	if (last)
		answered(bb);
}

/** bb_misc_work() - see the top */
void bb_misc_work(struct work_struct *work)
{
	struct bb *bb = container_of(work, struct bb, misc.work);
	struct bb_misc *misc = &bb->misc;

	if (READ_ONCE(bb->stopped))
		return;
	/* Before taking: what comes after that rings again. */
	atomic_xchg(&misc->rang, 0);
	/* What is left over does not keep a window from being walked. */
	if (!take_completions(bb))
		bb_queue(bb, work);
	if (misc->open && !misc->in_flight)
		send_window(bb);
}

/** bb_misc_alloc() - buffers, before the device is started */
int bb_misc_alloc(struct bb *bb)
{
	struct bb_misc *misc = &bb->misc;

	INIT_WORK(&misc->work, bb_misc_work);
	misc->request = kzalloc(sizeof(*misc->request), GFP_KERNEL);
	if (!misc->request)
		return -ENOMEM;
	return bb_window_alloc(&misc->window, bb_end_pfn());
}

/** bb_misc_free() - after the device was reset */
void bb_misc_free(struct bb *bb)
{
	bb_window_free(&bb->misc.window);
	kfree(bb->misc.request);
}

/** bb_misc_start() - the device is ready for requests to be made */
void bb_misc_start(struct bb *bb)
{
	post_request(bb);
}

/** bb_misc_reset() - after the device was reset: all buffers are ours, and no request is open */
void bb_misc_reset(struct bb *bb)
{
	bb->misc.in_flight = false;
	bb->misc.open = false;
}
