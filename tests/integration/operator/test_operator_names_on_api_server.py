"""Two jobs of one namespace whose objects would have the same names, on real API servers."""

import asyncio
import json
from pathlib import Path

import pytest
from tests.waiting import eventually

from unbroken_operator.adapters.errors import KubeRefused
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spec
from unbroken_operator.decisions.admission import accepted_facts

from .operator_bench import Bench, bench, operator
from .test_operator_on_api_server import kubeconfig_has_cel

LEGACY = "digits-rendezvous"
"""Its training pods have the names that the rendezvous pods of `digits` would have."""


async def _accept(made: Bench, name: str) -> None:
    """Write what a release has written that allowed such a name."""
    spec = (await made.job(name))["spec"]
    facts = accepted_facts(Spec.model_validate_json(json.dumps(spec)))
    await made.kube.merge(made.path(layout.PLURAL, f"{name}/status"), {"status": {"accepted": facts}})


async def _owner(made: Bench, resource: str, name: str) -> list[str]:
    item = await made.kube.get(made.path(resource, name))
    return [part["name"] for part in item["metadata"]["ownerReferences"]]


async def _check_harmless(made: Bench) -> None:
    """Both run, while the one of an earlier release is there first: nobody deletes, adopts or waits for the other's."""
    await made.wait_for_pods(*(f"{LEGACY}-{number}" for number in range(3)))
    before = {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in await made.pods()}
    await made.apply("digits", replicas=1)
    await made.wait_for_pods(*before, "digits-0")

    async def rendezvous_names() -> list[str] | None:
        found = sorted(await made.pod_names(layout.RENDEZVOUS))
        return found if len(found) == 2 else None

    found = await eventually(rendezvous_names, "a rendezvous for each")
    assert found == [f"{LEGACY}-3", f"{LEGACY}-rendezvous-0"]
    # The other way about: the next trainer of one would have the name of the rendezvous of the other.
    gone = f"{LEGACY}-2"
    await made.kube.delete(made.path("pods", gone), before[gone], is_forced=True)
    await made.wait_for_pods("digits-0", *(set(before) - {gone}), f"{LEGACY}-4")
    assert await eventually(rendezvous_names, "a rendezvous for each") == found
    assert await _owner(made, "pods", f"{LEGACY}-3") == ["digits"]
    assert await _owner(made, "pods", f"{LEGACY}-4") == [LEGACY]
    for resource in ("secrets", "services"):
        assert await _owner(made, resource, LEGACY) == ["digits"]
        assert await _owner(made, resource, f"{LEGACY}-rendezvous") == [LEGACY]


def test_a_job_named_like_the_pods_of_another_is_refused_and_one_of_before_harms_nobody(
    kubeconfig: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with bench(kubeconfig, tmp_path) as made:
            if kubeconfig_has_cel(await made.kube.get("/version")):
                with pytest.raises(KubeRefused, match="must not end with -rendezvous"):
                    await made.apply(LEGACY, replicas=1)
                return
            await made.apply("other-rendezvous", replicas=1)
            await made.apply(LEGACY, replicas=3)
            await _accept(made, LEGACY)
            with operator(made):
                await _check_harmless(made)

                async def is_refused() -> bool:
                    return (await made.condition("other-rendezvous", "Admitted")).get("reason") == "InvalidSpec"

                await eventually(is_refused, "the condition of a new job of such a name")

    asyncio.run(scenario())
