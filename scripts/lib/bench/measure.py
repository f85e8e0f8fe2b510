"""What is read of processes and of the machine: CPU time and memory. And the word for what is not to be had."""

import os
import select
import time

from emulated.basics import ScriptError


class Unavailable(ScriptError):
    """Something that this machine or this build has not got: what needs it is skipped, and nothing has failed."""


def cpu_seconds(pid):
    """CPU seconds of a process that is there, all its threads, ended ones too, by its own clock in nanoseconds."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # what clock_getcpuclockid(3) makes of a pid
    except OSError as error:
        raise ScriptError(f"reading the CPU time of process {pid}: {error}: it has ended") from error


def first_line(started, name, limit_s):
    """The first line that a process prints, empty when it ends without; it has so long for it."""
    if not select.select([started.stdout], [], [], limit_s)[0]:
        raise ScriptError(f"{name} said nothing within {limit_s} s")
    return started.stdout.readline().strip()


def status_bytes(pid):
    """The memory fields of /proc/PID/status in bytes, or None when the process is gone."""
    fields = {}
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name.startswith(("Rss", "Vm")):
                    fields[name] = int(value.split()[0]) << 10
    except (FileNotFoundError, ProcessLookupError):
        return None
    return fields if "RssAnon" in fields else None


def own_bytes(pid):
    """What a process holds besides shared memory, where its guest's RAM lies: its own memory and its program's."""
    fields = status_bytes(pid)
    return None if fields is None else fields["RssAnon"] + fields["RssFile"]


def _meminfo(name):
    with open("/proc/meminfo", encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith(f"{name}:")).split()[1]) << 10


def available_bytes():
    """The memory that can be taken without anything being put out."""
    return _meminfo("MemAvailable")


def machine():
    """One line on the machine."""
    model = "unknown"
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return f"{os.cpu_count()} cores, {_meminfo('MemTotal') >> 30} GiB, Linux {os.uname().release}, {model}"
