"""Reads the pod's GPUs: when asked, and as the driver reports."""

import time
from collections.abc import Callable, Iterable

from unbroken.watch.checks.check import not_checked
from unbroken.watch.checks.gpu import GpuSamples, XidHistory, XidSample, judge_xids
from unbroken.watch.errors import NotCheckedError
from unbroken.watch.files import Files
from unbroken.watch.lane import Tell
from unbroken.watch.nvml import Events, Gpu, Nvml

_WAIT_S = 10.0
"""The driver answers so often, also where there is no event: one that does not is known to hang."""
_MOST_EVENTS = 2048
"""In one go: a flood of the application's must not hold up what says that a GPU is gone."""
_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_HEARD_AGAIN_S = 60.0


class GpuReader:
    """Samples the GPUs. Not thread-safe."""

    def __init__(self, visible: str, clock: Callable[[], float]) -> None:
        self._visible, self._clock = visible, clock
        self._nvml: Nvml | None = None
        self._gpus: list[Gpu] = []

    def sample(self) -> GpuSamples:
        """Raises NotCheckedError where there is no library, driver or device."""
        if self._nvml is None:
            self._nvml = Nvml()
        if not self._gpus:
            self._gpus = self._nvml.devices(self._visible)
        return GpuSamples([self._nvml.read(gpu) for gpu in self._gpus], self._clock())

    def own_bus_ids(self) -> Iterable[str]:
        """Return the addresses of the pod's GPUs, as far as they are known."""
        return [gpu.bus_id for gpu in self._gpus if gpu.bus_id]


def adapters_bus_ids(files: Files) -> Iterable[str]:
    """Return the addresses of the pod's InfiniBand and RoCE adapters."""
    for name in files.names("/dev/infiniband"):
        adapter = (files.read(f"/sys/class/infiniband_verbs/{name}/ibdev") or "").strip()
        address = files.target(f"/sys/class/infiniband/{adapter}/device") if adapter and "/" not in adapter else ""
        if address:
            yield address


class EventListener:
    """Waits for events of the driver: nothing else takes a second to be known."""

    def __init__(self, visible: str, tell: Tell, check: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._visible, self._tell, self._check, self._clock = visible, tell, check, clock
        self._history: XidHistory | None = None
        self._num_gpus = 0
        self._due_s = clock()
        """When the driver was asked, and for how long it was to wait, or will be asked again."""

    def is_hanging(self, now_s: float, patience_s: float) -> bool:
        """Return whether the driver has not come back for so long."""
        return now_s - self._due_s > patience_s

    def run(self) -> None:
        """Listen for good; in a thread of its own."""
        pause_s = _PAUSE_S
        while True:
            began_s = self._due_s = self._clock()
            try:
                nvml = Nvml()
                gpus = nvml.devices(self._visible)
                self._num_gpus = len(gpus)
                self._listen(nvml.listen(gpus))
            except NotCheckedError as error:
                if self._history is None or not self._history.fatal:
                    self._tell(self._check, (not_checked(self._check, str(error)),))
            # A driver that fails at once, again and again, is no reason to be busy.
            pause_s = _PAUSE_S if self._clock() - began_s > _HEARD_AGAIN_S else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._due_s = self._clock() + pause_s
            time.sleep(pause_s)

    def _listen(self, events: Events) -> None:
        """Tell events until the driver has none to give. Raises NotCheckedError then."""
        while True:
            self._judge([], events)
            self._due_s = self._clock() + _WAIT_S
            first = events.wait(int(_WAIT_S * 1000))
            self._due_s = self._clock()
            found = [] if first is None else [first]
            while found and len(found) < _MOST_EVENTS:
                more = events.wait(0)
                if more is None:
                    break
                found.append(more)
            if found:
                self._judge(found, events)
                if len(found) >= _MOST_EVENTS:
                    time.sleep(_PAUSE_S)  # A flood: the driver keeps what comes meanwhile, or counts it as lost.

    def _judge(self, found: list[tuple[str, int]], events: Events) -> None:
        sample = XidSample(found, self._clock(), self._num_gpus, events.deaf)
        judgement = judge_xids(self._history, sample)
        self._history = judgement.history
        self._tell(self._check, judgement.findings)
