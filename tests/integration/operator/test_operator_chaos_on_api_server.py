"""The control plane dies without a warning while the operator is in the middle of something."""

import asyncio
from pathlib import Path

import pytest
from tests.clusters import kubeconfig_of
from tests.waiting import eventually

from unbroken_operator.adapters.errors import KubeError
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.api import layout

from .operator_bench import Bench, bench, operator
from .own_control_plane import ControlPlane, own_control_plane
from .test_operator_on_api_server import RECOVERY, report

NUM_PODS = 60
NUM_SEEN = 5
"""So many pods were made, or ended, when the control plane dies."""


async def _is_up(kubeconfig: Path) -> None:
    kube = await Kube.connect(str(kubeconfig))

    async def look() -> bool:
        try:
            return bool(await kube.get("/api/v1/namespaces/default"))
        except KubeError:
            return False

    try:
        await eventually(look, "the API server")
    finally:
        await kube.close()


async def _num_pods(made: Bench) -> int | None:
    try:
        return len(await made.pods())
    except KubeError:
        return None


async def _wait_for(made: Bench, num_pods: int) -> None:
    seen: list[int | None] = [None]

    async def look() -> bool:
        seen.append(await _num_pods(made))
        return seen[-1] == num_pods

    await eventually(look, f"{num_pods} training pods", describe=lambda: f"last seen: {seen[-1]}")


async def _create_while_all_of_it_dies(made: Bench, plane: ControlPlane) -> None:
    await made.apply("digits", replicas=NUM_PODS - 1, spares={"count": 1})

    async def has_begun() -> bool:
        return (await _num_pods(made) or 0) >= NUM_SEEN

    await eventually(has_begun, "the first pods")
    plane.api_server.kill()
    plane.etcd.kill()
    plane.etcd.start()
    plane.api_server.start()
    await _wait_for(made, NUM_PODS)


async def _promote_while_etcd_dies(made: Bench, plane: ControlPlane) -> None:
    rendezvous = await made.rendezvous("digits")
    async with rendezvous.serving() as address:
        await made.run_pod("digits-rendezvous-0", address)
        found = sorted(await made.pods(), key=lambda pod: str(pod["metadata"]["labels"][layout.ROLE_LABEL]))
        pods = [*found[:2], found[-1]]
        assert [pod["metadata"]["labels"][layout.ROLE_LABEL] for pod in found].count("spare") == 1
        await rendezvous.say(report(pods, 1))

        async def is_running() -> bool:
            try:
                return (await made.condition("digits", "Running")).get("status") == "True"
            except KubeError:
                # An API server that has just started serves pods before it serves jobs.
                return False

        await eventually(is_running, "Running")
        plane.etcd.kill()
        counts = {"restarts_by_rung": {"pod": 1}, "restarts_by_cause": {"process-signal": 1}}
        promoted = [pods[0], pods[2], pods[1]]
        await rendezvous.say(report(promoted, 2, recoveries=(RECOVERY,), iteration=1, **counts))
        plane.etcd.start()

        async def is_told() -> bool:
            try:
                roles = [
                    (await made.kube.get(made.path("pods", pod["metadata"]["name"])))["metadata"]["labels"]
                    for pod in promoted
                ]
                events = await made.events("Recovered")
                restarts = (await made.job("digits"))["status"]["restarts"]["total"]
            except KubeError:
                return False
            is_labelled = [item[layout.ROLE_LABEL] for item in roles] == ["active", "active", "spare"]
            return is_labelled and len(events) == 1 and restarts == 1

        await eventually(is_told, "status, labels and one Event of the recovery")


async def _delete_while_the_api_server_dies(made: Bench, plane: ControlPlane) -> None:
    await made.kube.merge(made.path(layout.PLURAL, "digits"), {"spec": {"suspend": True}})

    async def has_begun() -> bool:
        num_pods = await _num_pods(made)
        return num_pods is not None and num_pods <= NUM_PODS - NUM_SEEN

    await eventually(has_begun, "the first pods end")
    plane.api_server.kill()
    plane.api_server.start()
    await _wait_for(made, 0)

    async def is_suspended() -> bool:
        try:
            return (await made.condition("digits", "Suspended")).get("status") == "True"
        except KubeError:
            return False

    await eventually(is_suspended, "Suspended")
    await made.kube.merge(made.path(layout.PLURAL, "digits"), {"spec": {"suspend": False, "replicas": 2}})
    await _wait_for(made, 3)


@pytest.mark.cluster
def test_an_operator_whose_control_plane_is_killed_finishes_what_it_was_at(tmp_path: Path) -> None:
    """etcd and API server get SIGKILL in the middle of create, promote and delete; the operator runs through."""

    async def scenario(plane: ControlPlane) -> None:
        await _is_up(plane.kubeconfig)
        async with bench(plane.kubeconfig, tmp_path) as made:
            with operator(made) as running:
                await _create_while_all_of_it_dies(made, plane)
                await _promote_while_etcd_dies(made, plane)
                await _delete_while_the_api_server_dies(made, plane)
            assert "by a bug" not in running.log.read_text()

    with own_control_plane(kubeconfig_of("modern"), tmp_path) as plane:
        asyncio.run(scenario(plane))
