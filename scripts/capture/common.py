"""What every part of a capture needs: its one error, sizes as people write them, and progress on stderr."""

import re
import sys
import time

PAGE_BYTES = 4096
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB}
_began = time.monotonic()


class CaptureError(Exception):
    """A capture that cannot go on; the message says what was being done and what to do about it."""


def parse_size(text):
    """`8G`, `512M`, `0`: bytes. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+)([KMG]?)", text.strip().upper())
    if not match:
        raise ValueError(f"'{text}' is not a size: give a whole number with K, M or G, such as 8G")
    return int(match[1]) * _UNITS[match[2]]


def seconds():
    """Seconds since the start."""
    return time.monotonic() - _began


def progress(message):
    """One line on stderr, with the time since the start."""
    print(f"[{seconds():6.1f}s] {message}", file=sys.stderr, flush=True)
