"""What a guest says, over all the hosts that it has been on (the lines are described in guest.c).

A console is a list of pieces, one a host, in the order in which the guest was there. A line may begin on one host and
end on the next one: the pieces are joined before they are read.
"""

import re
from dataclasses import dataclass, field

from emulated.basics import ScriptError

_FAILED = re.compile(r"rig: failed: .*|Kernel panic - not syncing.*")
_FORMS = {
    "hb": re.compile(r"hb (\d+) (\d+)"),
    "mem": re.compile(r"mem (\d+) (\d+) (\d+) (\d+)"),
    "pattern": re.compile(r"pattern (\d+) (\d+) (\d+)"),
    "busy": re.compile(r"busy (\d+) (\d+)"),
    "bitmap": re.compile(r"bitmap" + r" (\d+)" * 8),
    "unloaded": re.compile(r"unloaded (\d+) (\d+) (\d+)"),
    "suspended": re.compile(r"suspended" + r" (\d+)" * 6),
    "churned": re.compile(r"churned" + r" (\d+)" * 5),
    "hogged": re.compile(r"hogged" + r" (\d+)" * 5),
    "loaded": re.compile(r"loaded (\d+)"),
}
# A guest beats this often (guest.c), and later when its host is slow.
_BEAT_MS = 100
CLOCK_SLACK_MS = 1500
# The clocks of this machine and of an emulated host go apart by up to 1 %; twice that is allowed.
_RATE_SHARE = 0.02
_FACT = re.compile(r"facts (\S+) (.*)")


@dataclass(frozen=True)
class Said:
    """One line: on which piece of the console it ended, and its numbers."""

    piece: int
    numbers: tuple


@dataclass
class Watch:
    """All that a guest has said, sorted."""

    hb: list = field(default_factory=list)  # number, clock in ms
    mem: list = field(default_factory=list)  # kB free, kB available, pages inflated, pages deflated
    pattern: list = field(default_factory=list)  # pass, pages, clock in ms at its begin
    busy: list = field(default_factory=list)  # round, clock in ms at its begin
    # Our balloon driver: requests, answers, pages free, holds of a lock, ns in all, ns of the longest, how many were of
    # 100 us or more, ns that the answer took
    bitmap: list = field(default_factory=list)
    unloaded: list = field(default_factory=list)  # requests, answers, how long it took in ms
    suspended: list = field(default_factory=list)  # requests, answers, suspends of the driver, errno, ms taken, ms asleep
    churned: list = field(default_factory=list)  # requests, answers, answers after it, rounds, took ms
    hogged: list = field(default_factory=list)  # pages in the balloon before and after, pages it gave, kills, longest step in ms
    loaded: list = field(default_factory=list)  # clock in ms
    facts: dict = field(default_factory=dict)
    ready: bool = False
    failed: str | None = None

    def on(self, kind, piece):
        """The lines of a kind on one piece."""
        return [said.numbers for said in getattr(self, kind) if said.piece == piece]

    def checked_on(self, piece):
        """How many passes over the whole pattern were both begun and ended on a piece."""
        beats = self.on("hb", piece)
        return sum(begun >= beats[0][1] for _, _, begun in self.on("pattern", piece)) if beats else 0


def _lines(pieces):
    """Whole lines with the piece that each ended on."""
    ends = []
    end = 0
    for piece in pieces:
        end += len(piece)
        ends.append(end)
    at = 0
    for line in b"".join(pieces).split(b"\n")[:-1]:
        at += len(line) + 1
        piece = next(number for number, end in enumerate(ends) if at <= end)
        yield piece, line.decode(errors="replace").strip("\r")


def read(pieces):
    """Reads a console. Raises ScriptError for a line that is damaged."""
    watch = Watch()
    for piece, line in _lines(pieces):
        if watch.failed is None and (match := _FAILED.search(line)):
            watch.failed = match[0]
        if line == "rig: ready":
            watch.ready = True
        if match := _FACT.fullmatch(line):
            watch.facts[match[1]] = match[2]
        kind = line.partition(" ")[0]
        if kind in _FORMS:
            match = _FORMS[kind].fullmatch(line)
            if not match:
                raise ScriptError(f"a line on the guest's console is damaged: {line!r}")
            getattr(watch, kind).append(Said(piece, tuple(map(int, match.groups()))))
    return watch


def check_heartbeat(watch):
    """No number missing or repeated, the clock never back; returns the longest step of the clock, in ms."""
    longest = 0
    expected, clock = 1, 0
    for said in watch.hb:
        number, ms = said.numbers
        if number != expected:
            raise ScriptError(f"heartbeat {expected} is missing: {number} came in its place, at {ms} ms of its clock")
        if ms < clock:
            raise ScriptError(f"the guest's clock went back from {clock} to {ms} ms at heartbeat {number}")
        if number > 1:
            longest = max(longest, ms - clock)
        expected, clock = number + 1, ms
    if expected == 1:
        raise ScriptError("the guest has sent no heartbeat")
    return longest


def check_step(watch, piece, paused_ms):
    """No jump of the guest's clock at a move: its step to the first beat on `piece` is at most the time it was paused.

    The clock stands still while the guest is paused (`paused_ms`: its downtime and the comparing of RAM), or goes on
    with the time: both are allowed, and a beat and some slack come on top. A beat that was on its way at the pause ends
    on the new piece, and the pause is in the step after it, so two steps are looked at.
    """
    old, new = watch.on("hb", piece - 1), watch.on("hb", piece)
    if not old or not new:
        raise ScriptError(f"the guest sent {len(old)} heartbeats before a move and {len(new)} after, none to compare")
    clocks = [ms for _, ms in (old[-1], *new[:2])]
    most = paused_ms + _BEAT_MS + CLOCK_SLACK_MS
    for before, after in zip(clocks, clocks[1:]):
        if not 0 <= after - before <= most:
            raise ScriptError(
                f"the guest's clock went from {before} to {after} ms over a move, by {after - before} ms: it was "
                f"paused for {paused_ms:.0f} ms, which explains a step of 0 to {most:.0f} ms"
            )


def check_stall(wall_ms, clock_ms, paused_ms):
    """Neither stall nor jump of the guest's clock over a move, by a clock outside; returns by how much it lags, in ms.

    `wall_ms`: the time outside between looks at the newest beat before a move and after it; `clock_ms`: the time
    between those beats by the guest's clock. It may fall behind by no more than the pause, and may not run ahead.
    """
    behind = wall_ms - clock_ms
    slack = CLOCK_SLACK_MS + wall_ms * _RATE_SHARE
    if behind > paused_ms + slack:
        raise ScriptError(
            f"the guest's clock stalled: it fell behind by {behind:.0f} of {wall_ms:.0f} ms over a move in which it "
            f"was paused for {paused_ms:.0f} ms"
        )
    if behind < -slack:
        raise ScriptError(f"the guest's clock jumped: it is {-behind:.0f} ms ahead after {wall_ms:.0f} ms with a move")
    return behind


def check_pattern(watch):
    """Passes over the pattern without a gap; the guest itself says when a page is wrong."""
    for expected, said in enumerate(watch.pattern, start=1):
        if said.numbers[0] != expected:
            raise ScriptError(f"pass {expected} over the pattern is missing: {said.numbers[0]} came in its place")


def tail(pieces, lines):
    """The end of a console, indented."""
    text = b"".join(pieces).decode(errors="replace").replace("\r", "").splitlines()
    return "\n".join("    " + line for line in text[-lines:])
