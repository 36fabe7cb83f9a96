"""Finds the sockets of gloo and of the iteration's store among all descriptors of this process, and shuts them down.

gloo has no abort; `shutdown(2)` on its connections frees every thread that is blocked on them. Only the receiving side
is shut down, and a copy of the descriptor keeps each connection open until all ranks have left the iteration: a failing
write of gloo (the peer's end is closed already) loses its operation, whose waiter then waits for gloo's own timeout. So
no rank's abort may make another rank's write fail.

Linux shows for certain which sockets are gloo's. /proc lists what is registered with each epoll descriptor: a socket,
and the address of the object that handles its events. With each of gloo's event loops, two such objects begin with the
address of a table of their C++ class. Where torch's library hides these tables, the threads of gloo's loops are found
by name, and their system call shows the epoll in which they sleep; a loop that spins never sleeps. No other socket is
touched. gloo's listening socket is left alone: without it gloo ends the process.

While a group is formed, one rank of each two waits until the other one connects. If that one is lost, there is no
connection to shut, and gloo waits on, past its own timeout. `shut_waits_for_peers` connects in its place.
"""

import ctypes
import errno
import functools
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection

GLOO_THREAD = "gloo_tcp_loop"
_EPOLL = "anon_inode:[eventpoll]"
_EPOLL_CTL_DEL = 2
_ATTEMPTS = 40
"""How often to look again: gloo's loop wakes now and then (every 10 ms)."""

# Plain calls on descriptors: a socket object would make them non-blocking under socket.setdefaulttimeout().
# PyDLL keeps the GIL: none of these calls blocks.
_libc = ctypes.PyDLL(None, use_errno=True)

# Kept: making the type each time is slow, and leaves garbage in cycles, which costs a restart another collection.
_Address = ctypes.c_char * 128

_LOOP_TABLES = ("_ZTVN4gloo9transport3tcp8ListenerE", "_ZTVN4gloo9transport3tcp11DeferrablesE")
"""Symbols of the tables of those two classes."""
_TABLE_HEADER_BYTES = 16
"""Offset in its class's table to which an object of a class with one base points."""

_CONNECT_S = 1.0
_SEQUENCE_NUMBER = "=q"
"""How a connection of gloo begins: with the number of the pair in its listener, which is the rank of the peer."""

_held: list[int] = []
"""Copies of gloo's descriptors."""
_answered: set[tuple[str, int]] = set()
"""Listeners of gloo in which no pair waits for its peer any more."""


def gloo_connections() -> list[int]:
    """Return the descriptors of all connections of gloo in this process."""
    return [descriptor for descriptor in _gloo_descriptors() if _peer(descriptor) is not None]


def shut_gloo_connections(but: Collection[int] = ()) -> int:
    """End every read on gloo's connections in this process; return how many connections there were.

    Call `release_connections` once all ranks have left the iteration. Connections in `but` are left alone.
    """
    connections = [descriptor for descriptor in gloo_connections() if descriptor not in but]
    for descriptor in connections:
        try:
            _held.append(os.dup(descriptor))
        except OSError:
            # gloo closed it meanwhile.
            continue
        _libc.shutdown(_held[-1], socket.SHUT_RD)
    return len(connections)


def shut_waits_for_peers(world_size: int) -> None:
    """End gloo's waits for peers that have not connected yet, or have not answered; for groups of this size at most.

    Each pair gets a connection that ends at once. Those that have one pass it over. A listener is answered once.
    """
    for descriptor in _gloo_descriptors():
        if not _is_listening(descriptor):
            if _peer(descriptor) is None:
                # One that still connects fails; one that has connected meanwhile reads no more.
                _libc.shutdown(descriptor, socket.SHUT_RD)
            continue
        address = _own_address(descriptor)
        if address is None or address in _answered:
            continue
        _answered.add(address)
        try:
            for number in range(world_size):
                with socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET) as connection:
                    connection.settimeout(_CONNECT_S)
                    # Not by create_connection: to look up a name Python imports a codec, from a disk that may hang.
                    connection.connect(address)
                    connection.sendall(struct.pack(_SEQUENCE_NUMBER, number))
        except OSError:
            # Its group is gone, or out of descriptors: its process may be ended for it later.
            continue


def release_connections() -> None:
    """Close what `shut_gloo_connections` held open."""
    _answered.clear()
    while _held:
        os.close(_held.pop())


