"""What the parts of a job say to the rendezvous, and it to them. Every message is a snapshot: repeating it is harmless.

    agent     <-> rendezvous   one WebSocket a pod, one JSON object a frame
    operator  <-> rendezvous   HTTP, one JSON object a body

What is said inside of a pod is in `pod_messages`. Frozen dataclasses of JSON types only; `protocol.wire` turns them
into text and back, strictly.
"""

from dataclasses import dataclass, field
from typing import Union

from unbroken_core.vocabulary.checkpoints import Held, Key, MemoryStatus, Peer, Restore
from unbroken_core.vocabulary.findings import Finding, Health
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, Doing, JobPhase, RankReason, Reason, Role, Rung, WorkerPhase

PROTOCOL = 1
"""Version of all messages; a peer of another version is refused. New fields with a default need no new one."""

FEATURES_HEADER = "Unbroken-Features"
"""Header of the agent's request for its WebSocket: what it knows beside the first messages, commas between them."""
CAN_HALT = "halt"
"""It knows Halt. Unknown messages are refused, unknown fields and headers are passed over."""

# ---------------------------------------------------------------------------------------------- agent <-> rendezvous


@dataclass(frozen=True)
class Fault:
    """One fault of one worker in one iteration, as its pod reports it."""

    cause: Cause
    iteration: int
    detail: str = ""
    """One line for people, at most 2,000 characters: exception type and text, exit code, signal, what hung."""
    detect_s: float = 0.0
    """Seconds from the fault instant to its report, on the pod's clock."""
    stack: tuple[str, ...] = ()
    """Top Python frames of the culprit, innermost last; empty when unknown."""
    exit_code: int | None = None
    """Of the worker's process, when that ended by itself with another one than 0."""
    is_certain: bool = False
    """Of a soft-timeout: whether the worker hangs itself; else it may wait for one that does."""
    is_hang: bool = False
    """Of a soft-timeout: its stamps stand still, or a log rule says so. Who hangs is judged by what all workers do; see
    `Activity`."""
    rule: str = ""
    """Name of the log rule that has found it; "" where none has."""


@dataclass(frozen=True)
class GroupState:
    """How far a worker is in one process group, as torch's flight recorder has it."""

    name: str
    members: str
    """Ranks of the group: "0-7", "3-1019:8" (`pod.group_ranks`); "" where they are too many runs."""
    begun: int
    """Collectives that the worker has begun in it."""
    pending: int = -1
    """The oldest of them that has not ended; -1: none, or not known."""
    what: str = ""
    """Name of that one, with type and size where all ranks must have the same."""
    last: tuple[str, ...] = ()
    """Names of the last ones, the newest last."""


@dataclass(frozen=True)
class Activity:
    """What a worker did when its iteration was ended for a hang, as its agent sees it."""

    iteration: int
    doing: Doing
    what: str = ""
    """Name of the collective or call, or the place in the script: "train.py:41 load_batch"; "" where unknown."""
    idle_s: float = 0.0
    """Age of its oldest stamp that counts; 0 for one that runs Python code and has never pinged."""
    ping_s: float = -1.0
    """Seconds since its last ping in this iteration; -1: it has not pinged."""
    sequence: int = -1
    """Collectives that its default group has begun; -1: not known."""
    num_groups: int = 0
    """Process groups that it is in; 0: not known."""
    stack: tuple[str, ...] = ()
    """Python frames, innermost last, unless it waits for others."""
    groups: tuple[GroupState, ...] = ()
    """How far it is in its groups; fewer than `num_groups` where that is not known of all."""


@dataclass(frozen=True)
class Policy:
    """What a script's rank assignment asks of the coordinator: the same on all workers, within the job's spec."""

    max_ranks: int | None = None
    divisible_by: int = 1
    fills_gaps: bool = False
    """Ranks that are lost without a spare are taken by the highest ones, in order (FillGaps)."""
    layers: tuple[Layer, ...] = ()
    """Of a Tree, without names; the first is the job, the pod is below the last. Empty: those of the spec."""
    root_key: str = ""
    sizes: tuple[tuple[int, int], ...] = ()
    """Steps of a filter of the world's size, ascending: (from so many ranks on, so many are active); empty: none."""
    code: str = ""
    """Name of a rank assignment in Python: one worker is asked at each plan. The fields above say nothing then."""


