"""Plug-ins: free a main thread that is blocked in a collective."""

import abc
import datetime
import logging
import os
import sys

from unbroken.inprocess.connections import sockets
from unbroken.inprocess.state import FrozenState
from unbroken.inprocess.torch_state import groups
from unbroken.inprocess.torch_state.flight_recorder import FlightRecorder

logger = logging.getLogger(__name__)


class Abort(abc.ABC):
    """Runs in a thread of the library, while the main thread is still inside the function.

    An exception in it is logged; the function is interrupted all the same.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return the state that it was given."""


class AbortTorchDistributed(Abort):
    """Ends all collectives and store operations of torch.distributed in this process.

    NCCL's communicators, and those of other devices, are aborted; gloo's connections and those to the iteration's store
    are shut down. The groups leave torch's registry later, and are destroyed in the background.

    Args:
        timeout: time box for these aborts; what has not ended by then is left to timeouts.hard.
        flight_recorder_dir: folder for what torch's flight recorder knows, written before anything is aborted; default:
            the environment's UNBROKEN_FLIGHT_RECORDER_DIR. Off without either.
    """

    def __init__(
        self,
        timeout: datetime.timedelta = datetime.timedelta(seconds=10),
        flight_recorder_dir: str | os.PathLike[str] | None = None,
    ) -> None:
        self._timeout = timeout
        self._flight_recorder = FlightRecorder(flight_recorder_dir)

    @property
    def timeout(self) -> datetime.timedelta:
        """Fixed: one instance is the default of all wrappers."""
        return self._timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """Free every thread that is blocked in torch.distributed."""
        if "torch.distributed" not in sys.modules:
            return state
        self._flight_recorder.dump(state)
        free_sockets()
        if not groups.abort_communicators(self.timeout.total_seconds()):
            logger.error(
                "communicators not aborted in time: timeout=%gs rank=%s",
                self.timeout.total_seconds(),
                state.active_rank,
            )
        return state


def free_sockets() -> None:
    """Free every thread that is blocked in gloo or in the iteration's store; harmless when repeated."""
    sockets.shut_gloo_connections()
    port = os.environ.get("MASTER_PORT", "")
    if port.isdecimal():
        # A rank that waits in the store for a lost peer's address is on no gloo connection yet.
        sockets.shut_connections_to(os.environ.get("MASTER_ADDR", ""), int(port))


class AbortTransformerEngine(Abort):
    """Releases the user buffers of TransformerEngine, where it is in use."""

    def __call__(self, state: FrozenState) -> FrozenState:
        """Destroy the user buffers."""
        engine = sys.modules.get("transformer_engine.pytorch")
        if engine is not None:
            engine.module.base.destroy_ub()
        return state