def shut_connections_to(host: str, port: int) -> int:
    """Shut all TCP connections to this numeric address down; return how many there were."""
    descriptors = map(int, _names("/proc/self/fd"))
    return sum(_shut_down(descriptor) for descriptor in descriptors if _peer(descriptor) == (host, port))


def _gloo_descriptors() -> list[int]:
    """Return all descriptors that are registered with gloo's loops."""
    return _found_by_objects() or [one for epoll in _epolls_of_sleepers() for one, _ in _registered(epoll)]


def _found_by_objects() -> list[int]:
    torch = sys.modules.get("torch._C")
    tables = frozenset() if torch is None else _tables(str(torch.__file__))
    if not tables:
        return []
    try:
        # Do not follow addresses in this process: an object may have gone, or the value may be no address.
        memory = os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    found: list[int] = []
    try:
        for epoll in _epolls():
            registered = _registered(epoll)
            if any(_pointer_at(memory, data) in tables for _, data in registered):
                found += [descriptor for descriptor, _ in registered]
    finally:
        os.close(memory)
    return found


def _epolls() -> list[int]:
    """Return all epoll descriptors.

    Asked to forget a descriptor that none of them knows, an epoll answers that it does not know it, and anything else
    that it is no epoll: a quarter of the time that reading all links in /proc/self/fd takes.
    """
    unknown = os.eventfd(0)
    found: list[int] = []
    try:
        for descriptor in map(int, _names("/proc/self/fd")):
            _libc.epoll_ctl(descriptor, _EPOLL_CTL_DEL, unknown, None)
            if ctypes.get_errno() == errno.ENOENT:
                found.append(descriptor)
    finally:
        os.close(unknown)
    return found


@functools.cache
def _tables(path: str) -> frozenset[int]:
    """Return the first words of gloo's objects; empty if torch's library hides them."""
    try:
        library = ctypes.CDLL(path)
        places = [ctypes.addressof(ctypes.c_char.in_dll(library, name)) for name in _LOOP_TABLES]
    except (OSError, ValueError):
        return frozenset()
    return frozenset(place + _TABLE_HEADER_BYTES for place in places)


def _pointer_at(memory: int, address: int) -> int:
    try:
        return int.from_bytes(os.pread(memory, ctypes.sizeof(ctypes.c_void_p), address), sys.byteorder)
    except (OSError, OverflowError):
        return 0


def _epolls_of_sleepers() -> set[int]:
    found: set[int] = set()
    pending = {task for task in _names("/proc/self/task") if _read(f"/proc/self/task/{task}/comm") == GLOO_THREAD}
    for _ in range(_ATTEMPTS):
        for task in tuple(pending):
            call = _read(f"/proc/self/task/{task}/syscall").split()
            if len(call) > 1 and _link(int(call[1], 16)) == _EPOLL:
                found.add(int(call[1], 16))
                pending.discard(task)
        if not pending:
            break
        time.sleep(0.0003)
    return found


def _registered(epoll: int) -> list[tuple[int, int]]:
    """Return each descriptor that an epoll waits for, with the data that its owner registered."""
    lines = (line.split() for line in _read(f"/proc/self/fdinfo/{epoll}").splitlines())
    return [(int(words[1]), int(words[5], 16)) for words in lines if len(words) > 5 and words[0] == "tfd:"]


def _shut_down(descriptor: int) -> int:
    """Return 1 when it was a connection, 0 for a listening or closed socket or anything else."""
    if _peer(descriptor) is None:
        return 0
    return int(_libc.shutdown(descriptor, socket.SHUT_RDWR) == 0)


def _is_listening(descriptor: int) -> bool:
    answer = ctypes.c_int()
    length = ctypes.c_uint32(ctypes.sizeof(answer))
    place = (socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return _libc.getsockopt(descriptor, *place, ctypes.byref(answer), ctypes.byref(length)) == 0 and bool(answer.value)


def _own_address(descriptor: int) -> tuple[str, int] | None:
    """Return the address of a TCP or UDP socket; None of anything else."""
    return _address(_libc.getsockname, descriptor)


def _peer(descriptor: int) -> tuple[str, int] | None:
    """Return the address at the other end; None when it is not a connected TCP or UDP socket."""
    return _address(_libc.getpeername, descriptor)


def _address(ask: Callable[..., int], descriptor: int) -> tuple[str, int] | None:
    buffer = _Address()
    length = ctypes.c_uint32(len(buffer))
    if ask(descriptor, buffer, ctypes.byref(length)) != 0:
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
    # Without a file object, which would cost more than the rest: every rank reads dozens of files per restart.
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
