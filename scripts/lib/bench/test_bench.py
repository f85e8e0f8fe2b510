#!/usr/bin/env python3
"""The parts of the bench that measure nothing: that each goal has its contenders, verdicts, JSON and the plots."""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import xml.dom.minidom
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "capture")]

# pylint: disable=wrong-import-position
import cells
import goals
import host_memory
import main as command
import measure
import ours
import output
import scale
import tally
from contest import Missing, Results
from emulated.basics import GIB, MIB, PAGE_BYTES, ScriptError
from qmp import Qmp

_RUN = {"total_ms": 100.0, "downtime_ms": 4.0, "moved_bytes": 1 << 30, "cpu_s": 2.0, "own_bytes": 8 << 20,
        "used_bytes": 1 << 30}


def filled(ours_ms=100.0, peer_ms=1000.0):
    """Results of one run of each usual contender."""
    results = Results()
    for cell in cells.usual():
        for name in cell.contenders:
            own = name.startswith("ours")
            run = {**_RUN, "total_ms": ours_ms if own else peer_ms, "round_0_bytes_per_s": 1e9, "verify_ms": 1.0}
            results.add(cell.name, name, run)
    return results


class Goals(unittest.TestCase):
    """Rows."""

    def test_each_goal_has_its_contenders_also_in_a_quick_run(self):
        for chosen in (cells.usual(), cells.quick(cells.usual()), cells.every()):
            by_name = {cell.name: set(cell.contenders) for cell in chosen}
            self.assertEqual(len(by_name), len(chosen), "two cells of one name")
            for goal in goals.GOALS:
                self.assertIn(goal.ours, by_name[goal.cell], goal.name)
                self.assertTrue(by_name[goal.cell] & set(goal.peers), goal.name)
        for chosen in (cells.usual(), cells.every()):
            by_name = {cell.name: set(cell.contenders) for cell in chosen}
            for goal in goals.GOALS:
                self.assertLessEqual(set(goal.peers), by_name[goal.cell], goal.name)

    def test_cpu_time_is_by_the_same_gib_for_both_whatever_they_move(self):
        results = Results()
        results.add(goals.AGED, "ours-zero-skipped-unverified", {**_RUN, "moved_bytes": 8 * GIB})
        results.add(goals.AGED, "qemu", {**_RUN, "cpu_s": 4.0, "moved_bytes": GIB})
        row = goals.rows(results, 300, ["cpu-seconds-per-gib"])[0]
        self.assertEqual((row.ours, row.peer, row.ratio, row.note), (2.0, 4.0, 0.5, None))

    def test_a_row_tells_who_is_lacking_and_has_no_verdict_where_one_failed(self):
        name = "fresh-idle-memfd-total-better-of-hints-and-none"
        results = Results(2)
        for _ in range(2):
            results.add(goals.MEMFD_DEFAULTS, "ours", {**_RUN, "total_ms": 1.0})
        results.add(goals.MEMFD_DEFAULTS, "qemu", _RUN)
        row = goals.rows(results, 300, [name])[0]
        self.assertEqual((row.met, row.note), (True, "qemu in 1 of 2 rounds; without qemu-hints: it did not take part"))
        results.skip(goals.MEMFD_DEFAULTS, "qemu-hints", measure.Unavailable("no hints"))
        row = goals.rows(results, 300, [name])[0]
        self.assertEqual((row.met, row.note), (True, "qemu in 1 of 2 rounds; without qemu-hints: no hints"))
        results.skip(goals.MEMFD_DEFAULTS, "qemu", ScriptError("it broke"))
        row = goals.rows(results, 300, [name])[0]
        self.assertEqual((row.ratio, row.met), (0.01, None))
        self.assertIn("qemu in 1 of 2 rounds: FAILED: it broke", row.note)

    def test_a_verdict_on_ours_alone_stands_though_a_peer_failed(self):
        results = Results(1)
        results.add(goals.FRESH, "ours-soft", _RUN)
        results.skip(goals.FRESH, "qemu-hints", ScriptError("it broke"))
        rows = {row.name: row for row in goals.rows(results, 300, ["downtime-idle", "downtime-idle-over-qemu"])}
        self.assertIs(rows["downtime-idle"].met, True)
        self.assertIsNone(rows["downtime-idle-over-qemu"].met)

    def test_compression_and_a_question_that_was_not_asked_are_told(self):
        results = Results(1)
        results.add(goals.FRESH, "ours-soft-asked", {**_RUN, "compression": "lz4", "asked": False})
        results.add(goals.FRESH, "ours", {**_RUN, "compression": "none", "asked": False})
        self.assertEqual(results.remarks(goals.FRESH, "ours-soft-asked"), [
            "ours-soft-asked compressed by lz4 in 1 of 1 rounds", "ours-soft-asked did not ask in 1 of 1 rounds",
        ])
        self.assertEqual(results.remarks(goals.FRESH, "ours"), [])
        for used, wire, told in (("none", 9, "none"), ("none", 8, "some pages"), ("zstd", 5, "zstd")):
            report = {"used": used, "raw_bytes": 9, "wire_bytes": wire}
            self.assertEqual(ours._compression(report), told)  # pylint: disable=protected-access

    def test_a_row_beside_a_goal_has_no_verdict_and_is_printed(self):
        rows = goals.rows(filled(), 300, goals.names())
        beside = [row.name for row in rows if row.goal is None]
        self.assertEqual(beside, [
            "fresh-idle-asked-total-with-hints", "fresh-idle-zero-skipped-total-without-hints",
            "aged-asked-total-with-hints", "aged-zero-skipped-total-without-hints",
        ])
        with contextlib.redirect_stdout(io.StringIO()) as said:
            output.print_goals(rows)
        self.assertTrue(all(name in said.getvalue() for name in beside))
        self.assertTrue(all(row.met is None and row.ratio for row in rows if row.goal is None))

    def test_a_goal_is_met_or_missed_by_its_bound(self):
        rows = {row.name: row for row in goals.rows(filled(100.0, 1000.0), 300, goals.names())}
        self.assertEqual(rows["fresh-idle-total-with-hints"].ratio, 0.1)
        self.assertIs(rows["fresh-idle-total-with-hints"].met, True)
        self.assertIs(rows["fresh-idle-memfd-total-better-of-hints-and-none"].met, False)
        self.assertIs(rows["round-0-bytes-per-second-over-floor"].met, True)
        self.assertIs(rows["downtime-idle"].met, True)
        self.assertEqual(rows["busy-downtime"].goal, 300)
        self.assertEqual(rows["cpu-seconds-per-gib"].ours, 2.0)
        self.assertEqual(rows["sender-peak-memory"].ours, 8.0)
        self.assertTrue(all(row.skipped is None for row in rows.values()))

    def test_the_best_of_the_peers_is_the_one_to_beat(self):
        results = filled()
        results.add(goals.POPULATED, "qemu-2ch", {**_RUN, "total_ms": 10.0})
        results.add(goals.POPULATED, "qemu-2ch", {**_RUN, "total_ms": 20.0})
        row = next(row for row in goals.rows(results, 300, ["fresh-idle-populated-total-best-channels"]))
        self.assertEqual((row.peer_name, row.peer), ("qemu-2ch", 20.0))

    def test_a_row_without_a_figure_says_why(self):
        results = Results()
        results.skip(goals.GBIT, "ours-compress", measure.Unavailable("migrate-send has no --compress"))
        self.assertFalse(results.failed)
        row = next(row for row in goals.rows(results, 300, ["gbit-compress-auto-over-compressed"]))
        self.assertEqual((row.skipped, row.met, row.lost), ("migrate-send has no --compress", None, False))
        results.skip(goals.FRESH, "qemu", ValueError("broken"))
        self.assertTrue(results.failed)

    def test_a_figure_that_is_not_there_though_nobody_was_skipped_is_lost(self):
        results = filled()
        self.assertFalse([row.name for row in goals.rows(results, 300, goals.names()) if row.lost])
        for runs in results.each().values():
            for run in runs:
                del run["own_bytes"]
        lost = [row.name for row in goals.rows(results, 300, goals.names()) if row.lost]
        self.assertEqual(lost, ["sender-peak-memory"])

    def test_a_migration_that_did_not_end_counts_as_long_as_it_was_waited_for(self):
        results = Results()
        results.add("busy", "qemu", {"total_ms": None, "limit_s": 20})
        self.assertEqual(results.median("busy", "qemu", "total_ms"), 20e3)
        with self.assertRaises(Missing):
            results.median("busy", "qemu", "cpu_s_per_gib")

    def test_only_takes_what_a_row_needs(self):
        needed = goals.needed(["round-0-bytes-per-second-over-floor"], cells.usual())
        self.assertEqual(needed, {goals.FRESH: {"ours", "floor"}})


