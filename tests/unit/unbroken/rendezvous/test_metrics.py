"""What a job's metrics say, and that their number is bounded."""

from collections.abc import Iterator
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from unbroken.network.refusals import Refusal
from unbroken.rendezvous.metrics import (
    BUCKETS_S,
    MAX_DOMAINS,
    RecoveryMeter,
    View,
    ViewCollector,
    count_spares,
)
from unbroken_core.protocol.messages import HealthStatus, JobStatus, PodFinding, PodStatus, TimeSpent
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.recovery.history import FaultRecord, History
from unbroken_core.vocabulary.checkpoints import MemoryStatus
from unbroken_core.vocabulary.findings import STRAGGLERS, WAS_SLOW, Finding, Verdict
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Phase, Reason, Role, Rung, Spent, WorkerPhase

SETTINGS = JobSettings(
    job="big", replicas=990, spares=10, ranks_per_pod=8, layers=(Layer("rack", "r"), Layer("switch", "s"))
)


def pod(number: int, num_racks: int = 20, num_switches: int = 100) -> PodStatus:
    """Return one of 1,000 pods; the last ten are spares."""
    is_spare = number >= 990
    return PodStatus(
        pod=f"big-{number}",
        uid=f"uid-{number}",
        node=f"node-{number}",
        role=Role.SPARE if is_spare else Role.ACTIVE,
        ranks=() if is_spare else tuple(range(8 * number, 8 * number + 8)),
        domains=(f"r{number % num_racks}", f"s{number % num_switches}"),
        workers=((WorkerPhase.READY if is_spare else WorkerPhase.RUNNING),) * 8,
        is_connected=True,
    )


def add_recovery(history: History, number: int) -> None:
    """Let one more worker fail and be replaced, on a node of its own."""
    incident = history.open(10.0 * number, number, 7920)
    cause = list(Cause)[number % len(Cause)]
    incident.add(FaultRecord(cause, f"u{number}", 0, 10.0 * number, pod=f"p{number}", node=f"n{number}", domain="d"))
    incident.raise_rung(list(Rung)[number % len(Rung)])
    incident.add_phase(Phase.STOP, 0.02)
    incident.add_phase(Phase.ENTER, 7.0)
    history.close(10.0 * number + 1.0)


def view(history: History, num_pods: int) -> View:
    """Return a job with so many pods and that history."""
    status = JobStatus(
        protocol=1,
        job="big",
        term=1,
        revision=1,
        phase=JobPhase.RUNNING,
        reason=Reason.TRAINING,
        message="",
        iteration=1000,
        world_size=7920,
        spare_ranks=80,
        lost_ranks=0,
        pods=tuple(map(pod, range(num_pods))),
        restarts_by_rung={},
        restarts_by_cause={},
        recoveries=history.to_messages(str),
        max_step=77,
        ettr=0.9,
    )
    return View(status, SETTINGS, 7920, 90.0, 79200.0, 1.5, dict.fromkeys(Refusal, 3))


def series(meter: RecoveryMeter, seen: View) -> dict[str, float]:
    """Return what a scrape reads."""
    registry = CollectorRegistry()
    registry.register(meter)
    registry.register(shown := ViewCollector())
    shown.view = seen

    def samples() -> Iterator[tuple[str, float]]:
        for family in parse(generate_latest(registry).decode()):
            for sample in family.samples:
                labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
                yield f"{sample.name}{{{labels}}}", sample.value

    return dict(samples())


def test_series_of_a_job_with_a_thousand_pods_and_restarts_are_few() -> None:
    history, meter = History(), RecoveryMeter()
    at_start = series(meter, view(history, 1))
    for number in range(1000):
        add_recovery(history, number)
        meter.look(history)
    seen = series(meter, view(history, 1000))
    assert len(seen) <= 300
    assert len([name for name in seen if name.startswith("unbroken_recent_culprits")]) == 20
    assert len([name for name in seen if name.startswith("unbroken_spares")]) == 20, "racks: there are 100 switches"
    # Nothing but nodes and domains is new: a counter that appears with its first event hides it from rate().
    new = {name.split("{")[0] for name in set(seen) - set(at_start)}
    assert new == {"unbroken_recent_culprits", "unbroken_spares"}
    assert sum(value for name, value in seen.items() if name.startswith("unbroken_restarts_total")) == 1000


