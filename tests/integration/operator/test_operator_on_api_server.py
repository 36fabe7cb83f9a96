"""The operator as a process, on real API servers."""

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.unit.unbroken_operator.api.test_operator_template_rules import HARMLESS, HAZARDS
from tests.waiting import eventually

from unbroken_core.protocol.messages import PROTOCOL, JobStatus, PodStatus, Recovery
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Role, Rung, WorkerPhase
from unbroken_operator.adapters.errors import KubeNotFound, KubeRefused
from unbroken_operator.api import layout
from unbroken_operator.decisions.objects.credentials import identity_of

from .operator_bench import Bench, bench, operator, ready_node


def kubeconfig_has_cel(version: dict[str, Any]) -> bool:
    """Return whether the API server enforces CEL rules."""
    return int("".join(filter(str.isdigit, version["minor"]))) >= 25


def report(pods: list[dict[str, Any]], revision: int, **fields: Any) -> JobStatus:
    """Return what a rendezvous says of these pods; the last one is a spare."""
    members = tuple(
        PodStatus(
            pod["metadata"]["name"],
            pod["metadata"]["uid"],
            "",
            Role.SPARE if pod is pods[-1] else Role.ACTIVE,
            () if pod is pods[-1] else (index,),
            (),
            (WorkerPhase.RUNNING,),
            True,
        )
        for index, pod in enumerate(pods)
    )
    values: dict[str, Any] = {
        "protocol": PROTOCOL,
        "job": "digits",
        "term": 1,
        "revision": revision,
        "phase": JobPhase.RUNNING,
        "reason": Reason.TRAINING,
        "message": "2 ranks train",
        "iteration": 0,
        "world_size": len(pods) - 1,
        "spare_ranks": 1,
        "lost_ranks": 0,
        "pods": members,
        "restarts_by_rung": {},
        "restarts_by_cause": {},
        "recoveries": (),
        "max_step": -1,
        "ettr": 0.5,
        **fields,
    }
    return JobStatus(**values)


NOTED = {
    "metadata": {"labels": {"team": "vision"}, "annotations": {"example.com/note": "x"}},
    "spec": {"containers": [{"name": "trainer", "image": "torch:2", "command": ["python3", "train.py"]}]},
}
RECOVERY = Recovery(
    number=1,
    cause=Cause.PROCESS_SIGNAL,
    rung=Rung.POD,
    rank=1,
    pod="digits-1",
    node="node-a",
    domain="rack-1",
    detail="signal 9",
    iteration_before=0,
    iteration_after=1,
    replaced_by=("digits-2",),
    phase_s={"detect": 0.001, "stop": 0.01, "plan": 0.002, "enter": 0.02},
    started_at="2026-01-01T00:00:00Z",
    ended_at="2026-01-01T00:00:01Z",
)


async def _job_with_rendezvous(made: Bench, rendezvous_address: str) -> list[dict[str, Any]]:
    await made.wait_for_pods("digits-0", "digits-1", "digits-2")
    await made.run_pod("digits-rendezvous-0", rendezvous_address)
    return await made.pods()


def test_a_job_gets_its_objects_and_takes_them_along_while_no_operator_runs(kubeconfig: Path, tmp_path: Path) -> None:
    """The whole set exists with its owner; `kubectl delete rtj` works with the operator dead: nothing holds it."""

    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply(
                "digits", replicas=2, spares={"count": 1}, template=NOTED, rendezvous={"nodeSelector": {"pool": "cpu"}}
            )
            with operator(made):
                await made.wait_for_pods("digits-0", "digits-1", "digits-2")
                for pod in await made.pods():
                    metadata = pod["metadata"]
                    assert (metadata["labels"]["team"], metadata["annotations"]["example.com/note"]) == ("vision", "x")

                async def rendezvous_pods() -> list[dict[str, Any]]:
                    # It is created beside the others.
                    return await made.pods(layout.RENDEZVOUS)

                (rendezvous,) = await eventually(rendezvous_pods, "the rendezvous pod")
                assert rendezvous["spec"]["nodeSelector"] == {"pool": "cpu"}

                async def is_settled() -> bool:
                    return bool(await made.condition("digits", "Running"))

                await eventually(is_settled, "a status")
                job = await made.job("digits")
                assert "finalizers" not in job["metadata"]
                assert "annotations" not in job["metadata"]
                identity = identity_of(await made.secret("digits"))
                assert identity is not None
                assert len(identity.job_key) == 64
                owned = [*await made.pods(), *await made.pods(layout.RENDEZVOUS)]
                owned.append(await made.kube.get(made.path("services", "digits-rendezvous")))
                owned.append(await made.kube.get(made.path("secrets", "digits-rendezvous")))
                owned.append(await made.kube.get(made.path("secrets", "digits.agents-0-rendezvous")))
                assert len(owned) == 7
                for item in owned:
                    (owner,) = item["metadata"]["ownerReferences"]
                    assert (owner["uid"], owner["controller"]) == (job["metadata"]["uid"], True)
            await made.kube.delete(made.path(layout.PLURAL, "digits"), job["metadata"]["uid"])

            async def is_all_gone() -> bool:
                pods = [*await made.pods(), *await made.pods(layout.RENDEZVOUS)]
                secrets, _ = await made.kube.list(made.path("secrets"), layout.JOB_LABEL)
                services, _ = await made.kube.list(made.path("services"), layout.JOB_LABEL)
                return not [*pods, *secrets, *services]

            await eventually(is_all_gone, "garbage collection of the job's objects")

    asyncio.run(scenario())


