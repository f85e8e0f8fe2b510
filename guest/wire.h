/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What guest and host exchange in the `bitmap` dialect. Bits 3 and 4 mean something else to a standard device: see
 * README.md.
 */
#ifndef BB_WIRE_H
#define BB_WIRE_H

#include <linux/bits.h>
#include <linux/build_bug.h>
#include <linux/types.h>

/* Inflate and deflate buffers carry a page bitmap in place of an array of page frame numbers. */
#define BB_F_PAGE_BITMAP 3
/* Queue 3 carries requests to the guest and its answers. */
#define BB_F_MISC_VQ 4
/* A bit of the standard dialect alone: REPORTING. A device that offers it does not speak this dialect. */
#define BB_STANDARD_ONLY BIT_ULL(5)

#define BB_PAGE_SHIFT 12

/* The only request: which pages are free? */
#define BB_GET_FREE_PAGES 0
/* More windows follow. */
#define BB_CONT 0
/* The last window. */
#define BB_DONE 1

/* The longest window: 32 GiB of guest-physical space, in pages. */
#define BB_MOST_WINDOW_PAGES (1UL << (35 - BB_PAGE_SHIFT))

/* Stands in front of a bitmap. Bit i of the bitmap, from bit 0 of byte 0 on, is page start_pfn + i. */
struct bb_header {
	__le16 cmd;
	__le16 page_shift;
	__le16 flag;
	__le16 reserved;
	__le64 req_id;
	__le64 start_pfn;
	__le64 bmap_len;
};
static_assert(sizeof(struct bb_header) == 32);

/* A request, written by the host into a buffer that the guest keeps posted. */
struct bb_request {
	__le16 cmd;
	__le16 reserved[3];
	__le64 param;
};
static_assert(sizeof(struct bb_request) == 16);

#endif
