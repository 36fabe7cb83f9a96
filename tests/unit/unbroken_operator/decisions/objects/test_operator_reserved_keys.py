"""Labels and annotations under our prefix are the operator's: a template cannot make pods look like others."""

import json
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import CONTAINER, World, a_job

from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spec
from unbroken_operator.decisions import admission
from unbroken_operator.decisions.admission import ValidSpec, admit
from unbroken_operator.decisions.objects.training_pods import training_pod
from unbroken_operator.decisions.snapshot import OperatorOptions, pod_view

KEYS = (
    layout.SETTINGS_ANNOTATION,
    layout.AVOIDS_ANNOTATION,
    layout.LEAVING_ANNOTATION,
    layout.TOPOLOGY_ANNOTATION,
    layout.TEMPLATE_ANNOTATION,
    layout.JOB_UID_ANNOTATION,
    layout.ROLE_LABEL,
    layout.COMPONENT_LABEL,
    layout.JOB_LABEL,
    "sub.unbroken.dev/anything",
)
FORGED = dict.fromkeys(KEYS, "x")


def template(labels: dict[str, str], annotations: dict[str, str]) -> dict[str, Any]:
    """Return a template with this metadata."""
    return {"metadata": {"labels": labels, "annotations": annotations}, "spec": {"containers": [CONTAINER]}}


@pytest.mark.parametrize("key", [layout.SETTINGS_ANNOTATION, layout.AVOIDS_ANNOTATION, layout.LEAVING_ANNOTATION])
def test_a_job_with_the_operators_keys_gets_no_pods_and_is_told_why(key: str) -> None:
    world = World(a_job(template=template({}, {key: "x"})))
    world.settle()
    assert (world.created, world.condition("Admitted")) == ([], ("False", "InvalidSpec"))


@pytest.mark.parametrize("key", KEYS)
def test_keys_that_got_past_admission_make_no_endless_pods(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_key_violations", lambda _spec: ())
    world = World(a_job(template=template({key: "x"}, {key: "x"})))
    world.settle()
    world.run_pods()
    world.settle()
    assert world.created == ["digits-rendezvous-0", "digits-0", "digits-1", "digits-2"]
    assert world.deleted == []


def test_what_the_operator_reads_of_a_pod_cannot_come_from_the_template() -> None:
    verdict = admit(a_job())
    assert isinstance(verdict, ValidSpec)

    def seen(labels: dict[str, str], annotations: dict[str, str]) -> Any:
        job = a_job(template=template(labels, annotations))
        spec = Spec.model_validate_json(json.dumps(job["spec"]))
        pod = training_pod(spec, verdict.settings, 7, Role.ACTIVE, OperatorOptions("sidecar:1"))
        assert pod["metadata"]["labels"].pop("mine", "y") == "y"
        pod["metadata"]["annotations"].pop(layout.TEMPLATE_ANNOTATION)
        return pod

    assert seen({**FORGED, "mine": "y"}, FORGED) == seen({"mine": "y"}, {})


def test_a_pod_of_an_earlier_release_with_a_forged_digest_is_still_a_training_pod() -> None:
    """Earlier releases took the annotation over from the template: its pods counted as stale rendezvous."""
    world = World()
    world.settle()
    world.pods["digits-0"]["metadata"]["annotations"][layout.SETTINGS_ANNOTATION] = "x"
    assert pod_view(world.pods["digits-0"]).component == layout.TRAINER
    assert world.actions() == ()