def test_the_report_of_the_rendezvous_becomes_status_labels_and_one_event(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2, spares={"count": 1})
            with operator(made):
                rendezvous = await made.rendezvous("digits")
                async with rendezvous.serving() as address:
                    pods = await _job_with_rendezvous(made, address)
                    await rendezvous.say(report(pods, 1))

                    async def is_running() -> bool:
                        return (await made.condition("digits", "Running")).get("status") == "True"

                    await eventually(is_running, "Running")

                    async def is_observed() -> bool:
                        seen = [set(item.pods) for item in rendezvous.observations[-1:]]
                        return seen == [{pod["metadata"]["uid"] for pod in pods}]

                    await eventually(is_observed, "an Observation of all pods")
                    promoted = [pods[0], pods[2], pods[1]]
                    counts = {"restarts_by_rung": {"pod": 1}, "restarts_by_cause": {"process-signal": 1}}
                    await rendezvous.say(report(promoted, 2, recoveries=(RECOVERY,), iteration=1, **counts))

                    async def is_told() -> list[dict[str, Any]]:
                        return await made.events("Recovered")

                    (event,) = await eventually(is_told, "an Event of the recovery")
                    assert event["message"].startswith("rank 1 (pod digits-1, node node-a, domain rack-1): ")

                    async def is_recorded() -> dict[str, Any] | None:
                        status = (await made.job("digits"))["status"]
                        return status if status.get("lastRecovery") else None

                    status = await eventually(is_recorded, "the recovery in the status")
                    assert status["restarts"] == {
                        "total": 1,
                        "byRung": {"pod": 1},
                        "byCause": {"process-signal": 1},
                    }
                    assert status["lastInterruption"]["rank"] == 1
                    assert status["lastRecovery"]["replacedBy"] == ["digits-2"]
                    assert (status["iteration"], status["state"]) == (1, "Running")

                    async def is_labelled() -> bool:
                        roles = [pod["metadata"]["labels"][layout.ROLE_LABEL] for pod in await made.pods()]
                        return roles == ["active", "spare", "active"]

                    await eventually(is_labelled, "labels of the promoted pods")
                    assert rendezvous.num_refused == 0

    asyncio.run(scenario())


def test_lost_pods_are_replaced_and_the_rendezvous_hears_of_it(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2, spares={"count": 1})
            with operator(made):
                rendezvous = await made.rendezvous("digits")
                async with rendezvous.serving() as address:
                    pods = await _job_with_rendezvous(made, address)
                    await rendezvous.say(report(pods, 1))
                    for pod in pods:
                        await made.run_pod(pod["metadata"]["name"], "127.0.0.9")
                    uid = pods[1]["metadata"]["uid"]
                    await made.end_pod("digits-1", "Failed")
                    await made.wait_for_pods("digits-0", "digits-1", "digits-2", "digits-3")

                    async def is_heard() -> bool:
                        pod = rendezvous.observations[-1].pods.get(uid) if rendezvous.observations else None
                        return pod is not None and pod.gone is Cause.POD_LOST

                    await eventually(is_heard, "the rendezvous hears of the failed pod")
                    await made.kube.delete(made.path("pods", "digits-2"), pods[2]["metadata"]["uid"], is_forced=True)
                    await made.wait_for_pods("digits-0", "digits-1", "digits-3", "digits-4")

    asyncio.run(scenario())


