"""What the operator shows of its jobs."""

from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from unbroken_core.vocabulary.reasons import Rung
from unbroken_operator.adapters.metrics import OperatorMetrics

Jobs = list[tuple[str, str, Mapping[str, Any]]]


def test_series_of_a_job_are_ten_and_go_when_it_goes() -> None:
    history = [{"number": number, "node": f"node-{number}", "pod": f"big-{number}"} for number in range(20)]
    status = {
        "state": "Running",
        "ranks": {"active": 7920, "spare": 80, "lost": 0},
        "restarts": {"total": 1000, "byRung": {rung.value: 200 for rung in Rung}, "byCause": {"exception": 1000}},
        "iteration": 1000,
        "ettr": 0.9,
        "history": history,
        "conditions": [{"type": "Running", "message": f"pod big-{number}"} for number in range(16)],
    }
    jobs: Jobs = []

    def look() -> Iterable[tuple[str, str, Mapping[str, Any]]]:
        return list(jobs)

    metrics = OperatorMetrics()
    metrics.show_jobs(look)

    def names() -> set[str]:
        families = parse(generate_latest(metrics.registry).decode())
        return {f"{sample.name}{sorted(sample.labels.items())}" for family in families for sample in family.samples}

    before = names()
    jobs.append(("ml", "big", status))
    of_job = names() - before
    assert len(of_job) == 11
    assert all("('training_job', 'big')" in name and "('namespace', 'ml')" in name for name in of_job)
    jobs.clear()
    assert names() == before
    assert not any("_created" in name for name in before)
