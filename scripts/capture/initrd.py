"""The captured guest's initrd: busybox, the looking program and its init script, as a cpio archive.

The archive is written here and not by cpio(1) because it holds a device node, which only root could make on disk.
"""

from pathlib import Path

from packages import run

HERE = Path(__file__).resolve().parent


def _entry(number, name, mode, data=b"", device=(0, 0)):
    """One member in `newc` format: a header of hexadecimal fields, the name, the data, each padded to 4 bytes."""
    encoded = name.encode() + b"\0"
    fields = [number, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(encoded), 0]
    header = b"070701" + b"".join(b"%08X" % field for field in fields) + encoded
    return header + b"\0" * (-len(header) % 4) + data + b"\0" * (-len(data) % 4)


def build(busybox, work):
    """Compiles the looking program and returns the path of the initrd, in `work`."""
    program = work / "capture-guest"
    run(
        "compiling the guest's program (this takes a C compiler and a static libc: apt-get install gcc libc6-dev)",
        ["cc", "-O2", "-static", "-o", str(program), str(HERE / "guest.c")],
    )
    members = [(name, 0o040755, b"", (0, 0)) for name in ("bin", "dev", "proc", "sys", "tmp")]
    members += [
        ("dev/console", 0o020600, b"", (5, 1)),
        ("bin/busybox", 0o100755, busybox.read_bytes(), (0, 0)),
        ("bin/sh", 0o120777, b"busybox", (0, 0)),
        ("bin/capture-guest", 0o100755, program.read_bytes(), (0, 0)),
        ("init", 0o100755, (HERE / "init").read_bytes(), (0, 0)),
        ("TRAILER!!!", 0, b"", (0, 0)),
    ]
    archive = b"".join(_entry(number, *member) for number, member in enumerate(members, start=1))
    path = work / "initrd.cpio"
    path.write_bytes(archive)
    return path
