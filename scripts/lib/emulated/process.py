"""An emulator's process: it ends when this process ends, whatever ends it. And sockets that it is about to open."""

import ctypes
import signal
import socket
import subprocess
import time

from .basics import ScriptError

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.05


def start(command, said_path):
    """Starts a command with its output in a file; the kernel ends it should this process vanish."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl

    def die_with_parent():
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    with open(said_path, "wb") as said:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches us alone, and we end it
            preexec_fn=die_with_parent,
        )


def end(process):
    """Ends it at once."""
    process.kill()
    process.wait()


def connect(path, deadline, alive):
    """Connects to a socket that the emulator is about to open; `alive` raises when the emulator is gone."""
    while True:
        link = socket.socket(socket.AF_UNIX)
        try:
            link.connect(str(path))
            return link
        except OSError as error:
            link.close()
            alive()
            if time.monotonic() > deadline:
                raise ScriptError(f"connecting to the emulator at {path}: {error}") from error
            time.sleep(_POLL_S)


def tail(paths, lines):
    """The last lines of files, indented, for an error message; a file that is not there has none."""
    found = []
    for path in paths:
        if path.exists():
            found += path.read_text(errors="replace").splitlines()
    return "\n".join("    " + line for line in found[-lines:])
