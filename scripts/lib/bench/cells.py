"""What is measured: cells, each a guest on a kind of memory over a link, and who takes part in it.

A contender's name says how it is set up. `qemu`, `qemu-hints`, each with `-2ch` or `-4ch` for multifd and `-zstd` for
its compression; `ours`, with `-skip-none`, `-zero-skipped` (free pages are sent, zero pages and holes are not),
`-compress` (auto), `-unverified` (it counts CPU time), `-memory` (its own memory is sampled), `-soft` (the built-in
guest, which runs, as much of it in use) or `-soft-asked` (the same, and its balloon is asked for free pages) behind it,
or with the size of a sparse soft guest; `floor`.
"""

import itertools
from dataclasses import dataclass, replace

import ours
from measure import Unavailable
from qemu import Way
from templates import Kind

SPARSE = {"8g": 8 << 30, "64g": 64 << 30, "512g": 512 << 30, "4t": 4 << 40}
SPARSE_USED = "300M"


@dataclass(frozen=True)
class Cell:
    """One comparison; all in it take turns."""

    life: str
    init: int
    ram: str
    receiver: str  # cold or populated
    contenders: tuple
    gbit: float = 0  # the link; 0: none, loopback
    delay_ms: float = 0

    @property
    def name(self):
        """In kebab-case."""
        if self.life == "sparse":
            return "sparse"
        link = f"-{self.gbit:g}gbit" if self.gbit else ""
        link += f"-{self.delay_ms:g}ms".replace(".", "-") if self.delay_ms else ""
        return f"{self.life}-init{self.init}-{self.ram}-{self.receiver}{link}"

    def kinds(self):
        """The templates that its contenders start from."""
        if self.life == "sparse":
            return set()
        kinds = {kind_of(self, name) for name in self.contenders if name.startswith("qemu")}
        if any(name.startswith("ours") for name in self.contenders):
            kinds.add(Kind(self.life, self.init, True))
        return kinds


def kind_of(cell, contender):
    """The template of a contender: a guest that offers hints only where they are to be taken."""
    return Kind(cell.life, cell.init, "hints" in contender)


_QEMU = ("qemu", "qemu-2ch", "qemu-4ch", "qemu-hints", "qemu-hints-2ch", "qemu-hints-4ch")
_COMPRESSED = ("qemu-zstd-4ch", "qemu-hints-zstd-2ch", "qemu-hints-zstd-4ch")
_FEW = ("qemu", "qemu-4ch", "qemu-hints", "ours")


def usual():
    """The cells that the goals need, and one or more of each life, memory, receiver and setting of init_on_alloc."""
    fresh = (*_QEMU, "ours", "ours-soft", "ours-soft-asked", "ours-skip-none", "ours-zero-skipped", "floor")
    aged = (*_QEMU, "ours", "ours-soft-asked", "ours-skip-none", "ours-zero-skipped")
    aged += ("ours-zero-skipped-unverified", "floor")
    return [
        Cell("sparse", 0, "anon", "cold", tuple(f"ours-{size}" for size in SPARSE)),
        Cell("fresh", 0, "anon", "cold", fresh),
        Cell("fresh", 0, "anon", "populated", (*_QEMU, "ours", "floor")),
        Cell("fresh", 0, "memfd", "cold", ("qemu-hints", "qemu-hints-4ch", "ours", "ours-memory")),
        Cell("fresh", 0, "anon", "cold", (*_QEMU, *_COMPRESSED, "ours", "ours-compress"), gbit=1),
        Cell("fresh", 1, "anon", "cold", _FEW),
        Cell("fresh", 1, "memfd", "cold", ("qemu", "qemu-4ch", "qemu-hints", "ours")),
        Cell("aged", 0, "anon", "cold", aged),
        Cell("aged", 1, "anon", "cold", _FEW),
        Cell("busy", 0, "anon", "cold", (*_QEMU, "ours")),
        Cell("busy", 1, "anon", "cold", _FEW),
    ]


def every():
    """Every life on every memory, with each setting, and all of QEMU's ways: hours. What is usual comes first."""
    have = usual()
    seen = {cell.name for cell in have}
    for life, init, ram, receiver in itertools.product(
        ("fresh", "aged", "busy"), (0, 1), ("anon", "memfd"), ("cold", "populated")
    ):
        cell = Cell(life, init, ram, receiver, (*_QEMU, "ours"))
        if cell.name not in seen:
            have.append(cell)
    return have


def behind_links():
    """The cells of `scripts/bench links`."""
    cells = []
    for gbit, delay in itertools.product((10, 1), (0.2, 20)):
        who = (*_QEMU, *_COMPRESSED[1:], "ours", "ours-compress", "floor")
        cells.append(Cell("fresh", 0, "anon", "cold", who, gbit=gbit, delay_ms=delay))
        cells.append(Cell("busy", 0, "anon", "cold", _FEW, gbit=gbit, delay_ms=delay))
    return cells


def part(cell, contenders):
    """A cell with those of its contenders alone that are among these."""
    return replace(cell, contenders=tuple(name for name in cell.contenders if name in contenders))


def quick(cells):
    """The same cells with fewer ways of QEMU: enough that each goal has its number."""
    dropped = {"qemu-2ch", "qemu-4ch", "qemu-hints-2ch", "qemu-zstd-4ch", "ours-64g", "ours-512g"}
    short = [part(cell, set(cell.contenders) - dropped) for cell in cells]
    return [cell for cell in short if cell.init == 0 or cell.ram == "memfd"]


def touched_bytes(cell, contender, sizes):
    """What a contender may touch of a guest's RAM at both ends together, beyond what an idle guest uses."""
    touches_all = "skip-none" in contender or (cell.life == "aged" and "zero-skipped" in contender)
    if contender.startswith("qemu"):
        # A hole of a memfd is filled by whoever reads it; a guest that is asked zeroes what it hands over, if it is set to.
        by_driver = cell.init == 1 if "hints" in contender else cell.life == "aged"
        touches_all = cell.ram == "memfd" or by_driver
    if touches_all:
        return sizes.memory_bytes
    return 3 * sizes.churn_bytes if cell.life == "busy" else 0


def way_of(cell, contender, downtime_ms, limit_s):
    """How QEMU is set up for a contender."""
    channels = next((int(word[0]) for word in contender.split("-") if word.endswith("ch")), 1)
    compression = "zstd" if "zstd" in contender else "none"
    return Way(channels, compression, cell.ram, cell.receiver == "populated", downtime_ms, limit_s)


def ours_of(cell, contender, programs, downtime_ms):
    """How ours is set up for a contender; refused when it is not built to be."""
    send = ["--downtime-limit", f"{downtime_ms}ms"]
    if "skip-none" in contender:
        send += ["--skip", "none"]
    elif "zero-skipped" in contender:
        send += ["--skip", "zero,hole"]
    if "asked" in contender:
        send += ["--ask", "always"]  # where no page was ever touched it would not ask by itself
    if "compress" in contender:
        send += ["--compress", "auto"]
    elif cell.gbit and not programs.missing(["--compress"]):
        send += ["--compress", "none"]  # its default would be another contender's; on loopback the default is right
    missing = programs.missing(send)
    if missing:
        raise Unavailable(f"migrate-send has no {missing}")
    return ours.Ours(
        send=tuple(send), shared=cell.ram == "memfd", prealloc=cell.receiver == "populated",
        verify="unverified" not in contender, sample="memory" in contender,
    )
