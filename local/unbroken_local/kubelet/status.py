"""What the kubelet reports about a pod: a pure function of spec and state, in the real kubelet's wording."""

from collections.abc import Mapping
from dataclasses import dataclass

from unbroken_local.kube import Json
from unbroken_local.kubelet import decide
from unbroken_local.kubelet.decide import ContainerState, Phase, States, Stop, Termination
from unbroken_local.kubelet.spec import ContainerSpec, Kind, PodSpec

OWNED_CONDITIONS = ("Initialized", "Ready", "ContainersReady", "PodScheduled")


@dataclass(frozen=True)
class PodFacts:
    """What the status says beside the containers."""

    host_ip: str
    pod_ip: str
    """Empty while the pod has none."""
    start_time: str
    now: str
    """Wall-clock time, RFC 3339 UTC."""


def pod_phase(pod: PodSpec, states: States, stop: Stop | None) -> str:
    """Return the pod's phase. It is final only when no container runs."""
    is_running = any(states[c.name].phase is Phase.RUNNING or states[c.name].is_busy for c in pod.containers)
    if not is_running:
        if stop is not None and stop.reason:
            return "Failed"
        if decide.is_finished(pod, states):
            return "Failed" if _has_failed(pod, states) else "Succeeded"
    return "Running" if decide.is_initialized(pod, states) and _has_begun(pod, states) else "Pending"


def _has_failed(pod: PodSpec, states: States) -> bool:
    if decide.has_failed_init(pod, states):
        return True
    return any((t := states[main.name].termination) is not None and t.exit_code != 0 for main in pod.mains)


def _has_begun(pod: PodSpec, states: States) -> bool:
    mains = [states[main.name] for main in pod.mains]
    return any(state.phase is not Phase.WAITING or state.last is not None for state in mains)


def build_status(pod: PodSpec, states: States, stop: Stop | None, facts: PodFacts, old: Json) -> Json:
    """Return the status subresource. `old` is the status that the API server has: what others own in it stays."""
    phase = pod_phase(pod, states, stop)
    if phase == "Pending" and old.get("phase") == "Running":
        phase = "Running"
    status: Json = {
        "phase": phase,
        "hostIP": facts.host_ip,
        "startTime": facts.start_time,
        "conditions": _conditions(pod, states, phase, facts.now, old),
        "containerStatuses": [_container_status(pod, c, states) for c in pod.mains],
    }
    if pod.inits:
        status["initContainerStatuses"] = [_container_status(pod, c, states) for c in pod.inits]
    if facts.pod_ip:
        status |= {"podIP": facts.pod_ip, "podIPs": [{"ip": facts.pod_ip}]}
    if stop is not None and stop.reason:
        status |= {"reason": stop.reason, "message": stop.message}
    return status


def _is_ready(container: ContainerSpec, state: ContainerState) -> bool:
    if container.kind is Kind.INIT:
        return True
    return state.phase is Phase.RUNNING and state.is_ready


def _conditions(pod: PodSpec, states: States, phase: str, now: str, old: Json) -> list[Json]:
    before: list[Json] = old.get("conditions") or []
    is_over = phase in {"Succeeded", "Failed"}
    over_reason = "PodCompleted" if phase == "Succeeded" else "PodFailed"
    unready = [c.name for c in pod.containers if not _is_ready(c, states[c.name])]
    uninitialized = [c.name for c in pod.inits if not decide.is_passed(c, states[c.name])]
    is_initialized = decide.is_initialized(pod, states) or phase == "Succeeded"
    if is_over:
        unready_reason, unready_message = over_reason, ""
    else:
        unready_reason, unready_message = "ContainersNotReady", f"containers with unready status: [{' '.join(unready)}]"
    init_message = f"containers with incomplete status: [{' '.join(uninitialized)}]"
    wanted: dict[str, tuple[bool, str, str]] = {
        "Initialized": (is_initialized, "", "")
        if is_initialized
        else (False, "ContainersNotInitialized", init_message),
        "Ready": (True, "", "") if not unready and not is_over else (False, unready_reason, unready_message),
        "ContainersReady": (True, "", "") if not unready and not is_over else (False, unready_reason, unready_message),
        "PodScheduled": (True, "", ""),
    }
    by_type = {condition["type"]: condition for condition in before}
    others = [condition for condition in before if condition["type"] not in wanted]
    return [_condition(kind, value, by_type.get(kind), now) for kind, value in wanted.items()] + others


def _condition(kind: str, value: tuple[bool, str, str], old: Json | None, now: str) -> Json:
    is_true, reason, message = value
    status = "True" if is_true else "False"
    is_same = old is not None and old.get("status") == status
    since = old.get("lastTransitionTime") if old is not None and is_same else None
    condition: Json = {"type": kind, "status": status, "lastProbeTime": None, "lastTransitionTime": since or now}
    if reason:
        condition["reason"] = reason
    if message:
        condition["message"] = message
    return condition


def _container_status(pod: PodSpec, container: ContainerSpec, states: States) -> Json:
    state = states[container.name]
    status: Json = {
        "name": container.name,
        "image": container.image,
        "imageID": f"local://{container.image}" if _has_run(state) else "",
        "containerID": f"local://{pod.uid}/{container.name}/{state.restarts}" if _has_run(state) else "",
        "ready": _shows_ready(container, state),
        "restartCount": state.restarts,
        "started": state.phase is Phase.RUNNING and state.is_started,
        "state": _state(pod, container, states),
        "lastState": {"terminated": _terminated(state.last)} if state.last is not None else {},
    }
    return {key: value for key, value in status.items() if key != "containerID" or value}


def _has_run(state: ContainerState) -> bool:
    return state.phase is not Phase.WAITING or state.last is not None


def _shows_ready(container: ContainerSpec, state: ContainerState) -> bool:
    if container.kind is Kind.INIT:
        return state.termination is not None and state.termination.exit_code == 0
    return state.phase is Phase.RUNNING and state.is_ready


def _state(pod: PodSpec, container: ContainerSpec, states: States) -> Mapping[str, Json]:
    state = states[container.name]
    if state.phase is Phase.RUNNING:
        return {"running": {"startedAt": state.started_at}}
    if state.phase is Phase.TERMINATED and state.termination is not None:
        return {"terminated": _terminated(state.termination)}
    body = {"reason": state.reason or ("PodInitializing" if pod.inits else "ContainerCreating")}
    return {"waiting": {**body, "message": state.message} if state.message else body}


def _terminated(termination: Termination) -> Json:
    body: Json = {"exitCode": termination.exit_code, "reason": termination.reason}
    for key, value in (
        ("startedAt", termination.started_at),
        ("finishedAt", termination.finished_at),
        ("message", termination.message),
    ):
        if value:
            body[key] = value
    return body
