"""Random jobs in random clusters with random faults, from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

from tests.simulation.control_loop.api_server import JsonObject
from tests.simulation.control_loop.names import JOB, NAMESPACE, RACK
from tests.simulation.control_loop.strikes import RANDOM_STRIKES, mend_all, strike_of
from tests.simulation.schedule import FaultPlan, Schedule, make_schedule

from unbroken_core.protocol.settings import JobSettings
from unbroken_core.vocabulary.reasons import Reason
from unbroken_operator.api import layout
from unbroken_operator.decisions.admission import ValidSpec, admit

CONTAINER: JsonObject = {"name": "trainer", "image": "torch:2", "command": ["python3", "t.py"]}

JOB_UID = "uid-of-digits"


@dataclass(frozen=True)
class LoopSchedule:
    """All that a seed decides."""

    job: Schedule
    job_object: JsonObject
    num_operators: int
    num_gpu_nodes: int
    weather: float
    """Share of the operator's calls that go wrong in some way."""
    strangers: tuple[JsonObject, ...]
    calm_s: float
    """From then on nothing strikes, and everything that was taken away is back."""


def make_loop_schedule(seed: int) -> LoopSchedule:
    """Return the schedule of a seed."""
    rng = random.Random(f"control loop {seed}")
    job_object = _job(rng)
    settings = settings_of(job_object)
    num_faults = rng.choice([0, 5, 20, 40, 40, 60, 80])
    pace_s = rng.choice([0.5, 2.0, 5.0, 10.0])
    names = list(RANDOM_STRIKES)
    if rng.random() < 0.4:
        names = rng.sample(names, rng.randint(2, 8))  # The same few again and again meet in ways that a mixture hides.
    moment_s = rng.choice([0.0, 1.0, 15.0, 15.0])
    faults = []
    for _number in range(num_faults):
        moment_s += rng.choice([0.0, 0.01, 0.3, 1.0, 3.0]) * rng.random() * pace_s + 0.001
        faults.append(strike_of(rng, rng.choice(names), moment_s))
    calm_s = moment_s + 1.0
    base = make_schedule(seed)
    job = replace(
        base,
        settings=settings,
        faults=(*faults, FaultPlan(calm_s, "** all is mended", mend_all)),
        ambushes=(),
        num_racks=rng.randint(1, 3),
        work_s=rng.choice([20.0, 60.0, 120.0]),
        bad_start=0.0,
        policy=None,
        is_silent=0.0,
        allowed_failures=(Reason.FAILED_BEFORE_READY, Reason.NO_PROGRESS),
        has_memory=True,
        can_halt=True,
        memory="none",
        queue_s=0.0,
        stall_s=0.0,
        patience_s=10_000.0,
        limit_s=calm_s + 4_000.0,
    )
    wanted = settings.replicas + settings.spares
    return LoopSchedule(
        job=job,
        job_object=job_object,
        num_operators=rng.choice([1, 1, 2]),
        num_gpu_nodes=wanted + rng.choice([1, 2, 4]),
        weather=rng.choice([0.0, 0.0, 0.02, 0.1, 0.3]),
        strangers=_strangers(rng),
        calm_s=calm_s,
    )


def settings_of(job: JsonObject) -> JobSettings:
    """Return the settings of a job, as the operator makes them of its spec."""
    verdict = admit(job)
    assert isinstance(verdict, ValidSpec), verdict
    return verdict.settings


def _job(rng: random.Random) -> JsonObject:
    replicas, ranks = rng.randint(1, 4), rng.choice([1, 1, 2])
    spec: JsonObject = {
        "replicas": replicas,
        "spares": {"count": rng.randint(0, 2), "spread": rng.choice(["Domains", "Anywhere"])},
        "ranksPerPod": ranks,
        "template": {"spec": {"containers": [dict(CONTAINER)]}},
    }
    if rng.random() < 0.5:
        spec["minReplicas"] = rng.randint(1, replicas)
    if rng.random() < 0.5:
        spec["topology"] = {"layers": [{"name": "rack", "label": RACK}]}
    return {
        "apiVersion": layout.API_VERSION,
        "kind": layout.KIND,
        "metadata": {"name": JOB, "namespace": NAMESPACE, "uid": JOB_UID, "generation": 1},
        "spec": spec,
    }


def _strangers(rng: random.Random) -> tuple[JsonObject, ...]:
    """Return pods that are not the job's, though they look like it."""
    found: list[JsonObject] = []
    for number in rng.sample(range(12), rng.choice([0, 0, 1, 3])):
        labels = {layout.JOB_LABEL: JOB, layout.COMPONENT_LABEL: rng.choice([layout.TRAINER, layout.RENDEZVOUS, "x"])}
        owner = {"apiVersion": layout.API_VERSION, "kind": layout.KIND, "name": "other", "uid": "uid-of-other"}
        found.append(
            {
                "metadata": {
                    "name": rng.choice([f"{JOB}-{number}", f"{JOB}-rendezvous-{number}", f"other-{number}"]),
                    "namespace": NAMESPACE,
                    "labels": labels if rng.random() < 0.7 else {},
                    "ownerReferences": [{**owner, "controller": True}],
                },
                "spec": {"nodeName": "elsewhere", "containers": [dict(CONTAINER)]},
            }
        )
    names = {item["metadata"]["name"]: item for item in found}
    return tuple(names.values())
