"""What the parts of one pod say to each other. Every message is a snapshot, so that repeating it is harmless.

    agent  <-> launcher     one Unix stream socket a process, one JSON object a line
    agent  <-> worker       the same
    agent  <-  watch        the same; Attach, then Health at each change
    launcher <- preflight   a pipe; Health after each of its parts, then PairState
    launcher -> preflight   a pipe; PairOrder

Frozen dataclasses of JSON types only, as in `messages`.
"""

from dataclasses import dataclass
from typing import Union

from unbroken_core.protocol.log_rules.rules import LogRule
from unbroken_core.protocol.messages import (
    Answer,
    Fault,
    GroupState,
    Halt,
    Halted,
    PairOrder,
    PairState,
    Policy,
    Question,
)
from unbroken_core.vocabulary.checkpoints import Restore
from unbroken_core.vocabulary.findings import Health
from unbroken_core.vocabulary.reasons import Cause, JobPhase, WorkerPhase

UNKNOWN_EXIT = 256
"""Exit code of a process that ended, or left its wrapped function, when the code is not known."""


@dataclass(frozen=True)
class Attach:
    """First message of a launcher or worker on each connection."""

    protocol: int
    role: str
    """"launcher", "worker" or "watch"."""
    pid: int
    local_rank: int = -1
    incarnation: int = -1
    """Both from the environment that the launcher gave the worker; -1 for a launcher."""
    stack_signal: int = 0
    """Signal at which the worker writes its stack (unbroken_core.pod.stacks); 0: none."""
    away_s: float = 0.0
    """Seconds for which its agent has been out of touch with the rendezvous, as far as it knows; 0 at first."""


@dataclass(frozen=True)
class ProcessState:
    """One worker process, as its parent sees it."""

    local_rank: int
    incarnation: int
    pid: int
    exit_code: int | None = None
    """None while it runs; -N when signal N ended it; UNKNOWN_EXIT when only somebody else knows. Told from the moment
    that it is certain: the memory may still be being freed. No other process is started there before that is over."""
    error: str = ""
    """First line of the error file that the worker wrote, or why it could not be started; "" otherwise."""
    port: int = 0
    """Port held for the process (process rung); 0 in a job with in-process restarts."""


@dataclass(frozen=True)
class Processes:
    """All worker processes of the pod; sent by the launcher at each change."""

    processes: tuple[ProcessState, ...]
    is_leaving: bool = False
    """Whether the pod was told to end."""
    is_draining: bool = False
    """Whether those that train go on meanwhile, for a while, until the agent ends them: their ranks can move before."""


@dataclass(frozen=True)
class MainThread:
    """Where a worker's main thread stands, as its library sees it."""

    iteration: int
    stack: tuple[str, ...]
    """Frames, "file:line in function", innermost last."""
    call: str = ""
    """Name of what the innermost frame is calling outside of Python; "" where that is nothing, or not known."""
    may_wait: bool | None = None
    """Whether that call may wait for other ranks; None: not known."""
    beside: str = ""
    """Collective in which another thread of the process waits."""
    is_raising: bool = False
    """Whether the thread is handling an exception: what it does now may follow from the interruption of others."""
    is_leaving: bool = False
    """Whether this answers Leave, not Look."""
    sequence: int = -1
    num_groups: int = 0
    groups: tuple[GroupState, ...] = ()
    """All three as in Activity."""


@dataclass(frozen=True)
class WorkerReport:
    """The worker as it sees itself; sent by the library at each change."""

    phase: WorkerPhase
    iteration: int
    host: str = ""
    port: int = 0
    fault: Fault | None = None
    has_progress: bool = False
    policy: Policy | None = None
    keys: tuple[str, ...] = ()
    """Both in every phase: a new agent or rendezvous may ask at any time."""
    answer: Answer | None = None
    halted: Halted | None = None
    """Its answer to the last Halt of this iteration."""
    checks: tuple[tuple[str, bool], ...] = ()
    """(name of a health check, whether it passed) of the last run of each in this process; empty before the first."""
    main_thread: MainThread | None = None
    """Its answer to the last Look or Leave of this iteration."""


