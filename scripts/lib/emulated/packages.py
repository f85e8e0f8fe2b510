"""Debian's kernel and busybox, fetched and taken apart but not installed, and the emulator, installed when absent.

Packages are kept under the user's cache, each unpacked in a folder of its own that appears by a rename: a folder that
is there is whole, so a later run needs no network.
"""

import os
import re
import shutil
import tempfile
from pathlib import Path

from .basics import ScriptError, progress, run

EMULATOR = "qemu-system-x86_64"


def cache_dir():
    """Where packages are kept: one place for the capture and the rig, which use the same ones."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "pageferry" / "capture"


def update_lists():
    """Brings apt's lists up to date, which only root may."""
    if os.geteuid() == 0:
        progress("apt-get update")
        run("updating the package lists", ["apt-get", "update"])


def ensure_emulator():
    """Installs the emulator by apt when it is not there, and returns its path."""
    found = shutil.which(EMULATOR)
    if found:
        return found
    if os.geteuid() != 0:
        raise ScriptError(f"{EMULATOR} is not here and installing it takes root: apt-get install qemu-system-x86")
    update_lists()
    progress("installing qemu-system-x86")
    run(
        "installing the emulator",
        ["apt-get", "install", "-y", "--no-install-recommends", "qemu-system-x86"],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )
    found = shutil.which(EMULATOR)
    if not found:
        raise ScriptError(f"qemu-system-x86 is installed, yet {EMULATOR} is not on the PATH")
    return found


def _newest(pattern, folder=None):
    found = sorted((folder or cache_dir()).glob(pattern), key=lambda path: path.stat().st_mtime)
    return found[-1] if found else None


def _fetch(package, folder=None):
    """Downloads and unpacks one package; its folder is named after the package and its version."""
    progress(f"fetching {package}")
    folder = folder or cache_dir()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as work:
        # apt drops its rights to the user _apt for a download and warns when that one cannot write here; it goes on.
        run(f"downloading {package}", ["apt-get", "download", package], cwd=work)
        archives = list(Path(work).glob("*.deb"))
        if len(archives) != 1:
            raise ScriptError(f"downloading {package}: {len(archives)} archives came in place of one")
        tree = Path(work) / "tree"
        run(f"unpacking {package}", ["dpkg", "-x", str(archives[0]), str(tree)])
        # apt writes the colon of an epoch as %3a.
        target = folder / archives[0].stem.replace("%3a", ":")
        shutil.rmtree(target, ignore_errors=True)
        tree.rename(target)
    return target


def _kernel_package():
    """The package that linux-image-cloud-amd64 stands for: the one with the kernel in it."""
    said = run("looking up Debian's cloud kernel", ["apt-cache", "depends", "linux-image-cloud-amd64"])
    match = re.search(r"Depends: (linux-image-\S+-cloud-amd64)", said)
    if not match:
        raise ScriptError("looking up Debian's cloud kernel: apt knows no linux-image-cloud-amd64; run apt-get update")
    return match[1]


def kernel_and_busybox(refresh):
    """Paths of vmlinuz and of a static busybox: from the cache, or fetched when not there or when `refresh` says so."""
    kernel = None if refresh else _newest("linux-image-*/boot/vmlinuz-*")
    busybox = None if refresh else _newest("busybox-static_*/bin/busybox")
    if not (kernel and busybox):
        update_lists()
        _fetch(_kernel_package())
        _fetch("busybox-static")
        kernel = _newest("linux-image-*/boot/vmlinuz-*")
        busybox = _newest("busybox-static_*/bin/busybox") or _newest("busybox-static_*/usr/bin/busybox")
    if not kernel:
        raise ScriptError(f"no vmlinuz in the kernel package under {cache_dir()}; try --refresh")
    if not busybox:
        raise ScriptError(f"no busybox in the busybox-static package under {cache_dir()}; try --refresh")
    return kernel, busybox


def kernel_of(line):
    """The path of vmlinuz of Debian's newest cloud kernel of a line, such as 6.12: from the cache, or fetched."""
    stock, _ = kernel_and_busybox(refresh=False)
    if stock.name.startswith(f"vmlinuz-{line}."):
        return stock
    # In a folder of its own: the newest kernel beside the stock one would be taken for it.
    folder = cache_dir() / f"line-{line}"
    kernel = _newest("linux-image-*/boot/vmlinuz-*", folder)
    if kernel:
        return kernel
    update_lists()
    pattern = f"^linux-image-{re.escape(line)}\\.[^ ]*-cloud-amd64$"
    said = run(f"looking for a kernel {line}", ["apt-cache", "search", "--names-only", pattern])
    found = [text.partition(" ")[0] for text in said.splitlines()]
    if not found:
        raise ScriptError(f"apt knows no cloud kernel {line}")
    _fetch(max(found, key=lambda name: [int(number) for number in re.findall(r"\d+", name)]), folder)
    kernel = _newest("linux-image-*/boot/vmlinuz-*", folder)
    if not kernel:
        raise ScriptError(f"no vmlinuz in the kernel package under {folder}")
    return kernel
