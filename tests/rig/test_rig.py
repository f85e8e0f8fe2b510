"""Tests of the parts of the rig that need no emulator: python3 tests/rig/test_rig.py"""

import json
import lzma
import socket
import sys
import tempfile
import threading
import unittest
import unittest.mock
from pathlib import Path

sys.dont_write_bytecode = True
ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "scripts" / "lib"), str(ROOT / "tests")]

# pylint: disable=wrong-import-position
from emulated import cpio
from emulated.basics import GIB, MIB, PAGE_BYTES, ScriptError
from rig import checks, console, guest, images, modules, reports, scenarios
from rig.agent import Agent

SAID = b"""\
facts cpus 2\r
hb 1 100\r
rig: ready\r
hb 2 200\r
mem 1000 900 0 0\r
pattern 1 24576 150\r
hb 3 300\r
"""


def report(**changes):
    """A source's report of a guest of 1 GiB."""
    pages = {"total": 262144, "sent": 62144, "zero": 0, "hole": 100000, "hinted": 100000, "ballooned": 0, "filled": 0}
    whole = {
        "version": 1, "role": "source", "result": "completed", "error": None, "ram_bytes": GIB, "pages": pages,
        "verified": True, "total_ms": 1500.0, "downtime_ms": 300.4, "verify_ms": 2000.0, "rounds": [{}, {}],
    }
    return {**whole, **changes, "pages": {**pages, **changes.get("pages", {})}}


class Console(unittest.TestCase):
    """What the guest says."""

    def test_all_kinds(self):
        watch = console.read([SAID])
        self.assertEqual([said.numbers for said in watch.hb], [(1, 100), (2, 200), (3, 300)])
        self.assertEqual((watch.mem[0].numbers, watch.pattern[0].numbers), ((1000, 900, 0, 0), (1, 24576, 150)))
        self.assertEqual((watch.facts, watch.ready, watch.failed), ({"cpus": "2"}, True, None))
        self.assertEqual(console.check_heartbeat(watch), 100)
        console.check_pattern(watch)

    def test_our_balloon_driver(self):
        watch = console.read([b"bitmap 1 1 9000 88 99000 4100 2 7000000\nunloaded 2 1 35\nloaded 5000\n"
                              b"suspended 2 1 1 19 4000 900\nchurned 2 1 1 12 9000\nhogged 9 5 4 0 70\n"])
        self.assertEqual((watch.suspended[0].numbers, watch.churned[0].numbers), ((2, 1, 1, 19, 4000, 900), (2, 1, 1, 12, 9000)))
        self.assertEqual(watch.hogged[0].numbers, (9, 5, 4, 0, 70))
        self.assertEqual(watch.bitmap[0].numbers, (1, 1, 9000, 88, 99000, 4100, 2, 7000000))
        self.assertEqual((watch.unloaded[0].numbers, watch.loaded[0].numbers), ((2, 1, 35), (5000,)))

    def test_every_cut_between_two_hosts(self):
        for cut in range(len(SAID) + 1):
            watch = console.read([SAID[:cut], SAID[cut:]])
            self.assertEqual(len(watch.hb), 3, cut)
            console.check_heartbeat(watch)

    def test_a_line_belongs_to_the_host_that_it_ended_on(self):
        watch = console.read([b"hb 1 1\nhb 2", b" 2\nhb 3 3\n", b"hb 4 4\n"])
        self.assertEqual([watch.on("hb", piece) for piece in range(3)], [[(1, 1)], [(2, 2), (3, 3)], [(4, 4)]])

    def test_the_last_line_may_be_on_its_way(self):
        self.assertEqual(len(console.read([SAID + b"hb 4 4"]).hb), 3)

    def test_missing_repeated_and_late_heartbeats(self):
        for lines in (b"hb 1 1\nhb 3 2\n", b"hb 1 1\nhb 1 2\n", b"hb 2 1\n", b"hb 1 5\nhb 2 4\n", b""):
            with self.assertRaises(ScriptError, msg=lines):
                console.check_heartbeat(console.read([lines]))

    def test_a_beat_lost_between_two_hosts(self):
        with self.assertRaisesRegex(ScriptError, "heartbeat 3 is missing"):
            console.check_heartbeat(console.read([b"hb 1 1\nhb 2 2\n", b"hb 4 4\n"]))

    def test_a_missing_pass(self):
        with self.assertRaises(ScriptError):
            console.check_pattern(console.read([b"pattern 1 8 1\npattern 3 8 2\n"]))

    def test_a_pass_begun_before_the_move_does_not_count(self):
        lines = b"hb 1 100\npattern 1 8 90\npattern 2 8 99\npattern 3 8 100\n"
        self.assertEqual(console.read([b"", lines]).checked_on(1), 1)
        self.assertEqual(console.read([b"", b"pattern 1 8 90\n"]).checked_on(1), 0)

    def test_a_damaged_line(self):
        for line in (b"hb 1\n", b"hb 1 2hb 2 3\n", b"hb one two\n", b"mem 1 2 3\n", b"pattern 1 2\n"):
            with self.assertRaises(ScriptError, msg=line):
                console.read([line])

    def test_failures_are_seen(self):
        for line in (b"rig: failed: page 3 is wrong\n", b"[ 1.0] Kernel panic - not syncing: oops\n"):
            self.assertIn(console.read([SAID + line]).failed, line.decode())