@dataclass(frozen=True)
class Question:
    """Who shall be which rank? Workers are numbered: those with ranks first, then the others in tree order."""

    term: int
    number: int
    """Counts up in a term."""
    iteration: int
    world_size: int
    """Workers that are numbered, lost ones included."""
    active_world_size: int
    """So many of them were active; 0 before the first plan."""
    terminated: tuple[int, ...]
    """Numbers of those that are lost, or whose domain stands aside; ascending."""
    names: tuple[tuple[str, ...], ...] = ()
    """What key functions of the script have said, each combination once."""
    keys: tuple[int, ...] = ()
    """By worker, the index in `names`; -1: not known. Empty where no step has keys."""


@dataclass(frozen=True)
class Answer:
    """What a worker's rank assignment says to a question."""

    term: int
    number: int
    workers: tuple[int, ...]
    """Number of the worker that shall be rank 0, rank 1, ..."""
    error: str = ""
    """Why there is no answer; "" when there is one."""


@dataclass(frozen=True)
class Halted:
    """Where a worker is that was told to halt."""

    term: int
    number: int
    """Of the Halt that this answers."""
    step: int
    """Last one that its script told in this iteration; -1: none."""
    is_held: bool = False
    """Whether it waits inside of ping, after this step."""
    is_done: bool = False
    """Whether it has also done there what its script does before ranks move."""


@dataclass(frozen=True)
class WorkerState:
    """One worker of a pod."""

    local_rank: int
    incarnation: int
    """0 for the first process at this place in this pod, +1 for each process started after it."""
    phase: WorkerPhase
    iteration: int = -1
    """The last iteration that this worker was told to enter; -1 before the first."""
    host: str = ""
    port: int = 0
    """Endpoint of the listening socket that the worker bound before it said READY; empty and 0 in other phases."""
    fault: Fault | None = None
    """Set from the fault until the worker is READY for the next iteration or a new process took its place."""
    step: int = -1
    """Last step reported by ping(step=); -1 when the script reports none."""
    has_progress: bool = False
    """Whether the worker pinged in this iteration."""
    policy: Policy | None = None
    """What its script asks for; None: nothing, or not known in this phase."""
    keys: tuple[str, ...] = ()
    """Name of its domain in each layer of the policy but the first. Of code: what its key functions say."""
    answer: Answer | None = None
    """To the last question that it was asked, while it is READY."""
    halted: Halted | None = None
    """Its answer to the last Halt, while it is RUNNING."""
    has_ended: bool = False
    """Whether its process has ended well after COMPLETED."""
    activity: Activity | None = None
    """What it did when its last iteration was ended for a hang; None: not asked, or not known yet."""


@dataclass(frozen=True)
class Pace:
    """How busy one worker was in one window of an iteration: the medians of its blocks of steps."""

    local_rank: int
    iteration: int
    window: int
    """Counts from 0 in an iteration; all workers count alike, since all enter it together."""
    busy_s: float
    """Seconds of a step in which it did not wait for others."""
    step_s: float
    """Seconds of a step."""


@dataclass(frozen=True)
class RankPlan:
    """One worker's part of a plan."""

    local_rank: int
    rank: int | None
    """Active rank, or None for a spare."""
    reason: RankReason


@dataclass(frozen=True)
class Repair:
    """The recovery that a plan ends. Should its rendezvous be lost before it has counted it, the next one does."""

    number: int
    """Counts recoveries under the plan's term from 1."""
    cause: Cause
    rung: Rung
    rank: int | None
    pod: str
    node: str
    domain: str
    detail: str
    iteration: int
    """The one that was interrupted; -1: none was known."""
    world_size: int
    """Its active ranks."""
    ago_s: float
    """Seconds from its beginning until the plan was cut."""
    detect_s: float = 0.0
    stop_s: float = 0.0
    """Of these, those until all had left the iteration."""
    replaced_by: tuple[str, ...] = ()
    """The first pods that were promoted."""


