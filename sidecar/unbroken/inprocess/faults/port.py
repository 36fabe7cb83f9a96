"""Takes orders to break this worker, and carries them out inside the script's function.

    order ──socket──> unbroken-faults (thread) ──signal──> main thread, in code of the script ──> the fault
                              └──────────── what is done, or why not ────────────> who ordered it

The main thread decides in the handler of a signal whether it stands in the script: not between two iterations, not in
this library, not in an atomic section. Until it does the signal is repeated; after PATIENCE_S the order is withdrawn,
and nothing happens later. Whoever takes the order out of `_due`, one of the two threads, has it: it is never done after
it was withdrawn. The answer is sent before the fault, since nobody may be left to send it after.
"""

import logging
import os
import signal
import socket
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Protocol

from unbroken.faults.worker_socket import MESSAGE_S, is_gone, is_same_user, listen, read_line, send_line
from unbroken.inprocess.exception import InternalError
from unbroken.inprocess.faults import acts
from unbroken.inprocess.faults.slowness import Slowness
from unbroken.inprocess.interruption.gate import Gate, is_unraisable
from unbroken.inprocess.interruption.signals import give_back, is_blocked, unused_signal
from unbroken.inprocess.pod.environment import PodContext
from unbroken.inprocess.pod.progress import ProgressSlot
from unbroken_core.pod import fault_orders
from unbroken_core.pod.fault_orders import WORKER, FaultOrder, read_order
from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""A main thread that runs no line of the script for this long keeps its order from being done."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.5
_CLOSE_S = 5.0
_LOOK_S = 1.0
_MAX_KNOWN = 64
_LIBRARY = tuple(str(folder) + os.sep for folder in (Path(__file__).parents[2], Path(fault_orders.__file__).parents[1]))
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class BreakableCall(Protocol):
    """The call whose function is broken."""

    @property
    def iteration(self) -> int:
        """Number of the iteration that the main thread is in."""

    @property
    def active_rank(self) -> int | None:
        """Rank of this worker; None for a spare, and before the first plan."""

    @property
    def is_in_function(self) -> bool:
        """Whether the main thread is inside the function, and not in a plug-in around it."""

    @property
    def is_pinged(self) -> bool:
        """Whether the function has called `ping` in this iteration."""