class Clock(unittest.TestCase):
    """The guest's clock over a move."""

    def check_step(self, before, after, paused_ms):
        """A move from beats with these clocks to beats with those."""
        numbers = iter(range(1, 100))
        pieces = [b"".join(b"hb %d %d\n" % (next(numbers), ms) for ms in clocks) for clocks in (before, after)]
        console.check_step(console.read(pieces), 1, paused_ms)

    def test_steps_that_the_pause_explains(self):
        self.check_step([900, 1000], [1100, 1200], 0)
        self.check_step([1000], [1000 + 2300 + 100 + console.CLOCK_SLACK_MS], 2300)
        self.check_step([1000], [1100, 1100 + 2300 + 100 + console.CLOCK_SLACK_MS], 2300)

    def test_jumps(self):
        most = 2300 + 100 + console.CLOCK_SLACK_MS
        for before, after in (([1000], [1001 + most]), ([1000], [1100, 1101 + most]), ([1000], [999])):
            with self.assertRaisesRegex(ScriptError, "the guest's clock went from .* it was paused for 2300 ms"):
                self.check_step(before, after, 2300)
        # A long step on the old host does not make one over the move right.
        with self.assertRaises(ScriptError):
            self.check_step([1, 9000], [12000], 300)

    def test_no_beat_to_compare(self):
        for before, after in (([], [100]), ([100], [])):
            with self.assertRaisesRegex(ScriptError, "none to compare"):
                self.check_step(before, after, 2300)

    def test_beside_a_clock_outside(self):
        self.assertEqual(console.check_stall(10_000, 9_900, 300), 100)
        console.check_stall(10_000, 10_000 - 300 - 1700, 300)
        console.check_stall(10_000, 10_000 + 1700, 300)
        with self.assertRaisesRegex(ScriptError, "stalled: it fell behind by 2001 of 10000 ms"):
            console.check_stall(10_000, 10_000 - 300 - 1701, 300)
        with self.assertRaisesRegex(ScriptError, "jumped: it is 1701 ms ahead"):
            console.check_stall(10_000, 10_000 + 1701, 300)


