"""The captured guest's initrd: busybox, the looking program and its init script."""

from pathlib import Path

from emulated import cpio
from emulated.basics import compile_static

HERE = Path(__file__).resolve().parent


def build(busybox, work, modules=()):
    """Compiles the looking program and returns the path of the initrd, in `work`. The guest loads the modules first."""
    program = work / "capture-guest"
    compile_static("the guest's program", HERE / "guest.c", program)
    archive = cpio.Archive()
    archive.folder("bin", "proc", "sys", "tmp")
    archive.program("bin/busybox", busybox.read_bytes())
    archive.link("bin/sh", "busybox")
    archive.program("bin/capture-guest", program.read_bytes())
    for number, module in enumerate(modules):
        archive.file(f"modules/{number:02}-{module.name}", module.read_bytes())
    archive.program("init", (HERE / "init").read_bytes())
    return archive.write(work / "initrd.cpio")
