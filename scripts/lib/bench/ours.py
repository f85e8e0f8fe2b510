"""Ours: one migration by migrate-send and migrate-recv, and the floor under it, a plain copy over TCP.

Every run verifies, and what that took, ahead of the pause and during it, is kept apart: totals here are without it. Only a
run that counts CPU time leaves it out, for CPU time cannot be taken apart afterwards.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import image
import measure
from emulated import process
from emulated.basics import GIB, MIB, ScriptError, run

ROOT = Path(__file__).resolve().parents[3]
_LIMIT_S = 300
_TIMED_OUT = 6  # what both commands end with when --timeout has passed
_RUN_FOR_MS = 100
_START_S = 120  # for a receiver to listen, all its memory populated
_JOIN_S = 10
_SAMPLE_S = 0.001


class Programs:
    """The built commands: from `built` as they lie there, or else built now."""

    def __init__(self, built=None):
        if not built:
            built = _build()
        self.send, self.receive = str(built / "migrate-send"), str(built / "migrate-recv")
        self.plain_copy = str(built / "examples/plain_copy")
        self.flags = run("asking migrate-send for its flags", [self.send, "--help"])

    def missing(self, arguments):
        """The first of these flags that migrate-send does not know, or None."""
        return next((flag for flag in arguments if flag.startswith("--") and f"{flag} <" not in self.flags), None)


def _build():
    """Builds, and returns the folder with the commands."""
    for what in (["-p", "migrate-send", "-p", "migrate-recv"], ["-p", "memory", "--example", "plain_copy"]):
        run("building", ["cargo", "build", "--release", "--quiet", *what], cwd=ROOT, capture_output=False, timeout=3600)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"


@dataclass(frozen=True)
class Ours:
    """How ours is set up. `shared`: the receiver rebuilds RAM in a file on tmpfs, which is what a memfd is."""

    send: tuple = ()
    receive: tuple = ()
    shared: bool = False
    prealloc: bool = False
    verify: bool = True
    sample: bool = False  # the sender's memory, many times a second
    timeout_s: int = 0  # the most before the pause: what then has not come to it is told as such; 0: it has to


def file_guest(folder):
    """A guest whose RAM was captured."""
    files = {"--ram": image.RAM, "--layout": image.LAYOUT, "--free-map": image.FREE}
    return ["--guest", "file", *(word for flag, name in files.items() for word in (flag, str(folder / name)))]


def soft_guest(memory_bytes, *more):
    """The built-in guest."""
    return ["--guest", "soft", "--memory", f"{memory_bytes // MIB}M", *more]


def _prealloc(memory_bytes):
    # A PC's RAM has a gap below 4 GiB as soon as it reaches up to there.
    return [f"--prealloc={'linux' if memory_bytes > 3 * GIB else 'soft'}", "--max-memory", f"{memory_bytes // MIB}M"]


def _wait(started, name, timeout_s=0):
    """Waits for a process, and returns its CPU seconds. Given a time-out, it may have ended by that."""
    limit_s = _LIMIT_S + timeout_s
    allowed = (0, _TIMED_OUT) if timeout_s else (0,)
    deadline = time.monotonic() + limit_s
    while True:
        pid, status, used = os.wait4(started.pid, os.WNOHANG)
        if pid:
            started.returncode = os.waitstatus_to_exitcode(status)
            if started.returncode not in allowed:
                raise ScriptError(f"{name} ended with {started.returncode}:\n{process.tail((started.said,), 5)}")
            return used.ru_utime + used.ru_stime
        if time.monotonic() > deadline:
            raise ScriptError(f"{name} did not end within {limit_s} s")
        time.sleep(0.005)


def _start(closing, command, said, **options):
    with open(said, "wb") as errors:
        started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True, **options)
    started.said = said
    closing.callback(_end, started)
    return started


def _end(started):
    if started.returncode is None:
        started.kill()
        started.wait()


def _sampled(sender):
    """The sender's peak beyond shared memory, where its guest's RAM lies; read until it has ended."""
    peak = [0]

    def sample():
        while (now := measure.own_bytes(sender.pid)) is not None:
            peak[0] = max(peak[0], now)
            time.sleep(_SAMPLE_S)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    return peak, thread


def migrate(programs, scratch, guest, way, memory_bytes, *, link=None, before=lambda: None):
    """One migration: figures."""
    prefixes = (link.source, link.receiver) if link else ((), ())
    with contextlib.ExitStack() as closing:
        work = Path(closing.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        command = [*prefixes[1], programs.receive, "--listen", f"tcp:{link.address if link else '127.0.0.1'}:0"]
        command += ["--insecure"] if link else []  # a link between name spaces is beyond loopback
        command += ["--run-for", f"{_RUN_FOR_MS}ms", "--report", str(work / "receiver.json")]
        command += ["--ram", str(work / "ram")] if way.shared else []
        command += [*(_prealloc(memory_bytes) if way.prealloc else []), *way.receive]
        receiver = _start(closing, command, work / "receiver.log", stdout=subprocess.PIPE, text=True)
        closing.callback(receiver.stdout.close)
        address = measure.first_line(receiver, "migrate-recv", _START_S).removeprefix("listening on ")
        if not address:
            _wait(receiver, "migrate-recv")
            raise ScriptError("migrate-recv ended without an error and without listening")
        before()  # what --prealloc populated is there, and memory that was given back settles
        command = [*prefixes[0], programs.send, "--to", address, "--report", str(work / "source.json"), "--quiet"]
        command += ["--insecure"] if link else []
        command += [*guest, *way.send, *(["--verify"] if way.verify else [])]
        command += ["--timeout", f"{way.timeout_s}s"] if way.timeout_s else []
        sender = _start(closing, command, work / "source.log", stdout=subprocess.DEVNULL)
        peak, thread = _sampled(sender) if way.sample else ([None], None)
        cpu = _wait(sender, "migrate-send", way.timeout_s) + _wait(receiver, "migrate-recv", way.timeout_s)
        if thread:
            thread.join(_JOIN_S)
        try:
            report = json.loads((work / "source.json").read_text())
        except (OSError, ValueError) as error:
            raise ScriptError(f"reading the report of migrate-send: {error}") from error
        return _figures(report, way, cpu, peak[0])


def _figures(report, way, cpu, peak):
    try:
        return _taken(report, way, cpu, peak)
    except (KeyError, IndexError, TypeError) as error:
        raise ScriptError(f"the report of migrate-send is not as it should be: {error!r}") from error


def _compression(told):
    """What most pages were packed by; `some pages` where that is none and yet less crossed than there was to send."""
    if not told:
        return "none"
    return "some pages" if told["used"] == "none" and told["wire_bytes"] < told["raw_bytes"] else told["used"]


def _taken(report, way, cpu, peak):
    if report["result"] == "timed-out":
        return {"total_ms": None, "downtime_ms": None, "limit_s": way.timeout_s, "moved_bytes": report["wire_bytes"]}
    if way.verify and report["verified"] is not True:
        raise ScriptError("the receiver's RAM is not the source's")
    first = report["rounds"][0]
    return {
        "total_ms": report["total_ms"] - report["verify_ms"] - report["verify_ahead_ms"],
        "downtime_ms": report["downtime_ms"],
        "verify_ms": report["verify_ms"],
        "moved_bytes": report["wire_bytes"],
        "sent_bytes": report["payload_bytes"],
        "round_0_bytes_per_s": first["wire_bytes"] / max(first["ms"], 0.001) * 1e3,
        "streams": report["streams"],
        "cpu_s": cpu,
        "own_bytes": peak,
        "compression": _compression(report.get("compress")),
        "asked": report["balloon"]["asked"],
    }


def milliseconds(said):
    """What a plain copy printed."""
    try:
        ms = float(said)
    except ValueError as error:
        raise ScriptError(f"a plain copy said {said[:80]!r} in place of milliseconds") from error
    if not ms > 0:
        raise ScriptError(f"a plain copy said that it took {ms} ms")
    return ms


def plain_copy(programs, moved_bytes, prealloc=False, *, before=lambda: None):
    """The floor on this machine, without a link."""
    before()
    mib = max(1, round(moved_bytes / MIB))
    said = run("a plain copy", [programs.plain_copy, str(mib), *(["--prealloc"] if prealloc else [])])
    ms = milliseconds(said)
    return {"total_ms": ms, "moved_bytes": mib * MIB, "round_0_bytes_per_s": mib * MIB / ms * 1e3}