class _Strike:
    """What the main thread is to do once."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act
        self.is_taken = threading.Event()
        self.is_settled = threading.Event()
        """Set once who ordered it knows, or has gone."""
        self.is_meant = False

    def settle(self, is_meant: bool) -> None:
        """Let it happen, or drop it."""
        self.is_meant = is_meant
        self.is_settled.set()


def _begin(act: Callable[[], object], is_meant: bool) -> None:
    if is_meant:
        act()


class FaultPort:
    """Of one call. `at_step` and the handler run in the main thread, all else in the port's own."""

    def __init__(self, place: PodContext, call: BreakableCall, gate: Gate, progress: ProgressSlot) -> None:
        self._place, self._call, self._gate, self._progress = place, call, gate, progress
        self._pid = os.getpid()
        self._signal_number = 0
        self._server: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve, name="unbroken-faults", daemon=True)
        self._due: deque[_Strike] = deque(maxlen=1)
        self._slowness: Slowness | None = None
        self._ballast: threading.Thread | None = None
        self._traced: FrameType | None = None
        """Frame of the script whose next line is waited for."""
        self._previous_trace: Any = None
        self._known: deque[str] = deque(maxlen=_MAX_KNOWN)
        """Orders that were done."""

    def open(self) -> None:
        """Take orders from now on; in the main thread. Without a socket the worker goes on, and takes none."""
        try:
            self._server = listen(self._place.folder, self._place.local_rank)
        except OSError as error:
            logger.warning("takes no faults: folder=%s error=%s", self._place.folder, error)
            return
        try:
            self._signal_number = unused_signal()
        except InternalError as error:
            logger.warning("takes no faults: error=%s", error)
            self._server.close()
            self._server = None
            return
        signal.signal(self._signal_number, self._on_signal)
        self._known.extend(self._read_known())
        self._thread.start()
        logger.warning("takes faults on purpose from who may exec into this pod: local_rank=%d", self._place.local_rank)

    def close(self) -> None:
        """Take no more orders; in the main thread."""
        self._due.clear()
        if self._server is None:
            return
        try:
            # Wakes the thread.
            self._server.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("port not shut down: error=%s", error)
        self._thread.join(_CLOSE_S)
        self._server.close()
        self._server = None
        if not self._thread.is_alive() and self._has_signal():
            give_back(self._signal_number)

    def forget(self) -> None:
        """Take none in a forked child."""
        self._due.clear()
        self._slowness = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def at_step(self) -> None:
        """End a step of the script, later if it is to be slow."""
        slowness = self._slowness
        if slowness is None:
            return
        if not slowness.holds(self._call.iteration, time.monotonic()):
            self._slowness = None
            return
        slowness.step(acts.work)
        self._progress.want_care()

    # ------------------------------------------------------------------------------------------ orders

    def _serve(self) -> None:
        while (server := self._server) is not None:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # It was closed.
            with connection:
                try:
                    self._receive(connection)
                except OSError as error:
                    logger.debug("order not read: error=%s", error)

    def _receive(self, connection: socket.socket) -> None:
        if not is_same_user(connection):
            send_line(connection, refused="want an order of this worker's own user")
            return
        try:
            order = read_order(read_line(connection))
            if is_gone(connection):
                logger.warning("fault on purpose withdrawn by who ordered it: kind=%s id=%s", order.kind, order.id)
                return
            done, settle = self._obey(order)
        except TimeoutError:
            send_line(connection, refused=f"want an order within {MESSAGE_S:.0f} s, got none; nothing was done")
            return
        except InputError as error:
            send_line(connection, refused=str(error))
            return
        except Exception as error:  # Whatever it is, it must not end the port in silence.
            logger.error("order not obeyed", exc_info=error)
            send_line(connection, refused=f"{type(error).__name__}: {error}")
            return
        logger.warning("fault on purpose: kind=%s id=%s: %s", order.kind, order.id, done)
        is_meant = False
        try:
            send_line(connection, done=done)
            is_meant = True
        finally:
            # Who ordered it and has gone says that nothing was done.
            if is_meant:
                self._note(order.id)
            settle(is_meant)

    @property
    def _known_file(self) -> Path:
        return self._place.folder / f"fault-{self._place.local_rank}.known"

    def _read_known(self) -> list[str]:
        """Return what earlier processes of this worker have done: an exit is not to be repeated by the next one."""
        try:
            return self._known_file.read_text().split()[-_MAX_KNOWN:]
        except (OSError, ValueError):
            return []

    def _note(self, order: str) -> None:
        self._known.append(order)
        try:
            self._known_file.write_text("\n".join(self._known))
        except OSError as error:
            logger.warning("order not noted, another process may do it again: id=%s error=%s", order, error)

    def _obey(self, order: FaultOrder) -> tuple[str, Callable[[bool], None]]:
        """Return what is done, and what lets it happen, or not. Raises InputError when it is not."""
        if order.kind not in WORKER:
            raise InputError(f"kind: want one of {', '.join(WORKER)} of a worker, got {order.kind!r}")
        rank = self._call.active_rank
        if order.id in self._known:
            return "this order was carried out before; nothing was done again", _nothing
        if order.rank is not None and order.rank != rank:
            now = "is a spare" if rank is None else f"has rank {rank}"
            raise InputError(f"rank: this worker {now}, want rank {order.rank}; nothing was done")
        self._check_inside()
        who = f"rank {rank}, iteration {self._call.iteration}, process {self._pid}"
        return f"{order.kind}: {who}", self._prepare(order)

    def _check_inside(self) -> None:
        if not (self._call.is_in_function and self._gate.is_inside):
            raise InputError(
                "this worker is not inside its training function now: it is a spare, or between two iterations, or "
                "done; nothing was done"
            )

    def _prepare(self, order: FaultOrder) -> Callable[[bool], None]:
        match order.kind:
            case "exit":
                return partial(_begin, partial(os._exit, order.code))
            case "slow":
                return partial(_begin, self._prepare_slow(order))
            case "oom":
                return partial(_begin, self._prepare_oom(order))
            case "mismatch":
                return self._strike(partial(_call_another, acts.group_of_many()))
            case "hang-gil":
                return self._strike(partial(acts.hold_gil, order.seconds))
            case _:
                return self._strike(partial(_raise, order.id))

    def _prepare_slow(self, order: FaultOrder) -> Callable[[], None]:
        iteration, now_s = self._call.iteration, time.monotonic()
        if not self._call.is_pinged:
            raise InputError("slow: want a script that calls ping() after each step, got no ping in this iteration")
        if self._slowness is not None and self._slowness.holds(iteration, now_s):
            raise InputError(f"slow: order {self._slowness.order.id} still holds; nothing was done")
        return partial(self._be_slow, Slowness(order, iteration, now_s + order.seconds))

    def _be_slow(self, slowness: Slowness) -> None:
        self._slowness = slowness
        self._progress.want_care()

    def _prepare_oom(self, order: FaultOrder) -> Callable[[], None]:
        if self._ballast is not None and self._ballast.is_alive():
            raise InputError("oom: memory is being taken already; nothing was done")
        limit_bytes = acts.memory_limit()
        self._ballast = threading.Thread(
            target=acts.take_memory, args=(limit_bytes, order.seconds), name="unbroken-fault-oom", daemon=True
        )
        return self._ballast.start

    def _strike(self, act: Callable[[], None]) -> Callable[[bool], None]:
        """Let the main thread take an act; return what lets it happen, or not. Raises InputError when it does not."""
        strike, iteration, main = _Strike(act), self._call.iteration, threading.main_thread().ident
        self._due.append(strike)
        pause_s, until_s = _FIRST_PAUSE_S, time.monotonic() + PATIENCE_S
        while main is not None and time.monotonic() < until_s and self._call.iteration == iteration:
            if not self._gate.is_inside or not self._has_signal():
                break
            signal.pthread_kill(main, self._signal_number)
            if strike.is_taken.wait(pause_s):
                return strike.settle
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        try:
            self._due.remove(strike)
        except ValueError:
            # The main thread has just taken it.
            return strike.settle
        self._check_inside()
        raise InputError(f"{self._why_not()}; nothing was done")

    def _has_signal(self) -> bool:
        # A script may take each signal that it likes; what it does with it must not be done by us.
        return signal.getsignal(self._signal_number) == self._on_signal

    def _why_not(self) -> str:
        if not self._has_signal():
            return f"the script has taken signal {self._signal_number}, by which the main thread of this worker is told"
        if is_blocked(self._signal_number):
            return f"the main thread of this worker blocks signal {self._signal_number}, by which it is told"
        return (
            f"the main thread of this worker ran no line of the script in {PATIENCE_S:.0f} s: it waits in a collective "
            "or other C code"
        )

    # ------------------------------------------------------------------------------------------ the main thread

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid or not self._due or not self._is_breakable(frame):
            return
        script, is_innermost = _script_frame(frame)
        if script is None:
            return
        if is_innermost:
            self._take()
        elif self._traced is None:
            # In torch it would look as if torch did it: at the next line of the script instead.
            self._traced, self._previous_trace = script, sys.gettrace()
            script.f_trace = self._on_line
            sys.settrace(self._on_call)

    def _on_call(self, _frame: FrameType, _event: str, _argument: object) -> Any:
        if not self._due:
            self._stop_tracing()

    def _on_line(self, frame: FrameType, event: str, _argument: object) -> Any:
        if not self._due or event == "return":
            # Of a return: the next signal looks where the main thread is by then.
            self._stop_tracing()
            return None
        if event == "line" and self._is_breakable(frame):
            self._stop_tracing()
            self._take()
            return None
        return self._on_line

    def _stop_tracing(self) -> None:
        if self._traced is not None:
            self._traced.f_trace = None
            self._traced = None
            sys.settrace(self._previous_trace)

    def _take(self) -> None:
        try:
            strike = self._due.pop()
        except IndexError:
            return  # It was withdrawn.
        strike.is_taken.set()
        while not strike.is_settled.wait(_LOOK_S) and self._thread.is_alive():
            pass
        if strike.is_meant:
            strike.act()

    def _is_breakable(self, frame: FrameType | None) -> bool:
        is_inside = self._call.is_in_function and self._gate.is_inside
        return is_inside and not self._gate.num_atomic and not is_unraisable(frame)


def _script_frame(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """Return the innermost frame that is neither torch's nor the standard library's, whether torch is not in it.

    None where that frame is this library's: it is not broken.
    """
    is_innermost, torch = True, _torch_folder()
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_LIBRARY):
            return None, False
        if torch and file.startswith(torch):
            is_innermost = False
        elif not file.startswith(("<frozen ", _STANDARD)) or any(part in file for part in _PACKAGES):
            return frame, is_innermost
        frame = frame.f_back
    return None, False


def _torch_folder() -> str:
    """Return the path of torch with a separator; nothing where it is not imported. A script may lie in a `torch`."""
    file = getattr(sys.modules.get("torch"), "__file__", None)
    return f"{Path(file).parent}{os.sep}" if file else ""


def _raise(order: str) -> NoReturn:
    raise acts.InjectedFault(f"on purpose, by `unbroken inject --fault exception` ({order})")


def _call_another(dist: Any) -> None:
    """Call what the others do not: they are in whatever the script calls next."""
    dist.barrier()


def _nothing(_is_meant: bool) -> None:
    return
