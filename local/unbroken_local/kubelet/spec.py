"""A pod's spec as the kubelet needs it, with the API's defaults filled in where the API server left them out."""

from dataclasses import dataclass
from enum import Enum

from unbroken_local.kube import Json


class Kind(Enum):
    """What part a container has in the life of its pod."""

    INIT = "init"
    SIDECAR = "sidecar"
    MAIN = "main"


@dataclass(frozen=True)
class ProbeSpec:
    """One probe; times in seconds."""

    handler: Json
    initial_delay_s: float
    period_s: float
    timeout_s: float
    success_threshold: int
    failure_threshold: int


@dataclass(frozen=True)
class ContainerSpec:
    """One container; `raw` is its object in the pod's spec."""

    name: str
    kind: Kind
    image: str
    raw: Json
    startup: ProbeSpec | None
    liveness: ProbeSpec | None
    readiness: ProbeSpec | None
    termination_path: str
    has_log_fallback: bool
    """Whether the end of the log is the termination message of a failure that wrote none."""


@dataclass(frozen=True)
class PodSpec:
    """One pod as it is to run."""

    uid: str
    namespace: str
    name: str
    restart_policy: str
    grace_s: float
    active_deadline_s: float | None
    is_host_network: bool
    containers: tuple[ContainerSpec, ...]
    """Init containers and sidecars in their order, then the main ones."""

    @property
    def mains(self) -> tuple[ContainerSpec, ...]:
        """Main containers in order."""
        return tuple(container for container in self.containers if container.kind is Kind.MAIN)

    @property
    def inits(self) -> tuple[ContainerSpec, ...]:
        """Init containers and sidecars in order."""
        return tuple(container for container in self.containers if container.kind is not Kind.MAIN)


def read_pod(pod: Json) -> PodSpec:
    """Read a Pod object."""
    spec = pod["spec"]
    grace = spec.get("terminationGracePeriodSeconds")
    deadline = spec.get("activeDeadlineSeconds")
    inits = [
        _read_container(raw, Kind.SIDECAR if raw.get("restartPolicy") == "Always" else Kind.INIT)
        for raw in spec.get("initContainers") or []
    ]
    mains = [_read_container(raw, Kind.MAIN) for raw in spec.get("containers") or []]
    return PodSpec(
        uid=pod["metadata"]["uid"],
        namespace=pod["metadata"].get("namespace", "default"),
        name=pod["metadata"]["name"],
        restart_policy=spec.get("restartPolicy") or "Always",
        grace_s=30.0 if grace is None else float(grace),
        active_deadline_s=None if deadline is None else float(deadline),
        is_host_network=bool(spec.get("hostNetwork")),
        containers=(*inits, *mains),
    )


def _read_container(raw: Json, kind: Kind) -> ContainerSpec:
    return ContainerSpec(
        name=raw["name"],
        kind=kind,
        image=raw.get("image") or "",
        raw=raw,
        startup=_read_probe(raw.get("startupProbe")),
        liveness=_read_probe(raw.get("livenessProbe")),
        readiness=_read_probe(raw.get("readinessProbe")),
        termination_path=raw.get("terminationMessagePath") or "/dev/termination-log",
        has_log_fallback=raw.get("terminationMessagePolicy") == "FallbackToLogsOnError",
    )


def _read_probe(raw: Json | None) -> ProbeSpec | None:
    if not raw:
        return None
    return ProbeSpec(
        handler=raw,
        initial_delay_s=float(raw.get("initialDelaySeconds") or 0),
        period_s=float(raw.get("periodSeconds") or 10),
        timeout_s=float(raw.get("timeoutSeconds") or 1),
        success_threshold=int(raw.get("successThreshold") or 1),
        failure_threshold=int(raw.get("failureThreshold") or 3),
    )
