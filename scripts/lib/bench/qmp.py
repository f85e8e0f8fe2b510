"""QEMU's control socket with its events, which the bench takes times from."""

import json
import socket
import time

from emulated.basics import ScriptError

_ANSWER_S = 120


class Qmp:
    """One command, one answer; events are kept, in the order in which they came."""

    def __init__(self, link):
        self._link = link
        self._rest = b""
        self.events = []
        self._next(time.monotonic() + _ANSWER_S)
        self.command("qmp_capabilities")

    def _next(self, deadline):
        """The next message, or None when there is none before `deadline`."""
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._link.settimeout(left)
            try:
                data = self._link.recv(1 << 16)
            except socket.timeout:
                return None
            except OSError as error:
                raise ScriptError(f"reading from QEMU: {error}") from error
            if not data:
                raise ScriptError("QEMU closed its control socket: it has ended")
            self._rest += data
        line, self._rest = self._rest.split(b"\n", 1)
        try:
            return json.loads(line)
        except ValueError as error:
            raise ScriptError(f"QEMU's control socket: no JSON: {line[:80]!r}") from error

    def command(self, name, **arguments):
        """Carries out a command; its result."""
        request = {"execute": name, "arguments": arguments} if arguments else {"execute": name}
        self._link.settimeout(_ANSWER_S)
        try:
            self._link.sendall(json.dumps(request).encode() + b"\n")
        except OSError as error:
            raise ScriptError(f"asking QEMU for {name}: {error}") from error
        deadline = time.monotonic() + _ANSWER_S
        while True:
            message = self._next(deadline)
            if message is None:
                raise ScriptError(f"QEMU did not answer {name} within {_ANSWER_S} s")
            if "event" in message:
                self.events.append(message)
            elif "error" in message:
                raise ScriptError(f"QEMU refused {name}: {message['error'].get('desc')}")
            else:
                return message["return"]

    def take_events(self, seconds):
        """Reads what comes within `seconds`, or until an event has come."""
        message = self._next(time.monotonic() + seconds)
        if message is not None and "event" in message:
            self.events.append(message)

    def when(self, event):
        """When the last event of this name happened, by the wall clock in seconds, or None."""
        times = [e["timestamp"] for e in self.events if e["event"] == event]
        return times[-1]["seconds"] + times[-1]["microseconds"] / 1e6 if times else None

    def migration_status(self):
        """The last status that a MIGRATION event told, or None."""
        told = [e["data"]["status"] for e in self.events if e["event"] == "MIGRATION"]
        return told[-1] if told else None

    def close(self):
        """Closes the socket."""
        self._link.close()
