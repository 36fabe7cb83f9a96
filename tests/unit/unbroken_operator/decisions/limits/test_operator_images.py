"""An administrator may say which images a rendezvous may have."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from tests.unit.unbroken_operator.decisions.test_operator_review import a_review
from tests.unit.unbroken_operator.operator_world import World, a_job

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.config import parse
from unbroken_operator.decisions.admission import admit, admit_images
from unbroken_operator.decisions.limits.images import is_allowed
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.plan import plan
from unbroken_operator.decisions.review import answer

ALLOWED = ("example.com/team/*", "example.com/rendezvous:1", "example.com/pinned@*")


def _world(allowed: tuple[str, ...], **spec: Any) -> World:
    world = World(a_job(**spec))
    world.options = dataclasses.replace(world.options, rendezvous_images=allowed)
    return world


@pytest.mark.parametrize(
    ("image", "is_it"),
    [
        ("example.com/team/any:2", True),
        ("example.com/rendezvous:1", True),
        ("example.com/pinned@sha256:0", True),
        ("example.com/rendezvous:10", False),
        ("example.com/team", False),
        ("example.com/teammate/any", False),
        ("example.com/pinned:1", False),
        ("", False),
    ],
)
def test_an_image_is_allowed_by_its_whole_name_or_by_a_prefix(image: str, is_it: bool) -> None:
    assert is_allowed(image, ALLOWED) is is_it


@pytest.mark.parametrize("field", ["rendezvous", "sidecar"])
def test_a_job_with_another_image_gets_no_pods_and_is_told_why(field: str) -> None:
    world = _world(ALLOWED, **{field: {"image": "evil.example/rendezvous:1"}})
    assert plan(world.snapshot()).counted == {OperatorRefusal.IMAGE}
    world.settle()
    assert world.pods == {}
    assert world.condition("Admitted") == ("False", "InvalidSpec")
    (message,) = world.messages("InvalidSpec")
    assert message.startswith(f"spec.{field}.image: 'evil.example/rendezvous:1' is not among the rendezvous images")
    assert "example.com/team/*" in message


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({}, id="the operator's own"),
        pytest.param({"rendezvous": {"image": "example.com/team/mine:3"}}, id="an allowed one"),
        pytest.param(
            {"sidecar": {"image": "other:1"}, "rendezvous": {"image": "example.com/rendezvous:1"}},
            id="another one beside the trainer",
        ),
    ],
)
def test_a_job_with_an_allowed_image_gets_its_pods(spec: dict[str, object]) -> None:
    world = _world(ALLOWED, **spec)
    world.settle()
    assert world.condition("Admitted") == ("True", "SpecAccepted")


def test_without_a_list_every_image_is_allowed() -> None:
    world = _world((), rendezvous={"image": "any.example/x"})
    world.settle()
    assert world.condition("Admitted") == ("True", "SpecAccepted")


@pytest.mark.parametrize("pattern", ["", "*", "example.com*", "example.com/*/x", "example.com/**"])
def test_a_pattern_that_allows_more_than_it_seems_to_is_refused_at_the_start(pattern: str, tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.touch()
    arguments = ["--all-namespaces", "--kubeconfig", str(kubeconfig), "--rendezvous-image", pattern]
    with pytest.raises(InputError, match="--rendezvous-image: must be an image, or a prefix that ends in"):
        parse(arguments)


def test_patterns_are_bounded(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.touch()
    arguments = ["--all-namespaces", "--kubeconfig", str(kubeconfig), *["--rendezvous-image", "a/*"] * 65]
    with pytest.raises(InputError, match="at most 64 times, got 65"):
        parse(arguments)
    assert parse(arguments[:-2]).rendezvous_images == ("a/*",) * 64


@pytest.mark.parametrize("field", ["rendezvous", "sidecar"])
def test_the_webhook_refuses_what_the_operator_would_not_admit(field: str) -> None:
    """Before, the API server took such a job, which then got no pods."""
    spec: dict[str, Any] = {field: {"image": "evil.example/rendezvous:1"}}
    job = a_job(**spec)
    refused = answer(a_review(job), (), ALLOWED).refused
    assert refused == admit_images(admit(job), ALLOWED)
    assert refused is not None
    assert answer(a_review(job), ()).refused is None, "any image, where there is no list"
    known = answer(a_review(job, before=job), (), ALLOWED)
    assert (known.refused, known.warnings) == (None, refused.violations), "one that was there before can be changed"


def test_operator_and_webhook_have_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    arguments = [
        "--all-namespaces",
        "--sidecar-image",
        "s:1",
        "--webhook-listen",
        "0.0.0.0:9443",
        "--webhook-certificates",
        "/c",
    ]
    config = parse([*arguments, "--rendezvous-image", "example.com/team/*"])
    assert config.webhook is not None
    assert config.webhook.images == config.rendezvous_images == ("example.com/team/*",)