def test_a_restarted_operator_changes_nothing(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2, spares={"count": 1})

            async def state() -> list[dict[str, Any]]:
                """Return all that an operator writes of pods; their status is the kubelet's and the scheduler's."""
                pods = [*await made.pods(), *await made.pods(layout.RENDEZVOUS)]
                others = ("resourceVersion", "managedFields")
                metadata = [{key: pod["metadata"][key] for key in pod["metadata"] if key not in others} for pod in pods]
                return [{"metadata": kept, "spec": pod["spec"]} for kept, pod in zip(metadata, pods, strict=True)]

            with operator(made):
                rendezvous = await made.rendezvous("digits")
                async with rendezvous.serving() as address:
                    pods = await _job_with_rendezvous(made, address)
                    await rendezvous.say(report(pods, 1))

                    async def is_running() -> bool:
                        return (await made.condition("digits", "Running")).get("status") == "True"

                    await eventually(is_running, "Running")
            async with rendezvous.serving() as address:
                await made.run_pod("digits-rendezvous-0", address)
                before = await state()
                rendezvous.observations.clear()
                with operator(made):

                    async def is_followed() -> bool:
                        return bool(rendezvous.observations)

                    await eventually(is_followed, "the new operator follows the rendezvous")
                    await rendezvous.say(report(pods, 2, iteration=5))

                    async def is_mirrored() -> bool:
                        return bool((await made.job("digits"))["status"]["iteration"] == 5)

                    await eventually(is_mirrored, "the new operator mirrors")
                    assert await state() == before

    asyncio.run(scenario())


def one_layer(**fields: Any) -> dict[str, Any]:
    """Return a topology of one layer with these fields."""
    return {"layers": [{"name": "rack", "label": "example.com/rack", **fields}]}


def mounted_at(path: str) -> dict[str, Any]:
    """Return the part of a pod's spec with a trainer that mounts something there."""
    mounts = [{"name": "v", "mountPath": path}]
    return {"containers": [{"name": "trainer", "image": "torch:2", "command": ["python3"], "volumeMounts": mounts}]}


def with_key(field: str, key: str) -> dict[str, Any]:
    """Return a template with one label or annotation."""
    container = {"name": "trainer", "image": "torch:2", "command": ["python3", "train.py"]}
    return {"metadata": {field: {key: "x"}}, "spec": {"containers": [container]}}


