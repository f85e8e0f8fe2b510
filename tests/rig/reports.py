"""Checks of the two reports that a migration leaves."""

import json

from emulated.basics import PAGE_BYTES, ScriptError

FATES = ("sent", "zero", "hole", "hinted", "ballooned", "filled")


def parse(data, whose):
    """A report as it came from a host."""
    try:
        report = json.loads(data)
    except ValueError as error:
        raise ScriptError(f"the {whose}'s report is no JSON ({error}): {bytes(data[:200])!r}") from error
    if not isinstance(report, dict) or report.get("version") != 1 or report.get("role") != whose:
        raise ScriptError(f"that is no report of a {whose}: {json.dumps(report)[:200]}")
    return report


def check_completed(report, *, memory_bytes, verified):
    """A report of a migration that went well: every page has one fate, and the digests were equal if compared."""
    role = report["role"]
    if report["result"] != "completed" or report["error"] is not None:
        raise ScriptError(f"the {role}'s report says {report['result']}: {report['error']}")
    if report["ram_bytes"] != memory_bytes:
        raise ScriptError(f"the {role}'s report is of {report['ram_bytes']} bytes of RAM, not of {memory_bytes}")
    pages = report["pages"]
    fates = sum(pages[fate] for fate in FATES)
    if fates != pages["total"] or pages["total"] != memory_bytes // PAGE_BYTES:
        raise ScriptError(f"the {role}'s pages do not add up to {memory_bytes // PAGE_BYTES}: {pages}")
    if report["verified"] is not verified:
        raise ScriptError(f"the {role}'s report says verified: {report['verified']}, not {verified}")


def check_failed(source):
    """A source's report of a migration that failed after pages had gone, and before anything was compared."""
    if source["result"] != "failed" or not source["error"]:
        raise ScriptError(f"the migration failed, and its report says {source['result']}: {source['error']}")
    if source["verified"] is not None:
        raise ScriptError(f"a migration that failed in a round says verified: {source['verified']}")
    if source["pages"]["sent"] <= 0:
        raise ScriptError(f"the receiver was killed in mid-round, and no page is told as sent: {source['pages']}")


def paused_ms(source):
    """How long the guest was paused: verify_ms is left out of the downtime, and is time paused, too."""
    return source["downtime_ms"] + source["verify_ms"]


def check_pair(source, receiver):
    """Both sides tell of the same pages."""
    told = [{fate: report["pages"][fate] for fate in FATES} for report in (source, receiver)]
    if told[0] != told[1]:
        raise ScriptError(f"the two reports tell of different pages: source {told[0]}, receiver {told[1]}")


def check_at_least(report, fate, pages, why):
    """At least so many pages had this fate."""
    found = report["pages"][fate]
    if found < pages:
        raise ScriptError(f"{found} pages were {fate}, of at least {pages} ({why}); all of them: {report['pages']}")


def written(source):
    """Pages that the guest wrote while round 0 was sent."""
    return source["rounds"][0]["dirty_pages_after"] if source["rounds"] else 0


def check_written(source, most, why):
    """At most so many pages were written while round 0 was sent."""
    if written(source) > most:
        raise ScriptError(f"{written(source)} pages were written in round 0, of at most {most} ({why})")


def say(source):
    """A migration's figures, short."""
    pages, rounds = source["pages"], len(source["rounds"])
    parts = [f"hinted {pages['hinted']}"]
    if pages["ballooned"]:
        parts.append(f"ballooned {pages['ballooned']}")
    parts += [
        f"sent {pages['sent']}",
        f"total {source['total_ms'] / 1000:.1f} s",
        f"downtime {source['downtime_ms']:.0f} ms",
        f"{rounds} round{'s' if rounds != 1 else ''}",
    ]
    return ", ".join(parts)


def beside(sources):
    """A table of what asking has cost, a column for each of these reports of sources, by name."""
    rows = {
        "asked, answered in time": lambda source: source["balloon"]["asked"] and not source["balloon"]["timed_out"],
        "pages hinted": lambda source: source["pages"]["hinted"],
        "pages written in round 0": written,
        "pages resent": lambda source: source["pages"]["resent"],
        "pages sent": lambda source: source["pages"]["sent"],
        "total ms": lambda source: round(source["total_ms"]),
        "downtime ms": lambda source: round(source["downtime_ms"]),
    }
    lines = [f"{'':24}" + "".join(f"{name:>14}" for name in sources)]
    for what, value in rows.items():
        lines.append(f"{what:24}" + "".join(f"{str(value(source)):>14}" for source in sources.values()))
    return "\n".join(lines) + "\n"
