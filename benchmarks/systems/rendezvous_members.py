"""The agents of a benchmark's job: N WebSocket connections from one process, each as light as it can be.

Commands come one a line on stdin, an answer goes to stdout as one line of JSON. Times are seconds of CLOCK_MONOTONIC.

    join             connect, say Hello with READY workers; {"seconds": until the last member has its first plan}
    run              all enter the iteration of the last plan
    fault            member 0 reports an exception; {"seconds": until the last of the others has the interrupt}
    ready            all are READY at one instant; {"seconds": until the last has its plan}
    almost           all are READY but member 0
    last             member 0 is READY as well; {"seconds": until the last has its plan}
    beat SECONDS     each member sends a heartbeat a second, evenly spread

With BENCH_CA, a file with an authority, connections are made with TLS.
"""

import json
import os
import select
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from unbroken_core.conventions.tls import client_context
from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import PROTOCOL, Fault, Heartbeat, Hello, Report, WorkerState
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

PODS_PER_RACK = 16
LIMIT_S = 120.0
_NO_MASK = b"\0\0\0\0"
"""A mask of zeros leaves the text as it is: a client must mask, and this one must cost next to nothing."""


def client_frame(message: object) -> bytes:
    """Return a message as a WebSocket frame of a client."""
    data = wire.encode(message).encode()
    if len(data) < 126:
        return struct.pack(">BB", 0x81, 0x80 | len(data)) + _NO_MASK + data
    if len(data) < 1 << 16:
        return struct.pack(">BBH", 0x81, 0x80 | 126, len(data)) + _NO_MASK + data
    return struct.pack(">BBQ", 0x81, 0x80 | 127, len(data)) + _NO_MASK + data


def split_frames(data: bytes) -> tuple[list[bytes], bytes]:
    """Return the payloads of whole frames of a server, and what is left."""
    found, at = [], 0
    while len(data) - at >= 2:
        size, start = data[at + 1], at + 2
        if size == 126:
            start += 2
            size = int.from_bytes(data[at + 2 : start], "big") if len(data) >= start else len(data)
        elif size == 127:
            start += 8
            size = int.from_bytes(data[at + 2 : start], "big") if len(data) >= start else len(data)
        if len(data) < start + size:
            break
        found.append(data[start : start + size])
        at = start + size
    return found, data[at:]


@dataclass
class Member:
    """One connection."""

    number: int
    connection: socket.socket
    is_secure: bool = True
    """Whether there is no handshake to be ended."""
    rest: bytes = b""
    is_open: bool = False
    """Whether the server has taken the WebSocket."""
    kinds: list[str] = field(default_factory=list)
    """Types of the messages that came since the last command."""