class Output(unittest.TestCase):
    """Files."""

    def test_json_and_plot_hold_every_row(self):
        results = filled()
        details = goals.details(results)
        rows = [*goals.rows(results, 300, goals.names()), *details, *goals.verify_costs(results)]
        with tempfile.TemporaryDirectory() as folder:
            output.write_json(Path(folder, "rows.json"), rows, "machine\nhow", results.reasons())
            output.write_plot(Path(folder, "plot.svg"), details, "machine\nhow")
            listed = json.loads(Path(folder, "rows.json").read_text())["rows"]
            bars = xml.dom.minidom.parse(str(Path(folder, "plot.svg"))).getElementsByTagName("rect")
        self.assertEqual([row["name"] for row in listed], [row.name for row in rows])
        self.assertEqual(len({row["name"] for row in listed}), len(listed))
        self.assertTrue(all({"name", "ours", "peer", "ratio", "unit", "runs"} <= set(row) for row in listed))
        self.assertEqual(len(bars), len(details) + 1)

    def test_what_was_skipped_is_counted_by_the_tests_and_what_failed_is_not(self):
        results = Results()
        results.skip("cell", "qemu", measure.Unavailable("no root"))
        results.skip("cell", "ours", ValueError("broken"))
        with contextlib.redirect_stdout(io.StringIO()) as said:
            output.print_skipped(results.reasons())
        counted = tally.Tally()
        for line in said.getvalue().splitlines():
            counted.line(line)
        self.assertEqual(list(counted.reasons), ["bench: cell qemu: no root"])
        self.assertIn("FAILED: bench: cell ours: broken", said.getvalue())


