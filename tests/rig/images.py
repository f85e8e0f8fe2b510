"""What the emulators start from: the kernel, the host's initrd with our programs in it, and in there the guest's.

The host's initrd holds: busybox, KVM and network modules, our three programs with the shared libraries that they ask
for, and in /guest the guest's kernel and initrd; where a scenario wants another kernel, in /guest-LINE, too. The guest's holds: busybox, the stock virtio drivers, the program that
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
# Our balloon driver, and what adds memory to a guest.
_OUR_MODULES = (ROOT / "guest", HERE / "hotadd")
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
        archive.file(f"modules/{modules.name(path)}", modules.content(path))
    archive.file("modules/order", "".join(f"{modules.name(path)}\n" for path in order).encode())


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


def guest_folder(line):
    """Where a host has what a guest boots; `line`: of the guest's kernel, or None for the stock one."""
    return f"guest-{line}" if line else "guest"


def find_kernel(line):
    """The kernel of a line, or the stock one (None), fetched when it is not here."""
    return packages.kernel_of(line) if line else packages.kernel_and_busybox(refresh=False)[0]


def _stock(line=None):
    """Debian's kernel (the stock one, or that of a line), busybox, and the folder of the kernel's modules."""
    _, busybox = packages.kernel_and_busybox(refresh=False)
    kernel = find_kernel(line)
    package = kernel.parent.parent
    tree = next((path for path in (package / "lib/modules", package / "usr/lib/modules") if path.is_dir()), None)
    if tree is None:
        raise ScriptError(f"the kernel package in {package} came without its modules; try --refresh")
    return kernel, busybox, tree


def build_drivers(work, line=None, script=_BUILD_MODULE):
    """Builds our balloon driver, and what adds memory, for the guest's kernel, in `work`. Raises NoHeaders."""
    version = find_kernel(line).name.removeprefix("vmlinuz-")
    progress(f"building the balloon driver for {version}")
    return [_build_module(script, version, source, work / "modules") for source in _OUR_MODULES]


def _build_module(script, version, source, out):
    command = [str(script), "--kernel", version, "--source", str(source), "--out", str(out / source.name)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_MODULE_LIMIT_S
        )
    except subprocess.TimeoutExpired as error:
        raise ScriptError(f"building {source} took more than {_MODULE_LIMIT_S} s") from error
    said = "\n".join((done.stdout + done.stderr).splitlines()[-8:])
    if done.returncode == _SKIPPED:
        raise NoHeaders(" ".join(said.split()).rpartition("SKIPPED: ")[2])
    if done.returncode != 0:
        raise ScriptError(f"building {source}: {' '.join(command)} ended with {done.returncode}:\n{said}")
    return Path(done.stdout.splitlines()[-1])


def build_guest(work, drivers=(), line=None):
    """Builds what a guest boots in `work`, with these drivers beside; returns its kernel and its initrd."""
    kernel, busybox, tree = _stock(line)
    program = work / "rig-guest"
    compile_static("the guest's program", HERE / "guest.c", program)
    guest = _start(busybox, "guest-init")
    guest.program("bin/rig-guest", program.read_bytes())
    _add_modules(guest, tree, _GUEST_MODULES)
    for driver in drivers:
        guest.file(f"modules/{driver.name}", driver.read_bytes())
    return kernel, guest.write(work / f"{guest_folder(line)}.cpio")


def build(work, *, programs=None, drivers):
    """Builds all of it in `work`.

    `programs`: the folder that our programs are in, else they are built. `drivers`: those of ours, for each line of
    kernels that guests are to have (None: the stock kernel).
    """
    folder = programs or build_programs()
    kernel, busybox, tree = _stock()
    progress(f"building images of {kernel.name} and of the programs in {folder}")
    host = _start(busybox, "host-init")
    _add_modules(host, tree, _HOST_MODULES)
    seen = set()
    for name in PROGRAMS:
        path = Path(folder) / name
        if not path.exists():
            raise ScriptError(f"{path} is not there: build it by cargo build --release -p {name}")
        _add_program(host, name, path, work, seen)
    for line, ours in drivers.items():
        guest_kernel, guest_initrd = build_guest(work, ours, line)
        host.file(f"{guest_folder(line)}/vmlinuz", guest_kernel.read_bytes())
        host.file(f"{guest_folder(line)}/initrd", guest_initrd.read_bytes())
    return Images(kernel, host.write(work / "host.cpio"), _clock_words(work))
