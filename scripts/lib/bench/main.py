"""Live migration measured against QEMU's, in one run: the same guests, the same machine, contenders taking turns.

  scripts/bench          on loopback, and one comparison over 1 Gbit/s: every row of the table of goals
  scripts/bench links    behind 10 and 1 Gbit/s with 0.2 and 20 ms there and back
  scripts/bench scale    ours alone, by RAM size, streams, regions, dirty rate and TLS; needs neither QEMU nor root
  scripts/bench inflate  the balloon alone (see scripts/bench inflate --help)

QEMU is Debian's, out of backports where that can be had, emulating (TCG); its guests run Debian's cloud kernel, ours
are the same RAM with its map of free pages, or, where the guest is busy or sparse, the built-in one with the same dirty
rate. Fetches QEMU, the kernel and busybox by apt; needs a C compiler, root for the links, memory for two and a half of
the guests, and three of them on disk.
"""

import argparse
import contextlib
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

sys.dont_write_bytecode = True
_SCRIPTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(_SCRIPTS / folder) for folder in ("capture", "lib")]

# pylint: disable=wrong-import-position
import cells
import contest
import emulators
import goals
import links
import output
import scale
from host_memory import HostMemory
from emulated.basics import GIB, MIB, ScriptError, parse_size, progress
from measure import Unavailable
from ours import Programs
from templates import Sizes, Templates

_DOWNTIME_MS = 300
_QUICK = {"rounds": 1, "memory": 512 * MIB, "limit": 20}
_FULL = {"rounds": 5, "memory": 8 * GIB, "limit": 120}
_SCALE_LIMIT_S, _SCALE_QUICK_LIMIT_S = 20, 4
_SKIPPED = 77


def _size(text):
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_arguments():
    """The command line; ends the process with code 2 when it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    modes = ("migrate", "links", "scale")
    parser.add_argument("mode", nargs="?", choices=modes, default=modes[0], help="what to measure")
    parser.add_argument("--rounds", type=int, help="rounds (default 5; quick: 1)")
    parser.add_argument("--memory", type=_size, metavar="SIZE", help="the guests' RAM (default 8G; quick: 512M)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="only these rows or cells (--list)")
    parser.add_argument("--list", action="store_true", help="print the names of rows and cells, and measure nothing")
    parser.add_argument("--all", action="store_true", help="every life, memory, setting and way of QEMU: many hours")
    parser.add_argument("--quick", action="store_true", help="tiny guests, one round: whether it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="leave the rows here")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="leave a plot here (SVG)")
    parser.add_argument(
        "--settle", type=float, metavar="SECONDS", help="to wait before each (default 0.5; --host-cold: 4; quick: 0.3)"
    )
    parser.add_argument(
        "--host-cold", action="store_true",
        help="do not touch and free memory before each, as --quick does not: what the host of this machine has taken back, "
        "it has to give again",
    )
    parser.add_argument(
        "--limit", type=int, metavar="SECONDS", help="for each of QEMU's (default 120; quick: 20)"
        "; with scale: for each dirty rate (default 20; quick: 4)",
    )
    parser.add_argument(
        "--busy-rate", type=_size, metavar="SIZE",
        help="what the busy guest dirties a second (default 256M, about half of what QEMU moves on loopback; behind a "
        "link half of what that carries)",
    )
    parser.add_argument("--qemu", type=Path, metavar="PROGRAM", help="this QEMU in place of the one from backports")
    parser.add_argument("--installed-qemu", action="store_true", help="the installed QEMU, not that of backports")
    parser.add_argument("--programs", type=Path, metavar="DIR", help="commands that are built already")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep guests here, and take those that are here")
    arguments = parser.parse_args()
    defaults = dict(_QUICK if arguments.quick else _FULL)
    if arguments.mode == "scale":
        defaults["limit"] = _SCALE_QUICK_LIMIT_S if arguments.quick else _SCALE_LIMIT_S
        if arguments.all or arguments.qemu or arguments.installed_qemu or arguments.busy_rate or arguments.keep:
            parser.error("scale measures ours alone: it takes no flag on QEMU, on lives or on captured guests")
    for name, value in defaults.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    warm = not (arguments.host_cold or arguments.quick)
    if arguments.settle is None:
        arguments.settle = 0.5 if warm else 0.3 if arguments.quick else 4.0
    if arguments.rounds < 1 or arguments.limit < 1 or arguments.settle < 0:
        parser.error("--rounds and --limit: give at least 1; --settle: at least 0")
    if not 512 * MIB <= arguments.memory <= 64 * GIB or arguments.memory % MIB:
        parser.error("--memory: give a whole number of MiB from 512M to 64G")
    arguments.host = HostMemory(warm, arguments.settle)
    if arguments.mode == "scale" and not arguments.quick and arguments.memory < GIB:
        parser.error("--memory: scale needs 1G at least, of which it has half in use")
    return arguments


def choose(arguments):
    """The cells to run, with the contenders that are wanted, and the names of the goals' rows among them."""
    if arguments.mode == "links":
        chosen = cells.behind_links()
    else:
        chosen = cells.every() if arguments.all else cells.usual()
    chosen = cells.quick(chosen) if arguments.quick else chosen
    rows = [] if arguments.mode == "links" else goals.names()
    if arguments.only:
        unknown = set(arguments.only) - set(rows) - {cell.name for cell in chosen}
        if unknown:
            print(f"bench: there is no row or cell {sorted(unknown)[0]}; --list has the names", file=sys.stderr)
            sys.exit(2)
        needed = goals.needed(arguments.only, chosen)
        rows = [name for name in rows if name in arguments.only]
        chosen = [cells.part(cell, needed[cell.name]) for cell in chosen if cell.name in needed]
    return chosen, rows


