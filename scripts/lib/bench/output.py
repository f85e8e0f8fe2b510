"""What is left of a bench: tables on stdout, JSON, and a plot."""

import json
import math
from dataclasses import dataclass
from html import escape

_BAR, _GAP, _LEFT, _WIDTH = 12, 5, 330, 620
_COLOURS = {"ours": "#2a6f97", "qemu": "#d08c60", "floor": "#8a8a8a", "total": "#2a6f97", "downtime": "#c1666b"}
_PANEL_WIDTH, _PANEL_HEIGHT, _PANEL_LEFT = 760, 240, 80


@dataclass(frozen=True)
class Dot:
    """A median on a curve. With a note it is drawn hollow: it is not what it would have come to."""

    at: float
    value: float
    least: float
    most: float
    note: str = None


@dataclass(frozen=True)
class Curve:
    """Dots by ascending place; its name is its colour's."""

    name: str
    dots: tuple


@dataclass(frozen=True)
class Panel:
    """A picture of curves, in milliseconds upwards; `ticks` and `mark` are places with their names."""

    title: str
    ticks: tuple
    curves: tuple
    across_log: bool = False
    up_log: bool = False
    mark: tuple = None


def _number(value):
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _print_note(row):
    if row.note:
        print(f"    {row.note}")


def print_goals(rows):
    """The table of goals."""
    print(f"\n{'goal':<50}{'ours':>10}{'peer':>10} {'unit':<5}{'ratio':>8}  {'goal':<10}{'':<8}peer")
    for row in rows:
        if row.skipped:
            print(f"{row.name:<50}SKIPPED: {row.skipped}")
            continue
        goal = "none"
        if row.goal is not None:
            goal = f"{'>=' if row.at_least else '<='} {row.goal:g}{' ' + row.unit if row.judged == 'ours' else ''}"
        verdict = {True: "met", False: "MISSED", None: "-"}[row.met]
        line = f"{row.name:<50}{_number(row.ours):>10}{_number(row.peer):>10} {row.unit:<5}{_number(row.ratio):>8}"
        print(f"{line}  {goal:<10}{verdict:<8}{row.peer_name}")
        _print_note(row)


def print_details(rows, costs):
    """All medians, with the least and the most, and what verifying took."""
    print(f"\n{'total, ms':<62}{'median':>10}  {'least .. most':<22}{'ours / it':>9}")
    for row in rows:
        runs = row.runs["peer"]
        spread = f"{min(runs):.1f} .. {max(runs):.1f}"
        ratio = f"{_number(row.ratio):>9}" + ("  (floor / ours)" if row.peer_name == "floor" else "")
        print(f"{row.name:<62}{row.peer:>10.1f}  {spread:<22}{ratio}")
        _print_note(row)
    if costs:
        print("\nverifying, ms, which no total above has in it")
        for row in costs:
            print(f"{row.name:<62}{row.ours:>10.1f}")


def print_series(about, rows):
    """One series of scripts/bench scale; the ratio is to its first point."""
    print(f"\n{about + ': ms':<62}{'median':>10}  {'least .. most':<22}{'x first':>8}")
    for row in rows:
        if row.skipped:
            print(f"{row.name:<62}SKIPPED: {row.skipped}")
            continue
        runs = row.runs["ours"]
        spread = f"{min(runs):.1f} .. {max(runs):.1f}" if runs else ""
        goal = "" if row.met is None else f"  goal <= {row.goal:g}: {'met' if row.met else 'MISSED'}"
        note = f"  {row.note}" if row.note else ""
        value = "-" if row.ours is None else f"{row.ours:.1f}"
        print(f"{row.name:<62}{value:>10}  {spread:<22}{_number(row.ratio):>8}{goal}{note}")


def print_skipped(reasons):
    """What took no part, and why; in the form that scripts/test counts."""
    if reasons:
        print()
    for (cell, contender), why in reasons.items():
        failed = why.startswith("FAILED: ")
        print(f"{'FAILED' if failed else 'SKIPPED'}: bench: {cell} {contender}: {why.removeprefix('FAILED: ')}")


def print_lost(rows):
    """Rows whose figure is not there, though nobody was skipped."""
    for row in rows:
        print(f"FAILED: bench: {row.name}: no figure: {row.skipped or row.peer_name}")


def write_json(path, rows, heading, reasons):
    """{"rows": [{"name", "ours", "peer", "ratio", "unit", "runs", ..}]}"""
    listed = []
    for row in rows:
        listed.append({
            "name": row.name, "ours": row.ours, "peer": row.peer, "ratio": row.ratio, "unit": row.unit,
            "runs": row.runs or {"ours": [], "peer": []}, "peer_name": row.peer_name, "goal": row.goal,
            "met": row.met, "skipped": row.skipped, "note": row.note,
        })
    skipped = [{"cell": cell, "contender": who, "why": why} for (cell, who), why in reasons.items()]
    path.write_text(json.dumps({"heading": heading, "rows": listed, "skipped": skipped}, indent=1) + "\n")


