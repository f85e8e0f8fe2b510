"""The rows that the goals are about, in the order of the table of goals, and the rows beside them."""

from dataclasses import dataclass

from contest import Missing
from emulated.basics import GIB, MIB

FRESH = "fresh-init0-anon-cold"
POPULATED = "fresh-init0-anon-populated"
GBIT = "fresh-init0-anon-cold-1gbit"
AGED = "aged-init0-anon-cold"
BUSY = "busy-init0-anon-cold"
MEMFD = "fresh-init0-memfd-cold"
MEMFD_DEFAULTS = "fresh-init1-memfd-cold"
_ALL = ("qemu", "qemu-2ch", "qemu-4ch", "qemu-hints", "qemu-hints-2ch", "qemu-hints-4ch")
_ZSTD = ("qemu-zstd-4ch", "qemu-hints-zstd-2ch", "qemu-hints-zstd-4ch")


@dataclass
class Row:
    """A comparison. `goal` bounds `judged`, which is the ratio unless it says otherwise; `None`: there is no goal."""

    name: str
    ours: float = None
    peer: float = None
    ratio: float = None
    unit: str = "ms"
    runs: dict = None
    peer_name: str = ""
    goal: float = None
    at_least: bool = False
    judged: str = "ratio"
    skipped: str = None
    note: str = None
    withdrawn: bool = False  # a contender failed: there is no verdict
    lost: bool = False  # without a figure, and nobody was skipped: the bench is at fault

    @property
    def met(self):
        """Whether the goal is reached; None where there is none or no figure."""
        value = getattr(self, self.judged)
        if self.goal is None or value is None or self.withdrawn:
            return None
        return value >= self.goal if self.at_least else value <= self.goal


@dataclass
class _Goal:
    """How a row is made: a figure of `ours` in `cell` against that of the best of `peers`."""

    name: str
    cell: str
    ours: str
    peers: tuple
    goal: float
    key: str = "total_ms"
    unit: str = "ms"
    scale: float = 1
    at_least: bool = False
    judged: str = "ratio"


GOALS = (
    _Goal("fresh-idle-total-with-hints", FRESH, "ours", ("qemu-hints",), 0.12),
    _Goal("fresh-idle-asked-total-with-hints", FRESH, "ours-soft-asked", ("qemu-hints",), None),
    _Goal("fresh-idle-populated-total-best-channels", POPULATED, "ours", _ALL, 0.4),
    _Goal("fresh-idle-skip-none-total-without-hints", FRESH, "ours-skip-none", ("qemu",), 0.5),
    _Goal("fresh-idle-zero-skipped-total-without-hints", FRESH, "ours-zero-skipped", ("qemu",), None),
    _Goal("fresh-idle-memfd-total-better-of-hints-and-none", MEMFD_DEFAULTS, "ours", ("qemu", "qemu-hints"), 0.02),
    _Goal("aged-total-with-hints", AGED, "ours", ("qemu-hints",), 0.12),
    _Goal("aged-asked-total-with-hints", AGED, "ours-soft-asked", ("qemu-hints",), None),
    _Goal("aged-skip-none-total-without-hints", AGED, "ours-skip-none", ("qemu",), 0.25),
    _Goal("aged-zero-skipped-total-without-hints", AGED, "ours-zero-skipped", ("qemu",), None),
    _Goal("aged-default-over-skip-none", AGED, "ours", ("ours-skip-none",), 0.10),
    _Goal("gbit-compress-auto-over-uncompressed", GBIT, "ours-compress", _ALL, 0.35),
    _Goal("gbit-compress-auto-over-compressed", GBIT, "ours-compress", _ZSTD, 0.9),
    _Goal(
        "round-0-bytes-per-second-over-floor", FRESH, "ours", ("floor",), 0.9, "round_0_bytes_per_s", "MB/s", 1e-6, True
    ),
    _Goal("downtime-idle", FRESH, "ours-soft", ("qemu-hints",), 10, "downtime_ms", judged="ours"),
    _Goal("downtime-idle-over-qemu", FRESH, "ours-soft", _ALL, 0.1, "downtime_ms"),
    _Goal("sparse-4-tib-over-8-gib", "sparse", "ours-4t", ("ours-8g",), 1.5),
    _Goal("busy-downtime", BUSY, "ours", _ALL, None, "downtime_ms", judged="ours"),
    _Goal("busy-total", BUSY, "ours", _ALL, 0.5),
    _Goal("cpu-seconds-per-gib", AGED, "ours-zero-skipped-unverified", ("qemu",), 0.7, "cpu_s_per_gib", "s"),
    _Goal(
        "sender-peak-memory", MEMFD, "ours-memory", ("qemu-hints",), 24, "own_bytes", "MiB", 1 / MIB, judged="ours",
    ),
)