def test_a_recovery_is_counted_once_with_the_seconds_of_each_phase() -> None:
    """1.23"""
    history, meter = History(), RecoveryMeter()
    add_recovery(history, 0)
    for _ in range(3):
        meter.look(history)
    seen = series(meter, view(history, 1))
    assert seen["unbroken_restarts_total{cause=capacity-returned,rung=in-process}"] == 1
    assert seen["unbroken_recovery_seconds_count{phase=stop}"] == 1
    assert seen["unbroken_recovery_seconds_sum{phase=enter}"] == 7.0
    assert seen["unbroken_recovery_seconds_bucket{le=5.0,phase=enter}"] == 0
    assert seen["unbroken_recovery_seconds_bucket{le=10.0,phase=enter}"] == 1
    assert seen["unbroken_recovery_seconds_count{phase=first-progress}"] == 0


def test_first_progress_is_counted_when_it_comes_after_the_recovery() -> None:
    history, meter = History(), RecoveryMeter()
    add_recovery(history, 0)
    meter.look(history)
    history.finished[-1].add_phase(Phase.FIRST_PROGRESS, 3.0)
    for _ in range(2):
        meter.look(history)
    seen = series(meter, view(history, 1))
    assert seen["unbroken_recovery_seconds_count{phase=first-progress}"] == 1
    assert seen["unbroken_recovery_seconds_sum{phase=first-progress}"] == 3.0
    assert seen["unbroken_recovery_seconds_count{phase=stop}"] == 1


def test_a_recovery_that_was_given_up_is_not_counted() -> None:
    history, meter = History(), RecoveryMeter()
    history.open(0.0, 0, 8).add(FaultRecord(Cause.EXCEPTION, "u", 0, 0.0))
    history.abandon()
    meter.look(history)
    seen = series(meter, view(history, 1))
    assert sum(value for name, value in seen.items() if name.startswith("unbroken_restarts_total")) == 0
    assert not any(name.startswith("unbroken_recent_culprits") for name in seen)


def test_values_are_those_of_the_status() -> None:
    seen = series(RecoveryMeter(), view(History(), 1000))
    wanted = {
        "unbroken_phase{phase=running}": 1,
        "unbroken_phase{phase=forming}": 0,
        "unbroken_iteration{}": 1000,
        "unbroken_step{}": 77,
        "unbroken_term{}": 1,
        "unbroken_ranks{role=active}": 7920,
        "unbroken_wanted_ranks{role=spare}": 80,
        "unbroken_ettr_ratio{}": 0.9,
        "unbroken_progress_seconds_total{}": 90,
        "unbroken_lost_gpu_seconds_total{}": 79200,
        "unbroken_heartbeat_age_seconds{}": 1.5,
        "unbroken_heartbeat_timeout_seconds{}": 30,
        "unbroken_refused_total{reason=unauthorized}": 3,
        "unbroken_spares{domain=r19,layer=rack}": 8,
        "unbroken_spares{domain=r0,layer=rack}": 0,
    }
    assert {name: seen.get(name) for name in wanted} == wanted


def test_time_is_shown_by_what_it_was_for() -> None:
    seen = view(History(), 1)
    spent = TimeSpent(90.0, redo_s=5.0, waiting_s=5.0, progress_rank_s=360.0, held_rank_s=600.0, wanted_rank_s=400.0)
    shown = series(RecoveryMeter(), replace(seen, status=replace(seen.status, time=spent)))
    assert {word.value: shown[f"unbroken_time_seconds{{spent={word.value}}}"] for word in Spent} == {
        "progress": 90.0,
        "checkpoint": 0.0,
        "redo": 5.0,
        "detect": 0.0,
        "restart": 0.0,
        "waiting": 5.0,
        "suspended": 0.0,
    }
    assert shown["unbroken_ettr_capacity_ratio{}"] == 0.9
    assert shown["unbroken_goodput_allocated_ratio{}"] == 0.6


def test_ettr_is_left_out_until_the_job_has_run() -> None:
    seen = view(History(), 1)
    assert "unbroken_ettr_ratio{}" not in series(RecoveryMeter(), replace(seen, status=replace(seen.status, ettr=None)))


