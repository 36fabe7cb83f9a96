"""Bad input is refused, or shown in a condition and an Event with what, where, seen and wanted."""

import asyncio
import json
from copy import deepcopy
from typing import Any

import pytest
from tests.waiting import LIMIT_S

from .e2e_bench import Bench, CommandError, Json, condition, job

pytestmark = pytest.mark.timeout(300)

PYTHON = ["python", "-c", "print('hello')"]
TORCHRUN_RUNGS = {"rungs": [{"name": "process", "limit": 1}]}
"""A job without in-process restarts whose processes are started again once."""


def changed(path: str, value: Any) -> Json:
    """Return a sound job with one field changed; a value of None removes it."""
    document = deepcopy(job("bad", PYTHON, minReplicas=1))
    *parents, last = (int(word) if word.isdigit() else word for word in path.split("."))
    target: Any = document
    for word in parents:
        target = target[word]
    if value is None:
        del target[last]
    else:
        target[last] = value
    return document


def test_unknown_field_is_refused_at_apply_or_dropped_by_an_old_api_server(bench: Bench) -> None:
    async def scenario() -> None:
        async with bench.namespace("unknown-field") as namespace:
            refusal = await bench.refusal(namespace, changed("spec.replica", 3))
            if refusal is not None:
                assert "replica" in refusal
                return
            assert not bench.has_rules
            stored = json.loads(await bench.cluster.kubectl("get", "rtj", "bad", "-n", namespace, "-o", "json"))
            assert "replica" not in stored["spec"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        pytest.param("spec.replicas", "four", "replicas", id="wrong type"),
        pytest.param("spec.template", {}, "template", id="empty template"),
        pytest.param("spec.template.spec.containers.0.image", None, "image", id="missing image"),
    ],
)
def test_malformed_job_is_refused_at_apply(bench: Bench, path: str, value: Any, named: str) -> None:
    async def scenario() -> None:
        async with bench.namespace(f"malformed-{named}") as namespace:
            with pytest.raises(CommandError, match=named):
                await bench.apply(namespace, changed(path, value))
            left = json.loads(await bench.cluster.kubectl("get", "rtj", "-n", namespace, "-o", "json"))
            assert left["items"] == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        pytest.param("spec.minReplicas", 2, "minReplicas", id="minReplicas above replicas"),
        pytest.param("spec.timeouts.softSeconds", 6, "soft", id="soft not below hard"),
        pytest.param("spec.template.spec.containers.0.command", None, "command", id="missing command"),
        pytest.param("metadata.name", "n" * 60, "name", id="name too long for its pods"),
    ],
)
def test_contradictory_job_is_refused_by_the_api_server_or_else_by_the_operator(
    bench: Bench, path: str, value: Any, named: str
) -> None:
    async def scenario() -> None:
        document = changed(path, value)
        name = document["metadata"]["name"]
        async with bench.namespace(f"contradictory-{named.lower()}") as namespace:
            refusal = await bench.refusal(namespace, document)
            if refusal is not None:
                assert named in refusal
                return
            async with bench.observe(namespace, name) as observer:
                seen = await observer.wait("a verdict", lambda now: bool(condition(now, "Admitted")), LIMIT_S)
            admitted = condition(seen, "Admitted")
            assert (admitted["status"], admitted["reason"]) == ("False", "InvalidSpec")
            assert named in admitted["message"]
            await bench.wait_event(namespace, name, "InvalidSpec")
            assert seen.pods == ()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("name", "spec", "kind", "reason", "named"),
    [
        pytest.param(
            "no-label",
            {"topology": {"layers": [{"name": "row", "label": "example.com/row"}]}},
            "TopologyKnown",
            "TopologyLabelMissing",
            "example.com/row",
            id="topology label that no node bears",
        ),
        pytest.param(
            "too-many",
            {
                "replicas": 11,
                "template": {
                    "spec": {
                        "containers": [
                            {
                                "name": "trainer",
                                "image": "unbroken/trainer-example:0.1.0",
                                "command": ["sleep", "600"],
                                "resources": {"limits": {"nvidia.com/gpu": 2}},
                            }
                        ]
                    }
                },
            },
            "PodsReady",
            "PodsUnschedulable",
            "nvidia.com/gpu",
            id="more pods than nodes",
        ),
        pytest.param(
            "no-image",
            {"template": {"spec": {"containers": [{"name": "t", "image": "nowhere/none:1", "command": PYTHON}]}}},
            "PodsReady",
            "ImagePullFailed",
            "nowhere/none:1",
            id="image that does not exist",
        ),
    ],
)
def test_job_that_does_not_fit_the_cluster_says_so_in_a_condition_and_an_event(
    bench: Bench, name: str, spec: Json, kind: str, reason: str, named: str
) -> None:
    async def scenario() -> None:
        document = job(name, ["sleep", "600"], **{"restart": TORCHRUN_RUNGS, **spec})
        async with bench.namespace(name) as namespace, bench.observe(namespace, name) as observer:
            await bench.apply(namespace, document)
            seen = await observer.wait(reason, lambda now: condition(now, kind).get("reason") == reason, LIMIT_S)
            assert condition(seen, kind)["status"] == "False"
            assert named in condition(seen, kind)["message"]
            await bench.wait_event(namespace, name, reason)

    asyncio.run(scenario())


def test_script_that_fails_at_once_fails_the_job_with_its_reason(bench: Bench) -> None:
    async def scenario() -> None:
        command = ["python", "-c", "raise SystemExit(3)"]
        async with bench.namespace("exits") as namespace, bench.observe(namespace, "exits") as observer:
            await bench.apply(namespace, job("exits", command, restart=TORCHRUN_RUNGS))
            end = await observer.wait("the end", lambda now: now.state == "Failed", LIMIT_S)
            assert condition(end, "Failed")["status"] == "True"
            assert condition(end, "Failed")["reason"] == "RestartBudgetExhausted"
            status = await bench.status(namespace, "exits")
            assert "code 3" in status["lastInterruption"]["detail"]
            assert "code 3" in condition(end, "Failed")["message"]
            # The last fault was not recovered from, and nobody says so.
            assert "endedAt" not in status["history"][-1]
            assert set(status["restarts"]["byRung"]) <= {"process"}
            await bench.wait_event(namespace, "exits", "RestartBudgetExhausted")

    asyncio.run(scenario())


def test_two_jobs_of_one_name_in_two_namespaces_complete_without_a_process_group(bench: Bench) -> None:
    async def scenario() -> None:
        async with (
            bench.namespace("one") as one,
            bench.namespace("two") as two,
            bench.observe(one, "same") as first,
            bench.observe(two, "same") as second,
        ):
            await bench.apply(one, job("same", PYTHON, restart=TORCHRUN_RUNGS))
            await bench.apply(two, job("same", ["python", "-c", "raise SystemExit(4)"], restart=TORCHRUN_RUNGS))
            done = await first.wait("the first job's end", lambda now: now.state in {"Complete", "Failed"}, LIMIT_S)
            failed = await second.wait("the second job's end", lambda now: now.state in {"Complete", "Failed"}, LIMIT_S)
            assert (done.state, failed.state) == ("Complete", "Failed")

    asyncio.run(scenario())
