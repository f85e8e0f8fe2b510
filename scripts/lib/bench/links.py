"""A link between two network namespaces: a veth pair with a token bucket of the kernel's.

Where there is to be delay too, it is a program of the bench's own between two TUN devices, link.c, for this kernel may
lack netem; it then paces as well. Whatever crosses it is TCP as it is, end to end, for all contenders alike.
"""

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from emulated import process
from emulated.basics import ScriptError, compile_static, run
from measure import Unavailable, first_line
from ours import milliseconds

HERE = Path(__file__).resolve().parent
_SOURCE, _RECEIVER = "10.85.0.1", "10.85.0.2"
_START_S = 10


class Link:
    """The prefixes that run a command on either side, and the receiver's address."""

    def __init__(self, source, receiver):
        self.source = ("ip", "netns", "exec", source)
        self.receiver = ("ip", "netns", "exec", receiver)
        self.address = _RECEIVER

    def plain_copy(self, moved_bytes, *, before):
        """The floor: as many bytes by TCP from warm memory into cold."""
        before()
        command = [sys.executable, str(HERE / "plain_copy.py")]
        receiver = subprocess.Popen([*self.receiver, *command, "receive", _RECEIVER], stdout=subprocess.PIPE, text=True)
        with receiver:
            try:
                port = first_line(receiver, "the receiver of a plain copy", _START_S)
                said = run("a plain copy", [*self.source, *command, "send", _RECEIVER, port, str(int(moved_bytes))])
            finally:
                receiver.kill()  # after its word to the sender there is nothing left to do; without, it would wait on
        ms = milliseconds(said)
        return {"total_ms": ms, "moved_bytes": moved_bytes, "round_0_bytes_per_s": moved_bytes / ms * 1e3}


def _try(what, command):
    try:
        run(what, command)
    except ScriptError as error:
        raise Unavailable(str(error)) from error


def _ip(*words):
    _try("setting up a link (this takes root, ip and namespaces)", ["ip", *words])


def _namespaces(closing):
    names = [f"pf-bench-{os.getpid()}-{side}" for side in ("source", "receiver")]
    for name in names:
        _ip("netns", "add", name)
        closing.callback(subprocess.run, ["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)
        _ip("-n", name, "link", "set", "lo", "up")
    return names


def _up(names, devices):
    for name, device, address in zip(names, devices, (_SOURCE, _RECEIVER)):
        peer = _RECEIVER if address == _SOURCE else _SOURCE
        _ip("-n", name, "address", "add", address, "peer", peer, "dev", device)
        _ip("-n", name, "link", "set", device, "up")


def _by_kernel(names, gbit):
    devices = ("pfb0", "pfb1")
    _ip("link", "add", devices[0], "netns", names[0], "type", "veth", "peer", "name", devices[1], "netns", names[1])
    _up(names, devices)
    bucket = max(256 << 10, int(gbit * 1e9 / 8 / 250))  # what crosses within a tick of the slowest kernel's timer
    for name, device in zip(names, devices):
        command = ["tc", "-n", name, "qdisc", "add", "dev", device, "root", "tbf", "rate", f"{gbit:g}gbit"]
        _try("pacing a link", [*command, "burst", str(bucket), "latency", "50ms"])


def _by_relay(names, gbit, delay_ms, closing):
    work = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="pageferry-link-")))
    compile_static("the link", HERE / "link.c", work / "link")
    rate, delay = str(int(gbit * 1e9 / 8)), str(int(delay_ms * 1e6 / 2))
    relay = process.start([str(work / "link"), *names, rate, delay], work / "said")
    closing.callback(process.end, relay)
    deadline = time.monotonic() + _START_S
    while "ready" not in (work / "said").read_text():
        if relay.poll() is not None or time.monotonic() > deadline:
            raise Unavailable(f"no link with delay: {(work / 'said').read_text().strip() or 'it did not start'}")
        time.sleep(0.02)
    _up(names, ("pfb0", "pfb0"))


@contextlib.contextmanager
def opened(cell):
    """A cell's link, for as long as the context lasts; None for loopback. `delay_ms` is there and back."""
    if not cell.gbit:
        yield None
        return
    with contextlib.ExitStack() as closing:
        names = _namespaces(closing)
        if cell.delay_ms:
            _by_relay(names, cell.gbit, cell.delay_ms, closing)
        else:
            _by_kernel(names, cell.gbit)
        yield Link(*names)
