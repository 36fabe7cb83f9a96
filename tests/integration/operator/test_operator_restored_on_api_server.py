"""etcd is restored from a backup while the operator runs: it goes on from what is there, not from what it remembers."""

import asyncio
import contextlib
import uuid
from pathlib import Path

import pytest
from tests.clusters import kubeconfig_of
from tests.waiting import eventually

from unbroken_operator.adapters.errors import KubeError, KubeUnavailable
from unbroken_operator.api import layout

from .operator_bench import Bench, bench, operator
from .own_control_plane import own_control_plane
from .test_operator_chaos_on_api_server import _is_up

NUM_WRITES = 100
"""So far ahead of the backup are the versions that the operator knows: it cannot wait for them."""


async def _wait_for(made: Bench, *names: str) -> None:
    seen: list[object] = [None]

    async def look() -> bool:
        try:
            seen[0] = await made.pod_names()
        except KubeError as error:
            seen[0] = error
        return seen[0] == list(names)

    await eventually(look, f"training pods {names}", describe=lambda: f"last seen: {seen[0]}")


async def _write(made: Bench, **spec: object) -> None:
    """Change the job, or a word of it; an API server that has just started takes a while to know of jobs."""
    patch = {"metadata": {"annotations": {"example.com/number": uuid.uuid4().hex}}, "spec": spec}

    async def look() -> bool:
        try:
            return bool(await made.kube.merge(made.path(layout.PLURAL, "digits"), patch))
        except KubeUnavailable:
            return False

    await eventually(look, "a change of the job")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("profile", [pytest.param(name, marks=pytest.mark.cluster) for name in ("full", "modern")])
def test_after_a_restore_the_operator_goes_on_from_what_is_there(profile: str, tmp_path: Path) -> None:
    async def scenario() -> None:
        await _is_up(plane.kubeconfig)
        async with bench(plane.kubeconfig, tmp_path) as made:
            with contextlib.suppress(KubeError):
                # No controller makes it here, and the profile full wants one for each pod.
                account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
                await made.kube.create(made.path("serviceaccounts"), account)
            await made.apply("digits", replicas=2)
            with operator(made) as running:
                await _wait_for(made, "digits-0", "digits-1")
                plane.back_up()
                await _is_up(plane.kubeconfig)
                for _ in range(NUM_WRITES):
                    await _write(made)
                await _write(made, replicas=3)
                await _wait_for(made, "digits-0", "digits-1", "digits-2")
                pod = (await made.pods())[0]
                await made.kube.delete(made.path("pods", "digits-0"), pod["metadata"]["uid"], is_forced=True)
                await _wait_for(made, "digits-1", "digits-2", "digits-3")
                plane.restore()
                await _is_up(plane.kubeconfig)
                await _wait_for(made, "digits-0", "digits-1")
                # One that is back counts, one that is not there does not; the job is what it was. No ordinal is used
                # twice: the processes of digits-2 and digits-3 may still run.
                await _write(made, replicas=3)
                await _wait_for(made, "digits-0", "digits-1", "digits-4")
                pod = (await made.pods())[0]
                await made.kube.delete(made.path("pods", "digits-0"), pod["metadata"]["uid"], is_forced=True)
                await _wait_for(made, "digits-1", "digits-4", "digits-5")
            text = running.log.read_text()
            assert "by a bug" not in text
            assert "history was replaced" in text

    with own_control_plane(kubeconfig_of(profile), tmp_path) as plane:
        asyncio.run(scenario())
