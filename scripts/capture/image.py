"""Writes a capture, and looks at one: which pages are there, which are free, which are zero.

Holes are kept as they are: a page that the guest never touched takes no room in ram.img, one that it touched takes
room even if it is zero. So a scan for holes finds there what it would find in the guest's memory.
"""

import errno
import json
import os

from common import CaptureError
from emulated.basics import PAGE_BYTES

RAM = "ram.img"
FREE = "free.map"
LAYOUT = "layout.json"
_STEP_BYTES = 8 << 20
_ZERO_PAGE = bytes(PAGE_BYTES)


def data_extents(fd, total_bytes):
    """(start, end) in bytes of each stretch of the file that is not a hole."""
    at = 0
    while at < total_bytes:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                return
            raise
        at = os.lseek(fd, start, os.SEEK_HOLE)
        yield start, at


def copy_sparse(source_fd, path, total_bytes):
    """Copies a file with its holes, and returns the bytes that were not holes. The copy is on disk when it returns."""
    copied = 0
    with open(path, "wb") as target:
        os.ftruncate(target.fileno(), total_bytes)
        for start, end in data_extents(source_fd, total_bytes):
            os.lseek(target.fileno(), start, os.SEEK_SET)
            at = start
            while at < end:
                sent = os.sendfile(target.fileno(), source_fd, at, min(end - at, _STEP_BYTES))
                if sent == 0:
                    raise CaptureError(f"copying the guest's RAM to {path}: it ended at {at} of {total_bytes} bytes")
                at += sent
            copied += end - start
        os.fsync(target.fileno())
    return copied


def write_map_and_layout(folder, free, regions, pages):
    """Writes free.map and layout.json."""
    (folder / FREE).write_bytes(free.to_bytes((pages + 7) // 8, "little"))
    layout = {"page_size": PAGE_BYTES, "regions": [{"start": r.start, "bytes": r.bytes} for r in regions]}
    (folder / LAYOUT).write_text(json.dumps(layout) + "\n")


def _runs(bits, pages):
    """How many runs of ones there are: ones that follow no one."""
    return (bits & ~(bits << 1) & ((1 << pages) - 1)).bit_count()


def _present_and_nonzero(path, total_bytes):
    """Two integers of one bit a page: pages that are not holes, and pages with anything but zeros in them."""
    present = bytearray((total_bytes // PAGE_BYTES + 7) // 8)
    nonzero = bytearray(len(present))
    with open(path, "rb") as file:
        extents = list(data_extents(file.fileno(), total_bytes))
        for start, end in extents:
            # A file system with larger blocks reports data in its own unit; a page with any data in it is present.
            start -= start % PAGE_BYTES
            for base in range(start, min(end, total_bytes), _STEP_BYTES):
                chunk = os.pread(file.fileno(), min(_STEP_BYTES, end - base), base)
                for at in range(0, len(chunk), PAGE_BYTES):
                    page = (base + at) // PAGE_BYTES
                    present[page // 8] |= 1 << page % 8
                    if chunk[at : at + PAGE_BYTES] != _ZERO_PAGE:
                        nonzero[page // 8] |= 1 << page % 8
    return int.from_bytes(present, "little"), int.from_bytes(nonzero, "little")


def examine(folder):
    """Figures of a capture, all of them counted from its three files. Raises CaptureError when these contradict."""
    try:
        layout = json.loads((folder / LAYOUT).read_text())
        page_bytes = layout["page_size"]
        total_bytes = sum(region["bytes"] for region in layout["regions"])
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureError(f"{folder / LAYOUT} is no layout of a capture: {error!r}") from error
    pages = total_bytes // PAGE_BYTES
    size = (folder / RAM).stat().st_size
    if page_bytes != PAGE_BYTES or size != total_bytes:
        raise CaptureError(f"{folder / RAM} has {size} bytes and {folder / LAYOUT} says {total_bytes}")
    encoded = (folder / FREE).read_bytes()
    if len(encoded) != (pages + 7) // 8:
        raise CaptureError(f"{folder / FREE} has {len(encoded)} bytes; {pages} pages take {(pages + 7) // 8}")
    free = int.from_bytes(encoded, "little")
    if free >> pages:
        raise CaptureError(f"{folder / FREE} has bits set past its last page")
    every = (1 << pages) - 1
    used = every & ~free
    present, nonzero = _present_and_nonzero(folder / RAM, total_bytes)
    if nonzero & ~present:
        raise CaptureError(f"{folder / RAM}: pages that are holes and not zero")
    return {
        "pages": pages,
        "free_pages": free.bit_count(),
        "used_pages": used.bit_count(),
        "free_runs": _runs(free, pages),
        "present_pages": present.bit_count(),
        "present_runs": _runs(present, pages),
        "used_present_pages": (used & present).bit_count(),
        "used_nonzero_pages": (used & nonzero).bit_count(),
        "used_nonzero_runs": _runs(used & nonzero, pages),
        "free_nonzero_pages": (free & nonzero).bit_count(),
        "allocated_bytes": (folder / RAM).stat().st_blocks * 512,
    }
