"""What a pod's containers do next: a pure function of their spec and state.

init and sidecar containers, in order:   an init container must end with 0, a sidecar must have started,
                                         before the next one starts
then the main containers, all at once;   sidecars are started again whatever happens to them
when no main container will run again:   sidecars are stopped, last one first, one at a time
when the pod is to stop:                 main and init containers at once, then the sidecars, last one first
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Union

from unbroken_local.kubelet.spec import ContainerSpec, Kind, PodSpec


class Phase(Enum):
    """Where a container is."""

    WAITING = "waiting"
    RUNNING = "running"
    TERMINATED = "terminated"


@dataclass(frozen=True)
class Termination:
    """How a container ended; times are RFC 3339 UTC, for people."""

    exit_code: int
    reason: str
    started_at: str | None = None
    finished_at: str | None = None
    message: str = ""


@dataclass(frozen=True)
class ContainerState:
    """One container now. Immutable: the shell replaces it."""

    phase: Phase = Phase.WAITING
    reason: str = ""
    """Why it waits; empty for "its turn has not come"."""
    message: str = ""
    started_at: str | None = None
    is_started: bool = False
    """Running, and its startup probe has succeeded."""
    is_ready: bool = False
    termination: Termination | None = None
    last: Termination | None = None
    """The termination before this run."""
    restarts: int = 0
    not_before_s: float = 0.0
    """Monotonic time of the next attempt to start."""
    is_busy: bool = False
    """An attempt to start is under way."""


@dataclass(frozen=True)
class Stop:
    """The whole pod is to stop until `deadline_s` (monotonic)."""

    deadline_s: float
    reason: str = ""
    """Why the pod failed (DeadlineExceeded); empty when it is being deleted."""
    message: str = ""


@dataclass(frozen=True)
class StartContainer:
    """Start this container now."""

    name: str


@dataclass(frozen=True)
class StopContainer:
    """End this container until `deadline_s` (monotonic); None means with the pod's own grace from now."""

    name: str
    deadline_s: float | None


Action = Union[StartContainer, StopContainer]


@dataclass(frozen=True)
class Decision:
    """Actions to take now, all safe to repeat, and when to decide again at the latest."""

    actions: tuple[Action, ...] = ()
    wake_at_s: float | None = None
    is_over: bool = False
    """Nothing runs, and nothing will run again."""


@dataclass
class _Draft:
    now_s: float
    actions: list[Action] = field(default_factory=list)
    wakes: list[float] = field(default_factory=list)

    def start(self, name: str, state: ContainerState) -> None:
        if state.is_busy:
            return
        if state.not_before_s <= self.now_s:
            self.actions.append(StartContainer(name))
        else:
            self.wakes.append(state.not_before_s)

    def done(self, is_over: bool = False) -> Decision:
        return Decision(tuple(self.actions), min(self.wakes, default=None), is_over)


States = Mapping[str, ContainerState]


def decide(pod: PodSpec, states: States, stop: Stop | None, now_s: float) -> Decision:
    """Return what to do now. `states` holds every container of the pod."""
    draft = _Draft(now_s)
    if stop is not None:
        return _stop_all(pod, states, stop, draft)
    if is_finished(pod, states):
        return _stop_sidecars(pod, states, None, draft)
    if not _start_inits(pod, states, draft):
        return draft.done()
    for container in pod.mains:
        state = states[container.name]
        if state.phase is not Phase.RUNNING and will_run_again(pod, container, state):
            draft.start(container.name, state)
    return draft.done()


def will_run_again(pod: PodSpec, container: ContainerSpec, state: ContainerState) -> bool:
    """Return whether a container that does not run is to be started (again)."""
    if state.phase is not Phase.TERMINATED or state.termination is None:
        return True
    has_failed = state.termination.exit_code != 0
    if container.kind is Kind.SIDECAR:
        return True
    if container.kind is Kind.INIT:
        return has_failed and pod.restart_policy != "Never"
    return pod.restart_policy == "Always" or (pod.restart_policy == "OnFailure" and has_failed)


def is_finished(pod: PodSpec, states: States) -> bool:
    """Return whether no main container will run (again), sidecars aside."""
    if has_failed_init(pod, states):
        return all(states[main.name].phase is not Phase.RUNNING for main in pod.mains)
    return all(
        states[main.name].phase is Phase.TERMINATED and not will_run_again(pod, main, states[main.name])
        for main in pod.mains
    )


def has_failed_init(pod: PodSpec, states: States) -> bool:
    """Return whether an init container failed for good."""
    for container in pod.inits:
        termination = states[container.name].termination
        if container.kind is Kind.INIT and termination is not None and termination.exit_code != 0:
            return not will_run_again(pod, container, states[container.name])
    return False


def is_initialized(pod: PodSpec, states: States) -> bool:
    """Return whether the main containers may run (once any of them has run, they may)."""
    if any(_has_run(states[main.name]) for main in pod.mains):
        return True
    return all(is_passed(container, states[container.name]) for container in pod.inits)


def is_passed(container: ContainerSpec, state: ContainerState) -> bool:
    """Return whether what comes after this init container or sidecar may start."""
    if container.kind is Kind.SIDECAR:
        return state.phase is Phase.RUNNING and state.is_started
    return state.termination is not None and state.phase is Phase.TERMINATED and state.termination.exit_code == 0


def _has_run(state: ContainerState) -> bool:
    return state.phase is not Phase.WAITING or state.restarts > 0 or state.last is not None


def _start_inits(pod: PodSpec, states: States, draft: _Draft) -> bool:
    """Start what is due among init containers and sidecars; return whether the main containers may run."""
    is_past = is_initialized(pod, states)
    for container in pod.inits:
        state = states[container.name]
        if container.kind is Kind.INIT and (is_past or is_passed(container, state)):
            continue
        if state.phase is not Phase.RUNNING:
            draft.start(container.name, state)
        if not is_past and not is_passed(container, state):
            return False
    return True


def _stop_all(pod: PodSpec, states: States, stop: Stop, draft: _Draft) -> Decision:
    for container in pod.containers:
        state = states[container.name]
        if container.kind is not Kind.SIDECAR and (state.phase is Phase.RUNNING or state.is_busy):
            draft.actions.append(StopContainer(container.name, stop.deadline_s))
    if draft.actions and draft.now_s < stop.deadline_s:
        draft.wakes.append(stop.deadline_s)
        return draft.done()
    return _stop_sidecars(pod, states, stop.deadline_s, draft)


def _stop_sidecars(pod: PodSpec, states: States, deadline_s: float | None, draft: _Draft) -> Decision:
    running = [
        container.name
        for container in reversed(pod.inits)
        if container.kind is Kind.SIDECAR
        and (states[container.name].phase is Phase.RUNNING or states[container.name].is_busy)
    ]
    is_late = deadline_s is not None and draft.now_s >= deadline_s
    draft.actions += [StopContainer(name, deadline_s) for name in (running if is_late else running[:1])]
    if running and deadline_s is not None and not is_late:
        draft.wakes.append(deadline_s)
    return draft.done(is_over=not draft.actions)


def waiting(state: ContainerState, reason: str, message: str = "", not_before_s: float = 0.0) -> ContainerState:
    """Return the state of a container that waits for its next attempt; keeps the last termination."""
    return replace(
        state,
        phase=Phase.WAITING,
        reason=reason,
        message=message,
        started_at=None,
        is_started=False,
        is_ready=False,
        termination=None,
        last=state.termination or state.last,
        not_before_s=not_before_s,
    )
