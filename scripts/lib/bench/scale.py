"""Scale: what ours costs as RAM, streams, regions of RAM and the guest's dirty rate grow, and what TLS does. Nobody else
takes part.

Each series varies one thing. Its points take turns, every other round in the opposite order, each after memory has
settled; the first point is what the others are compared with.
"""

import contextlib
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import cells
import measure
import output
import tls
from contest import Missing, Results
from emulated.basics import GIB, MIB, PAGE_BYTES, ScriptError, progress
from goals import Row
from ours import Ours, Programs, migrate, soft_guest
from templates import TMPFS

RAM, STREAMS, REGIONS, DIRTY, TLS = "scale-ram", "scale-streams", "scale-regions", "scale-dirty", "scale-tls"
_SPARSE_GOAL = 1.5  # the largest guest over the smallest, same used pages
_TLS_GOAL = 1 / 0.6  # TLS over plain, one stream each
_ROOM = 2.2  # of memory, in what a guest uses: source and receiver, and a little
_STRETCHES = 64  # of used pages in the RAM file: as many as there are regions at most
_GAP_BYTES = 256 * MIB  # between two regions


@dataclass(frozen=True)
class Extent:
    """How far each series goes."""

    rams: dict
    used_bytes: int
    streams: tuple
    regions: tuple
    link_bits_per_s: int
    dirty_percents: tuple  # of what the link carries
    tls_streams: tuple


FULL = Extent(
    cells.SPARSE, 300 * MIB, (1, 2, 4, 8), (1, 4, 16, 64), 2_000_000_000, (0, 25, 50, 75, 100, 125, 150, 200),
    (1, 2, 4),
)
QUICK = Extent({"1g": GIB, "64g": 64 * GIB}, 32 * MIB, (1, 2), (1, 4), 200_000_000, (0, 50, 200), (1,))


@dataclass(frozen=True)
class Point:
    """One guest and one way to send it. `at` is where the point lies on its curve."""

    name: str
    at: float
    guest: tuple
    way: Ours = Ours()


@dataclass(frozen=True)
class Series:
    """Points that differ in one thing."""

    name: str
    about: str
    used_bytes: int
    points: tuple


def _named(size):
    return f"{size // GIB}g" if size % GIB == 0 else f"{size // MIB}m"


def _used(size):
    return "--used", f"{size // MIB}M"


