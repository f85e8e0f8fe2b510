// SPDX-License-Identifier: GPL-2.0
/*
 * Statistics (virtio 1.3, section 5.5.6.3): the host holds one buffer, and returning it asks for a fresh one. Tags 10 to
 * 15 have names in the kernel's headers since 6.12 only; they are numbers here.
 */

#include <linux/mm.h>
#include <linux/scatterlist.h>
#include <linux/swap.h>
#include <linux/vm_event_item.h>
#include <linux/vmstat.h>

#include "balloon.h"

#define TAG_OOM_KILL 10
#define TAG_ALLOC_STALL 11
#define TAG_ASYNC_SCAN 12
#define TAG_DIRECT_SCAN 13
#define TAG_ASYNC_RECLAIM 14
#define TAG_DIRECT_RECLAIM 15

struct pairs {
	struct bb *bb;
	unsigned int count;
};

static void put(struct pairs *pairs, u16 tag, u64 value)
{
	struct bb *bb = pairs->bb;

	if (WARN_ON_ONCE(pairs->count == BB_MOST_STATS))
		return;
	bb->stats[pairs->count].tag = cpu_to_virtio16(bb->vdev, tag);
	bb->stats[pairs->count].val = cpu_to_virtio64(bb->vdev, value);
	pairs->count++;
}

static u64 bytes(unsigned long pages)
{
	return (u64)pages << PAGE_SHIFT;
}

#ifdef CONFIG_VM_EVENT_COUNTERS
static void put_events(struct pairs *pairs)
{
	unsigned long events[NR_VM_EVENT_ITEMS];
	u64 stalls = 0;
	int zone;

	all_vm_events(events);
	/* One counter a zone, in the zones' order. */
	for (zone = 0; zone < MAX_NR_ZONES; zone++)
		stalls += events[ALLOCSTALL_NORMAL - ZONE_NORMAL + zone];
	put(pairs, VIRTIO_BALLOON_S_SWAP_IN, bytes(events[PSWPIN]));
	put(pairs, VIRTIO_BALLOON_S_SWAP_OUT, bytes(events[PSWPOUT]));
	put(pairs, VIRTIO_BALLOON_S_MAJFLT, events[PGMAJFAULT]);
	put(pairs, VIRTIO_BALLOON_S_MINFLT, events[PGFAULT]);
#ifdef CONFIG_HUGETLB_PAGE
	put(pairs, VIRTIO_BALLOON_S_HTLB_PGALLOC, events[HTLB_BUDDY_PGALLOC]);
	put(pairs, VIRTIO_BALLOON_S_HTLB_PGFAIL, events[HTLB_BUDDY_PGALLOC_FAIL]);
#endif
	put(pairs, TAG_OOM_KILL, events[OOM_KILL]);
	put(pairs, TAG_ALLOC_STALL, stalls);
	put(pairs, TAG_ASYNC_SCAN, events[PGSCAN_KSWAPD]);
	put(pairs, TAG_DIRECT_SCAN, events[PGSCAN_DIRECT]);
	put(pairs, TAG_ASYNC_RECLAIM, events[PGSTEAL_KSWAPD]);
	put(pairs, TAG_DIRECT_RECLAIM, events[PGSTEAL_DIRECT]);
}
#else
static void put_events(struct pairs *pairs) {}
#endif

/* Fills the buffer and hands it to the host. */
static void post_stats(struct bb *bb)
{
	struct pairs pairs = { .bb = bb };
	struct scatterlist sg;
	struct sysinfo info;

	si_meminfo(&info);
	put(&pairs, VIRTIO_BALLOON_S_MEMFREE, bytes(info.freeram));
	put(&pairs, VIRTIO_BALLOON_S_MEMTOT, bytes(info.totalram));
	put(&pairs, VIRTIO_BALLOON_S_AVAIL, bytes(max(si_mem_available(), 0L)));
	put(&pairs, VIRTIO_BALLOON_S_CACHES, bytes(global_node_page_state(NR_FILE_PAGES)));
	put_events(&pairs);
	sg_init_one(&sg, bb->stats, pairs.count * sizeof(bb->stats[0]));
	if (virtqueue_add_outbuf(bb->stats_vq, &sg, 1, bb, GFP_KERNEL)) {
		bb->counters.queue_errors++;
		return;
	}
	virtqueue_kick(bb->stats_vq);
}

/** bb_stats_start() - the first buffer; the device is ready */
void bb_stats_start(struct bb *bb)
{
	post_stats(bb);
}

/** bb_stats_work() - the host returned the buffer */
void bb_stats_work(struct work_struct *work)
{
	struct bb *bb = container_of(work, struct bb, stats_work);
	unsigned int len;

	if (!READ_ONCE(bb->stopped) && virtqueue_get_buf(bb->stats_vq, &len))
		post_stats(bb);
}
