"""What to do about an interrupted iteration once the survivors have left it: a pure choice in the order of the ladder.

    step of LADDER       it applies where                                          choice and its rung
    _no_progress         the script failed too often in a row without progress     fail
    _after_job_restart   every process was started again                           cut, wait or fail: job
    _processes_first     each fault restarts processes, and some are starting      wait: process
    _last_call           a shortage is just over, more pods are starting           wait for timeouts.last_call
    _same_pods           every lost rank has a ready worker in its pod             cut: in-process or process
    _promoted_spares     every lost rank has a ready spare                         cut: pod
    _new_processes       a process is starting, nobody ready could take over       wait: process
    _smaller_world       fewer ranks are allowed and enough                        cut: world
    _more_pods           too few pods are ready, or no layer lets them take the
                         lost ranks, and more may come                             wait
    _every_process       enough pods are there                                     start every process again: job
    none                                                                           fail

A wait for processes or pods ends with timeouts.startup.

See docs/design/0001-spare-before-respawn.md for the order of `process` and `pod`.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple, Union

from unbroken_core.ranks.worlds import Outcome, Shortage, World
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Reason, Rung

MAX_MISTAKES = 1
"""A script that gives up, or fails by its own code, is run once more."""
MAX_SAME_IN_PROCESS = 2
"""So often in a row the same fault without progress is recovered in its process; then a new one is tried, once."""
MAX_SAME = 10
"""So often in a row the same fault without progress is recovered in a job without a limit of its own."""
MAX_AGAIN = 3 * MAX_SAME
"""So often there, with others between them."""
MAX_FAULTS = 10 * MAX_SAME
"""So often there, whatever each of them says: it may be one fault, with another number in it each time."""


@dataclass(frozen=True)
class Situation:
    """All that the choice depends on. Times are seconds of the coordinator's clock; inf is not to come yet."""

    now_s: float
    possible: frozenset[Rung]
    """Rungs that are listed and have budget left."""
    is_in_process: bool
    is_job_rung: bool
    """Whether every process was ordered to start again in this interruption."""
    respawning: Collection[str]
    """Names of pods that lost ranks and start a process at their places."""
    respawn_until_s: float
    outcome: Outcome
    """The world that what is ready makes, spares included when `pod` is possible."""
    has_respawned: bool
    """Whether a process was started again for the active ranks of this world."""
    num_living_pods: int
    """Pods that could be active now or as soon as their processes are ready."""
    num_starting_pods: int
    """Those of them that had no ranks and are not ready yet."""
    num_possible_pods: int
    """Pods that the job can have at most: all that it wants, without those whose processes do not start."""
    replicas: int
    minimum_replicas: int
    shortage_until_s: float
    startup_s: float
    """timeouts.startup, for people: what counts down would change the status all the time."""
    is_kept_apart: bool = False
    """Whether enough pods are ready, but the layers keep spares from the lost ranks, and a lost pod is replaced."""
    standing: str = ""
    """Why no startup timeout counts now, for people: the cluster runs too few pods; "" when they count."""
    last_call_until_s: float | None = None
    """Set once a shortage is over: those who come up together with the last one needed may still come in."""
    spent: tuple[str, ...] = ()
    """Rungs whose budget is used up, for people."""
    hopeless: str = ""
    """How the processes of a place that is given up have ended; "" when there is none."""
    num_barren: int = 0
    """Recoveries in a row, this one included, after which the job got nowhere."""
    no_progress_limit: int | None = None
    num_same: int = 0
    """Those of them, the newest ones, that had the very same fault."""
    num_again: int = 0
    """Those of them that had the very same fault, in a row or not."""
    is_mistake: bool = False
    """Whether the script itself makes it, wherever it runs: an error of its code, or it gives up by `sys.exit`."""
    culprit: str = ""
    """The fault, for people."""


@dataclass(frozen=True)
class WaitForHelp:
    """Not yet."""

    reason: Reason
    message: str
    until_s: float
    rung: Rung | None = None
    """The rung that the wait belongs to."""


@dataclass(frozen=True)
class TakeWorld:
    """Make this world the next plan."""

    world: World
    rung: Rung


@dataclass(frozen=True)
class RestartJob:
    """Start every process again."""


@dataclass(frozen=True)
class Fail:
    """Give the job up."""

    reason: Reason
    message: str


Choice = Union[WaitForHelp, TakeWorld, RestartJob, Fail]


