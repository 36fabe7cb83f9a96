"""The socket at which one worker takes orders: a file in the pod's folder, for this user only.

One line each way: an order (unbroken_core.pod.fault_orders), then {"done": "..."} or {"refused": "..."}. Who waits no
longer shuts the connection down: then no answer can be sent, and a worker that cannot answer does nothing.
"""

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

from unbroken_core.pod.fault_orders import MAX_ORDER_BYTES, FaultOrder, write_order
from unbroken_core.vocabulary.errors import InputError

MESSAGE_S = 5.0
"""For one line to come or go."""
_ANSWER_S = 45.0
_MAX_WAITING = 128
"""Orders that wait for the worker to be done with another."""
_MAX_ANSWER_BYTES = 8192
_PEER = struct.Struct("3i")


def socket_name(local_rank: int) -> str:
    """Return the file's name."""
    return f"fault-{local_rank}.sock"


@contextlib.contextmanager
def _short_path(folder: Path, name: str) -> Iterator[str]:
    """Yield a path of any file in the folder that a socket's address has room for: 107 bytes."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{name}"
    finally:
        os.close(descriptor)


def listen(folder: Path, local_rank: int) -> socket.socket:
    """Return the socket of this worker, in the place of one that an earlier process has left. Raises OSError."""
    name = socket_name(local_rank)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            (folder / name).unlink()
        with _short_path(folder, name) as path:
            server.bind(path)
        (folder / name).chmod(0o600)
        server.listen(_MAX_WAITING)
    except OSError:
        server.close()
        raise
    return server


def is_same_user(connection: socket.socket) -> bool:
    """Return whether the other side is this user, or root: who may end this process anyway."""
    _pid, uid, _gid = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return uid in (0, os.geteuid())


def is_gone(connection: socket.socket) -> bool:
    """Return whether the other side waits for no answer: it has ended, or withdrawn its order."""
    look = select.poll()
    look.register(connection, 0)
    return any(events & select.POLLHUP for _, events in look.poll(0))


def read_line(connection: socket.socket, most_bytes: int = MAX_ORDER_BYTES, limit_s: float = MESSAGE_S) -> str:
    """Return one line without its end, or what came of it. Raises OSError, TimeoutError among them."""
    data, until_s = b"", time.monotonic() + limit_s
    while b"\n" not in data and len(data) <= most_bytes:
        # Of the whole line: who sends a byte now and then keeps nobody waiting for longer.
        connection.settimeout(max(until_s - time.monotonic(), 0.001))
        part = connection.recv(4096)
        if not part:
            break
        data += part
    return data.partition(b"\n")[0].decode(errors="replace")


def send_line(connection: socket.socket, **answer: str) -> None:
    """Answer. Raises OSError."""
    connection.settimeout(MESSAGE_S)
    # A script may have given SIGPIPE its default action back, which ends the process.
    connection.sendall(json.dumps(answer).encode() + b"\n", socket.MSG_NOSIGNAL)


def deliver(folder: Path, local_rank: int, order: FaultOrder) -> str:
    """Give a worker an order; return what it says that it does. Raises InputError with why not."""
    where = f"worker {local_rank}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
        client.settimeout(MESSAGE_S)
        try:
            with _short_path(folder, socket_name(local_rank)) as path:
                client.connect(path)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            raise InputError(
                f"{where}: no process of it takes faults now ({_taking(folder)} do); want one whose script is inside "
                "unbroken.inprocess.Wrapper"
            ) from error
        except BlockingIOError as error:
            raise InputError(f"{where}: {_MAX_WAITING} orders wait for it already; nothing was done") from error
        except OSError as error:
            raise InputError(f"{where}: {error.strerror}; nothing was done") from error
        try:
            text = _ask(client, order)
        except OSError as error:
            raise InputError(f"{where}: {error.strerror}; the fault may have happened") from error
    if text is None:
        raise InputError(f"{where}: no answer in {_ANSWER_S:.0f} s; the order is withdrawn, nothing was done")
    return _read_answer(where, text)


def _ask(client: socket.socket, order: FaultOrder) -> str | None:
    """Return the answer; None if the order was withdrawn because there was none. Raises OSError."""
    try:
        with contextlib.suppress(BrokenPipeError):
            # It may have been refused before it was read: the answer says so.
            client.sendall(write_order(order).encode() + b"\n")
        return read_line(client, _MAX_ANSWER_BYTES, _ANSWER_S)
    except TimeoutError:
        # From now on the worker cannot answer. What it sent before is there to be read.
        client.shutdown(socket.SHUT_RDWR)
        return read_line(client, _MAX_ANSWER_BYTES) or None


def _taking(folder: Path) -> str:
    names = sorted(path.name for path in folder.glob("fault-*.sock"))[:16]
    return ", ".join(names) or "none"


def _read_answer(where: str, text: str) -> str:
    try:
        answer = json.loads(text)
        done, refused = answer.get("done"), answer.get("refused")
    except (ValueError, RecursionError, AttributeError) as error:
        raise InputError(f"{where}: want an answer, got {text[:80]!r}; the fault may have happened") from error
    if isinstance(done, str):
        return done
    raise InputError(f"{where}: {refused}")
