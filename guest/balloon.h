/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A balloon driver that speaks in page bitmaps. What each file is for:
 *
 *   driver.c   binds to the device: features, queues, work items, suspend, removal, debugfs
 *   inflate.c  pages into the balloon and out of it, to the host's target or because memory is short
 *   misc.c     answers the host's question which pages are free
 *   walk.c     finds free pages without allocating them
 *   window.c   buffers: a header and a bitmap
 *   stats.c    what the host is told of the guest's memory
 *
 * Locks, outermost first: bb.lock (a mutex: the balloon's pages, its two queues, and `actual` in the configuration), then
 * none. It is held while the host is waited for, so the notifier of memory that runs out only tries to take it, for a
 * second. The misc and statistics queues are each touched by one work item only, and so need no lock. Callbacks run in
 * interrupts: they queue work or wake a waiter, under bb.stop_lock, and nothing else.
 */
#ifndef BB_BALLOON_H
#define BB_BALLOON_H

#include <linux/atomic.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/notifier.h>
#include <linux/spinlock.h>
#include <linux/virtio.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <uapi/linux/virtio_balloon.h>

#include "compat.h"
#include "wire.h"

/* Tags 10 to 15 have names since 6.12; a host that does not know one skips it. */
#define BB_MOST_STATS 16

/* Entries of an array of page frame numbers. */
#define BB_MOST_PFNS 1024

/* A buffer for one window: a header, and a bitmap of `pages` bits right after it. One piece of physical memory. */
struct bb_window {
	struct bb_header *header;
	unsigned long *bits;
	unsigned long pages;
	size_t bytes;
};

/* What one walk over the guest's memory cost and found. */
struct bb_walk {
	u64 free_pages;
	u64 looked_at;
	u64 holds;
	u64 hold_max_ns;
	u64 hold_total_ns;
	/* Holds of 100 microseconds and more: more than looking takes, as where a host does not run the guest. */
	u64 long_holds;
};

/* The answering side of the misc queue. Touched by its work item alone, but for `rang`. */
struct bb_misc {
	struct virtqueue *vq;
	struct work_struct work;
	struct bb_request *request;
	struct bb_window window;
	/* Set by the queue's callback: a walk looks what came between two chunks. */
	atomic_t rang;
	/* The window's buffer is the host's until the host has used it. */
	bool in_flight;
	/* A request has come since the walk of the last window began. */
	bool renewed;
	/* A request is being answered: its id, the first page that is not answered yet, and where memory ends. */
	bool open;
	u64 id;
	unsigned long next;
	unsigned long end;
	ktime_t began;
	struct bb_walk walk;
};

/* How often what happened; read by debugfs without a lock. */
struct bb_counters {
	u64 requests;
	u64 answers;
	u64 windows;
	/* A newer request came before the last one was answered. */
	u64 superseded;
	/* The same id again while it is being answered. */
	u64 repeated;
	/* Wrong command, length, reserved fields, or id 0. */
	u64 bad_requests;
	/* A buffer that the device may only read came back with bytes written. */
	u64 bad_completions;
	/* A queue took no buffer. */
	u64 queue_errors;
	u64 told_buffers;
	u64 oom_pages;
	u64 suspends;
	struct bb_walk last;
	u64 last_answer_ns;
};

struct bb {
	struct virtio_device *vdev;
	struct workqueue_struct *wq;
	struct dentry *debugfs;

	/* Once `stopped`, no work is queued any more. */
	spinlock_t stop_lock;
	bool stopped;
	/* Being removed or suspended: the host is not waited for without end. */
	bool leaving;

	/* Serializes all below, and the inflate and deflate queues. Nothing is allocated under it: running out of memory
	 * ends in the notifier, which wants it.
	 */
	struct mutex lock;
	struct virtqueue *inflate_vq;
	struct virtqueue *deflate_vq;
	/* The host does not use buffers any more: none is given to it, and none of its buffers is touched. */
	bool mute;
	/* The queue whose buffer was not waited for any longer: `mute` ends when the host uses it. Or none. */
	struct virtqueue *owed;
	/* The host has used nothing for a long time, and is waited for all the same. */
	bool silent;
	/* Memory has run out: the host is waited for until `give_up`, no longer. */
	bool hurried;
	unsigned long give_up;
	/* Nothing goes into the balloon before this, in jiffies: memory has run out just now. */
	unsigned long calm_until;
	bool use_bitmap;
	struct bb_window window;
	__virtio32 *pfns;
	/* Blocks in the balloon, by order; page_private is the order. */
	struct list_head blocks[BB_MAX_ORDER + 1];
	unsigned long pages;
	wait_queue_head_t acked;
	struct delayed_work size_work;
	struct notifier_block oom;
	bool oom_registered;

	struct virtqueue *stats_vq;
	struct work_struct stats_work;
	struct virtio_balloon_stat stats[BB_MOST_STATS];

	struct bb_misc misc;
	struct bb_counters counters;
};

/* driver.c */
void bb_queue(struct bb *bb, struct work_struct *work);
void bb_queue_size(struct bb *bb, unsigned long delay);

/* inflate.c */
void bb_balloon_init(struct bb *bb);
void bb_size_work(struct work_struct *work);
void bb_deflate_all(struct bb *bb);
void bb_free_all(struct bb *bb);
int bb_oom_notify(struct notifier_block *nb, unsigned long unused, void *freed);
void bb_write_actual(struct bb *bb);

/* misc.c */
int bb_misc_alloc(struct bb *bb);
void bb_misc_free(struct bb *bb);
void bb_misc_start(struct bb *bb);
void bb_misc_reset(struct bb *bb);
void bb_misc_work(struct work_struct *work);

/* stats.c */
void bb_stats_start(struct bb *bb);
void bb_stats_work(struct work_struct *work);

/* walk.c */
int bb_walk_init(void);
void bb_walk_exit(void);
unsigned long bb_end_pfn(void);
int bb_walk(struct bb *bb, unsigned long start, unsigned long end, unsigned long *bits, bool (*interrupted)(struct bb *bb),
	    struct bb_walk *seen);

/* window.c */
int bb_window_alloc(struct bb_window *window, unsigned long pages);
void bb_window_free(struct bb_window *window);
size_t bb_window_seal(struct bb_window *window, u64 id, unsigned long start, unsigned long pages, u16 flag);

#endif
