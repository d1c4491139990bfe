"""A Type=notify service of its own, in the standard library: it keeps one memory file in PID 1's descriptor store.

Its status line says what it did at start: `stored TEXT`, or `got back TEXT` where PID 1 had kept it.
"""

import os
import signal
import socket
import sys

FIRST_PASSED_FD = 3
NAME = "slab-0"


def main() -> None:
    if os.environ.get("LISTEN_FDNAMES") == NAME:
        notify(f"READY=1\nSTATUS=got back {os.pread(FIRST_PASSED_FD, 100, 0).decode()}")
    else:
        fd = os.memfd_create(NAME)
        os.write(fd, sys.argv[1].encode())
        # Without FDPOLL=0, PID 1 would poll the descriptor and drop it at the first hang-up.
        notify(f"FDSTORE=1\nFDNAME={NAME}\nFDPOLL=0", fd)
        notify(f"READY=1\nSTATUS=stored {sys.argv[1]}")
    signal.pause()


def notify(message: str, *fds: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect(os.environ["NOTIFY_SOCKET"].replace("@", "\0", 1))
        socket.send_fds(manager, [message.encode()], fds)


if __name__ == "__main__":
    main()