class Command(unittest.TestCase):
    """Exit codes."""

    def run_without_qemu(self, *flags):
        """Its exit code and what it printed, where asking for any QEMU fails."""
        lost = mock.patch.object(command.emulators, "find", side_effect=ScriptError("apt:\nno network"))
        flags = mock.patch.object(sys, "argv", ["scripts/bench", "--quick", *flags])
        with lost, flags, mock.patch.object(command, "Programs"), mock.patch.object(command.signal, "signal"):
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()):
                return command.main(), said.getvalue()

    def test_where_no_qemu_can_be_had_it_says_that_it_was_skipped(self):
        self.assertEqual(
            self.run_without_qemu(), (77, "SKIPPED: bench: no QEMU is to be had: apt: no network\n")
        )

    def test_what_was_measured_is_left_whatever_ends_the_run(self):
        def broken(_arguments, _chosen, _program, _programs, results):
            results.add(goals.FRESH, "ours", dict(_RUN))
            raise ends

        found = SimpleNamespace(version="10.0.2")
        for ends, code in ((OSError("no room"), 1), (KeyboardInterrupt(), 130), (KeyError("odd"), None)):
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                left = Path(folder, "rows.json")
                flags = ["scripts/bench", "--quick", "--json", str(left)]
                for what in (
                    mock.patch.object(command.emulators, "find", return_value=found),
                    mock.patch.object(command, "Programs"), mock.patch.object(command.signal, "signal"),
                    mock.patch.object(command, "measure", broken),
                    mock.patch.object(sys, "argv", flags), contextlib.redirect_stdout(io.StringIO()),
                    contextlib.redirect_stderr(io.StringIO()),
                ):
                    stack.enter_context(what)
                if code is None:
                    with self.assertRaises(KeyError):
                        command.main()
                else:
                    self.assertEqual(command.main(), code)
                names = [row["name"] for row in json.loads(left.read_text())["rows"]]
                self.assertIn(f"{goals.FRESH}-ours", names)

    def test_a_qemu_that_was_named_has_to_be_there(self):
        self.assertEqual(self.run_without_qemu("--qemu", "/nowhere"), (1, ""))


