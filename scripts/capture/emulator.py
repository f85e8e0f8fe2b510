"""The emulated machine: QEMU under TCG with its RAM in a file on tmpfs, its console in a file, frames by a socket.

It ends with the context, whatever happens, and with this process even when that one is killed. Each wait ends at a
deadline, when the guest says that it failed, or when the emulator is gone; each of these shows the console's tail.
"""

import contextlib
import json
import os
import selectors
import time

import frames
from common import CaptureError
from emulated import process
from emulated.basics import progress

_SAID = "capture: "
_FAILED = "capture: failed: "
_CONSOLE_TAIL_LINES = 25
_POLL_S = 0.2
_START_LIMIT_S = 60
_QMP_LIMIT_S = 60


class _Qmp:
    """QEMU's control socket: one command, one answer."""

    def __init__(self, link):
        link.settimeout(_QMP_LIMIT_S)
        self._link = link
        self._file = link.makefile("rw")
        self._read()
        self.command("qmp_capabilities")

    def _read(self):
        try:
            line = self._file.readline()
        except OSError as error:
            raise CaptureError(f"waiting for the emulator's answer: {error}") from error
        if not line:
            raise CaptureError("the emulator closed its control socket")
        return json.loads(line)

    def command(self, name, **arguments):
        """Carries out a command and returns its result; events in between are of no interest here."""
        self._file.write(json.dumps({"execute": name, "arguments": arguments}) + "\n")
        self._file.flush()
        while True:
            answer = self._read()
            if "error" in answer:
                raise CaptureError(f"the emulator refused {name}: {answer['error'].get('desc')}")
            if "return" in answer:
                return answer["return"]

    def close(self):
        """Closes both the buffer and the socket."""
        with contextlib.suppress(OSError):  # what is left in the buffer matters to nobody
            self._file.close()
        self._link.close()


class Emulator:
    """A running guest. Use as a context. `program` is the emulator's command, `devices` what else it is told."""

    def __init__(
        self, program, kernel, initrd, work, ram_dir, *, memory_bytes, append, deadline, machine="q35", devices=()
    ):
        self._console_path = work / "console.log"
        self._said_path = work / "emulator.log"
        self._deadline = deadline
        self._seen = 0
        self._reader = frames.Reader()
        self._closing = contextlib.ExitStack()
        ram_path = ram_dir / "ram"
        with contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)
            self.ram_fd = os.open(ram_path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            self._closing.callback(os.close, self.ram_fd)
            os.ftruncate(self.ram_fd, memory_bytes)
            command = [*program, "-accel", "tcg", "-no-user-config", "-nodefaults", "-display", "none", "-no-reboot"]
            command += ["-M", f"{machine},memory-backend=ram0", "-smp", "1", "-m", f"{memory_bytes >> 20}M"]
            command += ["-object", f"memory-backend-file,id=ram0,share=on,mem-path={ram_path},size={memory_bytes}"]
            command += ["-kernel", str(kernel), "-initrd", str(initrd), "-append", append, *devices]
            command += ["-chardev", f"file,id=console,path={self._console_path}", "-serial", "chardev:console"]
            command += ["-chardev", f"socket,id=frames,path={work}/frames,server=on,wait=off"]
            command += ["-serial", "chardev:frames"]
            command += ["-qmp", f"unix:{work}/qmp,server=on,wait=off", "-S"]
            self._process = process.start(command, self._said_path)
            self._closing.callback(process.end, self._process)
            start_deadline = time.monotonic() + _START_LIMIT_S
            self._qmp = _Qmp(process.connect(work / "qmp", start_deadline, self._check_alive))
            self._closing.callback(self._qmp.close)
            self._frames = process.connect(work / "frames", start_deadline, self._check_alive)
            self._closing.callback(self._frames.close)
            # The emulator has it open and so have we: without a name it goes when both are gone, even after SIGKILL.
            ram_path.unlink()
            undo.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.close()

    def _console(self):
        try:
            return self._console_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def tail(self):
        """The end of what emulator and guest have said, for an error message."""
        return process.tail((self._said_path, self._console_path), _CONSOLE_TAIL_LINES)

    def _check_alive(self):
        code = self._process.poll()
        if code is not None:
            raise CaptureError(f"the emulator ended with {code}; the last it and the guest said:\n{self.tail()}")

    def _relay_console(self):
        """Shows what the guest's own programs say, and turns a failure of theirs into ours."""
        text = self._console()
        end = text.rfind("\n") + 1
        for line in text[self._seen : end].splitlines():
            if _FAILED in line:
                raise CaptureError(f"in the guest: {line.split(_FAILED, 1)[1]}; the console's tail:\n{self.tail()}")
            if line.startswith(_SAID):
                progress("guest: " + line[len(_SAID) :])
        self._seen = max(self._seen, end)

    def receive(self, kind, what):
        """Waits for the guest's next frame, which has to be of this kind."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._frames, selectors.EVENT_READ)
            while True:
                frame = self._reader.next_frame()
                if frame:
                    if frame[0] != kind:
                        raise CaptureError(f"waiting for {what}: the guest sent a frame of kind {frame[0]}")
                    return frame[1]
                if time.monotonic() > self._deadline:
                    raise CaptureError(
                        f"waiting for {what}: out of time (--timeout gives more); the console's tail:\n{self.tail()}"
                    )
                if selector.select(_POLL_S):
                    data = self._frames.recv(1 << 16)
                    if not data:
                        self._process.wait(_START_LIMIT_S)
                    self._reader.feed(data)
                self._relay_console()
                self._check_alive()

    def wait_for(self, said, what):
        """Waits until the guest's console has a line with `said` in it; returns that line."""
        while True:
            found = next((line for line in self._console().splitlines() if said in line), None)
            if found:
                return found
            if time.monotonic() > self._deadline:
                raise CaptureError(f"waiting for {what}: out of time; the console's tail:\n{self.tail()}")
            self._relay_console()
            self._check_alive()
            time.sleep(_POLL_S)

    def command(self, name, **arguments):
        """A command on the emulator's control socket; returns its result."""
        return self._qmp.command(name, **arguments)

    def send_byte(self):
        """Lets the guest's looking program go on."""
        self._frames.sendall(b"g")

    def stop(self):
        """Pauses the guest, and returns when it is paused."""
        self._qmp.command("stop")
        status = self._qmp.command("query-status")
        if status["running"]:
            raise CaptureError(f"the emulator was told to stop and says that it is {status['status']}")

    def cont(self):
        """Starts the guest, or lets it run on."""
        self._qmp.command("cont")

    def memory_map(self):
        """`info mtree -f`, as text."""
        return self._qmp.command("human-monitor-command", **{"command-line": "info mtree -f"})