def series(extent, memory_bytes, folder, timeout_s):
    """All series. `folder` is where the RAM file and its layouts are when they are needed."""
    used = extent.used_bytes
    found = [Series(
        RAM, f"sparse RAM, {used // MIB} MiB used", used,
        tuple(Point(name, size, tuple(soft_guest(size, *_used(used)))) for name, size in extent.rams.items()),
    )]
    for much in (used, memory_bytes // 2 // MIB * MIB):
        guest = tuple(soft_guest(memory_bytes, *_used(much)))
        found.append(Series(
            f"{STREAMS}-{_named(much)}", f"streams, {memory_bytes // MIB} MiB of RAM, {much // MIB} MiB used", much,
            tuple(Point(str(n), n, guest, Ours(("--streams", str(n), "--compress", "none"))) for n in extent.streams),
        ))
    file = ("--guest", "file", "--ram", str(folder / "ram"), "--layout")
    found.append(Series(
        REGIONS, f"regions, {memory_bytes // MIB} MiB of RAM in a file, {used // MIB} MiB used", used,
        tuple(Point(str(n), n, (*file, str(folder / f"layout-{n}.json"))) for n in extent.regions),
    ))
    carried = extent.link_bits_per_s // 8
    way = Ours(("--max-bandwidth", f"{extent.link_bits_per_s // 10**6}Mbit", "--compress", "none"), timeout_s=timeout_s)
    points = []
    for percent in extent.dirty_percents:
        rate = carried * percent // 100 // PAGE_BYTES
        guest = soft_guest(memory_bytes, *_used(used), "--workload", f"churn:{rate}")
        points.append(Point(f"{percent}-percent", rate * PAGE_BYTES / 1e6, tuple(guest), way))
    about = f"dirty rate, in percent of the link's {carried / 1e6:g} MB/s, {used // MIB} MiB used"
    return [*found, Series(DIRTY, about, used, tuple(points)), _tls(extent, memory_bytes, folder)]


def _tls(extent, memory_bytes, folder):
    """The same guest, plain and encrypted. Receivers' memory is populated, so that the copies are what is measured."""
    much = memory_bytes // 2 // MIB * MIB
    guest = tuple(soft_guest(memory_bytes, *_used(much)))
    points = []
    for streams in extent.tls_streams:
        send = ("--streams", str(streams), "--compress", "none")
        points.append(Point(f"plain-{streams}", streams, guest, Ours(send, prealloc=True)))
        way = Ours((*send, *tls.flags(folder, "source")), tls.flags(folder, "receiver"), prealloc=True)
        points.append(Point(f"tls-{streams}", streams, guest, way))
    about = f"TLS beside plain, by streams, receivers populated, {memory_bytes // MIB} MiB of RAM, {much // MIB} MiB used"
    return Series(TLS, about, much, tuple(points))


def write_ram(path, total_bytes, used_bytes):
    """A sparse RAM file: stretches of pages without a zero one, evenly spread."""
    block = random.Random(1).randbytes(MIB)
    with open(path, "wb") as ram:
        ram.truncate(total_bytes)
        for index in range(_STRETCHES):
            ram.seek(total_bytes // _STRETCHES * index)
            left = used_bytes // _STRETCHES // PAGE_BYTES * PAGE_BYTES
            while left > 0:
                left -= ram.write(block[:left])


def write_layout(path, total_bytes, count):
    """The layout file of that RAM in so many regions of one size."""
    each = total_bytes // count
    regions = [{"start": index * (each + _GAP_BYTES), "bytes": each} for index in range(count)]
    path.write_text(json.dumps({"page_size": PAGE_BYTES, "regions": regions}) + "\n")


class _Turns:
    """What all series need."""

    def __init__(self, programs, folder, arguments):
        self.programs = programs
        self.folder = folder
        self.rounds, self.host, self.memory = arguments.rounds, arguments.host, arguments.memory
        self.results = Results(arguments.rounds)

    def run(self, one):
        """A series."""
        for number in range(self.rounds):
            for point in one.points if number % 2 == 0 else one.points[::-1]:
                if self.results.skipped(one.name, point.name):
                    continue
                try:
                    figures = self._measured(one, point)
                except (ScriptError, OSError) as error:
                    self.results.skip(one.name, point.name, error)
                    progress(f"SKIPPED {one.name} {point.name}: {error}")
                    continue
                self.results.add(one.name, point.name, figures)
                total = f"{figures['total_ms']:.0f} ms" if figures["total_ms"] else f"not within {figures['limit_s']} s"
                progress(f"{one.name} {point.name}, round {number + 1}: {total}")

    def _measured(self, one, point):
        room = int(_ROOM * one.used_bytes) + GIB
        if measure.available_bytes() < room:
            raise measure.Unavailable(
                f"{measure.available_bytes() // MIB} MiB of memory are available, and this takes {room // MIB}"
            )
        missing = self.programs.missing(point.way.send)
        if missing:
            raise measure.Unavailable(f"migrate-send has no {missing}")
        with self.host.ready(int(_ROOM * one.used_bytes)) as before:
            return migrate(self.programs, self.folder, point.guest, point.way, self.memory, before=before)


def _values(one, point, results, key):
    """A figure of each run. What did not end has a total, as long as it was waited for, and no downtime."""
    if key == "total":
        return results.runs(one.name, point.name, "total_ms")
    measured = results.each().get((one.name, point.name), [])
    return [run["downtime_ms"] for run in measured if run["downtime_ms"] is not None]


def _row(one, point, results, key):
    """A point's figure, and the first point's beside it."""
    first = one.points[0]
    row = Row(f"{one.name}-{point.name}-{key}", peer_name=first.name)
    if (one.name, point.name) == (RAM, "4t"):
        row.goal = _SPARSE_GOAL
    if (one.name, point.name) == (TLS, "tls-1"):
        row.goal = _TLS_GOAL
    try:
        results.runs(one.name, point.name, "total_ms")  # or it is missing, and says why
        row.runs = {"ours": _values(one, point, results, key), "peer": []}
        if row.runs["ours"]:
            row.ours = statistics.median(row.runs["ours"])
        row.runs["peer"] = _values(one, first, results, key)
        row.peer = statistics.median(row.runs["peer"]) if row.runs["peer"] else None
        row.ratio = row.ours / row.peer if row.ours is not None and row.peer else None
    except Missing as why:
        if row.runs is None:
            row.skipped = str(why)
    measured = results.each().get((one.name, point.name), [])
    endless = [run["limit_s"] for run in measured if run["total_ms"] is None]
    notes = [f"not within {endless[0]} s in {len(endless)} of {len(measured)} rounds"] if endless else []
    names = dict.fromkeys((point.name, first.name) if row.goal is not None else (point.name,))
    notes += [] if row.skipped else filter(None, (results.lacking(one.name, name) for name in names))
    row.note = "; ".join([*notes, *results.remarks(one.name, point.name)]) or None
    row.withdrawn = any(results.failed_in(one.name, name) for name in names)
    return row


def rows(chosen, results):
    """The rows of each series: totals, and downtimes where the guest writes."""
    found = {}
    for one in chosen:
        keys = ("total", "downtime") if one.name == DIRTY else ("total",)
        found[one] = [_row(one, point, results, key) for key in keys for point in one.points]
    return found


def _curve(name, one, by_name, key):
    points = []
    for point in one.points:
        row = by_name[f"{one.name}-{point.name}-{key}"]
        if row.ours is not None:
            points.append(output.Dot(point.at, row.ours, min(row.runs["ours"]), max(row.runs["ours"]), row.note))
    return output.Curve(name, tuple(points))


def panels(found, extent):
    """What is drawn: total over RAM size, and total and downtime over the dirty rate."""
    drawn = []
    for one, listed in found.items():
        by_name = {row.name: row for row in listed}
        if one.name == RAM:
            ticks = tuple((point.at, f"{point.name[:-1]} {point.name[-1].upper()}iB") for point in one.points)
            curve = _curve("total", one, by_name, "total")
            drawn.append(output.Panel(f"Total over RAM: {one.about}", ticks, (curve,), across_log=True))
        elif one.name == DIRTY:
            ticks = tuple((point.at, f"{point.at:.0f} MB/s") for point in one.points)
            curves = tuple(_curve(key, one, by_name, key) for key in ("total", "downtime"))
            link = (extent.link_bits_per_s / 8 / 1e6, "link")
            about = f"Total and downtime over dirty rate: {one.used_bytes // MIB} MiB used"
            drawn.append(output.Panel(about, ticks, curves, up_log=True, mark=link))
    return [panel for panel in drawn if any(curve.dots for curve in panel.curves)]


def choose(arguments, folder):
    """The series that are wanted; ends the process with code 2 where there is none of a name."""
    extent = QUICK if arguments.quick else FULL
    every = series(extent, arguments.memory, folder, arguments.limit)
    unknown = set(arguments.only) - {one.name for one in every}
    if unknown:
        print(f"bench: there is no series {sorted(unknown)[0]}; --list has the names", file=sys.stderr)
        sys.exit(2)
    return extent, [one for one in every if not arguments.only or one.name in arguments.only]


def bench(arguments):
    """Measures, and leaves what was asked for. Returns the exit code: 1 when something failed that could be had."""
    if arguments.list:
        print("\n".join(one.name for one in choose(arguments, Path())[1]))
        return 0
    with contextlib.ExitStack() as closing:
        folder = Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="pageferry-bench-", dir=TMPFS)))
        extent, chosen = choose(arguments, folder)
        turns = _Turns(Programs(arguments.programs), folder, arguments)
        if any(one.name == REGIONS for one in chosen):
            write_ram(folder / "ram", arguments.memory, extent.used_bytes)
            for count in extent.regions:
                write_layout(folder / f"layout-{count}.json", arguments.memory, count)
        if any(one.name == TLS for one in chosen):
            tls.write_files(folder)
        try:
            for one in chosen:
                turns.run(one)
        finally:
            _leave(arguments, extent, chosen, turns.results)
    return 1 if turns.results.failed else 0


def _leave(arguments, extent, chosen, results):
    """Prints and writes what there is."""
    found = rows(chosen, results)
    heading = (
        f"{measure.machine()}\nOurs alone, loopback, verified, receivers cold; {arguments.rounds} rounds, medians; "
        f"{arguments.host.described()}; {extent.link_bits_per_s / 1e9:g} Gbit/s for dirty rates"
    )
    print(heading)
    for one, listed in found.items():
        output.print_series(one.about, listed)
    output.print_skipped(results.reasons())
    if arguments.json:
        every = [row for listed in found.values() for row in listed]
        output.write_json(arguments.json, every, heading, results.reasons())
    if arguments.plot:
        output.write_curves(arguments.plot, panels(found, extent), heading)
