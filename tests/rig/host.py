"""An emulated host: a kernel with kvm-amd and a real /dev/kvm, our programs, a network card, and an agent.

It ends with the context, whatever happens, and with this process even when that one is killed.
"""

import contextlib
import shlex
import time

from emulated import process
from emulated.basics import PAGE_BYTES, ScriptError, progress

from .agent import Agent

# What costs an emulator most is left out: string instructions byte by byte (erms, fsrm: twice the time to copy),
# five-level page tables under each guest, and checks that end a translated block (smap).
_CPU = "max,-erms,-fsrm,-la57,-smap"
_COMMAND_LINE = (
    "console=ttyS0 quiet loglevel=4 panic=-1 mitigations=off nokaslr init_on_alloc=0 tsc=reliable "
    "random.trust_cpu=on audit=0 selinux=0"
)
_MTU = 65000
_START_LIMIT_S = 90
_COMMAND_LIMIT_S = 30
_TAIL_LINES = 25
_FAILED = "rig: failed: "


class Job:
    """A command that goes on in a host: its two streams, its process id and its exit code are files in /run."""

    def __init__(self, host, name):
        self._host = host
        self.name = name

    def _path(self, kind):
        return f"/run/{self.name}.{kind}"

    def stdout(self):
        """What it has written to its standard output."""
        return self._host.read(self._path("out")).decode(errors="replace")

    def stderr(self):
        """What it has written to its standard error."""
        return self._host.read(self._path("err")).decode(errors="replace")

    def code(self):
        """Its exit code; None while it runs."""
        text = self._host.read(self._path("rc"))
        return int(text) if text else None

    def kill(self, signal="KILL"):
        """Sends it a signal."""
        self._host.run(f"kill -{signal} $(cat {self._path('pid')})")

    def told(self):
        """The end of what it has said, for a message."""
        lines = (self.stdout() + self.stderr()).splitlines()[-_TAIL_LINES:]
        return f"{self.name} on host {self._host.name} said:\n" + "\n".join("    " + line for line in lines)

    def wait(self, seconds, what):
        """Waits for its end and returns its exit code."""
        self._host.wait_until(f"[ -s {self._path('rc')} ]", seconds, f"{what}: {self.name} to end", self.told)
        return self.code()


class Host:
    """A running host. Use as a context."""

    def __init__(self, name, program, images, work, *, address, memory_mib, cpus, network):
        """`network`: the emulator's words for the wire between the hosts."""
        self.name = name
        self.address = address.partition("/")[0]
        self.console_path = work / f"{name}.console"
        self._said_path = work / f"{name}.emulator"
        self._closing = contextlib.ExitStack()
        port = work / f"{name}.port"
        with contextlib.ExitStack() as undo:
            undo.callback(self._closing.close)
            self._agent = Agent(port, self.check_alive)
            self._closing.callback(port.unlink, missing_ok=True)
            self._closing.callback(self._agent.close)
            command = [program, "-accel", "tcg,thread=multi", "-no-user-config", "-nodefaults", "-display", "none"]
            command += ["-no-reboot", "-M", "q35", "-cpu", _CPU, "-smp", str(cpus), "-m", f"{memory_mib}M"]
            command += ["-kernel", str(images.kernel), "-initrd", str(images.initrd)]
            command += ["-append", f"{_COMMAND_LINE} {images.words} rig.address={address} rig.mtu={_MTU}"]
            command += ["-chardev", f"file,id=console,path={self.console_path}", "-serial", "chardev:console"]
            command += ["-chardev", f"socket,id=agent,path={port}", "-device", "virtio-serial-pci"]
            command += ["-device", "virtserialport,chardev=agent,name=agent"]
            command += ["-netdev", f"{network},id=wire"]
            command += ["-device", f"virtio-net-pci,netdev=wire,romfile=,mac=52:54:00:00:00:{self.address[-1:]:0>2}"]
            self._process = process.start(command, self._said_path)
            self._closing.callback(process.end, self._process)
            undo.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._closing.close()

    def tail(self):
        """The end of what emulator and host have said."""
        return process.tail((self._said_path, self.console_path), _TAIL_LINES)

    def said(self):
        """The files that emulator and host write to."""
        return [self._said_path, self.console_path]

    def rss_bytes(self):
        """The memory that the emulator holds."""
        with open(f"/proc/{self._process.pid}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * PAGE_BYTES

    def check_alive(self):
        """Raises when the emulator is gone, or the host's init says that something failed."""
        code = self._process.poll()
        if code is not None:
            raise ScriptError(f"host {self.name}'s emulator ended with {code}; the last that was said:\n{self.tail()}")
        if self.console_path.exists() and _FAILED in (text := self.console_path.read_text(errors="replace")):
            failed = text.split(_FAILED, 1)[1].splitlines()[0]
            raise ScriptError(f"host {self.name}: {failed}; its console:\n{self.tail()}")

    def wait_until_up(self):
        """Waits for the agent."""
        began = time.monotonic()
        self._agent.wait_until_up(_START_LIMIT_S)
        progress(f"host {self.name} is up after {time.monotonic() - began:.1f} s")

    def run(self, command, seconds=_COMMAND_LIMIT_S):
        """Runs a shell command to its end: exit code and output."""
        code, output = self._agent.run(command, seconds)
        return code, output.decode(errors="replace")

    def check(self, command, what, seconds=_COMMAND_LIMIT_S):
        """Runs a shell command that has to succeed, and returns its output."""
        code, output = self.run(command, seconds)
        if code != 0:
            raise ScriptError(f"{what} on host {self.name}: '{command}' ended with {code}: {output.strip()}")
        return output

    def read(self, path, offset=0):
        """A file's bytes from an offset on; none when it is not there."""
        _, output = self._agent.run(f"[ ! -e {path} ] || tail -c +{offset + 1} {path}", _COMMAND_LIMIT_S)
        return output

    def start(self, name, words):
        """Starts a command that goes on."""
        inner = f"echo $$ >/run/{name}.pid; exec {shlex.join(words)}"
        whole = f"sh -c {shlex.quote(inner)} >/run/{name}.out 2>/run/{name}.err; echo $? >/run/{name}.rc"
        detached = f"setsid sh -c {shlex.quote(whole)} </dev/null >/dev/null 2>&1 &"
        self.check(f"rm -f /run/{name}.*; {detached}", f"starting {name}")
        return Job(self, name)

    def wait_until(self, condition, seconds, what, told=None):
        """Waits until a shell condition holds; `told` gives what to show when it does not in time."""
        began = time.monotonic()
        while self.run(condition)[0] != 0:
            if time.monotonic() - began > seconds:
                raise ScriptError(f"waited {seconds} s in vain for {what}; {told() if told else self.tail()}")
            time.sleep(0.2)
        return time.monotonic() - began

    def clean(self):
        """Ends what was started and removes its files, for the next scenario."""
        self.run("for pid in /run/*.pid; do [ -e $pid ] && kill -9 $(cat $pid); done; sleep 0.3; rm -rf /run/*; sync")
