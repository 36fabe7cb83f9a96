"""Finds the sockets of gloo and of the iteration's store among all descriptors of this process, and shuts them down.

gloo has no abort; `shutdown(2)` on its connections frees every thread that is blocked on them. Only their receiving
side is shut down, and a copy of the descriptor keeps each connection open until all ranks have left the iteration: a
write of gloo that fails (the peer's end is closed already) loses its operation, whose waiter then waits for gloo's
own timeout. So no rank's abort may make another rank's write fail. Which ones are gloo's
is known for sure from Linux: gloo's event loops run in threads of a known name that sleep in epoll_wait, /proc names
the epoll descriptor of that call, and the sockets that are registered with it. No other socket is touched. gloo's
listening socket is left alone: without it gloo ends the process.
"""

import ctypes
import os
import socket
import struct
import time
from collections.abc import Iterator

GLOO_THREAD = "gloo_tcp_loop"
_ATTEMPTS = 40
"""gloo's loop is awake now and then (it looks around every 10 ms); look again so often."""

# Plain calls on descriptors: a socket object would make them non-blocking under socket.setdefaulttimeout().
# PyDLL keeps the GIL: none of these calls blocks.
_libc = ctypes.PyDLL(None)

# Kept: a type that is made anew each time is slow, and garbage in cycles, which costs a restart another collection.
_Address = ctypes.c_char * 128

_held: list[int] = []
"""Copies of gloo's descriptors."""


def shut_gloo_connections() -> int:
    """Let every read on a connection of gloo in this process see its end; return how many connections there were.

    Call `release_connections` once all ranks have left the iteration.
    """
    connections = [
        descriptor for epoll in _gloo_epolls() for descriptor in _registered(epoll) if _peer(descriptor) is not None
    ]
    for descriptor in connections:
        try:
            _held.append(os.dup(descriptor))
        except OSError:
            # gloo closed it meanwhile.
            continue
        _libc.shutdown(_held[-1], socket.SHUT_RD)
    return len(connections)


def release_connections() -> None:
    """Close what `shut_gloo_connections` held open."""
    while _held:
        os.close(_held.pop())


def shut_connections_to(host: str, port: int) -> int:
    """Shut all TCP connections to this numeric address down; return how many there were."""
    descriptors = map(int, _names("/proc/self/fd"))
    return sum(_shut_down(descriptor) for descriptor in descriptors if _peer(descriptor) == (host, port))


def _gloo_epolls() -> set[int]:
    found: set[int] = set()
    pending = {task for task in _names("/proc/self/task") if _read(f"/proc/self/task/{task}/comm") == GLOO_THREAD}
    for _ in range(_ATTEMPTS):
        for task in tuple(pending):
            call = _read(f"/proc/self/task/{task}/syscall").split()
            if len(call) > 1 and _link(int(call[1], 16)) == "anon_inode:[eventpoll]":
                found.add(int(call[1], 16))
                pending.discard(task)
        if not pending:
            break
        time.sleep(0.0003)
    return found


def _registered(epoll: int) -> Iterator[int]:
    for line in _read(f"/proc/self/fdinfo/{epoll}").splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "tfd:":
            yield int(words[1])


def _shut_down(descriptor: int) -> int:
    """Return 1 when it was a connection, 0 for a listening or closed socket or anything else."""
    if _peer(descriptor) is None:
        return 0
    return int(_libc.shutdown(descriptor, socket.SHUT_RDWR) == 0)


def _peer(descriptor: int) -> tuple[str, int] | None:
    """Return the address at the other end; None when it is not a connected TCP or UDP socket."""
    buffer = _Address()
    length = ctypes.c_uint32(len(buffer))
    if _libc.getpeername(descriptor, buffer, ctypes.byref(length)) != 0:
        return None
    (family,) = struct.unpack_from("=H", buffer.raw)
    (port,) = struct.unpack_from("!H", buffer.raw, 2)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, buffer.raw[4:8]), port
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, buffer.raw[8:24]).removeprefix("::ffff:"), port
    return None


def _names(folder: str) -> list[str]:
    return os.listdir(folder)  # noqa: PTH208 - names are what is wanted, and fast


def _link(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 - a text, not a path
    except OSError:
        return ""


def _read(path: str) -> str:
    # Without a file object, which costs more than the rest: every rank reads dozens in each restart.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        text = b""
        while data := os.read(descriptor, 1 << 16):
            text += data
    except OSError:
        return ""
    finally:
        os.close(descriptor)
    return text.decode(errors="replace").strip()
