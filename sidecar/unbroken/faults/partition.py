"""A pod that nothing leaves for a while: each interface but lo gets a queue with no room for a packet.

Addresses, routes and connections stay: packets are lost as on a cut cable, and loopback works. It needs CAP_NET_ADMIN.
A process beside the workers takes the queues away again; were that one killed, the pod would stay cut off until it is
deleted, and its network with it.
"""

import contextlib
import errno
import os
import signal
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from unbroken_core.pod.fault_orders import FaultOrder
from unbroken_core.vocabulary.errors import InputError

_NEW_QUEUE, _DELETE_QUEUE = 36, 37
_REQUEST, _ACKNOWLEDGE, _EXCLUSIVE, _CREATE = 0x1, 0x4, 0x200, 0x400
_ROOT = 0xFFFFFFFF
_HANDLE = 0x0BAD0000
"""By which a queue of ours is known from others."""
_KIND, _OPTIONS, _ERROR = 1, 2, 2
_HEADER, _QUEUE, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBHiIII"), struct.Struct("=HH")
_LOOK_S = 0.5
_MAX_INTERFACES = 64


def part(folder: Path, order: FaultOrder, own_address: str) -> str:
    """Let nothing leave this pod until the order's seconds are over; return what is done. Raises InputError."""
    if own_address.startswith("127.") or own_address == "::1":
        raise InputError("partition: pods of `unbroken run` share this machine's network; nothing was done")
    interfaces = [(number, name) for number, name in socket.if_nameindex() if name != "lo"][:_MAX_INTERFACES]
    if not interfaces:
        raise InputError("partition: this pod has no network but loopback; nothing was done")
    cut: list[tuple[int, str]] = []
    try:
        for number, name in interfaces:
            _ask(_NEW_QUEUE, number, _REQUEST | _ACKNOWLEDGE | _CREATE | _EXCLUSIVE)
            cut.append((number, name))
    except OSError as error:
        _mend(cut)
        raise InputError(_why(error)) from error
    _mend_later(folder, order.seconds, cut)
    return f"partition: nothing leaves by {', '.join(name for _, name in cut)} for {order.seconds:g} s"


def _why(error: OSError) -> str:
    if error.errno == errno.EPERM:
        return "partition: want CAP_NET_ADMIN in the container, got none; nothing was done"
    if error.errno == errno.EEXIST:
        return "partition: an interface has a queue of its own, maybe of an order that still holds; nothing was done"
    return f"partition: {error.strerror}; nothing was done"


def _mend_later(folder: Path, seconds: float, cut: Sequence[tuple[int, str]]) -> None:
    until_s = time.monotonic() + seconds
    if os.fork():
        return
    # This process must not go on as the one that was forked.
    try:
        os.setsid()
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nothing, descriptor)
        while time.monotonic() < until_s and folder.is_dir():
            time.sleep(_LOOK_S)
    finally:
        _mend(cut)
        os._exit(0)


def _mend(cut: Sequence[tuple[int, str]]) -> None:
    for number, _name in cut:
        with contextlib.suppress(OSError):
            _ask(_DELETE_QUEUE, number, _REQUEST | _ACKNOWLEDGE)


def _ask(what: int, interface: int, flags: int) -> None:
    """Ask the kernel for the root queue of an interface. Raises OSError with its answer."""
    body = _QUEUE.pack(0, 0, 0, interface, _HANDLE, _ROOT, 0)
    body += _attribute(_KIND, b"bfifo\0")
    if what == _NEW_QUEUE:
        # One byte: less than any packet.
        body += _attribute(_OPTIONS, struct.pack("=I", 1))
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.settimeout(5.0)
        kernel.send(_HEADER.pack(_HEADER.size + len(body), what, flags, 1, 0) + body)
        answer = kernel.recv(4096)
    _size, kind, *_ = _HEADER.unpack_from(answer)
    (number,) = struct.unpack_from("=i", answer, _HEADER.size)
    if kind != _ERROR or number:
        raise OSError(-number, os.strerror(-number))


def _attribute(kind: int, data: bytes) -> bytes:
    size = _ATTRIBUTE.size + len(data)
    return _ATTRIBUTE.pack(size, kind) + data + bytes(-size % 4)
