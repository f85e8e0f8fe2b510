#!/usr/bin/env python3
"""The parts of the bench that measure nothing: that each goal has its contenders, verdicts, JSON and the plot."""

import json
import sys
import tempfile
import unittest
import xml.dom.minidom
from pathlib import Path

sys.dont_write_bytecode = True
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1] / "capture")]

# pylint: disable=wrong-import-position
import cells
import goals
import measure
import output
from contest import Missing, Results

_RUN = {"total_ms": 100.0, "downtime_ms": 4.0, "moved_bytes": 1 << 30, "cpu_s": 2.0, "own_bytes": 8 << 20}


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
        self.assertEqual((row.skipped, row.met), ("migrate-send has no --compress", None))
        results.skip(goals.FRESH, "qemu", ValueError("broken"))
        self.assertTrue(results.failed)

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


if __name__ == "__main__":
    unittest.main()
