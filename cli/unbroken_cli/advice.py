"""Pure: what a person should do next, with the job's own names in the commands."""

import re
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timedelta
from shlex import quote

from unbroken_cli.job import ConditionRecord, FaultSummary, JobRecord, moment
from unbroken_core.recovery.hangs import LINKS, MISTAKE
from unbroken_core.vocabulary.alert_thresholds import STORM_RECOVERIES, STORM_S
from unbroken_core.vocabulary.plurals import agreed, counted
from unbroken_core.vocabulary.reasons import Cause

MIN_FAULTS_OF_A_BAD_NODE = 2
MIN_FAULTS_OF_A_STORM = STORM_RECOVERIES + 1
"""So many within STORM_S, of which none was on purpose, are worth a word."""

_WAITS = {
    "InvalidSpec": "correct the field that the message names and apply the job again",
    "SecretDamaged": "delete the Secret that the message names: the operator makes it again",
    "NodesLeaving": "wait, or free or add nodes: pods can leave theirs when a spare elsewhere is ready",
    "FailedBeforeReady": "see the log of the pod that the message names: its process ends before it is ready",
    "Suspended": "set spec.suspend to false, or wait for the queue that has set it",
    "WriteRefused": "raise the quota, or change the policy or permission that the message names",
    "PodsUnschedulable": "free or add nodes, or lower the template's requests",
    "PodsGated": "wait for the queue or controller that has set the gate; it takes it away when there is room",
    "PodCreationBackOff": "stop who deletes the pods, a policy or a controller; the message names the last one and why",
    "ImagePullFailed": "correct the image's name, or add its pull secret to the template",
    "ContainerNotStarted": "add what the kubelet misses: a Secret, a ConfigMap, a volume or the command",
    "BelowMinimumReplicas": "bring nodes back or add some; the job fails only when enough pods run for "
    "timeouts.startupSeconds in vain",
    "WaitingForIsolation": "wait until the time in the message; if the machines of these pods are off for certain, "
    "delete one of their Nodes, or taint it node.kubernetes.io/out-of-service",
    "PodRefused": "delete the pod that the message names: a new one is made from the job's spec",
    "TopologyLabelMissing": "label the nodes that the message names",
    "TopologyLabelsContradict": "correct the labels of the nodes that the message names",
}
"""By reason of a job that does not train, what helps."""

_IN_QUARANTINE = "free or add nodes, or release one from quarantine: kubectl taint node NODE unbroken.dev/quarantine-"
_CLAIM = "create or repair the PersistentVolumeClaim that the message names, or correct its name in the template"
"""The scheduler says of a claim that is missing or not bound what it says of a lack of nodes."""
_MALFORMED = re.compile(r"/pods: (400|422) ")
"""An admission webhook or policy may answer so as well, and says that it denied the request."""

_ENDS = {
    "FailedAfterTraining": "fix what the script does after the training function; the end of its pod's log says more",
    "NoProgress": "fix the script: it fails at the same place again and again; the traceback is in the pod's log",
    "FatalLogLine": "fix what the line in the message says; no restart was wanted after it (health.logRules)",
    "FatalExitCode": "fix what the script gave up at; the end of its pod's log says what that was",
    "RestartBudgetExhausted": "find what the faults have in common, then delete the job and apply it again",
    "StartupTimeout": "see what the script does before it is ready, or raise timeouts.startupSeconds",
    "FailedBeforeReady": "fix the script or its command: it ends before it is ready",
    "PolicyRefused": "let rank_assignment in the script and world, topology in the job's spec say the same",
    "DeadlineExceeded": "raise spec.activeDeadlineSeconds, or make the job shorter",
    "RecoveryTimeout": "see the log of the pod that the message names, then delete the job and apply it again",
}
"""By reason of a job that failed, what helps."""