@dataclass(frozen=True)
class Plan:
    """One pod's part of a plan: what its workers are in one iteration. The newest (term, iteration) wins."""

    term: int
    iteration: int
    role: Role
    world_size: int
    """Active ranks in the whole job."""
    master_host: str
    master_port: int
    ranks: tuple[RankPlan, ...]
    domains: tuple[str, ...] = ()
    """Names of the pod's domains, outermost first, "" where unknown; the agent returns them when it joins again."""
    spare_ranks: int = 0
    """Spare workers in the whole job."""
    origins: tuple[tuple[int, str], ...] = ()
    """(local_rank, where its rank was in the plan before: domains and pod) of those that took another's rank."""
    restore: Restore | None = None
    """What the ranks go back to, in jobs with checkpoints in memory. None: they find out among themselves."""
    repair: Repair | None = None
    """None of a first plan."""


@dataclass(frozen=True)
class PairState:
    """Whether a pod tests with others, and how its last such test went. Said by its launcher as well."""

    port: int
    """Of the store at which a partner meets this pod; 0: it takes no tests, or no more of them."""
    host: str = ""
    """Where that is: the pod's address. The agent adds it to what the launcher says."""
    gpus: int = 0
    """GPUs that can take part."""
    term: int = 0
    number: int = 0
    """Both of the PairOrder that the rest answers; 0: none yet."""
    has_passed: bool | None = None
    """None: it cannot say."""
    why: str = ""
    """Why it has not passed, or cannot say, in one line."""


@dataclass(frozen=True)
class Hello:
    """First message of an agent on each connection."""

    protocol: int
    job: str
    pod: str
    pod_uid: str
    session: str
    """Random for each agent process."""
    node: str
    ranks_per_pod: int
    domains: tuple[str, ...] = ()
    """Known from `unbroken run` or an earlier plan; empty when the operator is to send them."""
    term: int = 0
    """Highest term that this agent has obeyed; 0 before the first."""
    plan: Plan | None = None
    """The plan that its workers are in; None before the first."""
    workers: tuple[WorkerState, ...] = ()
    memory: Held | None = None
    """What its keeper has; None without one, and of an agent that does not know of it."""
    entered_ago_s: float = 0.0
    """Seconds since workers of this pod entered the plan's iteration, as far as this agent saw it; 0: not known."""
    over_ago_s: float = 0.0
    """Seconds since this agent knows that the plan's iteration is over; 0: it does not."""
    health: Health | None = None
    """What the checks of devices and links say; None: nothing yet, or there is no watch."""
    checkpoint_s: float = 0.0
    step_ago_s: float = 0.0
    """Both as in Report."""
    pairs: PairState | None = None
    """None: this pod knows of no tests with others, and is sent no PairOrder."""


@dataclass(frozen=True)
class Report:
    """Workers of a pod as they are now; sent when anything but `step` changed, within 50 ms if that may wait."""

    seq: int
    """Counts up in a connection, Report and Heartbeat together."""
    workers: tuple[WorkerState, ...]
    is_leaving: bool = False
    """The pod was told to end (SIGTERM); its ranks should move."""
    entered_ago_s: float = 0.0
    """Seconds since the last of the workers that this shows in a new iteration was told to enter it."""
    memory: Held | None = None
    """What its keeper has; None: as this connection told last."""
    health: Health | None = None
    """What the checks of devices and links say; None: as this connection told last."""
    checkpoint_s: float = 0.0
    """Seconds for which training has stood still for checkpoints in the newest iteration of these workers, in the one
    that stood longest. Like a step, no news by itself."""
    paces: tuple[Pace, ...] = ()
    """Of the windows that have ended since the last Report or Heartbeat; no news by itself."""
    step_ago_s: float = 0.0
    """Seconds since the highest step of these workers in their newest iteration was made; 0: just now, or not known."""
    checkpoint_after_s: float = 0.0
    """Of `checkpoint_s`, what came after that step."""
    pairs: PairState | None = None
    """None: as this connection told last."""


@dataclass(frozen=True)
class Heartbeat:
    """Sent every `heartbeat_interval_s` while there is nothing else to say."""

    seq: int
    max_step: int = -1
    """Of the pod's workers in their newest iteration."""
    checkpoint_s: float = 0.0
    paces: tuple[Pace, ...] = ()
    step_ago_s: float = 0.0
    checkpoint_after_s: float = 0.0
    """All four as in Report."""


