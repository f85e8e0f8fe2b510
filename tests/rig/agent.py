"""The rig's side of the agent in a host (see host-init): commands in, exit codes and output out, over a virtio port."""

import re
import selectors
import socket
import time

from emulated.basics import ScriptError

_OUTPUT_MAX_BYTES = 64 << 20
_POLL_S = 0.2
_HEAD = re.compile(rb"(\d{1,9}) (\d{1,3}) (\d{1,9})\n")
_HEAD_MAX_BYTES = 64


class Agent:
    """A host's agent. The emulator connects to `path`, at which this listens from the start."""

    def __init__(self, path, alive):
        """`alive` raises when the emulator is gone, or its console shows a failure."""
        self._alive = alive
        self._number = 0
        self._bytes = bytearray()
        self._link = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(1)

    def close(self):
        """Closes the sockets."""
        self._listener.close()
        if self._link:
            self._link.close()

    def _wait(self, source, deadline, what):
        with selectors.DefaultSelector() as selector:
            selector.register(source, selectors.EVENT_READ)
            while not selector.select(_POLL_S):
                self._alive()
                if time.monotonic() > deadline:
                    raise ScriptError(f"no answer in time: {what}")

    def _more(self, deadline, what):
        self._wait(self._link, deadline, what)
        data = self._link.recv(1 << 20)
        if not data:
            raise ScriptError(f"the emulator closed the agent's port: {what}")
        self._bytes += data

    def _answer(self, deadline, what):
        while not (match := _HEAD.match(self._bytes)):
            if len(self._bytes) > _HEAD_MAX_BYTES:
                found = bytes(self._bytes[:_HEAD_MAX_BYTES])
                raise ScriptError(f"the agent sent {found!r} in place of an answer: {what}")
            self._more(deadline, what)
        number, code, length = map(int, match.groups())
        if length > _OUTPUT_MAX_BYTES:
            raise ScriptError(f"the agent announced {length} bytes of output: {what}")
        del self._bytes[: match.end()]
        while len(self._bytes) < length:
            self._more(deadline, what)
        output = bytes(self._bytes[:length])
        del self._bytes[:length]
        if number != self._number:
            raise ScriptError(f"the agent answered to command {number}, not to {self._number}: {what}")
        return code, output

    def wait_until_up(self, seconds):
        """Waits for the agent's greeting."""
        deadline = time.monotonic() + seconds
        self._wait(self._listener, deadline, "the emulator's start")
        self._link, _ = self._listener.accept()
        self._answer(deadline, "the host's start")

    def run(self, command, seconds):
        """Runs a shell command (one line) to its end; returns its exit code and its output, both streams together."""
        if "\n" in command:
            raise ScriptError(f"the agent takes one line: {command!r}")
        self._number += 1
        deadline = time.monotonic() + seconds
        self._link.sendall(f"{self._number} {command}\n".encode())
        return self._answer(deadline, command)
