"""The connection to the agent: a Unix stream socket, one JSON message per line, reopened whenever it breaks.

One thread reads it and stamps progress. Only snapshots travel: on every connection the worker sends who it is and its
state, so neither side must remember what the other has seen. While the agent is down, training goes on.
"""

import logging
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from unbroken.inprocess.exception import TimeoutError  # noqa: A004 - the reference's name
from unbroken.inprocess.pod.busy_time import SAMPLE_S
from unbroken.inprocess.pod.progress import ProgressSlot
from unbroken_core.pod.pod_messages import Attach, Enter, Leave, Look, MainThread, Release, ToWorker, WorkerReport
from unbroken_core.protocol import wire
from unbroken_core.protocol.bounds import MAX_NUMBER
from unbroken_core.protocol.messages import Fault, Halt, Halted, Policy, Question
from unbroken_core.vocabulary.errors import UnbrokenError, WireError, assert_never
from unbroken_core.vocabulary.reasons import Cause, WorkerPhase

logger = logging.getLogger(__name__)

RETRY_S = 0.05
SEND_TIMEOUT_S = 5.0
QUIET_S = 0.05
"""How long after a plan a report may wait: this worker and its peers need the processor to form their groups."""
_INSIDE = (WorkerPhase.RUNNING, WorkerPhase.STOPPING)


@dataclass(frozen=True)
class AgentOrders:
    """The agent's newest message of each kind."""

    enter: Enter | None = None
    """The newest plan."""
    leave: Leave | None = None
    """The newest iteration to leave."""
    release: Release | None = None
    halt: Halt | None = None
    """The newest order to wait after a step."""
    question: Question | None = None
    """The newest question about ranks."""

    def has_left(self, iteration: int) -> bool:
        """Return whether this iteration is over; a newer plan says so as well."""
        is_told = self.leave is not None and self.leave.iteration >= iteration
        return is_told or (self.enter is not None and self.enter.iteration > iteration)