class LadderStep(NamedTuple):
    """One step of the ladder: what it would do, where it applies."""

    rung: Rung | None
    """Rung that has to be listed and to have budget left; None where the step asks for none."""
    decide: Callable[[Situation], Union[Choice, None]]
    """Returns None where the step does not apply."""


def choose(view: Situation) -> Choice:
    """Return what to do now: the choice of the first step of the ladder that applies."""
    for check in LADDER:
        if check.rung is None or check.rung in view.possible:
            choice = check.decide(view)
            if choice is not None:
                return choice
    return _fail(view)


def _no_progress(view: Situation) -> Fail | None:
    if view.is_mistake and view.num_same > MAX_MISTAKES:
        remedy = (
            "call sys.exit(0) for an early stop, and raise an exception where a restart may help"
            if "SystemExit" in view.culprit
            else "correct the script, since no restart mends this"
        )
        same = f"the script failed in the same way {view.num_same} times in a row, without progress"
        return Fail(Reason.NO_PROGRESS, f"{same}: {view.culprit}; {remedy}")
    if view.no_progress_limit is None:
        return _same_again(view)
    if view.num_barren <= view.no_progress_limit:
        return None
    message = (
        f"{view.num_barren} faults in a row without progress between them, "
        f"at most {view.no_progress_limit} are allowed (restart.noProgressLimit); the last: {view.culprit}"
    )
    return Fail(Reason.NO_PROGRESS, message)


def _same_again(view: Situation) -> Fail | None:
    """Where nobody has set a limit, a fault that comes back word by word is one of the script, and so are very many."""
    if view.num_same > MAX_SAME:
        came = f"{view.num_same} recoveries in a row without progress between them"
    elif view.num_again > MAX_AGAIN:
        came = f"{view.num_again} recoveries, with others between them, without any progress"
    elif view.num_barren > MAX_FAULTS:
        came = f"{view.num_barren} recoveries in a row from faults that a script has, without progress between them"
        return Fail(
            Reason.NO_PROGRESS, f"{came} (restart.noProgressLimit sets another limit); the last: {view.culprit}"
        )
    else:
        return None
    message = f"the same fault came in {came} (restart.noProgressLimit sets another limit): {view.culprit}"
    return Fail(Reason.NO_PROGRESS, message)


def _processes_first(view: Situation) -> WaitForHelp | None:
    # Where every fault restarts the processes, a new process at the old place costs no more than one elsewhere.
    return None if view.is_in_process else _new_processes(view)


def _last_call(view: Situation) -> WaitForHelp | None:
    # Also where the last world was smaller and is whole again: the next chance to grow may be hours away.
    until_s = view.last_call_until_s
    if until_s is None or view.now_s >= until_s or view.num_starting_pods == 0:
        return None
    if isinstance(view.outcome, Shortage) or view.outcome.num_pods >= view.replicas:
        return None
    message = f"enough pods are ready again; waits a moment for {view.num_starting_pods} that are starting"
    return WaitForHelp(Reason.WAITING_FOR_PODS, message, until_s)


def _same_pods(view: Situation) -> TakeWorld | None:
    world = _whole_world(view)
    if world is None or _has_moved(world):
        return None
    is_new = view.has_respawned or not view.is_in_process
    return TakeWorld(world, Rung.PROCESS if is_new else Rung.IN_PROCESS)


def _promoted_spares(view: Situation) -> TakeWorld | None:
    world = _whole_world(view)
    return TakeWorld(world, Rung.POD) if world is not None and _has_moved(world) else None


def _new_processes(view: Situation) -> WaitForHelp | None:
    if not view.respawning or view.now_s >= view.respawn_until_s:
        return None
    message = f"waits at most {view.startup_s:.0f} s for new processes in {shorten_names(view.respawning)}"
    return WaitForHelp(Reason.WAITING_FOR_WORKERS, message, view.respawn_until_s, Rung.PROCESS)


def _smaller_world(view: Situation) -> TakeWorld | None:
    return None if isinstance(view.outcome, Shortage) else TakeWorld(view.outcome, Rung.WORLD)


def _more_pods(view: Situation) -> WaitForHelp | None:
    may_wait = (Rung.POD in view.possible or Rung.JOB in view.possible) and view.now_s < view.shortage_until_s
    # A pod whose script does not start keeps its place: nobody replaces it, so that its ranks would be missed for ever.
    may_wait = may_wait and view.num_possible_pods >= view.minimum_replicas
    is_help_near = view.num_living_pods < view.replicas or view.num_starting_pods > 0 or view.is_kept_apart
    return _wait_for_pods(view) if is_help_near and may_wait else None


