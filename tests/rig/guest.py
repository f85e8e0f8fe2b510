"""A guest under our VMM, watched wherever it runs, and moved from host to host."""

import json
import shlex
import time
from dataclasses import dataclass

from emulated.basics import MIB, ScriptError, progress

from . import checks, console, reports
from .images import guest_folder

_KERNEL_WORDS = "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr random.trust_cpu=on audit=0 selinux=0"
_FIRST_PORT = 4444
_POLL_S = 0.3
_READY_LIMIT_S = 150
_LISTEN_LIMIT_S = 20
_SETTLED_LIMIT_S = 60
_REPORT_LIMIT_S = 20
_GONE_LIMIT_S = 20
_MIGRATE_LIMIT_S = 200
_BEATS_AFTER = 20
_TAIL_LINES = 25
_CLOCK_SLACK = 1.1
# Silence of a peer that digests 8 GiB in an emulator is not death.
PATIENCE = ("--peer-timeout", "60s")


@dataclass
class Hop:
    """A migration that has ended well."""

    source: dict
    receiver: dict


class Guest:
    """One guest. `deadline` bounds every wait, beside the wait's own limit."""

    def __init__(self, pair, out, deadline, *, memory_mib, vcpus=1, kernel=None, kernel_words="", host_words=()):
        """`kernel`: the line that it is of, or None for the stock one."""
        self.pair = pair
        self.host = pair.a
        self.hops = 0
        self.memory_bytes = memory_mib * MIB
        self._out = out
        self._deadline = deadline
        self._pieces = [b""]
        self._pauses = []
        self._left_behind = []  # host, console and its bytes, of each place that the guest has been at
        self._before = None  # the time here and the guest's newest clock, looked at before the latest move
        folder = f"/{guest_folder(kernel)}"
        self._job = self.host.start("host", [
            "migrate-host", "--guest", "linux", "--kernel", f"{folder}/vmlinuz", "--initrd", f"{folder}/initrd",
            "--cmdline", f"{_KERNEL_WORDS} {kernel_words}".strip(), "--memory", f"{memory_mib}M", "--vcpus", str(vcpus),
            "--control", self._socket(), "--console", self._console(), *host_words,
        ])

    def _socket(self):
        return f"/run/guest-{self.hops}.sock"

    def _console(self):
        return f"/run/guest-{self.hops}.console"

    def left(self, seconds):
        """The seconds that a wait may take."""
        return max(0.0, min(seconds, self._deadline - time.monotonic()))

    def _refresh(self):
        self._pieces[-1] += self.host.read(self._console(), len(self._pieces[-1]))
        again = f"-{self.hops}" if self.hops >= 2 else ""
        (self._out / f"guest-{self.host.name}{again}.console").write_bytes(self._pieces[-1])

    def watch(self):
        """All that the guest has said until now. Raises when it says that something is wrong."""
        self._refresh()
        watch = console.read(self._pieces)
        if watch.failed:
            raise ScriptError(f"the guest on host {self.host.name} says: {watch.failed}; its console:\n{self.tail()}")
        return watch

    def tail(self):
        """The end of its console."""
        return console.tail(self._pieces, _TAIL_LINES)

    def wait_for(self, what, holds, seconds):
        """Waits until `holds` is true of what the guest has said; returns that."""
        began = time.monotonic()
        limit = self.left(seconds)
        while not holds(watch := self.watch()):
            all_told = f"{self._job.told()}\nthe guest's console:\n{self.tail()}"
            if (code := self._job.code()) is not None:
                raise ScriptError(f"waiting for {what}: the guest's process ended with {code}; {all_told}")
            if time.monotonic() - began > limit:
                raise ScriptError(f"waited {limit:.0f} s in vain on host {self.host.name} for {what}; {all_told}")
            time.sleep(_POLL_S)
        return watch

    def wait_until_ready(self):
        """Waits for the guest's program to have prepared what the scenario wants."""
        began = time.monotonic()
        watch = self.wait_for("the guest to be ready", lambda watch: watch.ready and watch.mem, _READY_LIMIT_S)
        progress(f"the guest is ready after {time.monotonic() - began:.1f} s")
        return watch

    def free_kb(self):
        """MemFree, from a line that the guest has yet to say."""
        seen = len(self.watch().mem)
        watch = self.wait_for("the guest's free memory", lambda watch: len(watch.mem) > seen, _SETTLED_LIMIT_S)
        return watch.mem[-1].numbers[0]

    def wait_for_free(self, least_kb, what, seconds=_SETTLED_LIMIT_S):
        """Waits until MemFree is at least so much."""
        watch = self.wait_for(
            f"{what}: MemFree of at least {least_kb} kB",
            lambda watch: (mem := watch.on("mem", self.hops)) and mem[-1][0] >= least_kb, seconds,
        )
        return watch.mem[-1].numbers[0]

    def process_bytes(self):
        """What the guest's process holds now, and the most that it has held."""
        path = f"/proc/$(cat /run/{self._job.name}.pid)/status"
        return checks.resident_bytes(self.host.check(f"cat {path}", "reading what the guest's process holds"))

    def control(self, *words):
        """Asks the guest's control socket; returns its answer."""
        command = shlex.join(["migrate-send", "--control", self._socket(), *words])
        said = self.host.check(f"{command} 2>/run/control.err || {{ cat /run/control.err; exit 1; }}", "asking it")
        try:
            return json.loads(said)
        except ValueError as error:
            raise ScriptError(f"'{command}' printed no JSON ({error}): {said[:300]!r}") from error

    def receiver(self):
        """Starts a receiver for this guest on the other host, and waits until it listens."""
        host = self.pair.other(self.host)
        number = self.hops + 1
        # What an earlier migration has left is not taken for this one's.
        host.check("rm -f /run/receiver.json", "removing an earlier report")
        job = host.start("recv", [
            "migrate-recv", "--listen", f"tcp:0.0.0.0:{_FIRST_PORT + number}", "--insecure",
            "--control", f"/run/guest-{number}.sock",
            "--console", f"/run/guest-{number}.console", "--report", "/run/receiver.json", *PATIENCE,
        ])
        listens = "grep -q ^listening /run/recv.out || [ -s /run/recv.rc ]"
        host.wait_until(listens, self.left(_LISTEN_LIMIT_S), "the receiver to listen", job.told)
        if job.code() is not None:
            raise ScriptError(f"the receiver did not come to listen, it ended with {job.code()}; {job.told()}")
        return job

    def sender(self, *words):
        """Starts to send this guest to the other host."""
        to = f"tcp:{self.pair.other(self.host).address}:{_FIRST_PORT + self.hops + 1}"
        self.host.check("rm -f /run/source.json", "removing an earlier report")
        return self.host.start("send", [
            "migrate-send", "--control", self._socket(), "--to", to, "--insecure", "--report", "/run/source.json", *PATIENCE, *words,
        ])

    def _report(self, host, path, whose):
        host.wait_until(f"[ -s {path} ]", self.left(_REPORT_LIMIT_S), f"the {whose}'s report")
        data = host.read(path)
        name = f"{whose}.json" if self.hops == 0 else f"{whose}-{self.hops + 1}.json"
        (self._out / name).write_bytes(data)
        return reports.parse(data, whose)

    def migrate(self, *words, verified=True):
        """Sends the guest to the other host, and checks both reports."""
        receiver = self.receiver()
        self._before = self._newest_beat()
        words = (*words, "--verify") if verified else words
        began = time.monotonic()
        sender = self.sender(*words)
        code = sender.wait(self.left(_MIGRATE_LIMIT_S), "the migration")
        took_ms = (time.monotonic() - began) * 1000
        if code != 0:
            raise ScriptError(f"sending ended with {code}; {sender.told()}\n{receiver.told()}")
        to = self.pair.other(self.host)
        source = self._report(self.host, "/run/source.json", "source")
        hop = Hop(source, self._report(to, "/run/receiver.json", "receiver"))
        if source["total_ms"] > took_ms * _CLOCK_SLACK:
            raise ScriptError(f"it took {took_ms:.0f} ms, the report says {source['total_ms']:.0f}: a clock is wrong")
        progress(f"host {self.host.name} to host {to.name}: {reports.say(hop.source)}")
        self._leave(to, receiver)
        self._pauses.append(reports.paused_ms(hop.source))
        for report in (hop.source, hop.receiver):
            reports.check_completed(report, memory_bytes=self.memory_bytes, verified=verified or None)
        reports.check_pair(hop.source, hop.receiver)
        return hop

    def _leave(self, to, receiver):
        """The guest is on host `to` now, and the process that it was in has to end: only then is its console whole."""
        code = self._job.wait(self.left(_GONE_LIMIT_S), "the guest's process at the source, after the hand-over")
        if code != 0:
            raise ScriptError(f"the guest was handed over, and its process ended with {code}; {self._job.told()}")
        self._refresh()
        self._left_behind.append((self.host, self._console(), len(self._pieces[-1])))
        self.host, self._job = to, receiver
        self.hops += 1
        self._pieces.append(b"")

    def check_gone(self):
        """Nowhere that the guest has been has it said anything since it left."""
        for host, path, size in self._left_behind:
            now = int(host.check(f"stat -c %s {path}", "looking at a console that was left"))
            checks.check_still(f"{path} on host {host.name}", size, now)

    def _newest_beat(self):
        """The time here in ms, and the guest's clock at the newest beat that is there then."""
        now_ms = time.monotonic() * 1000
        return now_ms, self.watch().hb[-1].numbers[1]

    def check_here(self, asleep_ms=0):
        """The guest goes on where it is: heartbeat without a gap, two new passes over the whole pattern.

        `asleep_ms`: for how long it had suspended itself since the migration began, which stops its clock.
        """
        watch = self.wait_for(
            "the guest to go on, with its pattern whole",
            lambda watch: len(watch.on("hb", self.hops)) >= _BEATS_AFTER and watch.checked_on(self.hops) >= 2,
            _SETTLED_LIMIT_S,
        )
        self.check_said(watch)
        now_ms, clock_ms = self._newest_beat()
        behind = console.check_stall(now_ms - self._before[0], clock_ms - self._before[1], self._pauses[-1] + asleep_ms)
        progress(f"the guest's clock is {behind:.0f} ms behind, of {self._pauses[-1]:.0f} ms that the guest was paused")
        return watch

    def check_said(self, watch=None):
        """What the guest has said until now has no gap."""
        watch = watch or self.watch()
        longest = console.check_heartbeat(watch)
        console.check_pattern(watch)
        for piece, paused_ms in enumerate(self._pauses, start=1):
            console.check_step(watch, piece, paused_ms)
        progress(f"{len(watch.hb)} heartbeats, none missing, the longest step of the guest's clock {longest} ms")

    def keep(self):
        """Keeps what there is to read, when a scenario ends in any way."""
        self._refresh()
        for host in self.pair.hosts():
            for name in ("host", "send", "recv"):
                for kind in ("out", "err"):
                    data = host.read(f"/run/{name}.{kind}")
                    if data:
                        (self._out / f"{name}-{host.name}.{kind}").write_bytes(data)