_CAUSES = {
    "soft-timeout": "if steps may take this long, raise timeouts.softSeconds; else find where {who} stood still",
    "log-rule": "see what {who} printed before the line that the rule is about",
    "hang by a log rule": "if the line may take this long, raise the rule's seconds; else see where {who} stood still",
    "hang by a mistake": "let all ranks call the same collectives of a group in the same order; no timeout helps",
    "hang by links": "test the links between these ranks (unbroken preflight, NCCL's log); if the collective may take "
    "this long, raise timeouts.softSeconds",
    "hard-timeout": "find what {who} does that cannot be interrupted; its log ends there",
    "process-signal": "signal 9: compare the pod's memory limit with its use; others: a crash in native code",
    "process-exit": "read the end of the log of the rank",
    "stale-state": "make meshes and models inside the wrapped function; the message says who keeps one",
    "unhealthy": "have the device of node {node} checked",
    "device-fault": "have the device or link that the message names checked, on node {node}",
    "straggler": "compare node {node} with others: clocks, throttling, neighbours, storage",
    "node-lost": "kubectl describe node {node}",
    "heartbeat-lost": "check the network of node {node}",
    "pod-lost": "check node {node}: the pod's connection broke and did not come back",
}
"""By cause, what to look at. An exception explains itself, and a deletion was on purpose."""

_CAUSES_ON_ONE_MACHINE = {
    "unhealthy": "have the device that the health check of {who} tried checked",
    "device-fault": "have the device or link that the message names checked",
    "straggler": "see what {who} has to do that others do not: all pods share the cores of this machine",
    "heartbeat-lost": "see what stopped the pod's agent or took its processor: all pods share this machine",
    "pod-lost": "see what ended the pod's agent: the output of `unbroken run` says how",
}
"""The same, where all pods are processes of `unbroken run`: it has no node to check or to compare."""
_NODE_OF_ONE_MACHINE = re.compile(r"local-\d+")
"""What `unbroken run` calls the node of a pod without domains."""

_ON_PURPOSE = ("pod-leaving", "capacity-returned")
"""Causes that are no faults: the log of such a pod explains nothing."""
_OPTIONS = {
    "timeouts.softSeconds": "--soft-timeout",
    "timeouts.startupSeconds": "--startup-timeout",
    "spec.restart.growBackSeconds": "--grow-back",
}
"""By field of a job's spec, the option of `unbroken run`; a rendezvous does not say which of the two it serves."""
_STILL_THERE = "(as long as the pod is there)"


def next_steps(job: JobRecord, now: datetime) -> tuple[str, ...]:
    """Return what to do, most urgent first; never empty."""
    if job.deleting:
        return tuple(_deletion_steps(job))
    last = job.faults[-1] if job.faults else None
    urgent = [*_state_steps(job, last), *_strength_steps(job)]
    others = [*_storm_steps(job, now), *_node_steps(job)]
    # A roll-out says nothing about a fault.
    faults = fault_steps(job, last) if last is not None and job.state == "Running" and not (urgent or others) else []
    steps = [*urgent, *faults, *_condition_steps(job), *others]
    if job.unwatched and not job.stale:
        steps.append(
            "to be sure, ask the rendezvous itself: docs/operations/on-call.md, Ask the rendezvous; of an operator "
            "with --lease NAMESPACE/NAME it can be seen here whether it runs"
        )
    return tuple(dict.fromkeys(_with_options(job, step) for step in steps)) or (_nothing(job),)


def fault_steps(job: JobRecord, fault: FaultSummary) -> list[str]:
    """Return how to look into one fault."""
    steps = []
    words = _words(job, fault)
    if words is not None and (fault.node or "{node}" not in words):
        who = "each rank, as listed in the fault," if fault.rank is None else f"rank {fault.rank}"
        steps.append(_with_options(job, words.format(who=who, node=quote(fault.node))))
    if fault.pod and job.namespace and fault.cause not in _ON_PURPOSE:
        steps.append(f"{_kubectl(job)} logs {quote(fault.pod)} -c {quote(job.container)} --tail=100   {_STILL_THERE}")
    return steps