@dataclass(frozen=True)
class Enter:
    """Agent to worker: your part of the plan."""

    term: int
    iteration: int
    rank: int | None
    world_size: int
    master_host: str
    master_port: int
    spare_ranks: int = 0
    alone_s: float | None = None
    """Seconds after which a worker without an agent leaves the iteration by itself, before its ranks can be
    reassigned. None for a spare."""
    lost_s: float | None = None
    """For how long the agent has been out of touch with the rendezvous; None while it is in touch. Sent again, with the
    same iteration, when that changes: a worker whose agent ends counts from there."""
    restore: Restore | None = None
    """What checkpoints in memory go back to; None: ranks find out among themselves."""
    window_s: float = 0.0
    """The worker measures how busy it is in windows of so many seconds; 0: it does not."""


@dataclass(frozen=True)
class Leave:
    """Agent to worker: the iteration is over; leave the training function."""

    iteration: int
    cause: Cause
    rank: int | None
    detail: str


@dataclass(frozen=True)
class Look:
    """Agent to worker: say where the main thread stands; it seems to be blocked."""

    iteration: int


@dataclass(frozen=True)
class Release:
    """Agent to worker: the job is over; COMPLETE returns from the wrapper, FAILED raises RestartAbort."""

    outcome: JobPhase
    message: str


@dataclass(frozen=True)
class Spawn:
    """Agent to launcher: start this process, unless this or a newer incarnation of the place was started.

    It waits for the end of the one before, whose exit code may be known a moment earlier."""

    local_rank: int
    incarnation: int
    environment: dict[str, str]


@dataclass(frozen=True)
class End:
    """Agent to launcher: end this process: SIGCONT and SIGTERM to its group, SIGKILL after the grace."""

    local_rank: int
    incarnation: int
    grace_s: float


@dataclass(frozen=True)
class DumpStack:
    """Agent to launcher: make this process write its stack; without effect when it does not handle the signal."""

    local_rank: int
    incarnation: int
    signal: int


@dataclass(frozen=True)
class Inspect:
    """Agent to launcher: this process's main thread has ended; report its exit code as soon as Linux shows it."""

    local_rank: int
    incarnation: int


@dataclass(frozen=True)
class Shutdown:
    """Agent to launcher: end what still runs after the grace, then exit with this code."""

    exit_code: int
    grace_s: float
    message: str
    released: tuple[int, ...] = ()
    """Local ranks whose workers were told that the job is over: how they end counts, also where they were quicker."""


@dataclass(frozen=True)
class Follow:
    """Agent to launcher: look for these in what workers print, from the next process on. Sent before any Spawn."""

    rules: tuple[LogRule, ...]


@dataclass(frozen=True)
class EndPairs:
    """Agent to launcher: this pod has ranks, and tests with no other pod any more."""


@dataclass(frozen=True)
class LineMark:
    """When one rule matched last in the output of one process."""

    local_rank: int
    incarnation: int
    rule: str
    at_s: float
    """CLOCK_MONOTONIC of the host: when the line was read."""
    count: int
    """Goes up with each mark of this rule and process."""
    line: str = ""
    """Its beginning; "" where only its absence speaks, or where output was passed over and it may have been in it."""
    is_told: bool = False
    """Whether it was told before, on an earlier connection."""


@dataclass(frozen=True)
class Lines:
    """What was printed; sent by a launcher that follows rules: at matches, and every second while lines are expected.

    Marks that have not changed are left out, except in the first one of a connection.
    """

    looked_s: float
    """CLOCK_MONOTONIC: whatever had been printed until then was looked at."""
    marks: tuple[LineMark, ...] = ()
    num_skipped: int = 0
    """Bytes that were passed over, as they were too many."""


FromWorker = Union[Attach, WorkerReport]
FromLauncher = Union[Attach, Processes, Lines, Health, PairState]
"""Health: what the pod's preflight has found, before its first process and at each connection. PairState: then, and
whenever a test with another pod has ended."""
FromWatch = Union[Attach, Health]
ToWorker = Union[Enter, Leave, Look, Release, Question, Halt]
ToLauncher = Union[Spawn, End, DumpStack, Inspect, Follow, PairOrder, EndPairs, Shutdown]
