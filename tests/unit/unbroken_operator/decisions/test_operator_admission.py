"""What is wrong with a spec is said with where, seen and wanted."""

import json
from typing import Any

import pytest
from tests.unit.unbroken_operator.operator_world import CONTAINER, a_job

from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Rung
from unbroken_operator.api.models import Spec
from unbroken_operator.api.schema import structural_schema
from unbroken_operator.decisions.admission import InvalidSpec, ValidSpec, accepted_facts, admit
from unbroken_operator.decisions.limits.fitting import fitted


def template(**fields: Any) -> dict[str, Any]:
    """Return a template whose first container has these fields, too."""
    return {"spec": {"containers": [{**CONTAINER, **fields}]}}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            {"nonsense": 1},
            "spec.nonsense: unknown field; see `kubectl explain rtj.spec`",
            id="unknown",
        ),
        pytest.param({"replicas": "2"}, "spec.replicas: input should be a valid integer, got '2'", id="wrong type"),
        pytest.param({"replicas": True}, "spec.replicas: input should be a valid integer, got True", id="bool"),
        pytest.param({"minReplicas": 3}, "spec.minReplicas: want 1 to replicas (2), got 3", id="minReplicas"),
        pytest.param(
            {"timeouts": {"softSeconds": 90}},
            "spec.timeouts.softSeconds: want less than timeouts.hardSeconds (90.0), got 90.0",
            id="soft",
        ),
        pytest.param(
            {"timeouts": {"barrierSeconds": 80}},
            "spec.timeouts.hardSeconds: want less than timeouts.barrierSeconds (80.0), got 90.0",
            id="barrier",
        ),
        pytest.param(
            {"ranksPerPod": 65}, "spec.ranksPerPod: input should be less than or equal to 64, got 65", id="ranksPerPod"
        ),
        pytest.param({"template": {}}, "spec.template.spec: is required", id="empty template"),
        pytest.param(
            {"template": {"spec": {"containers": []}}},
            "spec.template.spec.containers: must have at least 1 items, got 0",
            id="no container",
        ),
        pytest.param(
            {"template": {"spec": {"containers": [{"name": "t", "command": ["python"]}]}}},
            "spec.template.spec.containers[0].image: is required",
            id="no image",
        ),
        pytest.param(
            {"template": template(command=[])},
            "spec.template.spec.containers[0].command: is required: the command that starts the training "
            "(an image's own entrypoint cannot be put under the launcher)",
            id="no command",
        ),
        pytest.param(
            {"template": template(env=[{"name": "UNBROKEN_DIR", "value": "/"}])},
            "spec.template.spec.containers[0].env[0].name: names that begin with UNBROKEN_ are the operator's, "
            "got 'UNBROKEN_DIR'",
            id="our variable",
        ),
        pytest.param(
            {"template": template(volumeMounts=[{"name": "unbroken-private", "mountPath": "/x"}])},
            "spec.template.spec.containers[0].volumeMounts[0].name: is the operator's, who mounts it where it belongs: "
            "'unbroken-private'",
            id="the agent's volume",
        ),
        pytest.param(
            {"template": template(name="unbroken-agent")},
            "spec.template.spec.containers[0].name: is reserved for the operator: 'unbroken-agent'",
            id="our container",
        ),
        pytest.param(
            {"template": {**template(), "metadata": {"annotations": {"unbroken.dev/settings": "x", "mine": "y"}}}},
            "spec.template.metadata.annotations: keys under unbroken.dev/ and its subdomains are the operator's: "
            "remove them, got 'unbroken.dev/settings'",
            id="reserved annotation",
        ),
        pytest.param(
            {"template": {**template(), "metadata": {"labels": {f"{c}.unbroken.dev/{c * 90}": "" for c in "dcba"}}}},
            "spec.template.metadata.labels: keys under unbroken.dev/ and its subdomains are the operator's: remove "
            + "them, got "
            + ", ".join(f"'{c}.unbroken.dev/{c * 62}...'" for c in "abc")
            + " and 1 more",
            id="many reserved labels",
        ),
        pytest.param(
            {"template": {"spec": {"restartPolicy": "Always", "containers": [CONTAINER]}}},
            "spec.template.spec.restartPolicy: input should be 'Never', got 'Always'",
            id="restartPolicy",
        ),
        pytest.param(
            {"restart": {"rungs": [{"name": "retry"}]}},
            "spec.restart.rungs[0].name: input should be 'in-process', 'process', 'pod', 'world' or 'job', got 'retry'",
            id="rung",
        ),
        pytest.param(
            {"topology": {"layers": [{"name": "rack", "label": "x", "minRanks": 3, "maxRanks": 2}]}},
            "spec.topology.layers[rack].maxRanks: want at least minRanks (3), got 2",
            id="minRanks above maxRanks",
        ),
        pytest.param(
            {"topology": {"layers": [{"name": "rack", "label": "x", "maxRanks": 1}]}},
            "spec.topology.layers[rack].maxRanks: want at least ranksPerPod (2), because pods are kept whole unless "
            "world.minRanksPerPod allows otherwise, got 1",
            id="maxRanks below a pod",
        ),
        pytest.param(
            {"topology": {"layers": [{"name": "rack", "label": "x", "minRanks": 7}]}},
            "spec.topology.layers[rack].minRanks: want at most (replicas + spares.count) x ranksPerPod (6), since no "
            "domain can have more, got 7",
            id="minRanks above all",
        ),
        pytest.param({"queueName": "q"}, "spec.queueName: unknown field", id="not built yet"),
    ],
)
def test_a_violation_says_where_seen_and_wanted(spec: dict[str, Any], message: str) -> None:
    verdict = admit(a_job(**spec))
    assert isinstance(verdict, InvalidSpec)
    assert verdict.message.startswith(message)
    assert len(verdict.violations) == 1


