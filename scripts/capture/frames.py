"""Reads what the guest's looking program sends; the format is described in guest.c.

The bytes come from a guest: each length is bounded, each payload is checked against its CRC-32, each run against the
ones before it.
"""

import struct
import zlib
from dataclasses import dataclass

from common import CaptureError

MAGIC = b"PFCAPT01"
KIND_TEXT = 1
KIND_LOOK = 2
_HEADER = struct.Struct("<8sQQ")
_SUM = struct.Struct("<I")
_LOOK_HEAD = struct.Struct("<QQQ")
_PAYLOAD_MAX_BYTES = 256 << 20
# The kernel's counter of free pages lags by what each CPU has not yet added to it.
_COUNTER_SLACK_PAGES = 2048


@dataclass
class Look:
    """One look of the guest at its free pages."""

    counted: int  # free pages by the kernel's counter, after the look
    runs: list  # (first pfn, pages), rising, apart

    @property
    def pages(self):
        """Free pages in all runs."""
        return sum(pages for _, pages in self.runs)


def _parse_look(payload):
    if len(payload) < _LOOK_HEAD.size:
        raise CaptureError(f"a look of {len(payload)} bytes came from the guest: too short")
    before, after, count = _LOOK_HEAD.unpack_from(payload)
    if len(payload) != _LOOK_HEAD.size + count * 16:
        raise CaptureError(f"a look said {count} runs and brought {len(payload)} bytes")
    runs = list(struct.iter_unpack("<QQ", payload[_LOOK_HEAD.size :]))
    end = -1
    for start, pages in runs:
        if start <= end or pages == 0:
            raise CaptureError(f"a look brought the run {start}+{pages} after one that ended at {end}")
        end = start + pages
    look = Look(after, runs)
    if abs(look.pages - after) > _COUNTER_SLACK_PAGES + abs(after - before):
        raise CaptureError(
            f"the guest's kernel counts {after} free pages and shows {look.pages} in /proc/kpageflags: this kernel "
            "marks other pages than 6.1 does; take Debian 12's"
        )
    return look


class Reader:
    """Frames out of a stream of bytes, fed as they come."""

    def __init__(self):
        self._bytes = bytearray()

    def feed(self, data):
        """Takes in bytes as they came."""
        self._bytes += data

    def next_frame(self):
        """The next whole frame as (kind, value): text for KIND_TEXT, a Look for KIND_LOOK. None: not all here yet."""
        if len(self._bytes) < _HEADER.size:
            return None
        magic, kind, length = _HEADER.unpack_from(self._bytes)
        if magic != MAGIC or length > _PAYLOAD_MAX_BYTES:
            raise CaptureError(f"the guest sent no frame but {bytes(self._bytes[:24])!r}")
        total = _HEADER.size + length + _SUM.size
        if len(self._bytes) < total:
            return None
        payload = bytes(self._bytes[_HEADER.size : _HEADER.size + length])
        (wanted,) = _SUM.unpack_from(self._bytes, _HEADER.size + length)
        del self._bytes[:total]
        if zlib.crc32(payload) != wanted:
            raise CaptureError(f"a frame of kind {kind}, {length} bytes, came damaged over the serial line")
        if kind == KIND_TEXT:
            return kind, payload.decode(errors="replace")
        if kind == KIND_LOOK:
            return kind, _parse_look(payload)
        raise CaptureError(f"the guest sent a frame of unknown kind {kind}")