def _words(job: JobRecord, fault: FaultSummary) -> str | None:
    if fault.cause == Cause.SOFT_TIMEOUT:
        # What is known of a hang says more than which clock has found it.
        if MISTAKE in fault.detail:
            return _CAUSES["hang by a mistake"]
        if LINKS in fault.detail:
            return _CAUSES["hang by links"]
        if fault.detail.startswith("log rule "):
            return _CAUSES["hang by a log rule"]
    on_one_machine = _CAUSES_ON_ONE_MACHINE if _is_of_one_machine(job, fault.node) else {}
    return on_one_machine.get(fault.cause, _CAUSES.get(fault.cause))


def _is_of_one_machine(job: JobRecord, node: str) -> bool:
    """Whether a node is but a name of `unbroken run`, which a job that was read from a cluster never has."""
    return not job.namespace and _NODE_OF_ONE_MACHINE.fullmatch(node) is not None


def _with_options(job: JobRecord, step: str) -> str:
    """Add the option of `unbroken run` to a field, unless the job was read from a cluster."""
    for field, option in () if job.namespace else _OPTIONS.items():
        if f"(unbroken run: {option})" not in step:
            step = step.replace(field, f"{field} (unbroken run: {option})")
    return step


def recent_faults(job: JobRecord, now: datetime) -> list[FaultSummary]:
    """Return the faults of the last STORM_S seconds that nobody caused on purpose."""
    began = [(moment(fault.started_at), fault) for fault in job.faults if fault.cause not in _ON_PURPOSE]
    return [fault for time, fault in began if time is not None and now - time <= timedelta(seconds=STORM_S)]


def _deletion_steps(job: JobRecord) -> Iterator[str]:
    if "finalizer" in job.deleting:
        yield (
            "ask whoever set the finalizer to remove it; or, if nobody will: "
            f'{_kubectl(job)} patch rtj {quote(job.name)} --type merge -p \'{{"metadata":{{"finalizers":null}}}}\''
        )
        return
    pods = f"{_kubectl(job)} get pods -l unbroken.dev/job={quote(job.name)}"
    yield f"wait: its pods end within their grace period; see {pods}"


def _kubectl(job: JobRecord) -> str:
    return f"kubectl -n {quote(job.namespace)}"


def _nothing(job: JobRecord) -> str:
    if job.state == "Recovering":
        return "wait: the recovery ends by itself, by the next rung, or in Failed"
    if job.reason == "ProcessesEnding":
        return "wait: the job is complete when the processes of its ranks have ended"
    if job.state == "Forming":
        return "wait: it starts by itself"
    if job.state == "Unknown":
        return "wait: it is known again as soon as the rendezvous answers"
    return "nothing"


def _state_steps(job: JobRecord, last: FaultSummary | None) -> Iterator[str]:
    if not job.state:
        selector = "app.kubernetes.io/name=unbroken-operator"
        yield f"see whether an operator runs and serves this namespace: kubectl get deployments -A -l {selector}"
        return
    if job.stale:
        yield from _without_operator(job)
    if job.is_training is None:
        selector = f"unbroken.dev/job={job.name},unbroken.dev/component=rendezvous"
        yield f"{_kubectl(job)} describe pods -l {selector}   {_why_unknown(job)}"
    if job.state == "Failed":
        yield from _failure_steps(job, last)
        return
    admitted = job.condition("Admitted")
    if admitted is not None and admitted.reason == "InvalidSpec" and job.state != "Complete":
        yield _WAITS[admitted.reason]
    if job.state != "Complete" and job.is_training is False:
        yield from _wait_steps(job)


def _failure_steps(job: JobRecord, last: FaultSummary | None) -> Iterator[str]:
    if job.reason in _ENDS:
        yield _ENDS[job.reason]
    if last is not None and not last.is_recovered:
        yield from fault_steps(job, last)
    elif job.namespace and job.reason != "DeadlineExceeded":
        yield f"{_kubectl(job)} logs {_whose_log(job)} -c {quote(job.container)} --tail=100   {_STILL_THERE}"
    if job.namespace:
        yield f"{_kubectl(job)} delete rtj {quote(job.name)}   (then apply it again: a failed job stays as it is)"


