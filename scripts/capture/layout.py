"""Where the guest's RAM lies: taken from the emulator's memory map, held against what the guest says of itself.

"RAM order" is the order in ram.img: the regions one after the other, without the hole below 4 GiB.
"""

import re
from dataclasses import dataclass

from common import CaptureError
from emulated.basics import MIB, PAGE_BYTES

_RAM_LINE = re.compile(r"^ *([0-9a-f]{16})-[0-9a-f]{16} \(prio -?\d+, (?:ram|rom)\): ram0(?: @([0-9a-f]+))?$", re.M)
_SYSTEM_RAM = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) : System RAM$", re.M)


@dataclass
class Region:
    """A stretch of guest-physical addresses with RAM behind it; `offset` is its place in ram.img. All in bytes."""

    start: int
    bytes: int
    offset: int


def from_mtree(text, memory_bytes):
    """Regions out of `info mtree -f`.

    The flat view cuts RAM where video memory and ROM lie over it, yet the offset into the backing tells which pieces
    are one region: address minus offset is the same for all of them. The bytes under such an overlay are part of the
    backing, hence of the region; the guest never has them as RAM. A region goes from the first address that its
    backing could have to the start of the next region's backing.
    """
    # There is a view for each address space, with the same pieces of RAM in it. Lines end as on a terminal, in CR LF.
    starts = {}
    for first, offset in _RAM_LINE.findall(text.replace("\r", "")):
        offset = int(offset, 16) if offset else 0
        delta = int(first, 16) - offset
        starts[delta] = min(offset, starts.get(delta, offset))
    order = sorted(starts.items(), key=lambda item: item[1])
    if not order or order[0] != (0, 0):
        raise CaptureError("the emulator's memory map shows no RAM from address 0")
    ends = [offset for _, offset in order[1:]] + [memory_bytes]
    regions = [Region(offset + delta, end - offset, offset) for (delta, offset), end in zip(order, ends, strict=True)]
    for region in regions:
        if region.bytes <= 0 or region.bytes % PAGE_BYTES or region.start % PAGE_BYTES:
            raise CaptureError(f"the emulator's memory map gives a region at {region.start:#x} of {region.bytes} bytes")
    return regions


def check_against_guest(regions, iomem):
    """Refuses a layout that the guest's /proc/iomem contradicts."""
    seen = [(int(first, 16), int(last, 16) + 1) for first, last in _SYSTEM_RAM.findall(iomem)]
    if not seen:
        raise CaptureError("the guest's /proc/iomem shows no System RAM")
    for first, end in seen:
        if not any(r.start <= first and end <= r.start + r.bytes for r in regions):
            raise CaptureError(f"the guest has RAM at {first:#x}-{end:#x}, where the emulator's memory map has none")
    for region in regions:
        # The firmware keeps the top of the low region for ACPI tables; the guest has all the rest of each region.
        tops = [end for first, end in seen if region.start <= first < region.start + region.bytes]
        if not tops or region.start + region.bytes - max(tops) > MIB:
            raise CaptureError(f"the guest uses the region at {region.start:#x} up to {max(tops, default=0):#x} only")


def free_bits(regions, runs):
    """Runs of free page frames as one integer whose bit n is page n in RAM order. Refuses a run outside RAM."""
    bits = bytearray((sum(r.bytes for r in regions) // PAGE_BYTES + 7) // 8)
    for pfn, pages in runs:
        start, end = pfn * PAGE_BYTES, (pfn + pages) * PAGE_BYTES
        home = next((r for r in regions if r.start <= start and end <= r.start + r.bytes), None)
        if home is None:
            raise CaptureError(f"the guest calls {start:#x}-{end:#x} free, which does not lie in one region of its RAM")
        first = (start - home.start + home.offset) // PAGE_BYTES
        _set_bits(bits, first, first + pages)
    return int.from_bytes(bits, "little")


def _set_bits(bits, first, end):
    while first < end and first % 8:
        bits[first // 8] |= 1 << first % 8
        first += 1
    whole = (end - first) // 8
    bits[first // 8 : first // 8 + whole] = b"\xff" * whole
    for page in range(first + whole * 8, end):
        bits[page // 8] |= 1 << page % 8
