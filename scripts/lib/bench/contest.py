"""Runs cells: contenders take turns, every other round in the opposite order, each when the last one's processes are gone
and the machine's memory is as it was for the others (see host_memory.py).
"""

import statistics

import cells
import measure
import ours
import qemu
from emulated.basics import MIB, ScriptError, progress
from templates import Kind


# Of memory, in guests: what source and destination can take, both whole, and a little.
_ROOM = 2.2


class Missing(Exception):
    """A figure that is not there; the message says why."""


class Results:
    """The figures of all runs, by cell and contender, and why there are none where there are none."""

    def __init__(self, rounds=0):
        self.rounds = rounds  # how many runs each is to have
        self._runs = {}
        self._why = {}
        self.failed = False

    def add(self, cell, contender, figures):
        """A run."""
        self._runs.setdefault((cell, contender), []).append(figures)

    def skip(self, cell, contender, why):
        """Says why there will be no figures. What could have been had and was not has failed."""
        failed = not isinstance(why, measure.Unavailable)
        self.failed |= failed
        self._why.setdefault((cell, contender), f"{'FAILED: ' if failed else ''}{str(why).splitlines()[0]}")

    def skipped(self, cell, contender):
        """Whether it was found that there will be no figures."""
        return (cell, contender) in self._why

    def failed_in(self, cell, contender):
        """Whether it could have been had and was not, or not in every round."""
        return self._why.get((cell, contender), "").startswith("FAILED: ")

    def lacking(self, cell, contender):
        """What is missing of a contender, in words, or None when all of its runs are there."""
        have, why = len(self._runs.get((cell, contender), [])), self._why.get((cell, contender))
        if not have:
            return f"without {contender}: {why or 'it did not take part'}"
        if have < self.rounds or why:
            return f"{contender} in {have} of {self.rounds} rounds{': ' + why if why else ''}"
        return None

    def remarks(self, cell, contender):
        """What is to be known of a contender's figures, in words: compression, questions that were not asked."""
        runs = self._runs.get((cell, contender), [])
        found = []
        for name in sorted({run.get("compression") or "none" for run in runs} - {"none"}):
            count = sum(run.get("compression") == name for run in runs)
            how = name if name == "some pages" else f"by {name}"
            found.append(f"{contender} compressed {how} in {count} of {len(runs)} rounds")
        silent = sum(run.get("asked") is False for run in runs) if "asked" in contender.split("-") else 0
        if silent:
            found.append(f"{contender} did not ask in {silent} of {len(runs)} rounds")
        return found

    def each(self):
        """All cells and contenders with their runs."""
        return dict(self._runs)

    def reasons(self):
        """What was skipped, and why."""
        return dict(self._why)

    def runs(self, cell, contender, key):
        """A figure of each run. A migration that did not end counts as long as it was waited for."""
        runs = self._runs.get((cell, contender), [])
        values = []
        for run in runs:
            value = run.get(key)
            if value is None and key in ("total_ms", "downtime_ms") and "limit_s" in run:
                value = run["limit_s"] * 1e3
            if value is not None:
                values.append(value)
        if not values:
            raise Missing(self._why.get((cell, contender), f"{cell}: {contender} did not take part, or has no {key}"))
        return values

    def median(self, cell, contender, key):
        """The median of a figure."""
        return statistics.median(self.runs(cell, contender, key))

    def best(self, cell, contenders, key):
        """The contender with the least median of those that have one."""
        found = {}
        missing = None
        for contender in contenders:
            try:
                found[contender] = self.median(cell, contender, key)
            except Missing as why:
                missing = why
        if not found:
            raise missing
        return min(found, key=found.get)


