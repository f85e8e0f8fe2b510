"""A plain copy over TCP through a link: `receive ADDRESS` prints its port, `send ADDRESS PORT BYTES` milliseconds.

A link of 10 Gbit/s at most lies between, so this need not be the fastest copy that there is.
"""

import mmap
import socket
import sys
import time

_STEP = 1 << 20
_BUFFER = 4 << 20


def receive(address):
    """Takes what comes into cold memory, then says that all is there."""
    with socket.create_server((address, 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        print(server.getsockname()[1], flush=True)
        link, _ = server.accept()
    with link:
        total = int.from_bytes(link.recv(8, socket.MSG_WAITALL), "big")
        memory = memoryview(mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        at = 0
        while at < total:
            got = link.recv_into(memory[at : at + _STEP])
            if got == 0:
                raise SystemExit("the sender ended early")
            at += got
        link.sendall(b"!")


def send(address, port, total):
    """Sends from warm memory; prints the time from the first write to the receiver's word."""
    memory = memoryview(b"\x5a" * total)
    with socket.socket() as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        link.connect((address, port))
        began = time.monotonic()
        link.sendall(total.to_bytes(8, "big"))
        for at in range(0, total, _STEP):
            link.sendall(memory[at : at + _STEP])
        if link.recv(1) != b"!":
            raise SystemExit("the receiver ended early")
        print((time.monotonic() - began) * 1e3)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
