"""What the machine under this one does with free memory, kept out of the figures.

Where this machine is itself a guest, its host takes free memory back within seconds, and a first touch then costs ten to
thirty times what this kernel's own work on it is: who comes next after a process that has just ended is handed memory
which its host still has, and looks that much faster. So before each contender as much memory as it will touch is
touched and freed: cold for the contender, and warm for the machine, for all alike.

`host_memory.py BYTES`, run by the bench: touches so much, prints a line, waits for one, and gives it all back, of more
than 1 GiB only as it is used: what is free for two seconds would be gone again.
"""

import contextlib
import mmap
import os
import subprocess
import sys
import time

_CHUNK = 64 << 20
_AHEAD = 1 << 30  # is free at a time
_LOOK_S = 0.02
_START_S = 600
_MARGIN = 1 << 30  # stays free while memory is touched
_MADV_POPULATE_WRITE = 23
_ENOUGH = 1 << 30  # for what an idle guest uses, at either end, twice over


class HostMemory:
    """Readies the machine's memory before each contender, or only waits."""

    def __init__(self, warm, settle_s):
        self.warm = warm
        self.settle_s = settle_s

    def described(self):
        """A clause for a heading."""
        if self.warm:
            return "each into memory that this machine has from its host already"
        return f"each waits {self.settle_s:g} s before it starts"

    @contextlib.contextmanager
    def ready(self, touched_bytes=0):
        """Yields what is to be called right before a contender starts, which will touch so many bytes beyond a little."""
        with contextlib.ExitStack() as closing:

            def before():
                time.sleep(self.settle_s)
                if self.warm:
                    _touch(touched_bytes + _ENOUGH, closing)

            yield before


def _available():
    with open("/proc/meminfo", encoding="ascii") as lines:
        fields = dict(line.split(":") for line in lines)
    return [int(fields[name].split()[0]) << 10 for name in ("MemAvailable", "MemFree")]


def _touch(wanted, closing):
    count = os.cpu_count() or 1
    each = min(wanted, _available()[0] - _MARGIN) // count // _CHUNK * _CHUNK
    if each <= 0:
        return
    command = [sys.executable, __file__, str(each), str(_AHEAD // count)]
    helpers = [
        closing.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        for _ in range(count)
    ]
    for helper in helpers:
        closing.callback(helper.kill)
    for helper in helpers:
        helper.stdout.readline()
    for helper in helpers:
        helper.stdin.write(b"\n")
        helper.stdin.flush()
    if wanted <= _AHEAD:
        for helper in helpers:
            helper.wait()


def _hold(size, ahead):
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    for at in range(0, size, _CHUNK):
        memory.madvise(_MADV_POPULATE_WRITE, at, _CHUNK)
    print("touched", flush=True)
    sys.stdin.readline()
    if size <= ahead:
        return
    floor = _available()[1] + ahead * (os.cpu_count() or 1)
    at = 0
    while at < size:
        if _available()[1] < floor:
            memory.madvise(mmap.MADV_DONTNEED, at, _CHUNK)
            at += _CHUNK
        else:
            time.sleep(_LOOK_S)


if __name__ == "__main__":
    _hold(int(sys.argv[1]), int(sys.argv[2]))
