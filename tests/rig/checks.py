"""Checks of what a host's kernel and a guest's control socket say."""

import re

from emulated.basics import MIB, PAGE_BYTES, ScriptError

# Between two looks at a guest that is at rest its kernel takes and gives back less than this.
SLACK_KB = 8 << 10
_BALLOON_ID = 5
_IN_STATUS = re.compile(r"^(VmRSS|VmHWM):\s+(\d+) kB$", re.MULTILINE)


def resident_bytes(status):
    """What a process holds now, and the most that it has ever held, from its /proc/PID/status."""
    found = {name: int(kb) << 10 for name, kb in _IN_STATUS.findall(status)}
    if len(found) != 2:
        raise ScriptError(f"a process's status shows no VmRSS and VmHWM: {status[:200]!r}")
    return found["VmRSS"], found["VmHWM"]


def check_filled(facts, resident, mib):
    """The guest has written so much, and its host's process has held it: `resident` is what counts, in bytes."""
    if facts.get("filled_mib") != str(mib):
        raise ScriptError(f"the guest was to fill {mib} MiB, and says that it filled {facts.get('filled_mib')}")
    if resident < mib * MIB:
        raise ScriptError(f"the guest filled {mib} MiB, and its host's process held {resident / MIB:.0f} MiB only")


def check_driver(facts, driver, *bits):
    """The guest's balloon is driven by this driver, and these bits were agreed on."""
    names = [name.removesuffix("_device") for name, value in facts.items() if name.endswith("_device")]
    balloons = [name for name in names if int(facts[f"{name}_device"], 16) == _BALLOON_ID]
    if len(balloons) != 1:
        raise ScriptError(f"the guest sees {len(balloons)} balloons, not 1: {facts}")
    found, features = facts.get(f"{balloons[0]}_driver"), facts.get(f"{balloons[0]}_features", "")
    if found != driver:
        raise ScriptError(f"the guest's balloon is driven by {found}, not by {driver}")
    if any(features[bit : bit + 1] != "1" for bit in bits):
        raise ScriptError(f"{driver} did not agree on all of the bits {bits}: {features}")


def check_stats(told, free_kb):
    """Statistics of the control socket: fresh by its own word, and near what the guest itself says."""
    if told["fresh"] is not True or told["free_pages"] is None or told["total_pages"] is None:
        raise ScriptError(f"the statistics are not fresh: {told}")
    if abs(told["free_pages"] * PAGE_BYTES // 1024 - free_kb) > SLACK_KB:
        raise ScriptError(f"the statistics say {told['free_pages']} free pages, the guest itself {free_kb} kB")


def check_fell(before, after, pages):
    """Free pages are fewer by `pages` than they were: statistics that were kept from before do not show it."""
    fell = before["free_pages"] - after["free_pages"]
    if abs(fell - pages) * PAGE_BYTES // 1024 > SLACK_KB:
        raise ScriptError(f"the balloon took {pages} pages, and by the statistics the free ones are fewer by {fell}")


def check_still(path, at_the_end, now):
    """A console that a guest has left has not grown: the guest does not run on there, too. Sizes in bytes."""
    if now != at_the_end:
        raise ScriptError(
            f"the guest has moved, and its old console {path} went from {at_the_end} to {now} bytes: it runs there, too"
        )