def _whose_log(job: JobRecord) -> str:
    """Return the pod that the message names, for kubectl; else all of the job's."""
    named = re.search(rf"(?<![\w.-]){re.escape(job.name)}-\d{{1,10}}(?![\w.-]*\w)", job.message)
    return (
        quote(named[0]) if named else f"-l unbroken.dev/job={quote(job.name)},unbroken.dev/component=trainer --prefix"
    )


def _without_operator(job: JobRecord) -> Iterator[str]:
    selector = "app.kubernetes.io/name=unbroken-operator"
    yield f"bring the operator back; see its pods and their logs: kubectl get pods -A -l {selector}"
    if job.state not in ("Complete", "Failed", "Suspended", "Invalid"):
        yield (
            "meanwhile ask the rendezvous itself, as long as its pod is there: docs/operations/on-call.md, Ask the "
            "rendezvous; only an operator makes another pod"
        )


def _wait_steps(job: JobRecord) -> Iterator[str]:
    refusal = _refusal(job)
    if refusal is not None and job.state == "Recovering":
        # What it waits for does not come by itself, nor with more nodes.
        yield f"{_wait(refusal.reason, refusal.message)}: {refusal.message}"
        yield from _keep_pods(job)
        return
    if job.reason == "NameTaken":
        what = f"delete pods,services,secrets,networkpolicies -l unbroken.dev/job={quote(job.name)}"
        yield f"if an earlier job left them (--cascade=orphan): {_kubectl(job)} {what}"
        yield "else give this job another name"
    elif job.reason in _WAITS:
        yield _wait(job.reason, job.message)


def _wait(reason: str, message: str) -> str:
    if reason == "PodsUnschedulable" and "persistentvolumeclaim" in message.lower():
        return _CLAIM
    if reason == "PodsUnschedulable" and "unbroken.dev/quarantine" in message:
        return _IN_QUARANTINE
    if reason == "WriteRefused" and _MALFORMED.search(message) and "denied" not in message:
        part = "spec.rendezvous" if re.search(r"-rendezvous-[0-9]+: POST ", message) else "spec.template"
        return f"correct {part}, or revert its last change: no pod can be made of it, as the message says"
    return _WAITS[reason]


def _strength_steps(job: JobRecord) -> Iterator[str]:
    if job.state != "Running":
        return
    pods = job.condition("PodsReady")
    if pods is not None and pods.status == "False" and pods.reason in _WAITS:
        # What keeps new pods away says better than their number what would help.
        yield f"{_wait(pods.reason, pods.message)}: {pods.message}"
        yield from _keep_pods(job)
        return
    if job.lost_ranks and "; more join " in job.message:
        yield "wait: spares join at the step that the message names"
    elif job.lost_ranks and job.spare_ranks:
        yield (
            f"{counted(job.lost_ranks, 'rank is', 'ranks are')} missing and {job.spare_ranks} "
            f"{agreed(job.spare_ranks, 'waits as a spare', 'wait as spares')}: the next restart takes in as "
            "many as spec.world allows; spec.restart.growBackSeconds makes one for them"
        )
    elif job.lost_ranks and _is_starting(job):
        lost = counted(job.lost_ranks, "rank is", "ranks are")
        yield f"wait: pods start, and the next restart takes them in; until then {lost} missing"
    elif job.lost_ranks:
        yield f"add nodes: {counted(job.lost_ranks, 'rank is', 'ranks are')} missing and no spare waits"
    elif job.holds("SparesExhausted") and _is_starting(job):
        yield "wait: spare pods start; until one is ready, the next lost pod costs ranks or a wait"
    elif job.holds("SparesExhausted"):
        yield "add nodes, or raise spares.count: no spare is ready, the next lost pod costs ranks or a wait"


def _refusal(job: JobRecord) -> ConditionRecord | None:
    """Return what says that the API server refuses pods; None when it does not."""
    pods = job.condition("PodsReady")
    return pods if pods is not None and (pods.status, pods.reason) == ("False", "WriteRefused") else None


