"""The guests that take part, each brought up once: Debian's cloud kernel, at rest, aged or busy, kept as it then was.

A template is QEMU's saved state, which each of its sources starts from, and, of guests that ours sends too, the same
RAM of the same moment with its layout and the map of its free pages. So a round boots nothing, each source is as the
first one was, and a guest that was hinted, zeroed or scanned by one contender is not what the next one gets.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import frames
import image
import initrd
import layout
from emulated import packages
from emulated.basics import GIB, MIB, PAGE_BYTES, ScriptError, progress
from emulator import Emulator
from measure import Unavailable

TMPFS = Path("/dev/shm")
DISK = Path("/var/tmp")
STATE = "state"
_LIMIT_S = 1800
_SAVE_S = 600
_MODULES = (
    "virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_balloon",
)  # in the order in which they can be loaded
# `pc` leaves the last GiB below 4 GiB to devices, as --prealloc=linux has it; q35 leaves them two.
_MACHINE = "pc"
_AT_ONCE_UP_TO_BYTES = 2 * GIB


@dataclass(frozen=True)
class Kind:
    """A guest's life before it is migrated. `hint`: its balloon offers free page hints."""

    life: str  # fresh, aged, busy
    init: int  # init_on_alloc
    hint: bool

    def __str__(self):
        return f"{self.life}-{self.init}-{'hint' if self.hint else 'plain'}"


@dataclass(frozen=True)
class Sizes:
    """Of all guests of a bench."""

    memory_bytes: int
    age_bytes: int
    churn_bytes: int
    churn_pages_per_s: int


def devices(hint):
    """The balloon, and the thread that takes its hints."""
    hints = ",free-page-hint=on,iothread=io0" if hint else ""
    return ["-object", "iothread,id=io0", "-device", f"virtio-balloon-pci,id=balloon0,addr=0x5{hints}"]


def _folder(closing, where):
    return Path(closing.enter_context(tempfile.TemporaryDirectory(prefix="pageferry-bench-", dir=where)))


