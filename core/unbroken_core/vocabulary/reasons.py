"""The closed vocabulary: it feeds conditions, Events, logs, metric labels and the docs; no word is ever renamed."""

from enum import Enum


class Word(str, Enum):
    """A string enum that prints as its value (enum.StrEnum needs Python 3.11)."""

    __str__ = str.__str__


class Role(Word):
    """What a pod or a worker is for in the current plan."""

    ACTIVE = "active"
    SPARE = "spare"


class Cause(Word):
    """Why a job was interrupted; listed from the weakest evidence to the strongest."""

    CAPACITY_RETURNED = "capacity-returned"
    """No fault: pods are ready for ranks that the job had to do without for restart.growBackSeconds."""
    STRAGGLER = "straggler"
    """A rank was busy longer than all others in each step (health.stragglers: Move); the pod leaves."""
    EXCEPTION = "exception"
    """The training function raised an Exception."""
    BASE_EXCEPTION = "base-exception"
    """SystemExit, KeyboardInterrupt or another BaseException left the training function; the worker leaves."""
    STALE_STATE = "stale-state"
    """torch in a worker's process held something of the worker's previous rank; it gets a new process."""
    LOG_RULE = "log-rule"
    """What a worker printed, or did not print, is fatal by a rule of the job (health.logRules)."""
    SOFT_TIMEOUT = "soft-timeout"
    """A worker made no progress for timeouts.softSeconds, or a log rule says that somebody hangs."""
    HARD_TIMEOUT = "hard-timeout"
    """A worker made no progress for timeouts.hardSeconds and its process was ended."""
    UNHEALTHY = "unhealthy"
    """A health check failed; the worker leaves."""
    PROCESS_EXIT = "process-exit"
    """A worker's process ended with an exit code other than 0, or before it completed."""
    PROCESS_SIGNAL = "process-signal"
    """A worker's process was ended by a signal."""
    DEVICE_FAULT = "device-fault"
    """The pod's watch found a GPU or a link broken (health.mode: Act); the pod leaves."""
    POD_LEAVING = "pod-leaving"
    """The pod is being deleted, evicted or preempted."""
    POD_LOST = "pod-lost"
    """The pod's connection broke and did not come back, or the API server says that the pod is gone."""
    HEARTBEAT_LOST = "heartbeat-lost"
    """The pod fell silent for timeouts.heartbeatSeconds."""
    NODE_LOST = "node-lost"
    """The pod's node is down or unreachable."""

    @property
    def severity(self) -> int:
        """Rank of the evidence: among faults of one interruption the highest names the culprit."""
        return _SEVERITY[self]


_SEVERITY: dict["Cause", int] = {cause: number for number, cause in enumerate(Cause)}


class Rung(Word):
    """One step of the recovery ladder, cheapest first."""

    IN_PROCESS = "in-process"
    PROCESS = "process"
    POD = "pod"
    WORLD = "world"
    JOB = "job"


class Phase(Word):
    """One stretch of a recovery, in order; seconds of each are measured on the coordinator's clock, except detect."""

    DETECT = "detect"
    """Fault instant to its report, on the clock of the pod that noticed it."""
    STOP = "stop"
    """Interruption known to the coordinator, until the workers that the plan needs are ready."""
    PLAN = "plan"
    """Cutting and sending the plan."""
    ENTER = "enter"
    """Plan sent, until every active worker entered the training function."""
    FIRST_PROGRESS = "first-progress"
    """All entered, until every active worker reported its first step (only where the script pings)."""


class Spent(Word):
    """What a stretch of a job's time was for; together with what is not judged yet they are all of it."""

    PROGRESS = "progress"
    """Up to a step that the job reached for the first time; all running time, where the script reports no steps."""
    CHECKPOINT = "checkpoint"
    """Of that, and of redo: training stood still for a checkpoint, as far as workers tell."""
    REDO = "redo"
    """Up to a step that was there before, and from the last step until a fault: it is done again."""
    DETECT = "detect"
    """From a fault until the coordinator knew of it."""
    RESTART = "restart"
    """Until all workers train again, and what their function does before its first step."""
    WAITING = "waiting"
    """... while too few pods are there."""
    SUSPENDED = "suspended"
    """The job was suspended."""


class JobPhase(Word):
    """State of the coordinator."""

    FORMING = "forming"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    PLANNED = "planned"
    ENDING = "ending"
    """The training function has returned on all ranks; their processes have yet to end."""
    COMPLETE = "complete"
    FAILED = "failed"


class WorkerPhase(Word):
    """Where one worker is, as its agent sees it."""

    STARTING = "starting"
    """The process is being started, or runs but has not said that it is ready."""
    READY = "ready"
    """Waits for a plan and has an endpoint."""
    RUNNING = "running"
    """Inside the training function."""
    STOPPING = "stopping"
    """Left or is leaving the training function; not ready yet."""
    COMPLETED = "completed"
    """The training function returned; waits for the others."""
    GONE = "gone"
    """The process has ended; it is started again when the coordinator says so."""


