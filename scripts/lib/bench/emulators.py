"""Which QEMU is measured: the newest that Debian has for this release, which is the one in its backports.

It is fetched by apt into the user's cache and unpacked there, not installed; the installed one is what is left where
that cannot be had. apt works on lists and a cache of its own, so the machine's are as they were.
"""

import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from emulated import packages
from emulated.basics import ScriptError, progress, run

_FOLDER = "emulator-backports"
_MAPPED_RAM_SINCE = 9  # the first QEMU that saves RAM at fixed places in a file, holes left out


@dataclass
class Program:
    """A QEMU that runs: the command that starts it, and what it says it is."""

    command: list
    version: str

    @property
    def mapped_ram(self):
        """Whether it can save a guest so that loading it again touches no page that was not in use."""
        return int(self.version.split(".")[0]) >= _MAPPED_RAM_SINCE


def find(path, backports):
    """The QEMU at `path`, or the best one there is."""
    if path:
        return _look_at([str(path)])
    if backports:
        try:
            return _look_at(_unpacked())
        except (ScriptError, OSError) as error:
            progress(f"no QEMU from backports, the installed one takes part: {str(error).splitlines()[0]}")
    return _look_at([packages.ensure_emulator()])


def _look_at(command):
    said = run("asking QEMU for its version", [*command, "--version"])
    match = re.search(r"version (\d+\.\d+\.\d+)", said)
    if not match:
        raise ScriptError(f"{command[0]} does not say which version it is: {said[:80]!r}")
    return Program(command, match[1])


def _unpacked():
    """The command for the unpacked one, fetched when it is not there."""
    tree = packages.cache_dir().parent / _FOLDER
    if not tree.exists():
        _fetch(tree)
    command = [str(tree / "usr/bin/qemu-system-x86_64")]
    for folder in ("usr/share/qemu", "usr/share/seabios", "usr/lib/ipxe/qemu"):
        command += ["-L", str(tree / folder)]
    return command


def _archive():
    """Debian's archive as this machine's apt knows it: where it is, and its release."""
    said = run(
        "asking apt for its archives",
        ["apt-get", "indextargets", "--format", "$(REPO_URI) $(RELEASE) $(ORIGIN)", "Created-By: Packages"],
    )
    for line in said.splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "Debian" and "-" not in words[1]:
            return words[0], words[1]
    raise ScriptError("apt knows no archive of Debian itself: apt-get update")


def _fetch(tree):
    """Downloads QEMU and what it needs beyond what is installed, and unpacks it; `tree` appears by a rename."""
    where, release = _archive()
    tree.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=tree.parent) as work:
        work = Path(work)
        for folder in ("lists/partial", "cache/archives/partial"):
            (work / folder).mkdir(parents=True)
        signed = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]"
        suites = [f"deb {signed} {where} {suite} main\n" for suite in (release, f"{release}-backports")]
        (work / "sources.list").write_text("".join(suites))
        apt = ["apt-get", "-o", f"Dir::Etc::SourceList={work}/sources.list", "-o", "Dir::Etc::SourceParts=-"]
        apt += ["-o", f"Dir::State::Lists={work}/lists", "-o", f"Dir::Cache={work}/cache"]
        progress(f"fetching QEMU from {release}-backports")
        run("reading the lists of backports", [*apt, "update"])
        install = ["--yes", "--no-install-recommends", "--reinstall", "--download-only", "install", "qemu-system-x86"]
        run("downloading QEMU from backports", [*apt, "--target-release", f"{release}-backports", *install])
        for archive in sorted((work / "cache/archives").glob("*.deb")):
            run(f"unpacking {archive.name}", ["dpkg-deb", "--extract", str(archive), str(work / "tree")])
        program = work / "tree/usr/bin/qemu-system-x86_64"
        run("trying QEMU from backports", [str(program), "--version"])
        shutil.rmtree(tree, ignore_errors=True)
        (work / "tree").rename(tree)