def write_plot(path, rows, heading):
    """Bars of the medians on a logarithmic scale, a block for each cell, with a line from the least to the most."""
    if not rows:
        return
    low = 10 ** math.floor(math.log10(max(0.1, min(min(row.runs["peer"]) for row in rows))))
    high = 10 ** math.ceil(math.log10(max(max(row.runs["peer"]) for row in rows) + 1))

    def across(value):
        return _LEFT + _WIDTH * math.log(max(value, low) / low) / math.log(high / low)

    parts, down, last = [], 34, None
    for row in rows:
        cell = row.name.removesuffix(f"-{row.peer_name}")
        if cell != last:
            down += 16
            parts.append(f'<text x="8" y="{down}" font-weight="bold">{escape(cell)}</text>')
            down, last = down + 6, cell
        parts += _bar(row, down, across)
        down += _BAR + _GAP
    ticks = []
    for exponent in range(round(math.log10(low)), round(math.log10(high)) + 1):
        x = across(10.0**exponent)
        ticks.append(f'<line x1="{x:.0f}" y1="30" x2="{x:.0f}" y2="{down}" stroke="#ddd"/>')
        ticks.append(f'<text x="{x:.0f}" y="{down + 14}" text-anchor="middle">{10.0**exponent:g} ms</text>')
    _write_svg(path, _LEFT + _WIDTH + 90, down + 24, heading, [*ticks, *parts])


def _write_svg(path, width, height, heading, parts):
    """The second line of the heading is the picture's."""
    size = f'width="{width}" height="{height}"'
    top = f'<text x="8" y="18">{escape(heading.splitlines()[1])}</text>'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join([top, *parts]) + "\n</svg>\n"
    )


def _bar(row, down, across):
    left, end, middle = across(0), across(row.peer), down + _BAR / 2
    colour = _COLOURS[row.peer_name.split("-")[0]]
    least, most = across(min(row.runs["peer"])), across(max(row.runs["peer"]))
    return [
        f'<text x="{_LEFT - 6}" y="{down + 10}" text-anchor="end">{escape(row.peer_name)}</text>',
        f'<rect x="{left:.1f}" y="{down}" width="{max(1, end - left):.1f}" height="{_BAR}" fill="{colour}"/>',
        f'<line x1="{least:.1f}" y1="{middle}" x2="{most:.1f}" y2="{middle}" stroke="black"/>',
        f'<text x="{max(end, most) + 5:.1f}" y="{down + 10}">{row.peer:.0f}</text>',
    ]


def write_curves(path, panels, heading):
    """Panels one below the other."""
    parts, down = [], 34
    for panel in panels:
        parts += _panel(panel, down)
        down += _PANEL_HEIGHT + 84
    if panels:
        _write_svg(path, _PANEL_LEFT + _PANEL_WIDTH + 90, down, heading, parts)


def _scale(low, high, begin, end, log):
    """Where a value lies between two edges."""
    of = math.log if log else float
    span = (of(high) - of(low)) or 1

    def place(value):
        return begin + (end - begin) * (of(max(value, low)) - of(low)) / span

    return place


def _steps(low, high, log):
    """Round values from `low` on, the last one not below `high`."""
    if log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        return [10.0**exponent for exponent in range(first, max(last, first + 1) + 1)]
    power = 10 ** math.floor(math.log10(high / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * 5 >= high)
    return [step * index for index in range(math.ceil(high / step) + 1)]


def _panel(panel, down):
    dots = [dot for curve in panel.curves for dot in curve.dots]
    top, bottom, right = down + 22, down + 22 + _PANEL_HEIGHT, _PANEL_LEFT + _PANEL_WIDTH
    steps = _steps(max(0.1, min(dot.least for dot in dots)), max(0.1, *(dot.most for dot in dots)), panel.up_log)
    places = [at for at, _ in panel.ticks]
    across = _scale(min(places), max(places), _PANEL_LEFT + 24, right - 24, panel.across_log)
    up = _scale(steps[0], steps[-1], bottom, top, panel.up_log)
    parts = [f'<text x="8" y="{down + 10}" font-weight="bold">{escape(panel.title)}</text>']
    for step in steps:
        y = up(step)
        parts.append(f'<line x1="{_PANEL_LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_PANEL_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{step:g} ms</text>')
    for at, name in panel.ticks:
        parts.append(f'<text x="{across(at):.1f}" y="{bottom + 16}" text-anchor="middle">{escape(name)}</text>')
    if panel.mark and min(places) <= panel.mark[0] <= max(places):
        x = across(panel.mark[0])
        parts.append(f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#888" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="{top + 12}" fill="#555">{escape(panel.mark[1])}</text>')
    for index, curve in enumerate(panel.curves):
        parts += _drawn(curve, across, up)
        x, y = _PANEL_LEFT + 140 * index, bottom + 38
        colour = _COLOURS[curve.name]
        parts.append(f'<line x1="{x}" y1="{y}" x2="{x + 24}" y2="{y}" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{x + 30}" y="{y + 4}">{escape(curve.name)}</text>')
    if any(dot.note for dot in dots):
        x, y = _PANEL_LEFT + 140 * len(panel.curves), bottom + 42
        hollow = "hollow: in some rounds it did not end, which counts as the time-out"
        parts.append(f'<text x="{x}" y="{y}">{hollow}</text>')
    return parts


def _drawn(curve, across, up):
    colour = _COLOURS[curve.name]
    line = " ".join(f"{across(dot.at):.1f},{up(dot.value):.1f}" for dot in curve.dots)
    parts = [f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>']
    for dot in curve.dots:
        x, y = across(dot.at), up(dot.value)
        least, most = up(dot.least), up(dot.most)
        fill = "white" if dot.note else colour
        parts.append(f'<line x1="{x:.1f}" y1="{least:.1f}" x2="{x:.1f}" y2="{most:.1f}" stroke="{colour}"/>')
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" stroke="{colour}" stroke-width="1.5"/>')
        value = f"{dot.value:.1f}" if dot.value < 10 else f"{dot.value:.0f}"
        parts.append(f'<text x="{x:.1f}" y="{min(y, most) - 8:.1f}" text-anchor="middle">{value}</text>')
    return parts