class AgentLink:
    """Connection, its thread, and the newest orders."""

    def __init__(
        self,
        folder: Path,
        attach: Attach,
        progress: ProgressSlot,
        beat_s: float,
        *,
        policy: Policy | None = None,
        keys: tuple[str, ...] = (),
    ) -> None:
        """`policy` and `keys` go with every report."""
        self._folder = folder
        self._attach = attach
        self._progress = progress
        self._beat_s = beat_s
        self._policy = policy
        self._keys = keys
        self._report: WorkerReport | None = None
        self._reported_s = 0.0
        self._send_lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._news = threading.Condition()
        self._orders = AgentOrders()
        self._last_seen_s = time.monotonic()
        self._no_contact_since_s: float | None = None
        """Since when no agent of this worker had contact to the rendezvous, as far as the worker knows."""
        self._own_leave: Fault | None = None
        """Why this worker left an iteration by itself, the last time it did."""
        self._is_closing = False
        self._on_leave: Callable[[AgentOrders], None] = lambda _: None
        self._on_look: Callable[[int], None] = lambda _: None
        self._unsent = b""
        """A report that may wait."""
        self._quiet_s: float | None = None
        """When the thread sends postponed reports; None while none may be postponed."""
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="unbroken-link", daemon=True)

    @property
    def orders(self) -> AgentOrders:
        """The newest orders."""
        return self._orders

    def start(self, on_leave: Callable[[AgentOrders], None], on_look: Callable[[int], None]) -> None:
        """Start the thread; `on_leave` runs in it at every Leave and every new plan, `on_look` at every Look."""
        self._on_leave, self._on_look = on_leave, on_look
        self._last_seen_s = time.monotonic()
        self._thread.start()

    def close(self) -> None:
        """End connection and thread, if it was started."""
        self._is_closing = True
        if self._thread.is_alive():
            self._wake_writer.send(b"x")
            self._thread.join(SEND_TIMEOUT_S)
        self._drop_connection()
        self._wake_reader.close()
        self._wake_writer.close()

    def forget(self) -> None:
        """Close the descriptors in a forked child; the parent's connection stays."""
        self._is_closing = True
        for descriptor in (self._socket, self._wake_reader, self._wake_writer):
            if descriptor is not None:
                descriptor.close()
        self._socket = None

    def report(self, report: WorkerReport, may_wait: bool = False) -> None:
        """Report this worker's state to the agent; if the agent is down, as soon as it is back.

        `may_wait`: the agent already knows it from its own order; the report goes a moment later, or with the next one.
        """
        report = replace(report, policy=self._policy, keys=self._keys)
        own_leave = self._own_leave
        if own_leave is not None and report.fault is None and report.iteration == own_leave.iteration:
            # Otherwise the script would seem to have left by itself.
            report = replace(report, fault=own_leave)
        with self._send_lock:
            earlier = self._report
            if earlier is not None and earlier.halted is not None and _is_same_run(report, earlier):
                report = replace(report, halted=earlier.halted)
            if earlier is not None and earlier.main_thread is not None and earlier.iteration == report.iteration:
                report = replace(report, main_thread=earlier.main_thread)
            self._send(report, may_wait)

    def answer(self, halted: Halted) -> None:
        """Add an answer to the last report, if that was RUNNING; from any thread."""
        # A script may count as it likes; what is beyond the bounds of messages would be refused.
        halted = replace(halted, step=min(max(halted.step, -1), MAX_NUMBER))
        with self._send_lock:
            if self._report is not None and self._report.phase is WorkerPhase.RUNNING:
                self._send(replace(self._report, halted=halted))

    def tell(self, thread: MainThread) -> None:
        """Add where the main thread stands to the last report, if that is of the same iteration; from any thread."""
        with self._send_lock:
            if self._report is not None and self._report.iteration == thread.iteration:
                self._send(replace(self._report, main_thread=thread))

    def _send(self, report: WorkerReport, may_wait: bool = False) -> None:
        """Remember and send, with the lock held."""
        self._report, self._reported_s = report, time.monotonic()
        self._unsent += wire.encode(report).encode() + b"\n"
        if not may_wait or self._quiet_s is None:
            self._flush()

    def _flush(self) -> None:
        """Send postponed reports, with the lock held."""
        lines, self._unsent = self._unsent, b""
        connection = self._socket
        if connection is None or not lines:
            return
        try:
            connection.sendall(lines)
        except OSError as error:
            logger.warning("agent not reached: error=%s", error)
            _shutdown(connection)

    def _last_word(self) -> bytes:
        """Return the last report with the present age of its fault: the oldest fault names the culprit."""
        report = self._report
        if report is None:
            return b""
        if report.fault is not None:
            age_s = report.fault.detect_s + time.monotonic() - self._reported_s
            report = replace(report, fault=replace(report.fault, detect_s=age_s))
        return wire.encode(report).encode() + b"\n"

    def wait(self, is_enough: Callable[[AgentOrders], bool], away_timeout_s: float, what: str) -> AgentOrders:
        """Return the orders once they are enough.

        Waits as long as the agent is there: how long a job may wait is the coordinator's decision. Raises TimeoutError
        when the agent is away for `away_timeout_s`.
        """
        with self._news:
            while not is_enough(self._orders):
                away_s = 0.0 if self._socket is not None else time.monotonic() - self._last_seen_s
                if away_s > away_timeout_s:
                    raise TimeoutError(
                        f"{what}: no agent at {self._folder / 'agent.sock'} has answered for {away_s:.1f} s "
                        f"(limit {away_timeout_s:g} s)"
                    )
                self._news.wait(away_timeout_s - away_s + 0.1)
            return self._orders

    def _run(self) -> None:
        wire.prepare(ToWorker)
        next_beat_s = next_sample_s = 0.0
        buffer = b""
        while not self._is_closing:
            now_s = time.monotonic()
            if now_s >= next_beat_s:
                self._progress.beat()
                next_beat_s = now_s + self._beat_s
            if self._quiet_s is not None and now_s >= self._quiet_s:
                self._settle()
            if self._socket is None:
                buffer = b""
                self._connect()
                self._leave_when_alone()
            if self._progress.is_measured and now_s >= next_sample_s:
                self._progress.sample()
                next_sample_s = now_s + SAMPLE_S
            due_s = next_beat_s if self._quiet_s is None else min(next_beat_s, self._quiet_s)
            due_s = min(due_s, next_sample_s) if self._progress.is_measured else due_s
            wait_s = due_s - now_s if self._socket is not None else min(RETRY_S, due_s - now_s)
            if self._is_readable(wait_s):
                buffer = self._read(buffer)

    def _settle(self) -> None:
        """Send postponed reports; postpone none until the next plan."""
        with self._send_lock:
            self._quiet_s = None
            self._flush()

    def _is_readable(self, wait_s: float) -> bool:
        poller = select.poll()
        poller.register(self._wake_reader, select.POLLIN)
        connection = self._socket
        if connection is not None:
            poller.register(connection, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(max(wait_s, 0.0) * 1000 + 1)}
        return connection is not None and connection.fileno() in ready

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SEND_TIMEOUT_S)
        try:
            connection.connect(str(self._folder / "agent.sock"))
            self._progress.attach(self._folder / "stamps")
            with self._send_lock:
                away_s = 0.0 if self._no_contact_since_s is None else time.monotonic() - self._no_contact_since_s
                hello = wire.encode(replace(self._attach, away_s=away_s)).encode() + b"\n"
                connection.sendall(hello + self._last_word())
                self._socket, self._unsent = connection, b""
        except (OSError, UnbrokenError) as error:
            logger.debug("agent not reached: error=%s", error)
            connection.close()
            return
        logger.debug("agent reached")

    def _leave_when_alone(self) -> None:
        """Leave the iteration when an agent without contact would order it: others may have the ranks by now."""
        enter, report = self._orders.enter, self._report
        if self._socket is not None or enter is None or enter.alone_s is None or self._no_contact_since_s is None:
            return
        if report is None or report.phase not in _INSIDE:
            # A worker that has completed saves nothing more, and would have to repeat everything.
            return
        away_s = time.monotonic() - self._no_contact_since_s
        if away_s < enter.alone_s or self._orders.has_left(enter.iteration):
            return
        detail = f"no agent has heard the rendezvous for {away_s:.1f} s: left, since others may have its ranks by now"
        logger.warning("%s: iteration=%d rank=%s", detail, enter.iteration, enter.rank)
        self._own_leave = Fault(Cause.HEARTBEAT_LOST, enter.iteration, detail, away_s)
        self._obey(Leave(enter.iteration, Cause.HEARTBEAT_LOST, None, detail))

    def _read(self, buffer: bytes) -> bytes:
        connection = self._socket
        if connection is None:
            return b""
        try:
            data = connection.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._drop_connection()
            return b""
        *lines, rest = (buffer + data).split(b"\n")
        try:
            for line in lines:
                self._obey(wire.decode(line, ToWorker))
            if len(rest) > wire.MAX_MESSAGE_BYTES:
                raise WireError(f"message: want at most {wire.MAX_MESSAGE_BYTES} bytes, got {len(rest)} and no end")
        except WireError as error:
            logger.warning("message of the agent refused, connecting again: error=%s", error)
            self._drop_connection()
            return b""
        return rest

    def _obey(self, message: ToWorker) -> None:
        orders = self._orders
        if isinstance(message, Look):
            self._on_look(message.iteration)
            return
        if isinstance(message, Enter):
            self._no_contact_since_s = None if message.lost_s is None else time.monotonic() - message.lost_s
            if orders.enter is not None and message.iteration <= orders.enter.iteration:
                return
            orders = replace(orders, enter=message)
            # Before the main thread sees the plan: what it postpones will be sent for certain.
            self._quiet_s = time.monotonic() + QUIET_S
        elif isinstance(message, Leave):
            if orders.leave is not None and message.iteration <= orders.leave.iteration:
                return
            orders = replace(orders, leave=message)
        elif isinstance(message, Release):
            orders = replace(orders, release=message)
        elif isinstance(message, Question):
            orders = replace(orders, question=message)
        elif isinstance(message, Halt):
            orders = replace(orders, halt=message)
        else:
            assert_never(message)
        self._orders = orders
        # Before the waiters: all ranks wait for the interruption of a running function.
        self._on_leave(orders)
        with self._news:
            self._news.notify_all()

    def _drop_connection(self) -> None:
        with self._send_lock:
            connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()
            self._last_seen_s = time.monotonic()
            if self._no_contact_since_s is None:
                self._no_contact_since_s = self._last_seen_s
            with self._news:
                self._news.notify_all()


def _is_same_run(report: WorkerReport, earlier: WorkerReport) -> bool:
    is_running = report.phase is WorkerPhase.RUNNING and earlier.phase is WorkerPhase.RUNNING
    return is_running and report.iteration == earlier.iteration


def _shutdown(connection: socket.socket) -> None:
    """Make the reading thread notice that the connection is of no use."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
