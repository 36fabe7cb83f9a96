"""Whether the cluster runs enough pods: while it does not, the pod clock stands, and startup timeouts with it."""

from unbroken_core.coordinator.state.job import Cluster, JobState
from unbroken_core.coordinator.state.phases import Forming
from unbroken_core.protocol.messages import Observation
from unbroken_core.vocabulary.plurals import agreed, counted


def observe_cluster(job: JobState, observation: Observation, now_s: float) -> bool:
    """Take over what the operator sees. Return whether it is news."""
    pods = observation.pods
    seen = Cluster(
        pods, observation.is_accounted, sum(pod.gone is None and not pod.is_waiting for pod in pods.values())
    )
    known = job.cluster
    if known.num_running is None:
        job.checkpoints.await_first(uid for uid, pod in pods.items() if not pod.is_waiting)
    if seen != known:
        job.cluster = seen
    run_pod_clock(job, now_s)
    return (seen.pods, seen.is_accounted) != (known.pods, known.is_accounted)


def run_pod_clock(job: JobState, now_s: float) -> None:
    """Let the pod clock stand while the cluster runs too few pods whose processes can start, and may run more."""
    if job.cluster.num_running is None:
        return
    settings, least, num_stuck = job.settings, job.rules.least_pods, _num_stuck(job)
    num_possible = settings.replicas + settings.spares - num_stuck
    may_run_more = num_possible >= least
    num_running = job.cluster.num_running - (num_stuck if may_run_more else 0)
    lacks_ranks = may_run_more and _lacks_ranks(job, num_running, num_possible)
    job.pod_clock.stand(_text(job, num_stuck) if num_running < least or lacks_ranks else "", now_s)


def _text(job: JobState, num_stuck: int) -> str:
    """Return why the pod clock stands, for people."""
    stuck = f", {num_stuck} of them cannot start {agreed(num_stuck, 'its', 'their')} processes" if num_stuck else ""
    given_up, least = job.members.num_given_up, f"{job.rules.least_pods}"
    if given_up:
        stuck += f", {given_up} of their processes cannot start"
        least += f" with {counted(job.rules.least_ranks, 'rank')}"
    runs = f"{job.cluster.num_running} of {counted(job.settings.replicas, 'pod runs', 'pods run')}{stuck}"
    return (
        f"{runs}, at least {least} {agreed(job.rules.least_pods, 'is', 'are')} "
        "wanted; timeouts.startupSeconds does not count until the cluster has started them"
    )


def _lacks_ranks(job: JobState, num_running: int, num_possible: int) -> bool:
    """Whether the pods that run are too few to begin for places that were given up, and more pods may come."""
    if not isinstance(job.phase, Forming):
        return False  # Later a pod can be replaced: that must not wait for others.
    least, given_up = job.rules.least_ranks, job.members.num_given_up
    num_running_ranks, num_possible_ranks = (
        num_pods * job.settings.ranks_per_pod - given_up for num_pods in (num_running, num_possible)
    )
    return given_up > 0 and num_running_ranks < least <= num_possible_ranks


def _num_stuck(job: JobState) -> int:
    """Pods that run and can never be ready: none of them stands for one that the cluster has yet to start."""
    members, pods = job.members, job.cluster.pods
    stuck = (uid for uid in members.hopeless if uid not in members.ready and uid not in members.out)
    return sum(uid in pods and not pods[uid].is_waiting for uid in stuck)
