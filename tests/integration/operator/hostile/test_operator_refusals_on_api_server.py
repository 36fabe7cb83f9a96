"""The rules of the CRD, as a real API server reads them, and the operator's own checks refuse the same jobs."""

import asyncio

import pytest
from tests.clusters import kubeconfig_of
from tests.integration.operator.operator_bench import install_crd

from unbroken_operator.adapters.errors import KubeRefused
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.api import layout
from unbroken_operator.decisions.admission import InvalidSpec, admit

from . import bad_manifests


async def refusal(kube: Kube, job: bad_manifests.JsonObject) -> str:
    """Return what the API server says against a job, "" for nothing; the job is not made."""
    path = collection_path(layout.PLURAL, "default", layout.API_VERSION)
    try:
        await kube.create(f"{path}?dryRun=All", job)
    except KubeRefused as error:
        return str(error)
    return ""


def own_refusal(job: bad_manifests.JsonObject) -> str:
    """Return what operator and webhook say against it."""
    verdict = admit({**job, "metadata": {**job["metadata"], "namespace": "default", "uid": "u"}})
    return verdict.message if isinstance(verdict, InvalidSpec) else ""


# Only this profile has an API server that reads CEL.
@pytest.mark.cluster
def test_the_api_server_and_the_operator_refuse_the_same_jobs() -> None:
    cases = [*bad_manifests.by_rule(), *bad_manifests.by_schema()]
    said: list[str] = []
    differences: list[str] = []

    async def scenario() -> None:
        kube = await Kube.connect(str(kubeconfig_of("modern")))
        try:
            await install_crd(kube)
            for what, job in cases:
                theirs, ours = await refusal(kube, job), own_refusal(job)
                said.append(theirs)
                if bool(theirs) is not bool(ours):
                    differences.append(f"{what}: the API server says {theirs!r}, the operator {ours!r}")
        finally:
            await kube.close()

    asyncio.run(scenario())
    assert differences == []
    assert {bool(theirs) for theirs in said} == {True, False}
    unbroken = [rule for rule in bad_manifests.messages_of_rules() if not any(rule in theirs for theirs in said)]
    assert unbroken == [], "no job of the corpus breaks these rules"


def test_the_corpus_breaks_fields_in_all_parts_of_the_spec() -> None:
    cases = [what for what, _ in bad_manifests.by_schema()]
    assert len(cases) > 300
    assert {
        part for part in bad_manifests.spec_schema()["properties"] if not any(part in what for what in cases)
    } == set()
