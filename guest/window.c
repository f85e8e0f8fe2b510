// SPDX-License-Identifier: GPL-2.0
/* Buffers: a header and a bitmap, in one piece of physical memory, so that one descriptor is enough. */

#include <linux/align.h>
#include <linux/gfp.h>
#include <linux/mm.h>

#include "balloon.h"

/* A bitmap of one page of memory; a multiple of the largest block, so that no block lies in two windows. */
#define LEAST_WINDOW_PAGES ((unsigned long)PAGE_SIZE * 8)

static_assert((LEAST_WINDOW_PAGES & ((1UL << BB_MAX_ORDER) - 1)) == 0);
static_assert((BB_MOST_WINDOW_PAGES & (LEAST_WINDOW_PAGES - 1)) == 0);

/**
 * bb_window_alloc() - make a buffer
 * @window: where it is put
 * @pages: the longest window that is needed
 *
 * Where memory is too fragmented for that, windows are shorter and there are more of them. So it fails only where not
 * even two pages are to be had, and a driver that has acknowledged bitmaps never needs to fall back to something else.
 *
 * Return: 0, or -ENOMEM.
 */
int bb_window_alloc(struct bb_window *window, unsigned long pages)
{
	void *memory;

	pages = clamp(ALIGN(pages, LEAST_WINDOW_PAGES), LEAST_WINDOW_PAGES, BB_MOST_WINDOW_PAGES);
	for (;;) {
		window->bytes = sizeof(*window->header) + pages / 8;
		memory = alloc_pages_exact(window->bytes, GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN | __GFP_NORETRY);
		if (memory)
			break;
		if (pages == LEAST_WINDOW_PAGES)
			return -ENOMEM;
		pages = ALIGN(pages / 2, LEAST_WINDOW_PAGES);
	}
	window->header = memory;
	window->bits = memory + sizeof(*window->header);
	window->pages = pages;
	return 0;
}

/** bb_window_free() - the buffer must not be the host's */
void bb_window_free(struct bb_window *window)
{
	if (window->header)
		free_pages_exact(window->header, window->bytes);
	window->header = NULL;
}

/**
 * bb_window_seal() - write the header for the first bits of the bitmap
 * @window: its bitmap is made
 * @id: of the request that is answered, or 0
 * @start: a multiple of 64
 * @pages: how many bits; a multiple of 64
 * @flag: whether more windows follow
 *
 * Return: the bytes to send.
 */
size_t bb_window_seal(struct bb_window *window, u64 id, unsigned long start, unsigned long pages, u16 flag)
{
	*window->header = (struct bb_header){
		.cmd = cpu_to_le16(BB_GET_FREE_PAGES),
		.page_shift = cpu_to_le16(BB_PAGE_SHIFT),
		.flag = cpu_to_le16(flag),
		.req_id = cpu_to_le64(id),
		.start_pfn = cpu_to_le64(start),
		.bmap_len = cpu_to_le64(pages / 8),
	};
	return sizeof(*window->header) + pages / 8;
}