def test_a_broken_spec_is_shown_once_and_other_jobs_do_not_notice(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            has_cel = kubeconfig_has_cel(await made.kube.get("/version"))
            if has_cel:
                with pytest.raises(KubeRefused, match="minReplicas must be at most replicas"):
                    await made.apply("broken", replicas=1, minReplicas=3)
                with pytest.raises(KubeRefused, match="softSeconds must be less than hardSeconds"):
                    await made.apply("broken", timeouts={"softSeconds": 100})
                with pytest.raises(KubeRefused, match="maxRanks must be at least ranksPerPod"):
                    await made.apply("broken", ranksPerPod=4, topology=one_layer(maxRanks=3))
                with pytest.raises(KubeRefused, match="minRanks must be at most"):
                    await made.apply("broken", ranksPerPod=4, topology=one_layer(minRanks=5))
                with pytest.raises(KubeRefused, match="growBackSeconds needs in-process and pod among"):
                    await made.apply("broken", restart={"growBackSeconds": 60, "rungs": [{"name": "world"}]})
                for field in ("labels", "annotations"):
                    with pytest.raises(KubeRefused, match=f"{field}: keys under unbroken.dev/ and its subdomains are"):
                        await made.apply("broken", template=with_key(field, "unbroken.dev/settings"))
                    with pytest.raises(KubeRefused, match=f"{field}: keys under unbroken.dev/ and its subdomains are"):
                        await made.apply("broken", template=with_key(field, "sub.unbroken.dev/x"))
                await made.apply("users-key", suspend=True, template=with_key("labels", "notunbroken.dev/x"))
                for spec, message in HAZARDS.values():
                    words = re.sub(r": '.*|, got .*", "", message.split(": ", 1)[1])
                    with pytest.raises(KubeRefused, match=re.escape(words)):
                        await made.apply("broken", template={"spec": spec})
                await made.apply("harmless", suspend=True, template={"spec": HARMLESS})
                for size in (999_999, "1Ki", "1.5Gi", "1000Ti", "4gi"):
                    with pytest.raises(KubeRefused, match="sizeLimit"):
                        await made.apply("broken", memory={"sizeLimit": size})
                parts = ({"volumes": [{"name": "unbroken-state"}]}, mounted_at("/var/lib/unbroken-state/x"))
                for number, part in enumerate(parts):
                    with pytest.raises(KubeRefused, match=r"a job with spec\.memory: "):
                        await made.apply("broken", memory={"sizeLimit": "4Gi"}, template={"spec": {**HARMLESS, **part}})
                    name = f"without-memory-{number}"
                    await made.apply(name, suspend=True, template={"spec": {**HARMLESS, **part}})
                for number, sound in enumerate((1_000_000, "4Gi", "999Ti")):
                    await made.apply(f"memory-{number}", suspend=True, memory={"sizeLimit": sound})
            container = {"name": "trainer", "image": "torch:2", "command": ["python3"]}
            # No rule of the CRD can judge the type of a template's field.
            template = {"spec": {"containers": [container], "terminationGracePeriodSeconds": "soon"}}
            more = {} if has_cel else {"minReplicas": 3, "timeouts": {"softSeconds": 100}}
            await made.apply("broken", replicas=1, template=template, **more)
            with operator(made):
                await made.apply("sound", restart={"growBackSeconds": 60})
                await made.wait_for_pods("sound-0")

                async def is_refused() -> dict[str, Any] | None:
                    condition = await made.condition("broken", "Admitted")
                    return condition if condition.get("reason") == "InvalidSpec" else None

                condition = await eventually(is_refused, "the condition of the broken job")
                assert "spec.template.spec.terminationGracePeriodSeconds" in condition["message"]
                (event,) = await made.events("InvalidSpec")
                assert event["involvedObject"]["name"] == "broken"
                pod_spec = {"containers": [container], "terminationGracePeriodSeconds": None}
                mended = {"replicas": 3, "timeouts": None, "template": {"spec": pod_spec}}
                await made.kube.merge(made.path(layout.PLURAL, "broken"), {"spec": mended})
                await made.wait_for_pods("broken-0", "broken-1", "broken-2", "sound-0")
                assert len(await made.events("InvalidSpec")) == 1

    asyncio.run(scenario())


def test_an_invalid_edit_leaves_a_running_job_running_and_repaired(kubeconfig: Path, tmp_path: Path) -> None:
    """As an API server without the CRD's rules, or a template that they cannot judge, lets it through."""

    def template(**fields: Any) -> dict[str, Any]:
        return {"template": {"spec": fields}}

    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2, spares={"count": 1})
            with operator(made):
                rendezvous = await made.rendezvous("digits")
                async with rendezvous.serving() as address:
                    pods = await _job_with_rendezvous(made, address)
                    await rendezvous.say(report(pods, 1))

                    async def admitted() -> dict[str, Any]:
                        return await made.condition("digits", "Admitted")

                    async def is_running() -> bool:
                        return (await made.condition("digits", "Running")).get("status") == "True"

                    await eventually(is_running, "Running")
                    path = made.path(layout.PLURAL, "digits")
                    await made.kube.merge(path, {"spec": template(terminationGracePeriodSeconds="soon")})

                    async def is_refused() -> dict[str, Any] | None:
                        condition = await admitted()
                        return condition if condition.get("reason") == "InvalidSpec" else None

                    condition = await eventually(is_refused, "the refusal")
                    assert condition["status"] == "False"
                    assert "spec.template.spec.terminationGracePeriodSeconds" in condition["message"]
                    assert "the spec before it stays in force" in condition["message"]
                    await made.kube.delete(made.path("pods", "digits-1"), pods[1]["metadata"]["uid"], is_forced=True)
                    await made.wait_for_pods("digits-0", "digits-2", "digits-3")
                    (replacement,) = [pod for pod in await made.pods() if pod["metadata"]["name"] == "digits-3"]
                    assert isinstance(replacement["spec"]["terminationGracePeriodSeconds"], int)
                    job = await made.job("digits")
                    assert job["status"]["state"] in ("Running", "Recovering")
                    assert (await admitted())["reason"] == "InvalidSpec"
                    await made.kube.merge(path, {"spec": template(terminationGracePeriodSeconds=None)})

                    async def is_sound() -> bool:
                        return (await admitted()).get("reason") == "SpecAccepted"

                    await eventually(is_sound, "the mended spec")
                    assert sorted(await made.pod_names()) == ["digits-0", "digits-2", "digits-3"]

    asyncio.run(scenario())