class Doing(Word):
    """What a worker did when its iteration was ended because somebody made no progress."""

    COLLECTIVE = "collective"
    """Inside of a collective: it waited for other ranks."""
    WAITING = "waiting"
    """In a call that may wait for other ranks: backward, item, synchronize."""
    OWN_CODE = "own-code"
    """In code that waits for no rank: the script's, or a library's."""
    DATA_LOADER = "data-loader"
    IO = "io"
    FROZEN = "frozen"
    """No thread ran, outside of a collective: the process is stopped, or a thread holds the GIL."""
    UNKNOWN = "unknown"


class RankReason(Word):
    """Why a worker has this rank in a plan."""

    FIRST = "first"
    """First plan: order of the topology tree."""
    KEPT = "kept"
    """Survivor with its rank unchanged."""
    REPLACED = "replaced"
    """A spare that took a lost rank."""
    SHIFTED = "shifted"
    """A survivor that moved down because ranks below it were lost without a spare."""
    RESERVE = "reserve"
    """Healthy, not needed: a spare."""
    STEPPED_ASIDE = "stepped-aside"
    """Was active; idle because its host lost a worker, or by a limit or divisor of the world."""
    FILLED_GAP = "filled-gap"
    """A survivor with a high rank that took a lost rank of its domain (closeGaps)."""
    RETURNED = "returned"
    """Was idle; appended because the world could grow."""
    LOST = "lost"
    """Dead or gone: it has no rank any more."""
    ASSIGNED = "assigned"
    """Given by the script's own rank assignment."""


class Reason(Word):
    """Reason of a job's state, as conditions show it (CamelCase, as Kubernetes wants)."""

    WAITING_FOR_PODS = "WaitingForPods"
    WAITING_FOR_WORKERS = "WaitingForWorkers"
    WAITING_FOR_TOPOLOGY = "WaitingForTopology"
    WAITING_FOR_RENDEZVOUS = "WaitingForRendezvous"
    WAITING_FOR_ISOLATION = "WaitingForIsolation"
    REPORT_REFUSED = "ReportRefused"
    TRAINING = "Training"
    RECOVERING = "Recovering"
    BELOW_MINIMUM = "BelowMinimumReplicas"
    BUDGET_EXHAUSTED = "RestartBudgetExhausted"
    STARTUP_TIMEOUT = "StartupTimeout"
    RECOVERY_TIMEOUT = "RecoveryTimeout"
    NO_PROGRESS = "NoProgress"
    FATAL_EXIT = "FatalExitCode"
    FATAL_LINE = "FatalLogLine"
    POLICY_REFUSED = "PolicyRefused"
    COMPLETED = "AllRanksCompleted"
    ENDING = "ProcessesEnding"
    FAILED_AFTER_TRAINING = "FailedAfterTraining"
    INVALID_SPEC = "InvalidSpec"
    TOPOLOGY_LABEL_MISSING = "TopologyLabelMissing"
    TOPOLOGY_LABELS_CONTRADICT = "TopologyLabelsContradict"
    UNSCHEDULABLE = "PodsUnschedulable"
    PODS_GATED = "PodsGated"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    SPARES_READY = "SparesReady"
    SPARES_EXHAUSTED = "SparesExhausted"
    SPARES_SPREAD = "SparesSpread"
    SPARES_NOT_SPREAD = "SparesNotSpread"
    FEWER_RANKS = "FewerRanks"
    FULL_STRENGTH = "FullStrength"
    FAILED_BEFORE_READY = "FailedBeforeReady"
    SPEC_ACCEPTED = "SpecAccepted"
    NAME_TAKEN = "NameTaken"
    WRITE_REFUSED = "WriteRefused"
    POD_REFUSED = "PodRefused"
    THROTTLED = "Throttled"
    WITHIN_BUDGETS = "WithinBudgets"
    POD_CREATION_BACK_OFF = "PodCreationBackOff"
    CONTAINER_NOT_STARTED = "ContainerNotStarted"
    PODS_READY = "PodsReady"
    TOPOLOGY_KNOWN = "TopologyKnown"
    RECOVERED = "Recovered"
    NOTHING_TO_RECOVER = "NothingToRecover"
    NOT_FINISHED = "NotFinished"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    NODES_LEAVING = "NodesLeaving"
    TEMPLATE_CURRENT = "TemplateCurrent"
    TEMPLATE_OUTDATED = "TemplateOutdated"
    RENDEZVOUS_OUTDATED = "RendezvousOutdated"
    LED_BY_ANOTHER = "LedByAnother"
    CHANGED_BY_HAND = "ChangedByHand"
    SECRET_DAMAGED = "SecretDamaged"
    HELD_BY_FINALIZER = "HeldByFinalizer"
    POD_RELEASED = "PodReleased"
    NODES_HEALTHY = "NodesHealthy"
    DEVICES_FAULTY = "DevicesFaulty"
    HEALTH_NOT_CHECKED = "HealthNotChecked"
    RANKS_SLOW = "RanksSlow"
    PACE_EVEN = "PaceEven"
    PACE_NOT_MEASURED = "PaceNotMeasured"
    KEEPS_RECOVERING = "KeepsRecovering"
    RECOVERS_SELDOM = "RecoversSeldom"
    STANDS_STILL = "StandsStill"
    GETS_ON = "GetsOn"