class Checks(unittest.TestCase):
    """What a host's kernel and the control socket say."""

    def test_memory_of_a_process(self):
        status = "Name:\tmigrate-host\nVmPeak:\t 9 kB\nVmHWM:\t 2097156 kB\nVmRSS:\t   70000 kB\nRssAnon:\t 1 kB\n"
        self.assertEqual(checks.resident_bytes(status), (70000 << 10, 2097156 << 10))
        for text in ("", "VmRSS:\t 1 kB\n", "VmHWM:\t 1 kB\n"):
            with self.assertRaises(ScriptError, msg=text):
                checks.resident_bytes(text)

    def test_filled(self):
        checks.check_filled({"filled_mib": "2048"}, 2048 * MIB, 2048)
        for facts, resident in (
            ({}, 4096 * MIB), ({"filled_mib": "2047"}, 4096 * MIB), ({"filled_mib": "2048"}, 2048 * MIB - 1)
        ):
            with self.assertRaises(ScriptError, msg=facts):
                checks.check_filled(facts, resident, 2048)

    def test_statistics(self):
        good = {"fresh": True, "free_pages": 25000, "total_pages": 120000}
        for free_kb in (100_000, 100_000 - checks.SLACK_KB, 100_000 + checks.SLACK_KB):
            checks.check_stats(good, free_kb)
        for changes in ({"fresh": False}, {"free_pages": None}, {"total_pages": None}, {"free_pages": 25000 + 16384}):
            with self.assertRaises(ScriptError, msg=changes):
                checks.check_stats({**good, **changes}, 100_000)

    def test_statistics_that_do_not_follow(self):
        before = {"free_pages": 100_000}
        for free in (83_616, 83_616 + 2048, 83_616 - 2048):
            checks.check_fell(before, {"free_pages": free}, 16384)
        for free in (100_000, 116_384, 83_616 + 2049, 83_616 - 2049):
            with self.assertRaises(ScriptError, msg=free):
                checks.check_fell(before, {"free_pages": free}, 16384)

    def test_the_driver_of_the_balloon(self):
        facts = {
            "virtio0_device": "0x0004", "virtio0_features": "0" * 64, "virtio0_driver": "virtio_rng",
            "virtio1_device": "0x0005", "virtio1_features": "11111" + "0" * 59, "virtio1_driver": "ours",
        }
        checks.check_driver(facts, "ours", 3, 4)
        for bad, words, message in (
            (facts, ("virtio_balloon",), "driven by ours"),
            (facts, ("ours", 3, 5), "did not agree"),
            ({**facts, "virtio1_features": ""}, ("ours", 3), "did not agree"),
            ({**facts, "virtio1_driver": "none"}, ("ours",), "driven by none"),
            ({**facts, "virtio1_device": "0x0001"}, ("ours",), "0 balloons"),
            ({**facts, "virtio0_device": "0x0005"}, ("ours",), "2 balloons"),
        ):
            with self.assertRaisesRegex(ScriptError, message):
                checks.check_driver(bad, *words)

    def test_a_console_that_was_left(self):
        checks.check_still("/run/guest-0.console", 500, 500)
        for now in (501, 0):
            with self.assertRaisesRegex(ScriptError, "from 500 to"):
                checks.check_still("/run/guest-0.console", 500, now)


class FakeJob:
    """A process in a host that has ended, or does not."""

    name = "host"

    def __init__(self, host, code):
        self._host, self._code = host, code

    def wait(self, _, what):
        """Its exit code. What it wrote last is there only now."""
        if self._code is None:
            raise ScriptError(f"waited in vain for {what}")
        self._host.files["/run/guest-0.console"] += b"hb 2 200\n"
        return self._code

    def code(self):
        """It runs, as far as others see."""
        return None

    def told(self):
        """Nothing."""
        return ""


class FakeHost:
    """A host that has files, and remembers its commands."""

    def __init__(self, name):
        self.name = self.address = name
        self.files = {"/run/recv.out": b"listening\n"}
        self.commands = []
        self.code = 0

    def read(self, path, offset=0):
        """A file."""
        return self.files.get(path, b"")[offset:]

    def check(self, command, _):
        """Runs what it knows."""
        self.commands.append(command)
        return str(len(self.files[command.split()[-1]])) if command.startswith("stat") else ""

    def start(self, name, words):
        """Starts nothing."""
        self.commands.append(f"start {name} {' '.join(words)}")
        return FakeJob(self, self.code)

    def wait_until(self, *_):
        """Holds already."""


class FakePair:
    """Two of them."""

    def __init__(self):
        self.a, self.b = FakeHost("a"), FakeHost("b")
        self.a.files["/run/guest-0.console"] = b"hb 1 100\n"

    def other(self, host):
        """The other one."""
        return self.b if host is self.a else self.a


