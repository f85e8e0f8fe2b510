// SPDX-License-Identifier: GPL-2.0
/*
 * Binds to a virtio balloon device (id 5) in place of the kernel's own driver, and speaks the `bitmap` dialect with it:
 * the features PAGE_BITMAP and MISC_VQ of the June 2016 patch set, and queues with fixed numbers.
 */

#include <linux/debugfs.h>
#include <linux/module.h>
#include <linux/oom.h>
#include <linux/seq_file.h>
#include <linux/slab.h>
#include <linux/virtio_ids.h>

#include "balloon.h"

static struct dentry *debugfs_root;

/** bb_queue() - queue work, unless the driver is being removed or suspended; from any context */
void bb_queue(struct bb *bb, struct work_struct *work)
{
	unsigned long flags;

	spin_lock_irqsave(&bb->stop_lock, flags);
	if (!bb->stopped)
		queue_work(bb->wq, work);
	spin_unlock_irqrestore(&bb->stop_lock, flags);
}

/** bb_queue_size() - the same for the work that goes towards the target, @delay jiffies from now at the latest */
void bb_queue_size(struct bb *bb, unsigned long delay)
{
	unsigned long flags;

	spin_lock_irqsave(&bb->stop_lock, flags);
	if (!bb->stopped)
		mod_delayed_work(bb->wq, &bb->size_work, delay);
	spin_unlock_irqrestore(&bb->stop_lock, flags);
}

static void pages_used(struct virtqueue *vq)
{
	struct bb *bb = vq->vdev->priv;

	wake_up(&bb->acked);
	if (READ_ONCE(bb->owed))
		bb_queue_size(bb, 0);
}

static void stats_used(struct virtqueue *vq)
{
	struct bb *bb = vq->vdev->priv;

	if (bb->stats_vq)
		bb_queue(bb, &bb->stats_work);
}

static void misc_used(struct virtqueue *vq)
{
	struct bb *bb = vq->vdev->priv;

	atomic_set(&bb->misc.rang, 1);
	bb_queue(bb, &bb->misc.work);
}

static void config_changed(struct virtio_device *vdev)
{
	bb_queue_size(vdev->priv, 0);
}

/* Queue numbers are fixed: with a misc queue, the statistics queue exists even where it stays silent. */
static int find_queues(struct bb *bb)
{
	static const struct bb_queue_info wanted[BB_MOST_QUEUES] = {
		{ "inflate", pages_used },
		{ "deflate", pages_used },
		{ "stats", stats_used },
		{ "misc", misc_used },
	};
	bool stats = virtio_has_feature(bb->vdev, VIRTIO_BALLOON_F_STATS_VQ);
	bool misc = virtio_has_feature(bb->vdev, BB_F_MISC_VQ);
	struct virtqueue *vqs[BB_MOST_QUEUES] = {};
	int error;

	error = bb_find_vqs(bb->vdev, misc ? 4 : stats ? 3 : 2, vqs, wanted);
	if (error)
		return error;
	bb->inflate_vq = vqs[0];
	bb->deflate_vq = vqs[1];
	bb->stats_vq = stats ? vqs[2] : NULL;
	bb->misc.vq = misc ? vqs[3] : NULL;
	return 0;
}

/* Sets the device going, at first and after a suspend. */
static int start(struct bb *bb)
{
	unsigned long flags;
	int error = find_queues(bb);

	if (error)
		return error;
	WRITE_ONCE(bb->leaving, false);
	virtio_device_ready(bb->vdev);
	mutex_lock(&bb->lock);
	WRITE_ONCE(bb->silent, false);
	WRITE_ONCE(bb->mute, false);
	/* A device that was reset and has no target would otherwise never hear that the balloon is empty. */
	bb_write_actual(bb);
	mutex_unlock(&bb->lock);
	/* Nothing else touches these queues yet: no work is queued before `stopped` is taken away. */
	if (bb->stats_vq)
		bb_stats_start(bb);
	if (bb->misc.vq)
		bb_misc_start(bb);
	spin_lock_irqsave(&bb->stop_lock, flags);
	bb->stopped = false;
	spin_unlock_irqrestore(&bb->stop_lock, flags);
	/* What was used before that has rung in vain. */
	if (bb->stats_vq)
		bb_queue(bb, &bb->stats_work);
	if (bb->misc.vq)
		bb_queue(bb, &bb->misc.work);
	bb_queue_size(bb, 0);
	return 0;
}

