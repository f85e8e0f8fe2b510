/* SPDX-License-Identifier: GPL-2.0 */
/* What differs between kernels 6.1 and 6.12, in one place. */
#ifndef BB_COMPAT_H
#define BB_COMPAT_H

#include <linux/kernel.h>
#include <linux/mmzone.h>
#include <linux/version.h>
#include <linux/virtio_config.h>

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 1, 0)
#error "this module is for kernels from 6.1 on"
#endif

/* Bitmaps count pages of 4 KiB, bit 0 of byte 0 first, and headers are little-endian. */
#if defined(__BIG_ENDIAN) || BITS_PER_LONG != 64
#error "this module is for 64-bit little-endian machines"
#endif
#if !defined(CONFIG_PAGE_SIZE_4KB) && PAGE_SHIFT != 12
#error "this module is for pages of 4 KiB"
#endif

/* The order of the largest block of the buddy allocator. MAX_ORDER was one more until 6.4, and is gone since 6.8. */
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 4, 0)
#define BB_MAX_ORDER (MAX_ORDER - 1)
#elif LINUX_VERSION_CODE < KERNEL_VERSION(6, 8, 0)
#define BB_MAX_ORDER MAX_ORDER
#else
#define BB_MAX_ORDER MAX_PAGE_ORDER
#endif

/* One queue that the driver wants; 6.11 brought a structure of its own for that. */
struct bb_queue_info {
	const char *name;
	vq_callback_t *callback;
};

#define BB_MOST_QUEUES 4

static inline int bb_find_vqs(struct virtio_device *vdev, unsigned int count, struct virtqueue *vqs[],
			      const struct bb_queue_info wanted[])
{
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 11, 0)
	vq_callback_t *callbacks[BB_MOST_QUEUES] = {};
	const char *names[BB_MOST_QUEUES] = {};
	unsigned int i;

	if (count > BB_MOST_QUEUES)
		return -EINVAL;
	for (i = 0; i < count; i++) {
		callbacks[i] = wanted[i].callback;
		names[i] = wanted[i].name;
	}
	return virtio_find_vqs(vdev, count, vqs, callbacks, names, NULL);
#else
	struct virtqueue_info info[BB_MOST_QUEUES] = {};
	unsigned int i;

	if (count > BB_MOST_QUEUES)
		return -EINVAL;
	for (i = 0; i < count; i++) {
		info[i].callback = wanted[i].callback;
		info[i].name = wanted[i].name;
	}
	return virtio_find_vqs(vdev, count, vqs, info, NULL);
#endif
}

#endif