class Crowd:
    """All members. Single-threaded."""

    def __init__(
        self, port: int, token: str, num_members: int, ranks_per_pod: int, context: ssl.SSLContext | None = None
    ) -> None:
        self._address = ("127.0.0.1", port)
        self._context = context
        self._token = token
        self._num_members = num_members
        self._ranks_per_pod = ranks_per_pod
        self._poller = select.epoll()
        self._by_fd: dict[int, Member] = {}
        self._members: list[Member] = []
        self._seq = 0
        self._iteration = -1

    def join(self) -> float:
        """Connect all members; return the seconds until the last has its plan."""
        hellos = [client_frame(self._hello(number)) for number in range(self._num_members)]
        self._request = (
            f"GET /v1/agents HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {self._token}\r\n"
            "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        ).encode()
        since_s = time.monotonic()
        for number in range(self._num_members):
            member = self._connect(number)
            self._by_fd[member.connection.fileno()] = member
            self._members.append(member)
            self._poller.register(member.connection.fileno(), select.EPOLLIN)
            self._take(0.0, hellos)
        self._wait("Plan", self._members, hellos)
        took_s = time.monotonic() - since_s
        self._iteration += 1
        return took_s

    def run(self) -> float:
        """Let all enter the iteration."""
        self._say(self._members, WorkerPhase.RUNNING)
        return 0.0

    def fault(self) -> float:
        """Let member 0 fail; return the seconds until the last of the others knows."""
        self._forget()
        fault = Fault(Cause.EXCEPTION, self._iteration, "ValueError: the benchmark's fault")
        since_s = time.monotonic()
        self._say(self._members[:1], WorkerPhase.RUNNING, fault)
        self._wait("Interrupt", self._members)
        return time.monotonic() - since_s

    def ready(self) -> float:
        """Let all be ready at one instant; return the seconds until the last has its plan."""
        return self._plan(self._members)

    def almost(self) -> float:
        """Let all but one be ready."""
        self._say(self._members[1:], WorkerPhase.READY)
        return 0.0

    def last(self) -> float:
        """Let the one be ready, too; return the seconds until the last has its plan."""
        return self._plan(self._members[:1])

    def _plan(self, members: list[Member]) -> float:
        self._forget()
        since_s = time.monotonic()
        self._say(members, WorkerPhase.READY)
        self._wait("Plan", self._members)
        took_s = time.monotonic() - since_s
        self._iteration += 1
        return took_s

    def beat(self, seconds: float) -> float:
        """Send a heartbeat a member and second."""
        since_s = time.monotonic()
        sent, due = 0, 0
        self._seq += 1
        while (now_s := time.monotonic() - since_s) < seconds:
            due = int(now_s * self._num_members)
            for number in range(sent, due):
                # Members take turns; each round has its own number.
                frame = client_frame(Heartbeat(self._seq + number // self._num_members))
                self._members[number % self._num_members].connection.send(frame)
            sent = due
            self._take(0.005)
        self._seq += due // self._num_members + 1
        return sent / seconds

    # ------------------------------------------------------------------------------------------------------ internals

    def _connect(self, number: int) -> Member:
        connection = socket.create_connection(self._address, timeout=LIMIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setblocking(False)
        if self._context is None:
            connection.send(self._request)
            return Member(number, connection)
        name = os.environ["BENCH_SERVER_NAME"]
        secure = self._context.wrap_socket(connection, do_handshake_on_connect=False, server_hostname=name)
        member = Member(number, secure, is_secure=False)
        self._shake_hands(member)
        return member

    def _shake_hands(self, member: Member) -> None:
        """Go on with the handshake; at its end ask for the WebSocket."""
        connection = member.connection
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
        except ssl.SSLWantReadError:
            return
        member.is_secure = True
        connection.send(self._request)

    @staticmethod
    def _receive(member: Member) -> bytes | None:
        """Return what has come, None when it is not yet a whole record of TLS."""
        found = b""
        try:
            while piece := member.connection.recv(1 << 16):
                found += piece
                if not isinstance(member.connection, ssl.SSLSocket):
                    break
        except ssl.SSLWantReadError:
            return found or None
        return found

    def _hello(self, number: int) -> Hello:
        return Hello(
            PROTOCOL,
            "bench",
            f"bench-{number}",
            f"0123abcd-4567-89ef-0123-{number:012x}",
            f"session-{number}",
            f"node-{number}",
            self._ranks_per_pod,
            domains=(f"rack-{number // PODS_PER_RACK}",),
            workers=self._workers(WorkerPhase.READY),
        )

    def _workers(self, phase: WorkerPhase, fault: Fault | None = None) -> tuple[WorkerState, ...]:
        host, port = ("127.0.0.1", 20_000) if phase is WorkerPhase.READY else ("", 0)
        return tuple(
            WorkerState(local_rank, 0, phase, self._iteration, host, port, fault if local_rank == 0 else None)
            for local_rank in range(self._ranks_per_pod)
        )

    def _say(self, members: Iterable[Member], phase: WorkerPhase, fault: Fault | None = None) -> None:
        self._seq += 1
        frame = client_frame(Report(self._seq, self._workers(phase, fault)))
        for member in members:
            member.connection.send(frame)

    def _forget(self) -> None:
        for member in self._members:
            member.kinds.clear()

    def _wait(self, kind: str, members: list[Member], hellos: list[bytes] | None = None) -> None:
        """Read until each has a message of this type. Raises TimeoutError."""
        until_s = time.monotonic() + LIMIT_S
        missing = {member.number for member in members if kind not in member.kinds}
        while missing:
            for member in self._take(0.1, hellos):
                if kind in member.kinds:
                    missing.discard(member.number)
            if time.monotonic() > until_s:
                raise TimeoutError(f"{kind}: want it for all members in {LIMIT_S:g} s, {len(missing)} lack it")

    def _take(self, wait_s: float, hellos: list[bytes] | None = None) -> list[Member]:
        without_ended_report = []
        for fd, _event in self._poller.poll(wait_s, 512):
            member = self._by_fd[fd]
            if not member.is_secure:
                self._shake_hands(member)
                continue
            received = self._receive(member)
            if received is None:
                continue
            if not received:
                raise ConnectionError(f"member {member.number}: the rendezvous has closed the connection")
            data = member.rest + received
            if not member.is_open and hellos is not None:
                head, end, data = data.partition(b"\r\n\r\n")
                if not end or b" 101 " not in head[:20]:
                    raise ConnectionError(f"member {member.number}: want 101, got {head[:60]!r}")
                member.is_open = True
                member.connection.send(hellos[member.number])
            payloads, member.rest = split_frames(data)
            member.kinds += [kind_of(payload) for payload in payloads]
            without_ended_report.append(member)
        return without_ended_report


def kind_of(payload: bytes) -> str:
    """Return the type of a message without reading the rest of it."""
    return payload[9 : payload.find(b'"', 9)].decode()


def main() -> None:
    """Obey until stdin ends."""
    port, num_members, ranks_per_pod = map(int, sys.argv[1:4])
    authority = os.environ.get("BENCH_CA")
    context = None if authority is None else client_context(Path(authority).read_text())
    crowd = Crowd(port, os.environ["BENCH_TOKEN"], num_members, ranks_per_pod, context)
    commands: dict[str, Callable[..., float]] = {
        "join": crowd.join,
        "run": crowd.run,
        "fault": crowd.fault,
        "ready": crowd.ready,
        "almost": crowd.almost,
        "last": crowd.last,
        "beat": crowd.beat,
    }
    for line in sys.stdin:
        name, *numbers = line.split()
        print(json.dumps({"seconds": commands[name](*map(float, numbers))}), flush=True)


if __name__ == "__main__":
    main()