/* Ends all work for good or until start(): nothing is queued, nothing runs, a walk stops in its middle. */
static void stop_work(struct bb *bb)
{
	unsigned long flags;

	spin_lock_irqsave(&bb->stop_lock, flags);
	bb->stopped = true;
	spin_unlock_irqrestore(&bb->stop_lock, flags);
	WRITE_ONCE(bb->leaving, true);
	cancel_work_sync(&bb->stats_work);
	if (bb->misc.vq)
		cancel_work_sync(&bb->misc.work);
	cancel_delayed_work_sync(&bb->size_work);
}

/* Empties the balloon, takes the device's hands off our memory, and gives its queues up. */
static void stop_device(struct bb *bb)
{
	bb_deflate_all(bb);
	virtio_reset_device(bb->vdev);
	/* Nothing is in flight any more, whatever the host did with what it had. */
	bb_free_all(bb);
	bb_misc_reset(bb);
	bb->vdev->config->del_vqs(bb->vdev);
	if (bb->use_bitmap)
		memset(bb->window.bits, 0, bb->window.pages / 8);
}

static int counters_show(struct seq_file *file, void *unused)
{
	struct bb *bb = file->private;
	struct bb_counters *c = &bb->counters;

	seq_printf(file, "pages_in_balloon %lu\n", READ_ONCE(bb->pages));
	seq_printf(file, "told_buffers %llu\n", c->told_buffers);
	seq_printf(file, "oom_pages %llu\n", c->oom_pages);
	seq_printf(file, "suspends %llu\n", c->suspends);
	seq_printf(file, "requests %llu\n", c->requests);
	seq_printf(file, "answers %llu\n", c->answers);
	seq_printf(file, "windows %llu\n", c->windows);
	seq_printf(file, "superseded %llu\n", c->superseded);
	seq_printf(file, "repeated %llu\n", c->repeated);
	seq_printf(file, "bad_requests %llu\n", c->bad_requests);
	seq_printf(file, "bad_completions %llu\n", c->bad_completions);
	seq_printf(file, "queue_errors %llu\n", c->queue_errors);
	seq_printf(file, "window_pages %lu\n", bb->misc.window.pages);
	seq_printf(file, "last_free_pages %llu\n", c->last.free_pages);
	seq_printf(file, "last_looked_at %llu\n", c->last.looked_at);
	seq_printf(file, "last_lock_holds %llu\n", c->last.holds);
	seq_printf(file, "last_lock_hold_max_ns %llu\n", c->last.hold_max_ns);
	seq_printf(file, "last_lock_hold_total_ns %llu\n", c->last.hold_total_ns);
	seq_printf(file, "last_lock_holds_over_100us %llu\n", c->last.long_holds);
	seq_printf(file, "last_answer_ns %llu\n", c->last_answer_ns);
	return 0;
}
DEFINE_SHOW_ATTRIBUTE(counters);

static int alloc_buffers(struct bb *bb)
{
	int error;

	bb->use_bitmap = virtio_has_feature(bb->vdev, BB_F_PAGE_BITMAP);
	if (bb->use_bitmap) {
		error = bb_window_alloc(&bb->window, bb_end_pfn());
		if (error)
			return error;
	} else {
		bb->pfns = kcalloc(BB_MOST_PFNS, sizeof(*bb->pfns), GFP_KERNEL);
		if (!bb->pfns)
			return -ENOMEM;
	}
	return virtio_has_feature(bb->vdev, BB_F_MISC_VQ) ? bb_misc_alloc(bb) : 0;
}

/* After the device was reset, or before it was started. */
static void bb_free(struct bb *bb)
{
	if (bb->wq)
		destroy_workqueue(bb->wq);
	bb_misc_free(bb);
	bb_window_free(&bb->window);
	kfree(bb->pfns);
	kfree(bb);
}

static struct bb *bb_alloc(struct virtio_device *vdev)
{
	struct bb *bb = kzalloc(sizeof(*bb), GFP_KERNEL);

	if (!bb)
		return NULL;
	bb->vdev = vdev;
	bb->stopped = true;
	spin_lock_init(&bb->stop_lock);
	INIT_WORK(&bb->stats_work, bb_stats_work);
	bb_balloon_init(bb);
	bb->wq = alloc_workqueue("virtio_balloon_bitmap", WQ_UNBOUND, 0);
	if (!bb->wq || alloc_buffers(bb)) {
		bb_free(bb);
		return NULL;
	}
	return bb;
}