class Scale(unittest.TestCase):
    """Series, what is written for them, and what is told of a guest that cannot be caught up with."""

    def setUp(self):
        self.series = scale.series(scale.FULL, 8 * GIB, Path("/there"), 20)
        self.results = Results()
        for one in self.series:
            for point in one.points:
                self.results.add(one.name, point.name, {"total_ms": 100.0, "downtime_ms": 2.0})

    def row(self, name):
        """The row of that name."""
        found = scale.rows(self.series, self.results)
        return next(row for listed in found.values() for row in listed if row.name == name)

    def test_each_series_has_its_points(self):
        names = {one.name: [point.name for point in one.points] for one in self.series}
        self.assertEqual(names["scale-ram"], ["8g", "64g", "512g", "4t"])
        self.assertEqual(names["scale-streams-300m"], ["1", "2", "4", "8"])
        self.assertEqual(names["scale-streams-4g"], ["1", "2", "4", "8"])
        self.assertEqual(names["scale-regions"], ["1", "4", "16", "64"])
        for one in self.series[1:3]:
            self.assertTrue(all(point.way.send[-2:] == ("--compress", "none") for point in one.points))
        rates = [point.at for point in self.series[-2].points]
        self.assertEqual((rates[0], rates == sorted(rates), rates[-1] > 250), (0, True, True))
        for extent, memory in ((scale.FULL, GIB), (scale.QUICK, 512 * MIB)):
            listed = [one.name for one in scale.series(extent, memory, Path("/there"), 4)]
            self.assertEqual(len(set(listed)), 6, listed)

    def test_a_file_guest_has_the_same_pages_in_any_number_of_regions(self):
        with tempfile.TemporaryDirectory() as folder:
            ram, total = Path(folder, "ram"), 64 * MIB
            scale.write_ram(ram, total, 16 * MIB)
            content = ram.read_bytes()
            self.assertLess(os.stat(ram).st_blocks * 512, 17 * MIB)
            for count in (1, 4, 64):
                scale.write_layout(Path(folder, "layout"), total, count)
                layout = json.loads(Path(folder, "layout").read_text())
                starts = [region["start"] for region in layout["regions"]]
                self.assertEqual((layout["page_size"], len(starts)), (PAGE_BYTES, count))
                self.assertEqual(sum(region["bytes"] for region in layout["regions"]), total)
                for region, after in zip(layout["regions"], starts[1:]):
                    self.assertGreater(after, region["start"] + region["bytes"])
                self.assertFalse([start for start in starts if start % PAGE_BYTES])
        pages = [content[at : at + PAGE_BYTES] for at in range(0, total, PAGE_BYTES)]
        self.assertEqual(sum(any(page) for page in pages), 16 * MIB // PAGE_BYTES)
        for index in range(64):
            self.assertTrue(any(pages[len(pages) // 64 * index]), "a region of 64 without a page in use")

    def test_a_goal_is_set_for_4_tib_alone(self):
        self.assertIs(self.row("scale-ram-4t-total").met, True)
        self.assertIsNone(self.row("scale-ram-512g-total").met)
        self.results.add("scale-ram", "4t", {"total_ms": 300.0, "downtime_ms": 2.0})
        self.assertIs(self.row("scale-ram-4t-total").met, False)

    def test_what_did_not_end_is_told_and_has_not_failed(self):
        endless = {"total_ms": None, "downtime_ms": None, "limit_s": 20}
        one = self.series[-2]
        self.results = Results()
        for point in one.points:
            past = point.name in ("150-percent", "200-percent")
            self.results.add(one.name, point.name, endless if past else {"total_ms": 100.0, "downtime_ms": 2.0})
        self.results.add(one.name, "150-percent", {"total_ms": 9e3, "downtime_ms": 290.0})
        total, down = self.row("scale-dirty-200-percent-total"), self.row("scale-dirty-200-percent-downtime")
        self.assertEqual((total.ours, total.ratio, total.note), (20e3, 200, "not within 20 s in 1 of 1 rounds"))
        self.assertEqual((down.ours, down.ratio, down.skipped), (None, None, None))
        self.assertEqual(self.row("scale-dirty-150-percent-downtime").ours, 290.0)
        self.assertIn("1 of 2", self.row("scale-dirty-150-percent-total").note)
        self.assertFalse(self.results.failed)

    def test_a_time_out_of_ours_is_a_figure_only_where_one_was_set(self):
        report = {"result": "timed-out", "wire_bytes": 7, "verified": None}
        way = ours.Ours(timeout_s=4)
        self.assertEqual(ours._figures(report, way, 1.0, None)["limit_s"], 4)  # pylint: disable=protected-access

    def test_an_odd_report_or_answer_fails_one_run_and_not_all(self):
        odd = {"result": "completed", "verified": True, "rounds": []}
        for report in (odd, {**odd, "verified": None, "result": "failed"}, {}):
            with self.assertRaises(ScriptError):
                ours._figures(report, ours.Ours(), 1.0, None)  # pylint: disable=protected-access
        with self.assertRaises(ScriptError):
            measure.cpu_seconds(0x3FFFFFF)  # more than there can be processes
        near, far = socket.socketpair()
        with near:
            far.sendall(b'{"QMP": {}}\n{"return": {}}\n')
            control = Qmp(near)
            far.close()
            with self.assertRaises(ScriptError):
                control.command("query-status")
        with self.assertRaises(ScriptError):
            ours.milliseconds("soon")

    def test_both_curves_are_drawn_with_every_point(self):
        endless = {"total_ms": None, "downtime_ms": None, "limit_s": 20}
        for _ in range(2):
            self.results.add("scale-dirty", "200-percent", endless)
        found = scale.rows(self.series, self.results)
        with tempfile.TemporaryDirectory() as folder:
            output.write_curves(Path(folder, "plot.svg"), scale.panels(found, scale.FULL), "machine\nhow")
            drawn = xml.dom.minidom.parse(str(Path(folder, "plot.svg")))
            output.write_json(Path(folder, "rows.json"), found[self.series[0]], "machine\nhow", {})
            listed = json.loads(Path(folder, "rows.json").read_text())["rows"]
        dots = drawn.getElementsByTagName("circle")
        self.assertEqual(len(drawn.getElementsByTagName("polyline")), 3)
        self.assertEqual(len(dots), 4 + 8 + 8)
        self.assertEqual(sum(dot.getAttribute("fill") == "white" for dot in dots), 2)
        self.assertTrue(all({"name", "ours", "peer", "ratio", "unit", "runs", "note"} <= set(row) for row in listed))

    def test_a_series_that_was_skipped_leaves_no_curve_and_no_figure(self):
        self.results = Results()
        for point in self.series[0].points:
            self.results.skip("scale-ram", point.name, measure.Unavailable("too little memory"))
        found = scale.rows(self.series[:1], self.results)
        self.assertEqual([row.skipped for row in found[self.series[0]]], ["too little memory"] * 4)
        self.assertEqual(scale.panels(found, scale.FULL), [])


class HostMemoryTest(unittest.TestCase):
    """What is touched and given back before a contender."""

    def test_touched_memory_is_held_and_given_back_as_it_is_used(self):
        command = [sys.executable, host_memory.__file__, str(256 * MIB), str(128 * MIB)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
            try:
                self.assertEqual(holder.stdout.readline(), b"touched\n")
                held = measure.own_bytes(holder.pid)
                self.assertGreater(held, 256 * MIB)
                holder.stdin.write(b"\n")
                holder.stdin.flush()
                deadline = time.monotonic() + 30
                while (measure.own_bytes(holder.pid) or 0) > held - 64 * MIB:
                    self.assertLess(time.monotonic(), deadline, "nothing was given back")
                    time.sleep(0.01)
            finally:
                holder.kill()

    def test_who_touches_all_of_a_guest_is_known(self):
        sizes = SimpleNamespace(memory_bytes=8 * GIB, churn_bytes=512 * MIB)
        by_name = {cell.name: cell for cell in cells.usual()}
        rows = {
            ("fresh-init0-anon-cold", "qemu"): 0,
            ("fresh-init0-anon-cold", "ours-skip-none"): 8 * GIB,
            ("fresh-init1-anon-cold", "qemu-hints"): 8 * GIB,
            ("fresh-init1-memfd-cold", "qemu"): 8 * GIB,
            ("fresh-init1-memfd-cold", "ours"): 0,
            ("aged-init0-anon-cold", "qemu-hints"): 0,
            ("aged-init0-anon-cold", "qemu-4ch"): 8 * GIB,
            ("aged-init0-anon-cold", "ours-zero-skipped"): 8 * GIB,
            ("busy-init0-anon-cold", "ours"): 3 * 512 * MIB,
        }
        for (cell, contender), expected in rows.items():
            self.assertEqual(cells.touched_bytes(by_name[cell], contender, sizes), expected, (cell, contender))


if __name__ == "__main__":
    unittest.main()