def names():
    """The names of all goals' rows."""
    return [goal.name for goal in GOALS]


def needed(wanted, cells):
    """Of the cells, the contenders that these rows need; a name may also be that of a whole cell."""
    by_cell = {}
    for goal in GOALS:
        if goal.name in wanted:
            by_cell.setdefault(goal.cell, set()).update((goal.ours, *goal.peers))
    for cell in cells:
        if cell.name in wanted:
            by_cell[cell.name] = set(cell.contenders)
    for contenders in by_cell.values():
        if "floor" in contenders:
            contenders.add("ours")
    return by_cell


def _add_derived(results):
    """CPU time by what is not zero of the guest: one measure for all, whatever each of them moves for it."""
    for runs in results.each().values():
        for run in runs:
            if run.get("cpu_s") is not None and run.get("used_bytes"):
                run["cpu_s_per_gib"] = run["cpu_s"] / (run["used_bytes"] / GIB)


def _row(goal, results, downtime_ms):
    limit = downtime_ms if goal.name == "busy-downtime" else goal.goal
    row = Row(goal.name, unit=goal.unit, goal=limit, at_least=goal.at_least, judged=goal.judged)
    try:
        ours = results.runs(goal.cell, goal.ours, goal.key)
        row.ours = results.median(goal.cell, goal.ours, goal.key) * goal.scale
        row.runs = {"ours": [value * goal.scale for value in ours], "peer": []}
        row.peer_name = peer = results.best(goal.cell, goal.peers, goal.key)
        row.peer = results.median(goal.cell, peer, goal.key) * goal.scale
        row.runs["peer"] = [value * goal.scale for value in results.runs(goal.cell, peer, goal.key)]
        row.ratio = row.ours / row.peer if row.peer else None
    except Missing as why:
        row.lost = not any(results.skipped(goal.cell, name) for name in (goal.ours, *goal.peers))
        # A row that is judged by ours alone has its verdict without a peer.
        if row.ours is None or goal.judged == "ratio":
            row.ours = row.ratio = None
            row.skipped = str(why)
        else:
            row.peer_name = f"none: {why}"
    named = (goal.ours, *goal.peers)
    notes = [results.lacking(goal.cell, name) for name in named]
    notes += [remark for name in (goal.ours, row.peer_name) for remark in results.remarks(goal.cell, name)]
    # A verdict on ours alone needs no peer.
    judged = named if goal.judged == "ratio" else named[:1]
    row.withdrawn = any(results.failed_in(goal.cell, name) for name in judged)
    row.note = "; ".join(note for note in notes if note) or None
    return row


def rows(results, downtime_ms, wanted):
    """The goals' rows, or those of them that are wanted."""
    _add_derived(results)
    return [_row(goal, results, downtime_ms) for goal in GOALS if goal.name in wanted]


def details(results):
    """A row for each cell and contender: its total against that of ours in the same cell. Of the floor: floor/ours."""
    found = []
    for (cell, contender), _ in results.each().items():
        own = "ours-8g" if cell == "sparse" else "ours"
        row = Row(f"{cell}-{contender}", peer=results.median(cell, contender, "total_ms"), peer_name=contender)
        row.runs = {"ours": [], "peer": results.runs(cell, contender, "total_ms")}
        notes = [results.lacking(cell, contender), *results.remarks(cell, contender)]
        row.note = "; ".join(filter(None, notes)) or None
        try:
            row.ours = results.median(cell, own, "total_ms")
            row.runs["ours"] = results.runs(cell, own, "total_ms")
            row.ratio = row.peer / row.ours if contender == "floor" else row.ours / row.peer
        except Missing:
            row.ours = row.ratio = None
        found.append(row)
    return found


def verify_costs(results):
    """What --verify took in each cell, which no total has in it."""
    found = []
    for (cell, contender), _ in results.each().items():
        if contender == "ours":
            try:
                runs = results.runs(cell, contender, "verify_ms")
            except Missing:
                continue
            value = results.median(cell, contender, "verify_ms")
            found.append(Row(f"verify-{cell}", ours=value, runs={"ours": runs, "peer": []}))
    return found