def _keep_pods(job: JobRecord) -> Iterator[str]:
    if _refusal(job) is not None:
        yield "until then delete no pods of this job: nothing can take their place"


def _is_starting(job: JobRecord) -> bool:
    """Whether pods are on their way that nothing keeps from coming up."""
    pods, spares = job.condition("PodsReady"), job.condition("SparesExhausted")
    is_made = pods is not None and pods.status == "False" and pods.reason == "WaitingForPods"
    return is_made or (spares is not None and spares.message.partition(";")[0].endswith(" starting"))


def _condition_steps(job: JobRecord) -> Iterator[str]:
    current = job.condition("UpToDate")
    if current is not None and current.status == "False" and job.state == "Running" and _refusal(job) is None:
        yield current.message
    known = job.condition("TopologyKnown")
    if known is not None and known.status == "False" and job.state in ("Forming", "Running", "Recovering"):
        yield f"{_WAITS.get(known.reason, 'see the condition TopologyKnown')}: {known.message}"
    nodes = job.condition("NodesHealthy")
    if nodes is not None and nodes.status == "False" and job.state in ("Running", "Recovering"):
        yield "have checked what was found on the nodes: docs/runbooks/broken-device.md"
    slow = job.condition("Straggling")
    if slow is not None and slow.status == "True" and job.state == "Running":
        by_rule = ": log rule " in slow.message
        what = "see why" if by_rule else "all ranks wait for the slowest, so compare its node with others"
        yield f"{what}: {slow.message}"
    still = job.condition("NoProgress")
    if still is not None and job.holds("NoProgress") and job.state in ("Running", "Recovering"):
        yield (
            "find what keeps it from getting on (a hang that no timeout sees, missing pods, checkpoints further apart "
            f"than faults): {still.message}"
        )


def _why_unknown(job: JobRecord) -> str:
    # A new rendezvous answers, but does not know the ranks yet: the pods come back to it.
    if "a new rendezvous waits for the pods" in job.message:
        return "(a new one waits for the pods to come back)"
    return "(the rendezvous does not answer)"


def _storm_steps(job: JobRecord, now: datetime) -> Iterator[str]:
    recent = recent_faults(job, now)
    if job.state in ("Complete", "Suspended"):
        return
    if len(recent) < MIN_FAULTS_OF_A_STORM:
        storm = job.condition("RestartStorm")
        if storm is not None and job.holds("RestartStorm") and job.state in ("Running", "Recovering"):
            yield f"find what keeps interrupting it, such as evictions, preemption or a roll-out: {storm.message}"
        return
    causes = Counter(fault.cause for fault in recent)
    (cause, count), *others = causes.most_common()
    same = f"all of them {cause}" if not others else f"{count} of {len(recent)} are {cause}"
    where = f"-n {quote(job.namespace)} " if job.namespace else ""
    yield f"find what the last {len(recent)} faults have in common, {same}: unbroken timeline {where}{quote(job.name)}"


def _node_steps(job: JobRecord) -> Iterator[str]:
    if job.state == "Complete":
        return
    on_nodes = [fault for fault in job.faults if fault.node]
    num_nodes = len({fault.node for fault in on_nodes})
    # That a pod was deleted, evicted or moved says nothing against its node.
    blamed = Counter(fault.node for fault in on_nodes if fault.cause != Cause.POD_LEAVING)
    for node, count in blamed.most_common(1):
        if count >= MIN_FAULTS_OF_A_BAD_NODE and num_nodes > 1 and count * 2 > len(job.faults):
            yield _avoid(job, node, f"the culprit's {{}} in {count} of the last {len(job.faults)} faults")


def _avoid(job: JobRecord, node: str, was: str) -> str:
    if job.namespace:
        return f"kubectl cordon {quote(node)}   (it was {was.format('node')})"
    if _is_of_one_machine(job, node):
        return f"see what only the pod at {node} has to do: it was {was.format('place')}, and all share this machine"
    # A rendezvous does not say where its pods come from.
    return f"leave {node} out, on Kubernetes by kubectl cordon {quote(node)}   (it was {was.format('node')})"