def test_the_user_says_what_workers_are_forked_from() -> None:
    for name in ("UNBROKEN_PREIMPORT", "UNBROKEN_ALLOW_FAULTS"):
        assert isinstance(admit(a_job(template=template(env=[{"name": name, "value": ""}]))), ValidSpec)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param("a" * 47, "must have at most 46 characters, since pods are named after it, got 47", id="too long"),
        pytest.param("1st", "beginning with a letter", id="digit first"),
        pytest.param("a.b", "must be lowercase letters", id="dot"),
        pytest.param("a-rendezvous", "rendezvous pods of a job 'a' have such names", id="name of others' pods"),
    ],
)
def test_a_name_that_its_pods_cannot_bear_is_refused(name: str, part: str) -> None:
    verdict = admit(a_job(name))
    assert isinstance(verdict, InvalidSpec)
    assert part in verdict.message


def test_a_job_named_like_others_pods_that_was_accepted_before_goes_on() -> None:
    job = a_job("a-rendezvous")
    known = {"accepted": accepted_facts(Spec.model_validate_json(json.dumps(job["spec"])))}
    assert isinstance(admit({**job, "status": known}), ValidSpec)
    assert isinstance(admit({**job, "status": {"conditions": []}}), InvalidSpec)
    assert isinstance(admit(a_job("rendezvous")), ValidSpec)


def test_keys_that_only_look_like_the_operators_are_the_users() -> None:
    keys = ("unbroken.dev", "notunbroken.dev/x", "unbroken.dev.example.com/x", "example.com/unbroken.dev")
    metadata = {"labels": dict.fromkeys(keys, ""), "annotations": dict.fromkeys(keys, "")}
    assert isinstance(admit(a_job(template={**template(), "metadata": metadata})), ValidSpec)


def test_all_violations_are_told_together() -> None:
    verdict = admit(a_job(minReplicas=5, timeouts={"softSeconds": 100}, world={"divisibleBy": 9}))
    assert isinstance(verdict, InvalidSpec)
    assert len(verdict.violations) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"ranksPerPod": 4}, "spec.ranksPerPod: cannot change after the job was admitted (from 2 to 4)"),
        pytest.param(
            {"topology": {"layers": [{"name": "rack", "label": "x"}]}},
            "spec.topology.layers: cannot change after the job was admitted (from [] to ['rack=x'])",
        ),
        pytest.param(
            {"restart": {"rungs": [{"name": "process"}]}},
            "spec.restart.rungs (in-process): cannot change after the job was admitted (from True to False)",
        ),
    ],
)
def test_what_running_pods_depend_on_cannot_change(change: dict[str, Any], message: str) -> None:
    job = a_job(**change)
    job["status"] = {"accepted": {"ranksPerPod": 2, "layers": [], "isInProcess": True}}
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    assert verdict.violations == (message,)


def test_layers_of_the_longest_names_go_on_as_they_were_accepted() -> None:
    label = f"{'a' * 63}.{'b' * 63}.{'c' * 63}.{'d' * 61}/{'e' * 63}"
    job = a_job(topology={"layers": [{"name": "n" * 63, "label": label}]})
    first = admit(job)
    assert isinstance(first, ValidSpec)
    facts = accepted_facts(first.spec)
    assert len(facts["layers"][0]) == 381
    stored = fitted({"accepted": facts})
    assert stored["accepted"] == facts
    for accepted in (stored["accepted"], {**facts, "layers": [facts["layers"][0][:253]]}):
        assert isinstance(admit({**job, "status": {"accepted": accepted}}), ValidSpec)


def test_rungs_become_settings_in_the_order_of_the_ladder() -> None:
    rungs = [{"name": "job"}, {"name": "process", "limit": 3, "windowSeconds": 60}]
    verdict = admit(a_job(restart={"rungs": rungs, "maxFaultsPerRank": 2}))
    assert isinstance(verdict, ValidSpec)
    budgets = [(budget.rung, budget.limit, budget.window_s) for budget in verdict.settings.rungs]
    assert budgets == [(Rung.PROCESS, 3, 60.0), (Rung.JOB, None, 3600.0)]
    assert not verdict.settings.is_in_process
    assert verdict.settings.max_faults_per_rank == 2


def test_layers_become_settings_with_all_that_they_allow() -> None:
    rack = {"name": "rack", "label": "x/rack", "minRanks": 2, "maxRanks": 4, "replaceFrom": False}
    host = {"name": "host", "label": "x/host", "closeGaps": True}
    verdict = admit(a_job(topology={"layers": [rack, host]}))
    assert isinstance(verdict, ValidSpec)
    assert verdict.settings.layers == (
        Layer("rack", "x/rack", 2, 4, replace_from=False, close_gaps=False),
        Layer("host", "x/host", 1, None, replace_from=True, close_gaps=True),
    )


def test_every_field_of_the_spec_is_documented_and_bounded() -> None:
    missing: list[str] = []

    def visit(schema: dict[str, Any], path: str) -> None:
        if not schema.get("description") and not path.endswith("[]"):
            missing.append(f"{path}: no description")
        if schema.get("type") == "string" and not ({"maxLength", "enum"} & set(schema)):
            missing.append(f"{path}: no limit on its length")
        if schema.get("type") == "array" and "maxItems" not in schema:
            missing.append(f"{path}: no limit on its items")
        for name, child in schema.get("properties", {}).items():
            visit(child, f"{path}.{name}")
        if "items" in schema:
            visit(schema["items"], f"{path}[]")

    visit(structural_schema(Spec), "spec")
    assert missing == []
