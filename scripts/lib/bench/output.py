"""What is left of a bench: tables on stdout, JSON, and a plot."""

import json
import math
from html import escape

_BAR, _GAP, _LEFT, _WIDTH = 12, 5, 330, 620
_COLOURS = {"ours": "#2a6f97", "qemu": "#d08c60", "floor": "#8a8a8a"}


def _number(value):
    if value is None:
        return "-"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def print_goals(rows):
    """The table of goals."""
    print(f"\n{'goal':<50}{'ours':>10}{'peer':>10} {'unit':<5}{'ratio':>8}  {'goal':<10}{'':<8}peer")
    for row in rows:
        if row.skipped:
            print(f"{row.name:<50}SKIPPED: {row.skipped}")
            continue
        goal = f"{'>=' if row.at_least else '<='} {row.goal:g}{' ' + row.unit if row.judged == 'ours' else ''}"
        verdict = {True: "met", False: "MISSED", None: "-"}[row.met]
        line = f"{row.name:<50}{_number(row.ours):>10}{_number(row.peer):>10} {row.unit:<5}{_number(row.ratio):>8}"
        print(f"{line}  {goal:<10}{verdict:<8}{row.peer_name}")


def print_details(rows, costs):
    """All medians, with the least and the most, and what verifying took."""
    print(f"\n{'total, ms':<62}{'median':>10}  {'least .. most':<22}{'ours / it':>9}")
    for row in rows:
        runs = row.runs["peer"]
        spread = f"{min(runs):.1f} .. {max(runs):.1f}"
        ratio = f"{_number(row.ratio):>9}" + ("  (floor / ours)" if row.peer_name == "floor" else "")
        print(f"{row.name:<62}{row.peer:>10.1f}  {spread:<22}{ratio}")
    if costs:
        print("\nverifying, ms, which no total above has in it")
        for row in costs:
            print(f"{row.name:<62}{row.ours:>10.1f}")


def print_skipped(reasons):
    """What took no part, and why."""
    if reasons:
        print()
    for (cell, contender), why in reasons.items():
        print(f"SKIPPED {cell} {contender}: {why}")


def write_json(path, rows, heading, reasons):
    """{"rows": [{"name", "ours", "peer", "ratio", "unit", "runs", ..}]}"""
    listed = []
    for row in rows:
        listed.append({
            "name": row.name, "ours": row.ours, "peer": row.peer, "ratio": row.ratio, "unit": row.unit,
            "runs": row.runs or {"ours": [], "peer": []}, "peer_name": row.peer_name, "goal": row.goal,
            "met": row.met, "skipped": row.skipped,
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
    size = f'width="{_LEFT + _WIDTH + 90}" height="{down + 24}"'
    top = f'<text x="8" y="18">{escape(heading.splitlines()[1])}</text>'
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join([top, *ticks, *parts]) + "\n</svg>\n"
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
