"""QEMU to QEMU: one migration of a guest out of a template, and what it took.

Both are started anew for each migration, the source from the template's state. Times come from QEMU's own events, which
carry the wall clock: from the command to migrate to the destination's RESUME, downtime from the source's STOP to it.
"""

import contextlib
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import measure
from emulated import process
from emulated.basics import ScriptError
from qmp import Qmp
from templates import STATE, devices

_START_S = 60
_LOAD_S = 300
_SAMPLE_S = 0.02
_STOP_S = 30  # for the source's word that it had stopped, once the destination runs


@dataclass(frozen=True)
class Way:
    """How QEMU is set up for a migration. `channels` 1 is its plain stream, more are multifd."""

    channels: int = 1
    compression: str = "none"
    ram: str = "anon"  # or memfd, shared
    prealloc: bool = False
    downtime_ms: int = 300
    limit_s: int = 120


class Process:
    """One QEMU that waits for a guest. Use as a context."""

    def __init__(self, templates, kind, way, work, prefix=(), prealloc=False):
        size = f"{templates.sizes.memory_bytes >> 20}M"
        backend = "memory-backend-memfd,share=on" if way.ram == "memfd" else "memory-backend-ram"
        command = [*prefix, *templates.program.command, "-accel", "tcg", "-no-user-config", "-nodefaults"]
        command += ["-display", "none", "-M", f"{templates.machine},memory-backend=ram0", "-smp", "1", "-m", size]
        command += ["-object", f"{backend},id=ram0,size={size}{',prealloc=on' if prealloc else ''}"]
        command += ["-kernel", str(templates.kernel), "-initrd", str(templates.initrd)]
        command += ["-append", templates.append(kind), "-serial", "null", "-serial", "null"]
        command += [*devices(kind.hint), "-qmp", f"unix:{work}/qmp,server=on,wait=off", "-incoming", "defer"]
        self._said = work / "said"
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)
            self._process = process.start(command, self._said)
            self._closing.callback(process.end, self._process)
            self.pid = self._process.pid
            self.qmp = Qmp(process.connect(work / "qmp", time.monotonic() + _START_S, self._check_alive))
            self._closing.callback(self.qmp.close)
            undo.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.close()

    def _check_alive(self):
        if self._process.poll() is not None:
            raise ScriptError(f"QEMU ended with {self._process.returncode}:\n{process.tail((self._said,), 5)}")

    def set(self, capabilities, on=True, **parameters):
        """Capabilities and parameters of a migration."""
        listed = [{"capability": name, "state": on} for name in capabilities]
        self.qmp.command("migrate-set-capabilities", capabilities=listed)
        if parameters:
            self.qmp.command("migrate-set-parameters", **{k.replace("_", "-"): v for k, v in parameters.items()})

    def load(self, state, mapped_ram):
        """Takes the template's state, and lets the guest run."""
        if mapped_ram:
            self.set(["mapped-ram"])
        self.qmp.command("migrate-incoming", uri=f"file:{state}" if mapped_ram else f"exec:cat {state}")
        deadline = time.monotonic() + _LOAD_S
        while self.qmp.command("query-status")["status"] == "inmigrate":
            self._check_alive()
            if time.monotonic() > deadline:
                raise ScriptError(f"loading {state} took more than {_LOAD_S} s")
            time.sleep(0.05)
        if mapped_ram:
            self.set(["mapped-ram"], on=False)
        self.qmp.command("cont")


class _Peak:
    """Samples what a process holds beyond shared memory while a migration runs."""

    def __init__(self, pid):
        self.bytes = self._before = measure.own_bytes(pid) or 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(pid,), daemon=True)
        self._thread.start()

    def _run(self, pid):
        while not self._ended.wait(_SAMPLE_S) and (now := measure.own_bytes(pid)) is not None:
            self.bytes = max(self.bytes, now)

    def growth(self):
        """The most that it held more than before."""
        self._ended.set()
        self._thread.join()
        return self.bytes - self._before


def migrate(templates, kind, way, *, link=None, before=lambda: None):
    """One migration: figures, or None in place of the total when it did not end within its limit."""
    folder = templates.get(kind)
    with contextlib.ExitStack() as closing:
        works = [Path(closing.enter_context(tempfile.TemporaryDirectory(dir=templates.scratch))) for _ in range(2)]
        prefixes = (link.source, link.receiver) if link else ((), ())
        source = closing.enter_context(Process(templates, kind, way, works[0], prefixes[0]))
        source.load(folder / STATE, templates.program.mapped_ram)
        dest = closing.enter_context(Process(templates, kind, way, works[1], prefixes[1], way.prealloc))
        port = _prepare(source, dest, way, link.address if link else "127.0.0.1")
        before()  # memory that was given back settles, a guest that has just come runs
        return _timed(source, dest, way, f"tcp:{link.address if link else '127.0.0.1'}:{port}")


def _prepare(source, dest, way, address):
    """Sets both up, and has the destination listen; returns its port."""
    capabilities = ["events"] + (["multifd"] if way.channels > 1 else [])
    common = {"multifd_channels": way.channels} if way.channels > 1 else {}
    if way.compression != "none":
        common["multifd_compression"] = way.compression
    dest.set(capabilities, **common)
    source.set(capabilities, max_bandwidth=100 << 30, downtime_limit=way.downtime_ms, **common)
    dest.qmp.command("migrate-incoming", uri=f"tcp:{address}:0")
    told = dest.qmp.command("query-migrate")
    try:
        return told["socket-address"][0]["port"]
    except (KeyError, IndexError) as error:
        raise ScriptError(f"QEMU does not say where it listens: {told}") from error


def _timed(source, dest, way, uri):
    pids = (source.pid, dest.pid)
    cpu = sum(map(measure.cpu_seconds, pids))
    peak = _Peak(source.pid) if way.ram == "memfd" else None
    source.qmp.events.clear()
    dest.qmp.events.clear()
    began, deadline = time.time(), time.monotonic() + way.limit_s
    source.qmp.command("migrate", uri=uri)
    while not dest.qmp.when("RESUME"):
        dest.qmp.take_events(0.1)
        if not dest.qmp.when("RESUME"):
            source.qmp.take_events(0.001)
        if source.qmp.migration_status() == "failed":
            why = source.qmp.command("query-migrate").get("error-desc", "it does not say why")
            raise ScriptError(f"QEMU's migration failed: {why}")
        if time.monotonic() > deadline:
            return {"total_ms": None, "limit_s": way.limit_s}
    cpu = sum(map(measure.cpu_seconds, pids)) - cpu
    ram = source.qmp.command("query-migrate").get("ram", {})
    deadline = time.monotonic() + _STOP_S
    while not source.qmp.when("STOP"):
        if time.monotonic() > deadline:
            raise ScriptError(f"QEMU's source did not say within {_STOP_S} s that it had stopped")
        source.qmp.take_events(1)
    resumed = dest.qmp.when("RESUME")
    return {
        "total_ms": (resumed - began) * 1e3,
        "downtime_ms": (resumed - source.qmp.when("STOP")) * 1e3,
        "moved_bytes": ram.get("transferred"),
        "cpu_s": cpu,
        "own_bytes": peak.growth() if peak else None,
    }