class Moving(unittest.TestCase):
    """What a guest leaves at its source."""

    def guest(self, code=0):
        """A guest on fake hosts whose process ends with this code when the guest has gone."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        pair = FakePair()
        pair.a.code = code
        return pair, guest.Guest(pair, Path(folder.name), float("inf"), memory_mib=1)

    # pylint: disable=protected-access
    def test_earlier_reports_go_first(self):
        pair, moved = self.guest()
        moved.receiver()
        moved.sender()
        for host, name, path in ((pair.b, "recv", "/run/receiver.json"), (pair.a, "send", "/run/source.json")):
            start = next(i for i, command in enumerate(host.commands) if command.startswith(f"start {name} "))
            self.assertIn(f"rm -f {path}", host.commands[:start])

    def test_the_end_of_the_process_comes_before_the_last_look(self):
        pair, moved = self.guest()
        moved._leave(pair.b, FakeJob(pair.b, 0))
        self.assertEqual(len(moved.watch().on("hb", 0)), 2)
        moved.check_gone()

    def test_a_process_that_stays_or_fails(self):
        for code in (None, 1):
            pair, moved = self.guest(code)
            with self.assertRaises(ScriptError, msg=code):
                moved._leave(pair.b, FakeJob(pair.b, 0))

    def test_a_guest_that_goes_on_where_it_was(self):
        pair, moved = self.guest()
        moved._leave(pair.b, FakeJob(pair.b, 0))
        pair.a.files["/run/guest-0.console"] += b"hb 3 300\n"
        with self.assertRaisesRegex(ScriptError, "/run/guest-0.console on host a went from"):
            moved.check_gone()


class Reports(unittest.TestCase):
    """What both sides tell of a migration."""

    def test_good(self):
        reports.check_completed(report(), memory_bytes=GIB, verified=True)
        reports.check_completed(report(verified=None), memory_bytes=GIB, verified=None)
        reports.check_pair(report(), report(role="receiver"))
        reports.check_at_least(report(), "hinted", 100000, "as planned")
        self.assertEqual(reports.say(report()), "hinted 100000, sent 62144, total 1.5 s, downtime 300 ms, 2 rounds")

    def test_bad(self):
        bad = {
            "another end": report(result="failed", error="gone"),
            "an error": report(error="yet completed"),
            "another size": report(ram_bytes=2 * GIB),
            "lost pages": report(pages={"sent": 1}),
            "too few in all": report(pages={"sent": 1, "total": 200001}),
            "not verified": report(verified=None),
            "wrong digest": report(verified=False),
        }
        for why, found in bad.items():
            with self.assertRaises(ScriptError, msg=why):
                reports.check_completed(found, memory_bytes=GIB, verified=True)
        with self.assertRaises(ScriptError):
            reports.check_pair(report(), report(pages={"hinted": 0, "sent": 162144}))
        with self.assertRaises(ScriptError):
            reports.check_at_least(report(), "hinted", 6 * GIB // PAGE_BYTES, "6 GiB")

    def test_failed_in_mid_round(self):
        failed = report(result="failed", error="it closed the connection", verified=None)
        reports.check_failed(failed)
        for changes in (
            {"result": "completed"}, {"error": None}, {"verified": True}, {"verified": False}, {"pages": {"sent": 0}}
        ):
            with self.assertRaises(ScriptError, msg=changes):
                reports.check_failed({**failed, **changes})

    def test_time_paused(self):
        self.assertEqual(reports.paused_ms(report()), 2300.4)

    def test_beside_each_other(self):
        def asked(written, resent, timed_out):
            return report(
                rounds=[{"dirty_pages_after": written}, {"dirty_pages_after": 7}], pages={"resent": resent},
                balloon={"asked": True, "timed_out": timed_out},
            )

        lines = reports.beside({"ours": asked(12, 3, False), "stock": asked(1800000, 40, True)}).splitlines()
        self.assertEqual(lines[0].split(), ["ours", "stock"])
        rows = {" ".join(line.split()[:-2]): line.split()[-2:] for line in lines[1:]}
        self.assertEqual(rows["asked, answered in time"], ["True", "False"])
        self.assertEqual(rows["pages written in round 0"], ["12", "1800000"])
        self.assertEqual((rows["pages resent"], rows["total ms"]), (["3", "40"], ["1500", "1500"]))

    def test_what_is_no_report(self):
        for data in (b"", b"{", b"[]", b"{}", json.dumps(report(version=2)).encode()):
            with self.assertRaises(ScriptError, msg=data):
                reports.parse(data, "source")
        with self.assertRaises(ScriptError):
            reports.parse(json.dumps(report()).encode(), "receiver")


class Modules(unittest.TestCase):
    """The order of kernel modules."""

    def tree(self, **needs):
        """A tree of modules that need each other."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        for name, needed in needs.items():
            path = Path(folder.name) / f"{name}.ko"
            path.write_bytes(b"\x7fELF\0license=GPL\0depends=" + needed.encode() + b"\0name=x\0")
        return Path(folder.name)

    def test_needs_come_first(self):
        tree = self.tree(kvm_amd="kvm,ccp", kvm="irqbypass", irqbypass="", ccp="", other="")
        names = [path.stem for path in modules.in_order(tree, ["kvm-amd", "kvm"])]
        self.assertEqual(names, ["irqbypass", "kvm", "ccp", "kvm_amd"])

    def test_a_compressed_one(self):
        tree = self.tree(b="")
        packed = tree / "a.ko.xz"
        packed.write_bytes(lzma.compress(b"x\0depends=b\0"))
        order = modules.in_order(tree, ["a"])
        self.assertEqual([modules.name(path) for path in order], ["b.ko", "a.ko"])
        self.assertEqual(modules.content(order[1]), b"x\0depends=b\0")

    def test_absent_and_circular(self):
        for tree in (self.tree(a="b"), self.tree(a="b", b="a")):
            with self.assertRaises(ScriptError):
                modules.in_order(tree, ["a"])