static int probe(struct virtio_device *vdev)
{
	struct bb *bb = bb_alloc(vdev);
	int error;

	if (!bb)
		return -ENOMEM;
	vdev->priv = bb;
	if (virtio_has_feature(vdev, VIRTIO_BALLOON_F_DEFLATE_ON_OOM)) {
		bb->oom.notifier_call = bb_oom_notify;
		error = register_oom_notifier(&bb->oom);
		if (error)
			goto free;
		bb->oom_registered = true;
	}
	error = start(bb);
	if (error)
		goto unregister;
	bb->debugfs = debugfs_create_file(dev_name(&vdev->dev), 0400, debugfs_root, bb, &counters_fops);
	return 0;

unregister:
	if (bb->oom_registered)
		unregister_oom_notifier(&bb->oom);
free:
	bb_free(bb);
	vdev->priv = NULL;
	return error;
}

static void remove(struct virtio_device *vdev)
{
	struct bb *bb = vdev->priv;

	debugfs_remove(bb->debugfs);
	stop_work(bb);
	if (bb->oom_registered)
		unregister_oom_notifier(&bb->oom);
	stop_device(bb);
	bb_free(bb);
	vdev->priv = NULL;
}

/*
 * Features are agreed on after this. A legacy device has other byte orders, and one that offers REPORTING is a standard
 * device, whose bits 3 and 4 mean something else: both get the plain balloon.
 */
static int validate(struct virtio_device *vdev)
{
	u64 offered;

	if (!vdev->config->get) {
		dev_err(&vdev->dev, "the device has no configuration space\n");
		return -EINVAL;
	}
	offered = vdev->config->get_features(vdev);
	if (!(offered & BIT_ULL(VIRTIO_F_VERSION_1)) || offered & BB_STANDARD_ONLY) {
		if (offered & (BIT_ULL(BB_F_PAGE_BITMAP) | BIT_ULL(BB_F_MISC_VQ)))
			dev_warn(&vdev->dev, "the device does not speak the bitmap dialect: only a plain balloon is served\n");
		__virtio_clear_bit(vdev, BB_F_PAGE_BITMAP);
		__virtio_clear_bit(vdev, BB_F_MISC_VQ);
	}
	/* The host is told the guest's own physical addresses of pages: no IOMMU translates those. */
	__virtio_clear_bit(vdev, VIRTIO_F_ACCESS_PLATFORM);
	return 0;
}

#ifdef CONFIG_PM_SLEEP
/*
 * The work queue is none of those that are frozen with the processes: these are waited for, and a suspend would fail where
 * work waits for the host or walks. All of it ends here, as when the driver is removed.
 */
static int freeze(struct virtio_device *vdev)
{
	struct bb *bb = vdev->priv;

	stop_work(bb);
	stop_device(bb);
	bb->counters.suspends++;
	return 0;
}

static int restore(struct virtio_device *vdev)
{
	return start(vdev->priv);
}
#endif

static const struct virtio_device_id id_table[] = {
	{ VIRTIO_ID_BALLOON, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, id_table);

static const unsigned int features[] = {
	VIRTIO_BALLOON_F_MUST_TELL_HOST,
	VIRTIO_BALLOON_F_STATS_VQ,
	VIRTIO_BALLOON_F_DEFLATE_ON_OOM,
	BB_F_PAGE_BITMAP,
	BB_F_MISC_VQ,
};

static struct virtio_driver bb_driver = {
	.feature_table = features,
	.feature_table_size = ARRAY_SIZE(features),
	.driver.name = KBUILD_MODNAME,
	.driver.owner = THIS_MODULE,
	.id_table = id_table,
	.validate = validate,
	.probe = probe,
	.remove = remove,
	.config_changed = config_changed,
#ifdef CONFIG_PM_SLEEP
	.freeze = freeze,
	.restore = restore,
#endif
};

static int __init bb_init(void)
{
	int error = bb_walk_init();

	if (error)
		return error;
	debugfs_root = debugfs_create_dir(KBUILD_MODNAME, NULL);
	error = register_virtio_driver(&bb_driver);
	if (error) {
		debugfs_remove(debugfs_root);
		bb_walk_exit();
	}
	return error;
}

static void __exit bb_exit(void)
{
	unregister_virtio_driver(&bb_driver);
	debugfs_remove(debugfs_root);
	bb_walk_exit();
}

module_init(bb_init);
module_exit(bb_exit);
MODULE_DESCRIPTION("Virtio balloon that speaks in page bitmaps");
MODULE_LICENSE("GPL");