def _every_process(view: Situation) -> RestartJob | None:
    return RestartJob() if view.num_living_pods >= view.minimum_replicas else None


def _whole_world(view: Situation) -> World | None:
    return view.outcome if isinstance(view.outcome, World) and not view.outcome.num_closed else None


def _has_moved(world: World) -> bool:
    return bool(world.promoted) or world.num_left > 0


def _after_job_restart(view: Situation) -> Choice | None:
    if not view.is_job_rung:
        return None
    outcome = view.outcome
    has_all = isinstance(outcome, World) and outcome.num_pods >= view.replicas
    if isinstance(outcome, World) and (has_all or view.now_s >= view.respawn_until_s):
        return TakeWorld(outcome, Rung.JOB)
    if view.now_s >= view.respawn_until_s:
        return _fail(view)
    if view.num_living_pods < view.minimum_replicas:
        return _wait_for_pods(view) if view.now_s < view.shortage_until_s else _fail(view)
    message = f"started every process again and waits for them at most {view.startup_s:.0f} s"
    return WaitForHelp(Reason.WAITING_FOR_WORKERS, message, view.respawn_until_s, Rung.JOB)


def _wait_for_pods(view: Situation) -> WaitForHelp:
    limit = f"at most {view.startup_s:.0f} s " if not view.standing else ""
    message = (
        f"waits {limit}for pods: {view.num_living_pods} of {counted(view.replicas, 'is', 'are')} there "
        f"({view.num_starting_pods} starting), at least {counted(view.minimum_replicas, 'is', 'are')} wanted"
    )
    message += f"; {view.standing}" if view.standing else ""
    if isinstance(view.outcome, Shortage) and view.outcome.is_objection:
        message += f"; {view.outcome.detail}"
    if view.is_kept_apart:
        message += (
            "; the spares that are ready may not take the lost ranks (replaceFrom, minRanks and maxRanks in "
            "topology.layers): a pod in place of the lost one helps; next time a layer that allows more, or a smaller "
            "minReplicas"
        )
    return WaitForHelp(Reason.BELOW_MINIMUM, message, view.shortage_until_s)


def _fail(view: Situation) -> Fail:
    why = f"; {view.outcome.detail}" if isinstance(view.outcome, Shortage) else ""
    why += f"; the last fault: {view.culprit}" if view.culprit else ""
    if view.hopeless:
        return Fail(Reason.FAILED_BEFORE_READY, f"processes end before they are ready: {view.hopeless}{why}")
    if view.num_living_pods < view.minimum_replicas:
        left = counted(view.num_living_pods, "pod is", "pods are")
        message = f"{left} left, at least {view.minimum_replicas} wanted{why}"
        return Fail(Reason.BELOW_MINIMUM, message)
    if view.is_job_rung:
        return Fail(Reason.RECOVERY_TIMEOUT, f"all processes were started again, too few got ready in time{why}")
    spent = f"; used up: {', '.join(view.spent)}" if view.spent else ""
    left = ", ".join(sorted(view.possible)) or "none"
    return Fail(Reason.BUDGET_EXHAUSTED, f"no rung of the ladder is left (possible: {left}{spent}){why}")


LADDER: Final = (
    LadderStep(None, _no_progress),
    LadderStep(None, _after_job_restart),
    LadderStep(Rung.PROCESS, _processes_first),
    LadderStep(None, _last_call),
    LadderStep(None, _same_pods),
    LadderStep(Rung.POD, _promoted_spares),
    LadderStep(Rung.PROCESS, _new_processes),
    LadderStep(Rung.WORLD, _smaller_world),
    LadderStep(None, _more_pods),
    LadderStep(Rung.JOB, _every_process),
)
"""In the order in which they are asked. A new rung is one entry, its function, and its rows in the tests."""


def shorten_names(pods: Collection[str], name: Callable[[str], str] = str) -> str:
    """Return at most four names for people; `name` makes one of an item."""
    shown = ", ".join(map(name, islice(pods, 4)))
    num_more = len(pods) - 4
    return shown if num_more <= 0 else f"{shown} and {num_more} more pod{'s' * (num_more > 1)}"
