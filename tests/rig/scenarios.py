"""The scenarios: each boots a guest on host a, moves it, and looks whether it is the same guest on the other side.

A scenario returns its migrations, in order. It fails by ScriptError.
"""

import errno
import time
from dataclasses import dataclass
from typing import Callable

from emulated.basics import GIB, MIB, PAGE_BYTES, ScriptError, progress

from . import checks, reports
from .guest import Guest

ALL = {}
MAIN = "idle-8g"

_ASK = ("--ask", "always", "--hint-timeout", "60s")
# Free memory that is "back": what the kernel itself takes in the meantime is little.
_BACK_SHARE = 0.98
_BALLOON_LIMIT_S = 120
_POLL_S = 0.5


@dataclass(frozen=True)
class Scenario:
    """One scenario: what it shows, and what it takes; `cpus`: the processors that a host is given for it."""

    name: str
    shows: str
    run: Callable
    cpus: int
    guests: int  # how many it boots, one after the other
    our_driver: bool  # whether a guest of it has our balloon driver
    kernel: str | None  # the line of kernels that its guests have, or None for the stock one


class Stage:
    """What a scenario has: two hosts, a folder for what it leaves, and a deadline."""

    def __init__(self, pair, out, deadline, kernel=None):
        self.pair = pair
        self.out = out
        self.deadline = deadline
        self.guest = None
        self._kernel = kernel

    def boot(self, **options):
        """Boots the scenario's guest on host a, and waits until it is ready."""
        self.guest = Guest(self.pair, self.out, self.deadline, kernel=self._kernel, **options)
        self.guest.wait_until_ready()
        return self.guest

    def boot_another(self, folder, **options):
        """Ends the guest that there was, and boots another one, which leaves its files in a folder of its own."""
        self.guest.check_gone()
        self.guest.keep()
        self.pair.clean()
        out = self.out / folder
        out.mkdir()
        self.guest = Guest(self.pair, out, self.deadline, kernel=self._kernel, **options)
        self.guest.wait_until_ready()
        return self.guest

    def wait(self, what, ask, seconds):
        """Waits until `ask` answers with something true, and returns that."""
        end = min(self.deadline, time.monotonic() + seconds)
        while not (answer := ask()):
            if time.monotonic() > end:
                raise ScriptError(f"waited in vain for {what}; the guest's console:\n{self.guest.tail()}")
            time.sleep(_POLL_S)
        return answer


def _scenario(name, cpus=1, guests=1, our_driver=False, kernels=(None,)):
    def add(function):
        shows = " ".join(function.__doc__.split())
        for line in kernels:
            with_line = f"{name}-{line}" if line else name
            told = f"{shows} Guest's kernel: {line}." if line else shows
            ALL[with_line] = Scenario(with_line, told, function, cpus, guests, our_driver, line)
        return function

    return add