@dataclass(frozen=True)
class Welcome:
    """Answer to Hello: this agent is a member."""

    protocol: int
    term: int
    heartbeat_interval_s: float
    over: int = -1
    """No worker may enter an iteration up to this one; what the agent should do instead follows."""
    copies: int = 0
    """On so many other pods checkpoints in memory shall be copied. If it is not 0, a pod that has a keeper asks for a
    certificate (CertificateRequest), opens its keeper's listener and says so in Held.port. 0: nothing of that, and what
    was open may be closed. An agent obeys the last Welcome, whatever its own settings say."""


@dataclass(frozen=True)
class Refused:
    """Answer to a Hello that is not accepted; the connection is closed after it. The agent tries again, slower."""

    reason: str


@dataclass(frozen=True)
class Halt:
    """Wait inside of ping, after the first step from `step` on: ranks are to move where all have finished one step.

    Sent only to agents that know it, of jobs with in-process restarts. The newest counts.
    """

    term: int
    number: int
    """Counts up in a term."""
    iteration: int
    step: int
    """NO_STEP: go on, nothing is to be moved any more."""
    is_common: bool
    """All stand after the same step: do what the script does before a move, and go on waiting. Interrupt follows."""
    within_s: float
    """Wait no longer than this, counted from the receipt."""


NO_STEP = 1 << 62


@dataclass(frozen=True)
class Interrupt:
    """The iteration is over for everyone: leave the training function and say READY."""

    term: int
    iteration: int
    cause: Cause
    rank: int | None
    """Active rank of the first culprit known; None for a fault outside the workers."""
    pod: str
    detail: str


@dataclass(frozen=True)
class Respawn:
    """Start a process again at these places (only where the one there is GONE), or end it first when it is stuck."""

    term: int
    places: tuple[tuple[int, int], ...]
    """(local_rank, incarnation that is to be replaced); a newer incarnation is left alone."""
    cause: Cause


@dataclass(frozen=True)
class PairOrder:
    """Test with another pod, which gets the same number; a newer order ends an older one.

    Sent only to pods without ranks whose last PairState had a port.
    """

    term: int
    number: int
    """Counts up in a term; no two pairs have the same."""
    side: int
    """0: the partner comes to this pod's store; 1: this pod goes to the partner's."""
    host: str
    port: int
    """Of that store."""
    gpus: int
    """GPUs of each that take part; 0: the test is without any."""
    within_s: float
    """What has not ended by then has failed."""


@dataclass(frozen=True)
class Consult:
    """Ask this worker, unless another process is in its place."""

    term: int
    local_rank: int
    incarnation: int
    question: Question


@dataclass(frozen=True)
class Finish:
    """The job is over: let the workers go."""

    term: int
    outcome: JobPhase
    """COMPLETE or FAILED."""
    reason: Reason
    message: str


@dataclass(frozen=True)
class CertificateRequest:
    """Vouch for the key of this pod's keeper. Sent after a Welcome with `copies`; the answer is Certificate."""

    request: str
    """Certificate signing request, PEM; only its key counts. The pod is the one that this connection has shown."""


@dataclass(frozen=True)
class Certificate:
    """The answer to CertificateRequest."""

    term: int
    certificate: str = ""
    """Of the pod's key, and those that lead to the authority, PEM; "" with an error."""
    authority: str = ""
    """Whom keepers of this job believe, PEM."""
    error: str = ""
    """Why there is no certificate; asking again with the same request does not help."""


@dataclass(frozen=True)
class Buddies:
    """Who keeps copies of whose checkpoints in memory: all that concerns this pod, the newest counts.

    Sent only to agents whose last Held had a port, whenever it has changed for this pod, and after each Hello with a
    Held that has one. A keeper does nothing of it before the first; a new agent of the pod waits for its own.
    """

    term: int
    keepers: tuple[Peer, ...] = ()
    """Who shall keep copies of this pod's checkpoints, the newest of each rank. Sending to anybody else ends."""
    owners: tuple[str, ...] = ()
    """Uids of the pods whose copies this pod takes. Copies of others stay as they are, until `drop` names them."""
    drop: tuple[str, ...] = ()
    """Uids of pods whose copies this pod removes, of all steps: others are safe elsewhere, or they are void. Never one
    of `owners`."""
    protected: Key | None = None
    """The newest protected step: nobody overwrites it, nor its copies, until there is a newer one."""
    next_protected: Key | None = None
    """A complete step that is not overwritten either, and is copied before all that is newer, by all pods."""
    lost: tuple[str, ...] = ()
    """Uids of pods of which the plan in force says what they have, and that are lost since: nobody waits for them."""