class Contest:
    """What all cells need."""

    def __init__(self, templates, programs, open_link, settings, results):
        self.templates = templates
        self.programs = programs
        self.open_link = open_link
        self.settings = settings
        self.results = results

    def run(self, chosen):
        """All cells, those of one template together; a template goes when no later cell needs it."""
        if measure.available_bytes() < _ROOM * self.templates.sizes.memory_bytes:
            raise measure.Unavailable(
                f"{measure.available_bytes() // MIB} MiB of memory are available, and two guests take "
                f"{int(_ROOM * self.templates.sizes.memory_bytes) // MIB}: free some, or give a smaller --memory"
            )
        chosen = sorted(chosen, key=lambda cell: (cell.life, cell.init))
        for index, cell in enumerate(chosen):
            try:
                with self.open_link(cell) as link:
                    self._cell(cell, link)
            except (ScriptError, OSError) as error:
                for contender in cell.contenders:
                    self.results.skip(cell.name, contender, error)
                progress(f"SKIPPED {cell.name}: {error}")
            later = set().union(*(other.kinds() for other in chosen[index + 1 :]))
            for kind in cell.kinds() - later:
                self.templates.drop(kind)

    def _cell(self, cell, link):
        self.templates.get_all(cell.kinds())
        used = self._used_bytes(cell)
        for number in range(self.settings.rounds):
            for contender in cell.contenders if number % 2 == 0 else cell.contenders[::-1]:
                if self.results.skipped(cell.name, contender):
                    continue
                try:
                    figures = self._one(cell, contender, link)
                except (ScriptError, OSError) as error:
                    self.results.skip(cell.name, contender, error)
                    progress(f"SKIPPED {cell.name} {contender}: {error}")
                    continue
                self.results.add(cell.name, contender, {**figures, "used_bytes": used})
                total = f"{figures['total_ms']:.0f} ms" if figures["total_ms"] else f"more than {figures['limit_s']} s"
                progress(f"{cell.name} {contender}, round {number + 1}: {total}")

    def _used_bytes(self, cell):
        """What is not zero of the guest, one number for all in a cell; None where each has a guest of its own."""
        kinds = sorted(cell.kinds(), key=lambda kind: (not kind.hint, str(kind)))  # ours sends the one with hints
        return self.templates.used_bytes(kinds[0]) if kinds else None

    def _one(self, cell, contender, link):
        touched = cells.touched_bytes(cell, contender, self.templates.sizes)
        with self.settings.host.ready(touched) as before:
            return self._timed(cell, contender, link, before)

    def _timed(self, cell, contender, link, before):
        if contender.startswith("qemu"):
            if measure.available_bytes() < _ROOM * self.templates.sizes.memory_bytes:
                self.templates.drop_rams()
            way = cells.way_of(cell, contender, self.settings.downtime_ms, self.settings.limit_s)
            return qemu.migrate(
                self.templates, cells.kind_of(cell, contender), way, link=link, before=before
            )
        if contender == "floor":
            return self._floor(cell, link, before)
        way = cells.ours_of(cell, contender, self.programs, self.settings.downtime_ms)
        return ours.migrate(
            self.programs, self.templates.scratch, self._guest(cell, contender), way,
            self.templates.sizes.memory_bytes, link=link, before=before,
        )

    def _guest(self, cell, contender):
        sizes = self.templates.sizes
        if cell.life == "sparse":
            return ours.soft_guest(cells.SPARSE[contender.removeprefix("ours-")], "--used", cells.SPARSE_USED)
        if cell.life == "aged" and contender.startswith("ours-soft"):
            used = self.templates.not_free_bytes(Kind(cell.life, cell.init, True)) // MIB * MIB
            room = sizes.memory_bytes * 31 // 32 - used - 5 * MIB  # the soft guest's own tables take the rest
            aged = ["--used", f"{used // MIB}M", "--aged", f"{max(0, min(sizes.age_bytes, room)) // MIB}M"]
            return ours.soft_guest(sizes.memory_bytes, *aged, *(["--init-on-alloc"] if cell.init else []))
        if cell.life == "busy" or contender.startswith("ours-soft"):
            used = f"{self.templates.used_bytes(Kind(cell.life, cell.init, True)) // MIB}M"
            workload = f"churn:{sizes.churn_pages_per_s}" if cell.life == "busy" else "idle"
            init = ["--init-on-alloc"] if cell.init else []
            return ours.soft_guest(sizes.memory_bytes, "--used", used, "--workload", workload, *init)
        return ours.file_guest(self.templates.ram(Kind(cell.life, cell.init, True)))

    def _floor(self, cell, link, before):
        """A copy of as many bytes as ours sent: the used pages that are not zero."""
        try:
            sent = self.results.median(cell.name, "ours", "sent_bytes")
        except Missing as why:
            raise measure.Unavailable(f"nobody knows how much to copy: {why}") from why
        if link:
            return link.plain_copy(sent, before=before)
        return ours.plain_copy(self.programs, sent, cell.receiver == "populated", before=before)


def heading(program, settings, sizes, rates):
    """What the figures were taken with; `rates` are what busy guests dirty, pages a second."""
    busy = " and ".join(map(str, rates))
    return (
        f"{measure.machine()}\nQEMU {program.version} (TCG), guests of {sizes.memory_bytes // MIB} MiB, aged by "
        f"{sizes.age_bytes // MIB} MiB, busy with {busy} pages/s in {sizes.churn_bytes // MIB} MiB; "
        f"{settings.rounds} rounds, medians; {settings.host.described()}"
    )
