"""The one error of these scripts, sizes as people write them, commands run to their end, progress on stderr."""

import re
import subprocess
import sys
import time

PAGE_BYTES = 4096
MIB = 1 << 20
GIB = 1 << 30

_UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB}
_COMMAND_LIMIT_S = 900
_began = time.monotonic()


class ScriptError(Exception):
    """Something that cannot go on; the message says what was being done and what to do about it."""


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


def run(what, command, **options):
    """Runs a command to its end, bounded, and returns its standard output. Raises ScriptError with what it said."""
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "timeout": _COMMAND_LIMIT_S, **options}
    try:
        done = subprocess.run(command, text=True, check=False, **options)
    except FileNotFoundError as error:
        raise ScriptError(f"{what}: {command[0]} is not on this machine; install it") from error
    except subprocess.TimeoutExpired as error:
        raise ScriptError(f"{what}: {command[0]} took more than {options['timeout']} s") from error
    if done.returncode != 0:
        tail = "\n".join(((done.stdout or "") + (done.stderr or "")).splitlines()[-8:])
        raise ScriptError(f"{what}: {' '.join(map(str, command))} ended with {done.returncode}:\n{tail}")
    return done.stdout


def compile_static(what, source, target):
    """Compiles a C program without shared libraries, for an initrd that has none."""
    run(
        f"compiling {what} (this takes a C compiler and a static libc: apt-get install gcc libc6-dev)",
        ["cc", "-O2", "-Wall", "-Wextra", "-static", "-o", str(target), str(source)],
    )