class Templates:
    """Makes templates as they are wanted, and drops those that are not wanted any more."""

    def __init__(self, program, sizes, keep, closing):
        self.program = program
        self.sizes = sizes
        self.machine = _MACHINE
        self._keep = keep
        self._rams = {}  # memfds by kind
        self.disk = keep or _folder(closing, DISK)
        self.scratch = _folder(closing, TMPFS)
        closing.callback(self.drop_rams)
        try:
            self.kernel, busybox = packages.kernel_and_busybox(False)
        except ScriptError as error:
            raise Unavailable(f"no guest: {error}") from error
        self.initrd = initrd.build(busybox, self.scratch, self._modules())
        # busybox, the modules and the guest's program are in the initrd
        self._guest = hashlib.sha256(self.kernel.read_bytes() + self.initrd.read_bytes()).hexdigest()[:12]

    def _modules(self):
        tree = self.kernel.parent.parent / "lib/modules"
        found = {path.stem: path for path in tree.glob("*/kernel/drivers/virtio/*.ko")}
        missing = [name for name in _MODULES if name not in found]
        if missing:
            lost = ", ".join(missing)
            raise ScriptError(f"{self.kernel} came without its modules {lost}; try capture-linux-ram --refresh")
        return [found[name] for name in _MODULES]

    def append(self, kind):
        """The guest's command line."""
        words = ["console=ttyS0", "panic=-1", f"init_on_alloc={kind.init}"]
        words.append(f"capture.age_mib={self.sizes.age_bytes // MIB if kind.life == 'aged' else 0}")
        if kind.life == "busy":
            words.append(f"capture.churn={self.sizes.churn_bytes // MIB}:{self.sizes.churn_pages_per_s}")
        return " ".join(words)

    def folder(self, kind):
        """Where a template lies. Its name says all that it depends on, so one that was kept is never the wrong one."""
        sizes = f"{self.sizes.memory_bytes // MIB}M-{self.sizes.age_bytes // MIB}M"
        if kind.life == "busy":
            sizes += f"-{self.sizes.churn_bytes // MIB}M-{self.sizes.churn_pages_per_s}"
        return self.disk / f"{kind}-{sizes}-qemu-{self.program.version}-{self._guest}"

    def get_all(self, kinds):
        """Makes templates that are not there: two at a time where memory is no matter, for they wait more than they do.

        The threads that make them live as long as their emulators, which end with the thread that started them.
        """
        at_once = 2 if self.sizes.memory_bytes <= _AT_ONCE_UP_TO_BYTES else 1
        with ThreadPoolExecutor(at_once) as pool:
            for made in [pool.submit(self.get, kind) for kind in sorted(kinds, key=str)]:
                made.result()

    def get(self, kind):
        """The folder of a template, which is made when it is not there."""
        folder = self.folder(kind)
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".making-", dir=folder.parent) as making:
                self._make(kind, Path(making))
                Path(making, "whole").mkdir()
                for name in (STATE, image.RAM, image.FREE, image.LAYOUT):
                    if Path(making, name).exists():
                        os.replace(Path(making, name), Path(making, "whole", name))
                Path(making, "whole").rename(folder)
        return folder

    def used_bytes(self, kind):
        """How much of a guest's RAM is not zero: what its state takes, which holds no more."""
        return (self.get(kind) / STATE).stat().st_blocks * 512

    def not_free_bytes(self, kind):
        """How much of a guest's RAM is not free, zero pages among it; of a guest whose free pages were taken."""
        free = int.from_bytes((self.get(kind) / image.FREE).read_bytes(), "little").bit_count()
        return self.sizes.memory_bytes - free * PAGE_BYTES

    def ram(self, kind):
        """The folder with a guest's RAM, layout and free map for ours. RAM is in memory as a running guest's is: in a
        memfd that cannot get shorter."""
        folder = self.scratch / f"ram-{kind}"
        if kind not in self._rams:
            kept = self.get(kind)
            folder.mkdir()
            for name in (image.FREE, image.LAYOUT):
                shutil.copy(kept / name, folder / name)
            memfd = os.memfd_create(str(kind), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            self._rams[kind] = memfd
            (folder / image.RAM).symlink_to(f"/proc/{os.getpid()}/fd/{memfd}")
            with open(kept / image.RAM, "rb") as file:
                image.copy_sparse(file.fileno(), folder / image.RAM, self.sizes.memory_bytes)
            fcntl.fcntl(memfd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        return folder

    def drop_rams(self):
        """Copies of guests' RAM in memory, which make room for others and come again when they are wanted."""
        for kind in list(self._rams):
            self._drop_ram(kind)

    def _drop_ram(self, kind):
        if kind in self._rams:
            os.close(self._rams.pop(kind))
            shutil.rmtree(self.scratch / f"ram-{kind}")

    def drop(self, kind):
        """A template that is not wanted any more; it stays if it is to be kept."""
        self._drop_ram(kind)
        if not self._keep:
            shutil.rmtree(self.folder(kind), ignore_errors=True)

    def _make(self, kind, target):
        progress(f"booting a guest: {kind}, {self.sizes.memory_bytes // MIB} MiB, '{self.append(kind)}'")
        with tempfile.TemporaryDirectory(prefix="template-", dir=self.scratch) as work:
            with Emulator(
                self.program.command, self.kernel, self.initrd, Path(work), Path(work),
                memory_bytes=self.sizes.memory_bytes, append=self.append(kind), machine=self.machine,
                deadline=time.monotonic() + _LIMIT_S, devices=devices(kind.hint),
            ) as guest:
                if kind.life == "busy":
                    guest.cont()
                    progress("guest: " + guest.wait_for("capture: churned", "the guest to be busy"))
                    guest.stop()
                    save(guest, self.program, target / STATE)
                else:
                    self._capture(kind, guest, target)

    def _capture(self, kind, guest, target):
        """Saves a guest at rest; and, of one that takes hints, keeps its RAM and which pages of it are free."""
        regions = layout.from_mtree(guest.memory_map(), self.sizes.memory_bytes)
        guest.cont()
        layout.check_against_guest(regions, guest.receive(frames.KIND_TEXT, "the guest to come to rest"))
        looks = [guest.receive(frames.KIND_LOOK, f"look {number} at the free pages") for number in (1, 2)]
        guest.stop()
        if kind.hint:
            check_hints(guest, self.program)
            # Before the state, for saving reads all RAM and leaves no holes in it.
            image.copy_sparse(guest.ram_fd, target / image.RAM, self.sizes.memory_bytes)
        save(guest, self.program, target / STATE)
        if kind.hint:
            guest.cont()
            guest.send_byte()
            looks.append(guest.receive(frames.KIND_LOOK, "the look after the pause"))
            bits = [layout.free_bits(regions, look.runs) for look in looks]
            free = bits[0] & bits[1] & bits[2]
            pages = self.sizes.memory_bytes // PAGE_BYTES
            image.write_map_and_layout(target, free, regions, pages)
            progress(f"{free.bit_count()} of {pages} pages are free")


def check_hints(guest, program):
    """Refuses a guest whose driver has not taken the offer of hints: it would be measured without them."""
    path = "/machine/peripheral/balloon0/virtio-backend"
    told = guest.command("x-query-virtio-status", path=path)
    taken = " ".join(told["guest-features"].get("dev-features", []))
    if "FREE_PAGE_HINT" not in taken:
        raise ScriptError(
            f"the guest's balloon driver takes no hints from QEMU {program.version}; it took: {taken or 'nothing'}"
        )


def save(guest, program, path):
    """Saves a paused guest's state to a file."""
    if program.mapped_ram:
        guest.command("migrate-set-capabilities", capabilities=[{"capability": "mapped-ram", "state": True}])
    guest.command("migrate-set-parameters", **{"max-bandwidth": 100 << 30})
    guest.command("migrate", uri=f"file:{path}" if program.mapped_ram else f"exec:cat > {path}")
    deadline = time.monotonic() + _SAVE_S
    while True:
        told = guest.command("query-migrate")
        if told.get("status") == "completed":
            return
        if told.get("status") in ("failed", "cancelled") or time.monotonic() > deadline:
            raise ScriptError(f"saving the guest's state to {path}: {told.get('status')}: {told.get('error-desc', '')}")
        time.sleep(0.05)
