"""Two hosts on one wire."""

import contextlib

import time

from emulated.basics import ScriptError

from .host import Host

NAMES = ("a", "b")
_WIRE_LIMIT_S = 20


def _wait_for(wire, host):
    """Waits for the first host's end of the wire, which the second one connects to."""
    deadline = time.monotonic() + _WIRE_LIMIT_S
    while not wire.exists():
        host.check_alive()
        if time.monotonic() > deadline:
            raise ScriptError(f"host {host.name}'s emulator has not opened {wire} after {_WIRE_LIMIT_S} s")
        time.sleep(0.05)


class Pair:
    """Two running hosts, `a` and `b`. Use as a context."""

    def __init__(self, program, images, work, *, memory_mib, cpus):
        wire = work / "wire"
        self._closing = contextlib.ExitStack()
        with contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)
            self._closing.callback(wire.unlink, missing_ok=True)
            for number, name in enumerate(NAMES, start=1):
                server = "on" if number == 1 else "off"
                host = Host(
                    name, program, images, work, address=f"10.0.0.{number}/24", memory_mib=memory_mib, cpus=cpus,
                    network=f"stream,server={server},addr.type=unix,addr.path={wire}",
                )
                self._closing.enter_context(host)
                setattr(self, name, host)
                if number == 1:
                    _wait_for(wire, host)
            undo.pop_all()

    def wait_until_up(self):
        """Waits for both agents."""
        for host in self.hosts():
            host.wait_until_up()

    def hosts(self):
        """Both."""
        return [getattr(self, name) for name in NAMES]

    def other(self, host):
        """The one that is not this one."""
        return self.b if host is self.a else self.a

    def clean(self):
        """Makes both ready for another scenario."""
        for host in self.hosts():
            host.clean()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.close()