def _hinted(hop, least_bytes, why):
    balloon = hop.source["balloon"]
    if not balloon["asked"] or balloon["timed_out"]:
        raise ScriptError(f"the balloon was not asked, or did not answer in time: {balloon}")
    reports.check_at_least(hop.source, "hinted", least_bytes // PAGE_BYTES, why)


@_scenario("idle-8g")
def idle_8g(stage):
    """An idle 8 GiB guest by the stock driver's free page hints (init_on_alloc=0, --ask always)."""
    guest = stage.boot(memory_mib=8 << 10, kernel_words="init_on_alloc=0")
    before = guest.free_kb()
    hop = guest.migrate(*_ASK)
    _hinted(hop, 6 * GIB, "more than 6 GiB's worth")
    guest.check_here()
    guest.wait_for_free(int(before * _BACK_SHARE), "the hinted pages to come back to the guest")
    return [hop]


@_scenario("idle-8g-default")
def idle_8g_default(stage):
    """The same guest with Debian's default init_on_alloc=1, and --ask auto."""
    guest = stage.boot(memory_mib=8 << 10)
    before = guest.free_kb()
    hop = guest.migrate("--ask", "auto", "--hint-timeout", "60s")
    progress(f"the balloon was {'' if hop.source['balloon']['asked'] else 'not '}asked: {hop.source['balloon']['why']}")
    guest.check_here()
    guest.wait_for_free(int(before * _BACK_SHARE), "free memory as before")
    return [hop]


@_scenario("freed-2g")
def freed_2g(stage):
    """A guest that has filled 2 GiB and given them back: hints leave behind what was written once."""
    guest = stage.boot(memory_mib=3 << 10, kernel_words="init_on_alloc=0 rig.fill=2048")
    # Nothing is given back to the host before the move: what was filled is there still.
    held, _ = guest.process_bytes()
    checks.check_filled(guest.watch().facts, held, 2048)
    hop = guest.migrate(*_ASK)
    _hinted(hop, 2 * GIB, "as much as was filled")
    guest.check_here()
    return [hop]


@_scenario("busy")
def busy(stage):
    """A guest that churns a tmpfs and compresses, and compares what comes out."""
    guest = stage.boot(memory_mib=768, kernel_words="init_on_alloc=0 rig.mode=busy")
    guest.wait_for("a round of the busy loop", lambda watch: watch.busy, 60)
    hop = guest.migrate(*_ASK)
    guest.check_here()
    guest.wait_for("two rounds of the busy loop at the destination", lambda watch: len(watch.on("busy", 1)) >= 2, 90)
    return [hop]


@_scenario("two-vcpus", cpus=2)
def two_vcpus(stage):
    """Two vCPUs: the heartbeat on one, the pattern on the other."""
    guest = stage.boot(memory_mib=768, vcpus=2, kernel_words="init_on_alloc=0")
    cpus = guest.watch().facts.get("cpus")
    if cpus != "2":
        raise ScriptError(f"the guest sees {cpus} vCPUs, not 2; its console:\n{guest.tail()}")
    hop = guest.migrate(*_ASK)
    guest.check_here()
    return [hop]


@_scenario("a-b-a")
def a_b_a(stage):
    """There, back, and there again."""
    guest = stage.boot(memory_mib=512, kernel_words="init_on_alloc=0")
    hops = []
    for _ in range(3):
        hops.append(guest.migrate(*_ASK))
        guest.check_here()
    return hops


@_scenario("receiver-killed")
def receiver_killed(stage):
    """The receiver is killed in mid-round: the guest runs on where it was, and a second try succeeds."""
    guest = stage.boot(memory_mib=512, kernel_words="init_on_alloc=0")
    receiver = guest.receiver()
    other = stage.pair.b
    count = "cat /sys/class/net/eth0/statistics/rx_bytes"
    start = int(other.check(count, "counting what came"))
    sender = guest.sender("--max-bandwidth", "40Mbit", "--compress", "none", "--verify")
    def arrived():
        return int(other.check(count, "counting what came")) > start + 16 * MIB

    stage.wait("16 MiB to arrive", lambda: sender.code() is not None or arrived(), 60)
    if sender.code() is not None:
        raise ScriptError(f"sending ended with {sender.code()} before the receiver was killed; {sender.told()}")
    receiver.kill()
    code = sender.wait(guest.left(90), "the sender to notice")
    if code != 4:
        raise ScriptError(f"sending to a receiver that was killed ended with {code}, not with 4; {sender.told()}")
    progress(f"the sender noticed and ended with {code}")
    told = stage.pair.a.read("/run/source.json")
    (stage.out / "source-killed.json").write_bytes(told)
    reports.check_failed(reports.parse(told, "source"))
    seen = len(guest.watch().hb)
    guest.wait_for("the guest to run on where it was", lambda watch: len(watch.hb) >= seen + 20, 30)
    guest.check_said()
    hop = guest.migrate(*_ASK)
    guest.check_here()
    return [hop]


def _inflate(stage, guest, target, pages):
    """Sets the balloon's target, and waits until the guest has followed."""
    guest.control("--balloon-target", target)
    return stage.wait(
        f"the balloon to hold {pages} pages",
        lambda: (stats := guest.control("--balloon-stats"))["actual_pages"] == pages and stats, _BALLOON_LIMIT_S,
    )


@_scenario("balloon-1g")
def balloon_1g(stage):
    """The balloon is inflated by 1 GiB before, and deflated after: its pages are left behind, and come back."""
    guest = stage.boot(memory_mib=2 << 10, kernel_words="init_on_alloc=0")
    before = guest.free_kb()
    pages = GIB // PAGE_BYTES
    _inflate(stage, guest, "1G", pages)
    inside = guest.free_kb()
    if before - inside < (GIB >> 10) - checks.SLACK_KB:
        raise ScriptError(f"the balloon holds 1 GiB, and MemFree went from {before} kB to {inside} kB only")
    hop = guest.migrate("--ask", "never")
    reports.check_at_least(hop.source, "ballooned", pages, "what the balloon holds")
    guest.check_here()
    _inflate(stage, guest, "0", 0)
    guest.wait_for_free(before - checks.SLACK_KB - before // 50, "the balloon's memory to come back to the guest")
    guest.check_said()
    return [hop]


@_scenario("reporting")
def reporting(stage):
    """Free page reporting: what a guest has filled and freed is given back all the time, and is a hole at the move."""
    guest = stage.boot(
        memory_mib=1 << 10, kernel_words="init_on_alloc=0 rig.fill=640", host_words=("--free-page-reporting",)
    )
    # Reporting may be done by now: what counts is the most that the process has held.
    _, most = guest.process_bytes()
    checks.check_filled(guest.watch().facts, most, 640)
    stage.wait("the host's memory to come back (VmRSS below 480 MiB)", lambda: guest.process_bytes()[0] < 480 * MIB, 90)
    hop = guest.migrate("--ask", "never")
    reports.check_at_least(hop.source, "hole", 500 * MIB // PAGE_BYTES, "most of what was filled and then reported")
    guest.check_here()
    return [hop]


@_scenario("stats")
def stats(stage):
    """The guest's statistics follow what it has free, before the move and after it."""
    guest = stage.boot(memory_mib=512, kernel_words="init_on_alloc=0")

    def asked():
        told = guest.control("--balloon-stats")
        checks.check_stats(told, guest.free_kb())
        return told

    before = asked()
    hop = guest.migrate(*_ASK)
    guest.check_here()
    after = asked()
    if before["total_pages"] != after["total_pages"]:
        raise ScriptError(f"the guest had {before['total_pages']} pages before and {after['total_pages']} after")
    # Numbers that were kept from an earlier answer do not follow this.
    pages = 64 * MIB // PAGE_BYTES
    _inflate(stage, guest, "64M", pages)
    checks.check_fell(after, asked(), pages)
    guest.check_said()
    return [hop]


@_scenario("done-seen")
def done_seen(stage):
    """The guest sees DONE: the memory that its driver held for the hints is free again at the destination."""
    guest = stage.boot(memory_mib=1 << 10, kernel_words="init_on_alloc=0")
    before = guest.free_kb()
    hop = guest.migrate(*_ASK)
    _hinted(hop, before * 1024 // 2, "half of what was free")
    guest.check_here()
    after = guest.wait_for_free(int(before * _BACK_SHARE), "the hinted pages to come back to the guest")
    progress(f"MemFree was {before} kB before and is {after} kB after")
    return [hop]


_DRIVER = "virtio_balloon_bitmap"
_PAGE_BITMAP, _MISC_VQ = 3, 4
_ANSWER_LIMIT_S = 20
_UNLOAD_MOST_MS = 5000
_HOG_LIMIT_S = 120
_CHURN_LIMIT_S = 120
_CHURN_LEAST = 12
_HOTADD_MIB = 256
_PAGES_A_BITMAP = 1 << 16  # that our driver tells of at a time


def _with_our_driver(boot, *words, kernel_words="", **options):
    """Boots a guest with our balloon driver in place of the stock one, and else as Debian has it."""
    guest = boot(
        kernel_words=f"rig.balloon=bitmap {kernel_words}".strip(), host_words=("--balloon", "bitmap", *words), **options
    )
    checks.check_driver(guest.watch().facts, _DRIVER, _PAGE_BITMAP, _MISC_VQ)
    return guest


def _answer(guest):
    """What our driver tells of its latest answer."""
    watch = guest.wait_for(
        "the balloon driver to have answered",
        lambda watch: watch.bitmap and watch.bitmap[-1].numbers[1], _ANSWER_LIMIT_S,
    )
    _, _, free, holds, held_ns, longest_ns, long, took_ns = watch.bitmap[-1].numbers
    return (
        f"{free} pages free, found in {took_ns / 1e6:.1f} ms; a zone's lock was held {holds} times, for "
        f"{held_ns / max(holds, 1) / 1e3:.1f} us on average, {longest_ns / 1e3:.1f} us at most, {long} times for 100 us or more"
    )


@_scenario("bitmap-8g", guests=2, our_driver=True)
def bitmap_8g(stage):
    """An idle 8 GiB guest with Debian's own init_on_alloc=1 by our driver's page bitmaps, and, to compare, by the stock
    driver's hints."""
    guest = _with_our_driver(stage.boot, memory_mib=8 << 10)
    ours = guest.migrate(*_ASK)
    _hinted(ours, 6 * GIB, "more than 6 GiB's worth")
    guest.check_here()
    answer = _answer(guest)
    guest.check_said()
    progress(f"our driver: {answer}")

    guest = stage.boot_another("stock", memory_mib=8 << 10)
    checks.check_driver(guest.watch().facts, "virtio_balloon")
    stock = guest.migrate(*_ASK)
    guest.check_here()
    table = reports.beside({"by bitmaps": ours.source, "stock hints": stock.source}) + f"our driver: {answer}\n"
    (stage.out / "beside.txt").write_text(table)
    progress("the guest that was asked by bitmaps, and the one that was asked for hints:\n" + table.rstrip())
    return [ours, stock]


@_scenario("bitmap-2g", our_driver=True, kernels=(None, "6.12"))
def bitmap_2g(stage):
    """An idle 2 GiB guest by our driver's page bitmaps, which cost it no writes; then 1 GiB into the balloon, and back."""
    guest = _with_our_driver(stage.boot, memory_mib=2 << 10)
    kernel = guest.watch().facts.get("kernel")
    hop = guest.migrate(*_ASK)
    _hinted(hop, 3 * GIB // 2, "more than 1.5 GiB's worth")
    reports.check_written(hop.source, hop.source["pages"]["hinted"] // 20, "no page because of the question")
    guest.check_here()
    progress(f"our driver on {kernel}: {_answer(guest)}; pages written in round 0: {reports.written(hop.source)}")
    before = _inflate_and_look(stage, guest, "1G", GIB)
    back = guest.migrate("--ask", "never")
    # The first bitmap after an answer is not believed, and of the others one page in 64 may have come out silently.
    pages = GIB // PAGE_BYTES - _PAGES_A_BITMAP
    reports.check_at_least(back.source, "ballooned", pages - pages // 64, "what the balloon holds and the device believes")
    guest.check_here()
    _inflate(stage, guest, "0", 0)
    guest.wait_for_free(before - checks.SLACK_KB - before // 50, "the balloon's memory to come back to the guest")
    guest.check_said()
    return [hop, back]


def _inflate_and_look(stage, guest, target, bytes_):
    """Inflates, and sees that MemFree has followed; returns MemFree as it was before."""
    before = guest.free_kb()
    began = time.monotonic()
    _inflate(stage, guest, target, bytes_ // PAGE_BYTES)
    took = time.monotonic() - began
    inside = guest.free_kb()
    if before - inside < (bytes_ >> 10) - checks.SLACK_KB:
        raise ScriptError(f"the balloon holds {target}, and MemFree went from {before} kB to {inside} kB only")
    progress(f"the balloon holds {target} after {took:.1f} s; MemFree went from {before} kB to {inside} kB")
    return before


@_scenario("bitmap-inflate", guests=2, our_driver=True)
def bitmap_inflate(stage):
    """By page bitmaps, 7 of 8 GiB go into the balloon, are left behind at a move, and come back; the host has their
    memory back with --balloon-discard at-once, and without it not."""
    guest = _with_our_driver(
        stage.boot, "--balloon-discard", "at-once", memory_mib=8 << 10, kernel_words="rig.fill=2048"
    )
    held, _ = guest.process_bytes()
    checks.check_filled(guest.watch().facts, held, 2048)
    before = _inflate_and_look(stage, guest, "7G", 7 * GIB)
    now, _ = guest.process_bytes()
    progress(f"with at-once, the host's process held {held // MIB} MiB before and {now // MIB} MiB after")
    if now > held - GIB:
        raise ScriptError(f"the balloon holds 7 GiB, and its host's process {now} bytes, after {held} bytes before")
    hop = guest.migrate("--ask", "never")
    # One page in 64 may have come out silently, as far as the device knows (the drivers of 2016): it is not left out.
    pages = 7 * GIB // PAGE_BYTES
    reports.check_at_least(hop.source, "ballooned", pages - pages // 64, "what the balloon holds, but for one in 64")
    guest.check_here()
    began = time.monotonic()
    _inflate(stage, guest, "0", 0)
    progress(f"the balloon is empty after {time.monotonic() - began:.1f} s")
    guest.wait_for_free(before - checks.SLACK_KB - before // 50, "the balloon's memory to come back to the guest")
    guest.check_said()

    guest = _with_our_driver(
        lambda **options: stage.boot_another("mark", **options), memory_mib=2 << 10,
        kernel_words="init_on_alloc=0 rig.fill=1024",
    )
    held, _ = guest.process_bytes()
    checks.check_filled(guest.watch().facts, held, 1024)
    before = _inflate_and_look(stage, guest, "1536M", 1536 * MIB)
    now, _ = guest.process_bytes()
    progress(f"without it, the host's process held {held // MIB} MiB before and {now // MIB} MiB after")
    if now < held - checks.SLACK_KB * 1024:
        raise ScriptError(f"pages were only to be marked, and the host's process went from {held} to {now} bytes")
    _inflate(stage, guest, "0", 0)
    guest.wait_for_free(before - checks.SLACK_KB - before // 50, "the balloon's memory to come back to the guest")
    guest.check_said()
    return [hop]


@_scenario("bitmap-unload", our_driver=True)
def bitmap_unload(stage):
    """Our driver is unloaded in the middle of a request, loaded again, and asked again: nothing hangs."""
    guest = _with_our_driver(stage.boot, memory_mib=1 << 10, kernel_words="rig.unload=1 rig.walk_pause_us=20000")
    first = guest.migrate("--ask", "always", "--hint-timeout", "15s")
    watch = guest.wait_for("the driver to be loaded again", lambda watch: watch.loaded, _ANSWER_LIMIT_S)
    requests, answers, took_ms = watch.unloaded[-1].numbers
    progress(f"the driver was unloaded in {took_ms} ms, with {requests} requests and {answers} answers until then; "
             f"the session: {first.source['balloon']}")
    if took_ms > _UNLOAD_MOST_MS:
        raise ScriptError(f"unloading the driver in the middle of a request took {took_ms} ms")
    if first.source["balloon"]["timed_out"]:
        raise ScriptError(f"the driver had gone, and the host waited for its answer: {first.source['balloon']}")
    guest.check_here()
    free_kb = guest.free_kb()
    second = guest.migrate(*_ASK)
    _hinted(second, free_kb * 1024 // 2, "half of what was free")
    guest.check_here()
    progress(f"loaded again: {_answer(guest)}")
    return [first, second]


@_scenario("bitmap-oom", our_driver=True, kernels=(None, "6.12"))
def bitmap_oom(stage):
    """The guest's memory runs out while most of it is in the balloon: the balloon gives it, nobody is killed, and at a move
    what came out is sent."""
    guest = _with_our_driver(stage.boot, memory_mib=1 << 10, kernel_words="rig.hog=400")
    pages = 640 * MIB // PAGE_BYTES
    _inflate(stage, guest, "640M", pages)
    watch = guest.wait_for("the guest's memory to have run out", lambda watch: watch.hogged, _HOG_LIMIT_S)
    first, left, given, killed, longest_ms = watch.hogged[-1].numbers
    progress(f"of {first} pages in the balloon it gave {given} and has {left}; {killed} processes were killed, and the longest "
             f"MiB took {longest_ms} ms")
    if killed or not given or (first, left) != (pages, pages - given):
        raise ScriptError(f"of {pages} pages, {first} were in the balloon, {given} came out, {left} are left, {killed} kills")
    told = guest.control("--balloon-stats")["actual_pages"]
    if told != left:
        raise ScriptError(f"the balloon holds {left} pages, and the host was told of {told}")
    hop = guest.migrate("--ask", "never")
    guest.check_here()
    guest.check_said()
    return [hop]


@_scenario("bitmap-suspend", our_driver=True, kernels=(None, "6.12"))
def bitmap_suspend(stage):
    """The guest suspends all its devices in the middle of a request, as it does to hibernate, and resumes them: nothing
    hangs, the balloon fills again, and the next request is answered."""
    # The walk takes longer than the kernel waits for work to end before it gives a suspend up (20 s).
    guest = _with_our_driver(
        stage.boot, memory_mib=1 << 10, kernel_words="init_on_alloc=0 rig.suspend=1 rig.walk_pause_us=50000"
    )
    pages = 64 * MIB // PAGE_BYTES
    _inflate(stage, guest, "64M", pages)
    first = guest.migrate("--ask", "always", "--hint-timeout", "60s", "--max-bandwidth", "80Mbit")
    watch = guest.wait_for("the guest to be resumed", lambda watch: watch.suspended, _ANSWER_LIMIT_S)
    requests, answers, suspends, error, took_ms, asleep_ms = watch.suspended[-1].numbers
    progress(f"the guest suspended and resumed in {took_ms} ms, with {requests} requests and {answers} answers until then, "
             f"and ended with {errno.errorcode.get(error, error)}; the session: {first.source['balloon']}")
    # There is nowhere to write an image to, which comes out after devices were suspended and resumed.
    if (suspends, error) != (1, errno.ENODEV):
        raise ScriptError(f"the driver was suspended {suspends} times, and hibernating ended with errno {error}")
    if first.source["balloon"]["timed_out"]:
        raise ScriptError(f"the driver was suspended, and the host waited for its answer: {first.source['balloon']}")
    guest.check_here(asleep_ms)
    stage.wait("the balloon to fill again", lambda: guest.control("--balloon-stats")["actual_pages"] == pages, 30)
    free_kb = guest.free_kb()
    second = guest.migrate(*_ASK)
    _hinted(second, free_kb * 1024 // 2, "half of what was free")
    guest.check_here()
    progress(f"after it: {_answer(guest)}")
    return [first, second]


@_scenario("bitmap-hotplug", our_driver=True, kernels=(None, "6.12"))
def bitmap_hotplug(stage):
    """Memory is added to the guest's kernel, put online and taken away, over and over, while a request is answered; the
    next answer tells of memory that was added to stay."""
    guest = _with_our_driver(
        stage.boot, memory_mib=(2 << 10) + _HOTADD_MIB,
        kernel_words=f"mem=2048M rig.hotadd={_HOTADD_MIB} rig.walk_pause_us=10000",
    )
    before = guest.free_kb()
    first = guest.migrate(*_ASK)
    watch = guest.wait_for("memory to be added to stay", lambda watch: watch.churned, _CHURN_LIMIT_S)
    _, answers, answers_after, rounds, took_ms = watch.churned[-1].numbers
    progress(f"memory was added and taken away {rounds} times in {took_ms} ms, with {answers} answers before and "
             f"{answers_after} after; the session: {first.source['balloon']}")
    if rounds < _CHURN_LEAST or answers_after != answers + 1:
        raise ScriptError(f"memory was added {rounds} times only, or the answer never came")
    _hinted(first, before * 1024 // 2, "half of what was free")
    guest.check_here()
    added_kb = _HOTADD_MIB << 10
    free_kb = guest.wait_for_free(before + added_kb - checks.SLACK_KB - added_kb // 20, "the memory that was added")
    second = guest.migrate(*_ASK)
    _hinted(second, (free_kb - added_kb // 2) * 1024, "what is free, with what was added")
    guest.check_here()
    progress(f"with what was added: {_answer(guest)}")
    return [first, second]


@_scenario("bitmap-windows", our_driver=True)
def bitmap_windows(stage):
    """Guest-physical space of 37 GiB, of which the guest's kernel uses the first 3 GiB and the last: its answer comes in
    two windows through one buffer. Past 32 GiB there is no bitmap inflation; the balloon takes arrays."""
    for host in stage.pair.hosts():
        # The guest's RAM is more than the host has, and hardly any of it is touched.
        host.check("echo 1 >/proc/sys/vm/overcommit_memory", "allowing more memory than there is")
    guest = stage.boot(
        memory_mib=36 << 10, kernel_words="rig.balloon=bitmap memmap=32G$4G", host_words=("--balloon", "bitmap")
    )
    checks.check_driver(guest.watch().facts, _DRIVER, _MISC_VQ)
    before = guest.free_kb()
    hop = guest.migrate(*_ASK)
    _hinted(hop, before * 1024 - 256 * MIB, "what is free, in both windows")
    if hop.source["balloon"]["answers"] != 2:
        raise ScriptError(f"the answer was to come in two windows: {hop.source['balloon']}")
    guest.check_here()
    progress(f"two windows: {_answer(guest)}")
    _inflate_and_look(stage, guest, "64M", 64 * MIB)
    _inflate(stage, guest, "0", 0)
    guest.check_said()
    return [hop]