def test_the_nodes_labels_reach_pods_and_rendezvous(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            node = f"node-{made.namespace}"
            async with ready_node(made.kube, node, {"example.com/rack": "rack-7"}):
                layers = [{"name": "rack", "label": "example.com/rack"}, {"name": "nvl", "label": "example.com/nvl"}]
                await made.apply("digits", topology={"layers": layers})
                with operator(made):
                    rendezvous = await made.rendezvous("digits")
                    async with rendezvous.serving() as address:
                        await made.wait_for_pods("digits-0")
                        await made.run_pod("digits-0", "127.0.0.9", node)
                        await made.run_pod("digits-rendezvous-0", address)
                        await rendezvous.say(report([*await made.pods(), *await made.pods()], 1))

                        async def is_stamped() -> bool:
                            (pod,) = await made.pods()
                            annotations = pod["metadata"].get("annotations") or {}
                            return annotations.get(layout.TOPOLOGY_ANNOTATION) == '{"rack": "rack-7", "nvl": ""}'

                        await eventually(is_stamped, "the annotation of the pod")

                        async def is_sent() -> bool:
                            sent = [item for seen in rendezvous.observations[-1:] for item in seen.pods.values()]
                            return [item.domains for item in sent] == [("rack-7", "")]

                        await eventually(is_sent, "the domains in the Observation")

                        async def is_told() -> list[dict[str, Any]]:
                            return await made.events("TopologyLabelMissing")

                        (event,) = await eventually(is_told, "an Event")
                        assert f"label example.com/nvl on node {node}" in event["message"]

    asyncio.run(scenario())


def test_a_job_that_is_deleted_and_made_again_at_once_starts_anew(kubeconfig: Path, tmp_path: Path) -> None:
    """Two jobs of one name, one after the other: nothing of the first is used by the second."""

    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            first = await made.apply("digits", replicas=2)
            with operator(made):
                await made.wait_for_pods("digits-0", "digits-1")
                old = await made.kube.get(made.path("secrets", "digits-rendezvous"))
                await made.kube.delete(made.path(layout.PLURAL, "digits"), first["metadata"]["uid"])
                second = await made.apply("digits", replicas=2)

                async def is_there() -> list[dict[str, Any]]:
                    owner = second["metadata"]["uid"]
                    pods = [
                        item for item in await made.pods() if item["metadata"]["ownerReferences"][0]["uid"] == owner
                    ]
                    return pods if len(pods) == 2 else []

                await eventually(is_there, "pods of the second job")
                new = await made.kube.get(made.path("secrets", "digits-rendezvous"))
                assert new["metadata"]["ownerReferences"][0]["uid"] == second["metadata"]["uid"]
                assert new["data"] != old["data"]

                async def is_all() -> bool:
                    return len(await made.pods()) == 2

                await eventually(is_all, "only pods of the second job")

    asyncio.run(scenario())


def test_a_secret_and_a_service_that_someone_deleted_come_back(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=1)
            with operator(made):
                await made.wait_for_pods("digits-0")
                old = await made.kube.get(made.path("secrets", "digits-rendezvous"))
                service = await made.kube.get(made.path("services", "digits-rendezvous"))
                await made.kube.delete(made.path("services", "digits-rendezvous"), service["metadata"]["uid"])

                async def is_back() -> bool:
                    try:
                        item = await made.kube.get(made.path("services", "digits-rendezvous"))
                    except KubeNotFound:
                        return False
                    return bool(item["metadata"]["uid"] != service["metadata"]["uid"])

                await eventually(is_back, "another Service")
            await made.kube.delete(made.path("secrets", "digits-rendezvous"), old["metadata"]["uid"])
            with operator(made):
                await made.secret("digits")

    asyncio.run(scenario())


def test_measures_of_a_job_go_with_the_job(kubeconfig: Path, tmp_path: Path) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made, aiohttp.ClientSession() as session:
            job = await made.apply("digits")
            with operator(made) as running:

                async def metrics() -> str:
                    async with session.get(f"http://127.0.0.1:{running.metrics_port}/metrics") as answer:
                        return await answer.text()

                await made.wait_for_pods("digits-0")

                async def is_counted() -> bool:
                    return 'unbroken_operator_jobs{state="Forming"} 1.0' in await metrics()

                await eventually(is_counted, "the job in the metrics")
                await made.kube.delete(made.path(layout.PLURAL, "digits"), job["metadata"]["uid"])

                async def is_gone() -> bool:
                    return 'unbroken_operator_jobs{state="Forming"} 0.0' in await metrics()

                await eventually(is_gone, "no job in the metrics")

    asyncio.run(scenario())