def sizes_for(arguments, gbit):
    """The guests. Aged by three quarters of RAM, busy in a 16th of it."""
    rate = arguments.busy_rate or (int(gbit * 1e9 / 8 / 2) if gbit else 256 * MIB)
    churn = max(64 * MIB, arguments.memory // 16)
    return Sizes(arguments.memory, arguments.memory * 3 // 4 // MIB * MIB, churn, max(1, rate // 4096))


def measure(arguments, chosen, program, programs, results):
    """Runs the cells, each with the guests that its link asks for. `results` has what there is, whatever it raises."""
    settings = _settings(arguments)
    for gbit, part in sorted(_by_rate(chosen).items()):
        with contextlib.ExitStack() as closing:
            templates = Templates(program, sizes_for(arguments, gbit), arguments.keep, closing)
            contest.Contest(templates, programs, links.opened, settings, results).run(part)


def _settings(arguments):
    return SimpleNamespace(
        rounds=arguments.rounds, host=arguments.host, limit_s=arguments.limit, downtime_ms=_DOWNTIME_MS
    )


def _by_rate(chosen):
    by_rate = {}
    for cell in chosen:
        by_rate.setdefault(cell.gbit if cell.life == "busy" else 0, []).append(cell)
    return by_rate


def report(arguments, results, rows, heading):
    """Prints and writes what there is; returns the rows whose figure is not there, though nobody was skipped."""
    judged = goals.rows(results, _DOWNTIME_MS, rows)
    details, costs = goals.details(results), goals.verify_costs(results)
    print(heading)
    output.print_goals(judged)
    output.print_details(details, costs)
    output.print_skipped(results.reasons())
    if arguments.json:
        output.write_json(arguments.json, [*judged, *details, *costs], heading, results.reasons())
    if arguments.plot:
        output.write_plot(arguments.plot, details, heading)
    aims = [row for row in judged if row.goal is not None]
    print(f"\n{len(aims)} goals: {sum(row.met is True for row in aims)} met, "
          f"{sum(row.met is False for row in aims)} missed, {sum(row.met is None for row in aims)} without a verdict")
    return [row for row in judged if row.lost]


def compete(arguments, chosen, rows, program, programs):
    """Measures, and leaves what there is whatever ends it; returns the exit code."""
    results, lost, ended = contest.Results(arguments.rounds), [], None
    rates = [sizes_for(arguments, gbit).churn_pages_per_s for gbit in sorted(_by_rate(chosen))]
    heading = contest.heading(program, _settings(arguments), sizes_for(arguments, 0), rates)
    try:
        measure(arguments, chosen, program, programs, results)
    except (ScriptError, OSError) as error:
        if not results.each():
            raise
        ended = f"FAILED: bench: it ended early, and what it came to is above: {' '.join(str(error).split())}"
    finally:
        if results.each() or results.reasons():
            lost = report(arguments, results, rows, heading)
    if ended:
        print(ended)
        return 1
    output.print_lost(lost)
    return 1 if results.failed or lost else 0


def find_qemu(arguments):
    """The QEMU that takes part; one that was named has to be there."""
    try:
        return emulators.find(arguments.qemu, not arguments.installed_qemu)
    except ScriptError as error:
        if arguments.qemu:
            raise
        raise Unavailable(f"no QEMU is to be had: {error}") from error


def main():
    """Exit codes: 0 measured, whatever the figures are and whatever was not to be had; 1 something failed; 2 usage; 77
    nothing can be measured here (no QEMU, no packages, too little memory), said by a line `SKIPPED: bench: reason`."""
    arguments = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        if arguments.mode == "scale":
            return scale.bench(arguments)
        chosen, rows = choose(arguments)
        if arguments.list:
            print("\n".join([*rows, *(cell.name for cell in chosen)]))
            return 0
        programs = Programs(arguments.programs)
        program = find_qemu(arguments)
        progress(f"QEMU {program.version}")
        return compete(arguments, chosen, rows, program, programs)
    except Unavailable as error:
        print(f"SKIPPED: bench: {' '.join(str(error).split())}")
        return _SKIPPED
    except (ScriptError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
