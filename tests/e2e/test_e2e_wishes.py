"""What people do to a job that trains although nothing is wrong: its node is cordoned, it is suspended and resumed."""

import asyncio
import json

import pytest
from tests.waiting import eventually

from .e2e_bench import Bench, Json, job

pytestmark = [pytest.mark.timeout(300), pytest.mark.parametrize("bench", ["local"], indirect=True)]

NAME = "wishes"
LIMIT_S = 90.0


async def pods(bench: Bench) -> dict[str, Json]:
    """Return the training pods by name."""
    selector = f"unbroken.dev/job={NAME},unbroken.dev/component=trainer"
    text = await bench.cluster.kubectl("get", "pods", "-n", NAME, "-l", selector, "-o", "json")
    return {item["metadata"]["name"]: item for item in json.loads(text)["items"]}


async def patch(bench: Bench, **spec: object) -> None:
    """Change the job's spec."""
    await bench.cluster.kubectl("patch", "rtj", NAME, "-n", NAME, "--type", "merge", "-p", json.dumps({"spec": spec}))


def is_at_full_strength(status: Json) -> bool:
    """Whether the job trains and has a ready spare."""
    conditions = {item["type"]: item["status"] for item in status.get("conditions", ())}
    return status.get("state") == "Running" and conditions.get("SparesExhausted") == "False"


def test_ranks_leave_a_cordoned_node_and_a_suspended_job_goes_on_where_it_was(bench: Bench) -> None:
    async def scenario() -> None:
        document = job(NAME, ["sleep", "600"], spares={"count": 1}, restart={"rungs": [{"name": "pod"}]})
        async with bench.namespace(NAME):
            await bench.apply(NAME, document)
            await bench.wait_status(NAME, "a job that trains", is_at_full_strength)
            by_role = {item["metadata"]["labels"]["unbroken.dev/role"]: item for item in (await pods(bench)).values()}
            node, spare = by_role["active"]["spec"]["nodeName"], by_role["spare"]["metadata"]["name"]
            await bench.cluster.kubectl("cordon", node)
            try:
                moved = await bench.wait_status(
                    NAME,
                    "ranks that have moved, and a new spare",
                    lambda status: status.get("restarts", {}).get("total") == 1 and is_at_full_strength(status),
                )

                async def is_gone() -> bool:
                    return sorted(await pods(bench)) == sorted((spare, f"{NAME}-2"))

                await eventually(is_gone, "the pod on the cordoned node is gone", LIMIT_S)
            finally:
                await bench.cluster.kubectl("uncordon", node)
            assert moved["lastRecovery"]["cause"] == "pod-leaving"
            assert moved["lastRecovery"]["replacedBy"] == [spare]
            await patch(bench, suspend=True)
            suspended = await bench.wait_status(
                NAME,
                "a suspended job without pods",
                lambda status: (
                    status["state"] == "Suspended"
                    and any("has no pods" in item["message"] for item in status["conditions"])
                ),
            )
            assert await pods(bench) == {}
            await patch(bench, suspend=False)
            resumed = await bench.wait_status(NAME, "a job that trains again", is_at_full_strength)
            for status in (suspended, resumed):
                assert status["restarts"]["total"] == 1, "no fault"
                assert status["history"] == moved["history"]
            assert resumed["iteration"] > moved["iteration"]
            assert resumed["rendezvous"]["term"] > moved["rendezvous"]["term"]

    asyncio.run(scenario())


def test_a_changed_template_is_rolled_out_pod_by_pod_when_the_job_says_so(bench: Bench) -> None:
    """New pods first, ranks move, old pods go: in the end all are new, and nothing else has happened."""

    async def scenario() -> None:
        document = job(NAME, ["sleep", "600"], spares={"count": 1}, restart={"rungs": [{"name": "pod"}]})
        async with bench.namespace(NAME):
            await bench.apply(NAME, document)
            await bench.wait_status(NAME, "a job that trains", is_at_full_strength)
            old = set(await pods(bench))
            labels = {"metadata": {"labels": {"example.com/version": "2"}}}
            await patch(bench, updatePolicy="Rolling", template=labels)
            status = await bench.wait_status(
                NAME,
                "a job of new pods",
                lambda status: (
                    is_at_full_strength(status)
                    and any(item["type"] == "UpToDate" and item["status"] == "True" for item in status["conditions"])
                ),
            )

            seen: dict[str, str] = {}

            async def are_new() -> bool:
                found = await pods(bench)
                seen.clear()
                for name, item in found.items():
                    seen[name] = item["metadata"]["labels"].get("example.com/version", "old")
                return list(seen.values()) == ["2", "2"] and not old & set(seen)

            await eventually(
                are_new, "two pods of the new template, and no other", LIMIT_S, lambda: f"there are {seen}"
            )
            assert status["restarts"] == {"total": 1, "byRung": {"pod": 1}, "byCause": {"pod-leaving": 1}}

    asyncio.run(scenario())


def test_a_script_that_gives_up_for_good_ends_its_job_and_no_rung_is_taken(bench: Bench) -> None:
    async def scenario() -> None:
        restart = {"rungs": [{"name": "process"}, {"name": "pod"}], "fatalExitCodes": [78]}
        document = job(NAME, ["sh", "-c", "sleep 1; echo no such data; exit 78"], restart=restart)
        async with bench.namespace(NAME):
            await bench.apply(NAME, document)
            status = await bench.wait_status(
                NAME, "a job that has failed", lambda status: status.get("state") == "Failed"
            )
            (failed,) = (item for item in status["conditions"] if item["type"] == "Failed")
            assert failed["reason"] == "FatalExitCode"
            assert failed["message"] == (
                f"rank 0 ({NAME}-0) exited with code 78, after which restart.fatalExitCodes wants no restart"
            )
            assert status["restarts"]["total"] == 0
            await bench.wait_event(NAME, NAME, "FatalExitCode")

    asyncio.run(scenario())


def test_a_line_that_a_job_calls_fatal_ends_it_with_the_rule_and_one_that_cannot_be_is_refused(bench: Bench) -> None:
    async def scenario() -> None:
        restart = {"rungs": [{"name": "process"}, {"name": "pod"}]}
        # The kubelet would replace $(HOME), and the pattern would match nothing.
        rule = {"name": "data", "pattern": r"^fatal: \$(HOME) is gone$", "verdict": "fatal-stop"}
        command = ["sh", "-c", "sleep 1; printf 'fatal: %sHOME is gone\\n' '$'; sleep 600"]
        async with bench.namespace(NAME):
            broken = job(NAME, command, restart=restart, health={"logRules": [{**rule, "pattern": "(a"}]})
            await bench.apply(NAME, broken)
            status = await bench.wait_status(NAME, "a refusal", lambda status: status.get("state") == "Invalid")
            (admitted,) = (item for item in status["conditions"] if item["type"] == "Admitted")
            assert "spec.health.logRules[0].pattern: want a ) for this (" in admitted["message"]
            await bench.apply(NAME, job(NAME, command, restart=restart, health={"mode": "Off", "logRules": [rule]}))
            status = await bench.wait_status(
                NAME, "a job that has failed", lambda status: status.get("state") == "Failed"
            )
            (failed,) = (item for item in status["conditions"] if item["type"] == "Failed")
            assert failed["reason"] == "FatalLogLine"
            assert failed["message"] == f"rank 0 ({NAME}-0): log rule data: a line matches: fatal: $HOME is gone"
            assert status["restarts"]["total"] == 0

    asyncio.run(scenario())
