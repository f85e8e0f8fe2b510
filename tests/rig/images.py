"""What the emulators start from: the kernel, the host's initrd with our programs in it, and in there the guest's.

The host's initrd holds: busybox, KVM and network modules, our three programs with the shared libraries that they ask
for, and in /guest the guest's kernel and initrd. The guest's holds: busybox, the stock virtio drivers, the program that
is watched, and where a scenario wants it our own balloon driver, built against that kernel's headers.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from emulated import cpio, packages
from emulated.basics import ScriptError, compile_static, progress, run

from . import modules

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PROGRAMS = ("migrate-host", "migrate-send", "migrate-recv")

_HOST_MODULES = ("kvm-amd", "virtio_pci", "virtio_net", "virtio_console")
_GUEST_MODULES = ("virtio_mmio", "virtio_balloon", "virtio-rng")
_BUILD_MODULE = ROOT / "scripts" / "build-guest-module"
_MODULE_LIMIT_S = 600
_SKIPPED = 77
_LIBRARY = re.compile(r"^\s*(?:\S+ => )?(/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)


class NoHeaders(Exception):
    """The headers that our balloon driver is built against are not to be had; says why."""


@dataclass(frozen=True)
class Images:
    """What a host boots."""

    kernel: Path
    initrd: Path
    words: str  # for the host kernel's command line


def build_programs():
    """Builds our programs for release, and returns the folder that they are in."""
    command = ["cargo", "build", "--release"] + [word for name in PROGRAMS for word in ("-p", name)]
    run("building the programs", command, cwd=ROOT)
    return Path(os.environ.get("CARGO_TARGET_DIR") or ROOT / "target") / "release"


def _add_program(archive, name, path, work, seen):
    bare = work / name
    run(f"stripping {name}", ["strip", "--strip-all", "-o", str(bare), str(path)])
    archive.program(f"bin/{name}", bare.read_bytes())
    for library in _LIBRARY.findall(run(f"looking up what {name} is linked with", ["ldd", str(path)])):
        if library not in seen:
            seen.add(library)
            archive.program(library.lstrip("/"), Path(library).read_bytes())


def _add_modules(archive, tree, wanted):
    order = modules.in_order(tree, wanted)
    for path in order:
        archive.file(f"modules/{path.name}", path.read_bytes())
    archive.file("modules/order", "".join(f"{path.name}\n" for path in order).encode())


def _start(busybox, init):
    archive = cpio.Archive()
    archive.folder("bin", "proc", "sys", "run", "tmp")
    archive.program("bin/busybox", busybox.read_bytes())
    archive.link("bin/sh", "busybox")
    archive.program("init", (HERE / init).read_bytes())
    return archive


def _clock_words(work):
    """What tells a host's kernel how fast its clock is.

    An emulated processor's time-stamp counter is this machine's. A kernel that measures it while this machine is busy
    gets it wrong, by a factor, and all its times with it; what it is told it measures more exactly and keeps within 1 %.
    """
    if os.uname().machine != "x86_64":
        return ""
    program = work / "rig-tsc"
    compile_static("the program that measures the clock", HERE / "tsc.c", program)
    return f"tsc_early_khz={run('measuring the clock', [str(program)]).strip()}"


def _stock():
    """Debian's kernel, busybox, and the folder of the kernel's modules."""
    kernel, busybox = packages.kernel_and_busybox(refresh=False)
    package = kernel.parent.parent
    tree = next((path for path in (package / "lib/modules", package / "usr/lib/modules") if path.is_dir()), None)
    if tree is None:
        raise ScriptError(f"the kernel package in {package} came without its modules; try --refresh")
    return kernel, busybox, tree


def build_balloon_driver(work, script=_BUILD_MODULE):
    """Builds our balloon driver for the guest's kernel, in `work`; returns its path. Raises NoHeaders."""
    kernel, _ = packages.kernel_and_busybox(refresh=False)
    version = kernel.name.removeprefix("vmlinuz-")
    progress(f"building the balloon driver for {version}")
    command = [str(script), "--kernel", version, "--out", str(work / "balloon-driver")]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_MODULE_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ScriptError(f"building the balloon driver took more than {_MODULE_LIMIT_S} s") from error
    said = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
    if done.returncode == _SKIPPED:
        raise NoHeaders(" ".join(said.split()).rpartition("SKIPPED: ")[2])
    if done.returncode != 0:
        raise ScriptError(f"building the balloon driver: {' '.join(command)} ended with {done.returncode}:\n{said}")
    return Path(done.stdout.splitlines()[-1])


def build_guest(work, balloon_driver=None):
    """Builds what a guest boots in `work`, with the balloon driver beside; returns its kernel and its initrd."""
    kernel, busybox, tree = _stock()
    program = work / "rig-guest"
    compile_static("the guest's program", HERE / "guest.c", program)
    guest = _start(busybox, "guest-init")
    guest.program("bin/rig-guest", program.read_bytes())
    _add_modules(guest, tree, _GUEST_MODULES)
    if balloon_driver:
        guest.file(f"modules/{balloon_driver.name}", balloon_driver.read_bytes())
    return kernel, guest.write(work / "guest.cpio")


def build(work, *, programs=None, balloon_driver=None):
    """Builds all of it in `work`; `programs`: the folder that our programs are in, else they are built."""
    folder = programs or build_programs()
    kernel, busybox, tree = _stock()
    progress(f"building images of {kernel.name} and of the programs in {folder}")
    _, guest_initrd = build_guest(work, balloon_driver)

    host = _start(busybox, "host-init")
    _add_modules(host, tree, _HOST_MODULES)
    seen = set()
    for name in PROGRAMS:
        path = Path(folder) / name
        if not path.exists():
            raise ScriptError(f"{path} is not there: build it by cargo build --release -p {name}")
        _add_program(host, name, path, work, seen)
    host.file("guest/vmlinuz", kernel.read_bytes())
    host.file("guest/initrd", guest_initrd.read_bytes())
    return Images(kernel, host.write(work / "host.cpio"), _clock_words(work))