class BalloonDriver(unittest.TestCase):
    """Building it for the guest's kernel."""

    def build(self, script):
        """Builds by a script in place of the one that there is."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "script"
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
            kernel = Path("boot/vmlinuz-6.1.0-1-cloud-amd64")
            with unittest.mock.patch.object(images.packages, "kernel_and_busybox", return_value=(kernel, None)):
                return images.build_drivers(Path(folder), script=path)

    def test_for_the_kernel_that_is_booted(self):
        self.assertEqual(self.build('echo "$2/${4##*/}"'), [Path(f"6.1.0-1-cloud-amd64/{name}") for name in ("guest", "hotadd")])

    def test_no_headers_and_no_module_are_two_things(self):
        with self.assertRaisesRegex(images.NoHeaders, "^no headers$"):
            self.build("echo SKIPPED: no headers; exit 77")
        with self.assertRaisesRegex(ScriptError, "ended with 1:\nno compiler"):
            self.build("echo no compiler >&2; exit 1")


class Archive(unittest.TestCase):
    """The initrd."""

    def test_folders_come_before_what_is_in_them(self):
        archive = cpio.Archive()
        archive.program("lib/x/y", b"12345")
        archive.link("lib/z", "x/y")
        with tempfile.TemporaryDirectory() as folder:
            data = archive.write(Path(folder) / "out").read_bytes()
        names = []
        at = 0
        while at < len(data):
            fields = [int(data[at + 6 + i * 8 : at + 14 + i * 8], 16) for i in range(13)]
            names.append(data[at + 110 : at + 109 + fields[11]].decode())
            at = (at + 110 + fields[11] + 3) // 4 * 4
            at = (at + fields[6] + 3) // 4 * 4
        self.assertEqual(names, ["dev", "dev/console", "lib", "lib/x", "lib/x/y", "lib/z", "TRAILER!!!"])


class Agents(unittest.TestCase):
    """The protocol of the agent in a host."""

    def talk(self, *answers):
        """An agent whose other end says these things, one after each command."""
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        path = Path(folder.name) / "port"
        agent = Agent(path, lambda: None)
        self.addCleanup(agent.close)

        def host():
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(str(path))
                link.sendall(b"0 0 0\n")
                lines = link.makefile("rb")
                for answer in answers:
                    self.heard.append(lines.readline())
                    link.sendall(answer)

        self.heard = []
        thread = threading.Thread(target=host)
        thread.start()
        self.addCleanup(thread.join)
        agent.wait_until_up(10)
        return agent

    def test_commands_and_output(self):
        agent = self.talk(b"1 0 3\nabc", b"2 17 0\n")
        self.assertEqual((agent.run("echo abc", 10), agent.run("false", 10)), ((0, b"abc"), (17, b"")))
        self.assertEqual(self.heard, [b"1 echo abc\n", b"2 false\n"])

    def test_nonsense(self):
        nonsense = {
            "answered to command 2": b"2 0 0\n",
            "in place of an answer": b"x" * 100,
            "announced 999999999 bytes": b"1 0 999999999\n",
            "closed the agent's port": b"1 0 10\nabc",
        }
        for why, answer in nonsense.items():
            agent = self.talk(answer)
            with self.assertRaisesRegex(ScriptError, why):
                agent.run("true", 2)

    def test_two_lines(self):
        agent = self.talk()
        with self.assertRaises(ScriptError):
            agent.run("true\nfalse", 2)


class Scenarios(unittest.TestCase):
    """The list."""

    def test_all_that_were_asked_for(self):
        asked = {
            "idle-8g", "idle-8g-default", "freed-2g", "busy", "two-vcpus", "a-b-a", "receiver-killed", "balloon-1g",
            "reporting", "stats", "done-seen", "bitmap-8g", "bitmap-inflate", "bitmap-unload", "bitmap-2g",
            "bitmap-2g-6.12", "bitmap-suspend", "bitmap-suspend-6.12", "bitmap-hotplug", "bitmap-hotplug-6.12",
            "bitmap-windows", "bitmap-oom", "bitmap-oom-6.12",
        }
        self.assertEqual(set(scenarios.ALL), asked)
        self.assertIn(scenarios.MAIN, scenarios.ALL)


if __name__ == "__main__":
    unittest.main()
