"""Plug-ins: may this worker go on?"""

import abc
import datetime

from unbroken.inprocess.bounded import call_bounded
from unbroken.inprocess.exception import RestartError
from unbroken.inprocess.state import FrozenState


class HealthCheck(abc.ABC):
    """Runs in the main thread at the start of every iteration, and after a fault once `finalize` is done.

    An exception at the start restarts the iteration; one after a fault means that this worker leaves.
    """

    @abc.abstractmethod
    def __call__(self, state: FrozenState) -> FrozenState:
        """Return the state that it was given."""


class CudaHealthCheck(HealthCheck):
    """Synchronises this worker's CUDA device twice from another thread; does nothing where CUDA is not in use.

    The first round finishes work that was under way, the second shows that the context still works.
    Raises TimeoutError when a round takes longer than `timeout`, and CUDA's own error.
    """

    def __init__(self, timeout: datetime.timedelta = datetime.timedelta(seconds=30)) -> None:
        self.timeout = timeout

    def __call__(self, state: FrozenState) -> FrozenState:
        """Raise when the device does not answer."""
        import torch  # noqa: PLC0415 - the package's import must stay cheap

        if torch.cuda.is_available() and torch.cuda.is_initialized():
            device = torch.cuda.current_device()
            what = f"CudaHealthCheck: want device {device} to answer"
            for _ in range(2):
                call_bounded(lambda: torch.cuda.synchronize(device), self.timeout, f"CudaHealthCheck-{device}", what)
        return state


class FaultCounterExceeded(RestartError):
    """This process caused more faults than it may."""


class FaultCounter(HealthCheck):
    """Raises FaultCounterExceeded after more than `max_rank_faults` faults of this process; None means no limit."""

    def __init__(self, max_rank_faults: int | None = None) -> None:
        self.max_rank_faults = max_rank_faults
        self.faults_count = 0

    def __call__(self, state: FrozenState) -> FrozenState:
        """Count a fault when the function raised here."""
        if state.fn_exception is None:
            return state
        self.faults_count += 1
        if self.max_rank_faults is not None and self.faults_count > self.max_rank_faults:
            raise FaultCounterExceeded(
                f"FaultCounter.max_rank_faults: want at most {self.max_rank_faults}, got {self.faults_count}"
            )
        return state