AgentMessage = Union[Hello, Report, Heartbeat, CertificateRequest]
RendezvousMessage = Union[
    Welcome, Refused, Halt, Interrupt, Plan, Respawn, PairOrder, Consult, Finish, Certificate, Buddies
]

# -------------------------------------------------------------------------------------------- operator <-> rendezvous


@dataclass(frozen=True)
class PodObservation:
    """One pod as the API server shows it."""

    pod: str
    node: str
    domains: tuple[str, ...]
    """One name a layer, outermost first, "" where the node lacks the label; empty while the pod has no node."""
    role: Role = Role.ACTIVE
    """Role that the pod was made for: a preference in the first plan only."""
    gone: Cause | None = None
    """POD_LEAVING, POD_LOST or NODE_LOST when the API server says so."""
    is_waiting: bool = False
    """Whether the cluster has not started all of its containers yet: it has no node, or images are being pulled."""
    is_ended: bool = False
    """Whether its processes are known to have ended: its kubelet says so, or its node is known to be off."""


@dataclass(frozen=True)
class GonePod:
    """A pod with ranks, as the coordinator before reported it, that has gone since."""

    pod: str
    node: str
    ranks: tuple[int, ...]
    ago_s: float = field(default=0.0, compare=False)
    """Seconds since the operator saw that it had gone."""


@dataclass(frozen=True)
class TimeSpent:
    """Where the time went since the job first ran, in seconds: a field for each word of Spent, and what is not judged.

    Seconds times ranks: of progress, of what was held (spares and waiting included), and of what was wanted.
    """

    progress_s: float
    redo_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0
    waiting_s: float = 0.0
    suspended_s: float = 0.0
    open_s: float = 0.0
    """Since the last step: the next one, or a fault, says what it was."""
    progress_rank_s: float = 0.0
    held_rank_s: float = 0.0
    wanted_rank_s: float = 0.0
    checkpoint_s: float = 0.0


@dataclass(frozen=True)
class EarlierRun:
    """What the coordinator before this one reported last. Ages, since clocks of two hosts are never compared."""

    ago_s: float
    """Seconds since that report."""
    gained_s: float
    """Seconds of first-time progress until then."""
    ran_for_s: float
    """Seconds from the job's first run until then."""
    time: TimeSpent | None = None
    """Where they went; None of a coordinator that did not tell."""
    suspended_s: float = 0.0
    """Of the seconds since that report, those in which the job was suspended."""


@dataclass(frozen=True)
class Observation:
    """All pods of the job by uid; `PUT /v1/observation`. A pod that the rendezvous knows and this lacks is gone."""

    pods: dict[str, PodObservation]
    is_accounted: bool = False
    """Whether the processes of every pod of the job that is not in `pods` are known to have ended."""
    gone: tuple[GonePod, ...] = ()
    """For a new coordinator: pods of the world that it takes over."""
    earlier: EarlierRun | None = field(default=None, compare=False)
    """For a new coordinator; ages are no news."""
    counted: tuple[int, int] | None = field(default=None, compare=False)
    """For a new coordinator: term and number of the newest recovery of an earlier one that is counted, 0 and 0 if none
    is. None: nobody knows."""


@dataclass(frozen=True)
class RungUse:
    """One recovery, by the highest rung that it needed."""

    rung: Rung
    ago_s: float
    """Seconds since the operator learned that it was over; clocks of two hosts are never compared."""


@dataclass(frozen=True)
class Earlier:
    """What earlier coordinators of the job have done, as the operator has written it down: UNBROKEN_EARLIER."""

    term: int = 0
    """Highest one that was used."""
    iteration: int = -1
    uses: tuple[RungUse, ...] = ()


@dataclass(frozen=True)
class PodStatus:
    """One member as the coordinator sees it."""

    pod: str
    uid: str
    node: str
    role: Role
    ranks: tuple[int, ...]
    """Active ranks in local order; empty for a spare."""
    domains: tuple[str, ...]
    workers: tuple[WorkerPhase, ...]
    is_connected: bool
    unfit: str = ""
    """Why it can have no ranks by what its watch found; "" when it can."""