def test_spares_are_shown_by_the_innermost_layer_with_few_domains() -> None:
    layers = ["rack", "switch"]
    pods = [pod(number, num_racks=2, num_switches=MAX_DOMAINS) for number in range(1000)]
    layer, by_domain = count_spares(pods, layers)
    assert (layer, len(by_domain), sum(by_domain.values())) == ("switch", MAX_DOMAINS, 80)
    assert "r0/s0" in by_domain
    crowded = [pod(number, num_racks=MAX_DOMAINS + 1) for number in range(1000)]
    assert count_spares(crowded, layers) == ("job", {"all": 80})
    assert count_spares([replace(pod(999), domains=())], []) == ("job", {"all": 8})


def test_buckets_reach_from_milliseconds_to_minutes() -> None:
    assert (BUCKETS_S[0], BUCKETS_S[-1]) == (0.005, 600)


def test_what_is_safe_in_memory_is_shown_and_copies_only_of_a_job_that_wants_them() -> None:
    seen = view(History(), 1)

    def shown(memory: MemoryStatus | None, copies: int) -> dict[str, float]:
        status, settings = replace(seen.status, memory=memory), replace(seen.settings, copies=copies)
        found = series(RecoveryMeter(), replace(seen, status=status, settings=settings))
        return {name.removesuffix("{}"): value for name, value in found.items() if "memory" in name}

    assert shown(None, 1) == {}
    assert shown(MemoryStatus(110), 0) == {"unbroken_memory_complete_step": 110}
    assert shown(MemoryStatus(110, 100), 1) == {
        "unbroken_memory_complete_step": 110,
        "unbroken_memory_protected_step": 100,
    }


def test_what_is_on_the_disk_is_shown_by_a_job_that_writes_there() -> None:
    seen = view(History(), 1)

    def shown(max_step: int, memory: MemoryStatus | None) -> dict[str, float]:
        status = replace(seen.status, max_step=max_step, memory=memory)
        found = series(RecoveryMeter(), replace(seen, status=status))
        return {name.removesuffix("{}"): value for name, value in found.items() if "disk" in name}

    assert shown(120, None) == shown(120, MemoryStatus(120)) == {}
    assert shown(120, MemoryStatus(110, disk_step=100, disk_every=50)) == {
        "unbroken_disk_step": 100,
        "unbroken_disk_every_steps": 50,
        "unbroken_disk_behind_steps": 20,
    }
    # A script that reports no steps; nothing on the disk yet; one on the disk that an iteration did not go on from.
    assert shown(-1, MemoryStatus(110, disk_step=100, disk_every=50))["unbroken_disk_behind_steps"] == 10
    assert shown(120, MemoryStatus(110, disk_every=50))["unbroken_disk_behind_steps"] == 120
    assert shown(90, MemoryStatus(80, disk_step=100, disk_every=50))["unbroken_disk_behind_steps"] == 0


def test_what_is_found_adds_no_series_whatever_its_names_and_a_pod_without_ranks_is_no_straggler() -> None:
    def told(*findings: Finding) -> dict[str, float]:
        seen = view(History(), 1)
        found = tuple(PodFinding("big-0", "n", finding) for finding in findings)
        unchecked = tuple((f"c{number}", 1) for number in range(len(findings)))
        health = HealthStatus(1, found, len(found), unchecked, num_paced=8)
        return series(RecoveryMeter(), replace(seen, status=replace(seen.status, health=health)))

    evil = '\x1b[2J\n# TYPE x counter\\"} 1\u202e<script>'
    many = (Finding(f"c{number}", f"{evil}{number}", Verdict.FATAL, "x", evil, evil) for number in range(62))
    slow = (
        Finding(STRAGGLERS, "rank 0", Verdict.DEGRADED, "slow-rank"),
        Finding(STRAGGLERS, "worker 1", Verdict.DEGRADED, WAS_SLOW),
    )
    seen = told(*many, *slow)
    assert seen.keys() == told().keys()
    assert seen["unbroken_health_findings{verdict=fatal}"] == 62
    assert (seen["unbroken_stragglers{}"], seen["unbroken_health_unchecked{}"]) == (1, 64)
