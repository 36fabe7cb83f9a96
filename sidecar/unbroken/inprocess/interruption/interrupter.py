"""Ends a running function: frees what blocks it, then gets the main thread out through the gate."""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from unbroken.inprocess.abort import Abort, free_sockets
from unbroken.inprocess.connections.sockets import shut_waits_for_peers
from unbroken.inprocess.interruption.gate import Gate
from unbroken.inprocess.interruption.slow_plugin import PATIENCE_S, named_when_slow
from unbroken.inprocess.state import FrozenState
from unbroken.inprocess.torch_state.groups import current_groups
from unbroken.inprocess.torch_state.leftovers import CLOSE_TIMEOUT_S, Leftovers
from unbroken.standstill import standstill

logger = logging.getLogger(__name__)

ATOMIC_POLL_S = 0.05


class InterruptibleCall(Protocol):
    """The call whose function is ended."""

    @property
    def iteration(self) -> int:
        """Number of the iteration that the main thread is in."""

    @property
    def state(self) -> FrozenState:
        """This worker as of now."""


class Interrupter:
    """Has a thread of its own: neither the main thread nor the link's may wait for an abort."""

    def __init__(
        self,
        gate: Gate,
        leftovers: Leftovers,
        running: InterruptibleCall,
        aborts: Callable[[], Sequence[Abort]],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`aborts` returns the plug-ins of the calls that run now, in the order in which they are to be called.

        One that runs longer than `patience_s` is named in the log.
        """
        self._gate = gate
        self._leftovers = leftovers
        self._running = running
        self._aborts = aborts
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._aborted_iteration = -1
        self._to_stop: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch, name="unbroken-monitor", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread, if it was started."""
        if self._thread.is_alive():
            self._to_stop.put(None)
            self._thread.join(CLOSE_TIMEOUT_S)

    def stop(self, iteration: int) -> None:
        """End the function that runs in this iteration; from any thread, without waiting."""
        self._to_stop.put(iteration)

    def abort_once(self, iteration: int) -> None:
        """Free what is blocked in a communicator, once per iteration; a second caller waits for the first.

        The main thread comes here on its way out of each iteration: what is behind it is not aborted any more.
        """
        with self._lock:
            if iteration <= self._aborted_iteration:
                return
            self._aborted_iteration = iteration
            standstill.spoil()
            self._leftovers.keep(current_groups())
            for abort in self._aborts():
                try:
                    with named_when_slow("abort", iteration, self._patience_s):
                        abort(self._running.state.without_exception())
                except Exception as error:
                    logger.error("abort raised: iteration=%d", iteration, exc_info=error)

    def _watch(self) -> None:
        while (iteration := self._to_stop.get()) is not None:
            self._stop_function(iteration)

    def _stop_function(self, iteration: int) -> None:
        gate = self._gate
        while not gate.atomic_lock.acquire(timeout=ATOMIC_POLL_S):
            if gate.left.is_set():
                return
        try:
            # Meanwhile the main thread may have left by itself and be on its way to the next iteration.
            if self._is_inside(iteration):
                gate.hold()
                try:
                    self.abort_once(iteration)
                finally:
                    gate.force_out(lambda: self._free_again(iteration))
        finally:
            gate.atomic_lock.release()

    def _is_inside(self, iteration: int) -> bool:
        return self._running.iteration == iteration and not self._gate.left.is_set()

    def _free_again(self, iteration: int) -> bool:
        """Return whether the main thread was still in this iteration's function; it may be in the next one by now."""
        # Under the lock that the main thread takes on its way out: the next iteration's sockets must not be touched.
        with self._lock:
            is_inside = self._is_inside(iteration)
            if is_inside and self._aborts():
                free_sockets()
                state = self._running.state
                shut_waits_for_peers(state.active_world_size or state.world_size)
            return is_inside