@dataclass(frozen=True)
class PodFinding:
    """What the watch of one pod found wrong."""

    pod: str
    node: str
    finding: Finding


@dataclass(frozen=True)
class HealthStatus:
    """What the watches of all pods say."""

    num_pods: int
    """Pods whose watch has said something."""
    findings: tuple[PodFinding, ...] = ()
    """What is wrong, the worst first, at most 64."""
    num_findings: int = 0
    unchecked: tuple[tuple[str, int], ...] = ()
    """Checks that tell nothing, and in how many pods."""
    held: str = ""
    """Why nobody is blamed although something speaks against them; "" when nothing does."""
    num_paced: int = 0
    """Ranks that were compared in the last window: how busy each is, with those of its stage."""


@dataclass(frozen=True)
class OtherFault:
    """A fault of a recovery besides the culprit's."""

    cause: Cause
    rank: int | None
    pod: str
    detail: str
    """One line, at most 300 characters."""
    taken_by: str = ""
    """Pod that took its rank over; "" when none did, or it is not known."""


@dataclass(frozen=True)
class Recovery:
    """One recovery; while `ended_at` is empty it is not over, and if the job has failed it never will be."""

    number: int
    """Counts recoveries of the job from 1."""
    cause: Cause
    rung: Rung | None
    """The highest rung that this recovery needed so far; None before the first."""
    rank: int | None
    pod: str
    node: str
    domain: str
    """Name of the innermost domain of the culprit; "" when unknown."""
    detail: str
    iteration_before: int
    iteration_after: int
    replaced_by: tuple[str, ...]
    """Pods that were promoted."""
    phase_s: dict[str, float]
    """Seconds by Phase value; phases that were not measured are missing."""
    started_at: str
    ended_at: str
    """Wall-clock time, RFC 3339 UTC, for people; the end is when all active workers ran again."""
    world_size_before: int = 0
    world_size_after: int = 0
    num_faults: int = 1
    """Faults that were collected into this recovery."""
    stack: tuple[str, ...] = ()
    """Python frames of the culprit, innermost last, as in Fault; empty when unknown."""
    others: tuple[OtherFault, ...] = ()
    """Faults besides the culprit's, at most 4, the strongest evidence first; `num_faults` counts all. Of a hang not
    those that only waited."""
    taken_by: str = ""
    """Pod that took the culprit's rank over; "" when none did, or it is not known."""


@dataclass(frozen=True)
class JobStatus:
    """What the rendezvous knows; `GET /v1/status?after=REVISION&timeout=SECONDS` answers when it is newer."""

    protocol: int
    job: str
    term: int
    revision: int
    """+1 on every change; compare only within one term."""
    phase: JobPhase
    reason: Reason
    message: str
    """One sentence with numbers: what it is doing, or what it waits for."""
    iteration: int
    world_size: int
    spare_ranks: int
    lost_ranks: int
    """Active ranks that the job wants and does not have."""
    pods: tuple[PodStatus, ...]
    restarts_by_rung: dict[str, int]
    restarts_by_cause: dict[str, int]
    recoveries: tuple[Recovery, ...]
    """Newest last, at most 20."""
    max_step: int
    ettr: float | None
    """Seconds of first-time progress / wall seconds since the job first ran; None before it ran."""
    refused: tuple[str, ...] = ()
    """Pods that may have no part in the job, and why."""
    broken_spares: int = 0
    """Wholly spare pods of which a plan took some workers only: the last resort."""
    memory: MemoryStatus | None = None
    """None of a job without checkpoints in memory."""
    health: HealthStatus | None = None
    """None while no watch has said anything."""
    gained_s: float = 0.0
    """Seconds of first-time progress, under earlier coordinators too, as far as this one was told."""
    ran_for_s: float | None = None
    """Wall seconds since the job first ran, likewise; None before it ran."""
    time: TimeSpent | None = None
    """Where they went; None before it ran."""
    still_for_s: float = 0.0
    """Seconds since the job got anywhere, as far as this coordinator saw; 0 where it is not to train."""
