"""The webhook refuses what the operator would refuse, and nothing that was there before."""

import asyncio
import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import make_mocked_request
from tests.handshake import shakes_hands
from tests.unit.unbroken_operator.operator_world import CONTAINER, a_job

from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters import webhook
from unbroken_operator.adapters.certificates import make_certificates
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spec
from unbroken_operator.decisions.admission import InvalidSpec, accepted_facts, admit
from unbroken_operator.decisions.objects.credentials import Certificates
from unbroken_operator.decisions.review import ReviewAnswer, answer

JsonObject = dict[str, Any]
NO_COMMAND: JsonObject = {"template": {"spec": {"containers": [{"name": "trainer", "image": "torch:2"}]}}}


def a_review(job: Any, before: Any = None, **fields: Any) -> JsonObject:
    """Return what the API server sends."""
    request = {
        "uid": "r1",
        "operation": "CREATE" if before is None else "UPDATE",
        "resource": {"group": layout.GROUP, "version": layout.VERSION, "resource": layout.PLURAL},
        "namespace": "ml",
        "object": job,
        "oldObject": before,
        **fields,
    }
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def test_a_sound_job_passes() -> None:
    assert answer(a_review(a_job()), ()) == ReviewAnswer("r1", "ml/digits")


def test_a_template_with_the_operators_keys_is_refused_unless_it_had_them_before() -> None:
    metadata = {"annotations": {"unbroken.dev/avoids": "x"}}
    job = a_job(template={"metadata": metadata, "spec": {"containers": [CONTAINER]}})
    refused = answer(a_review(job), ()).refused
    assert refused is not None
    assert refused.message == (
        "spec.template.metadata.annotations: keys under unbroken.dev/ and its subdomains are the operator's: remove "
        "them, got 'unbroken.dev/avoids'"
    )
    known = answer(a_review(job, before=job), ())
    assert (known.refused, known.warnings) == (None, refused.violations)


def test_a_bad_job_is_refused_with_the_words_of_the_operator() -> None:
    """What, where, seen and wanted: kubectl shows this sentence."""
    job = a_job(minReplicas=3, **NO_COMMAND)
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    assert len(verdict.violations) == 2
    assert answer(a_review(job), ()).to_json() == {
        "apiVersion": "admission.k8s.io/v1",
        "kind": "AdmissionReview",
        "response": {
            "uid": "r1",
            "allowed": False,
            "status": {"code": 422, "reason": "Invalid", "message": verdict.message},
        },
    }
    assert "spec.minReplicas: want 1 to replicas (2), got 3" in verdict.message


def test_what_cannot_change_after_admission_is_refused_by_the_status_that_is_stored() -> None:
    """The user's own status in the new object counts for nothing."""
    before = a_job() | {"status": {"accepted": accepted_facts(Spec.model_validate_json(json.dumps(a_job()["spec"])))}}
    after = a_job(ranksPerPod=4)
    for status in ({}, {"accepted": {"ranksPerPod": 4}}):
        refused = answer(a_review(after | {"status": status}, before), ()).refused
        assert refused == InvalidSpec(("spec.ranksPerPod: cannot change after the job was admitted (from 2 to 4)",))
    assert answer(a_review(a_job(replicas=3), before), ()).refused is None


def test_a_job_with_an_old_fault_can_be_changed_elsewhere_and_the_user_is_told() -> None:
    before = a_job(minReplicas=3)
    after = a_job(minReplicas=3, suspend=True)
    told = ("spec.minReplicas: want 1 to replicas (2), got 3",)
    assert answer(a_review(after, before), ()) == ReviewAnswer("r1", "ml/digits", warnings=told)
    worse = answer(a_review(a_job(minReplicas=3, **NO_COMMAND), before), ()).refused
    assert worse is not None
    assert [text.partition(":")[0] for text in worse.violations] == ["spec.template.spec.containers[0].command"]


@pytest.mark.parametrize(
    ("fields", "namespaces"),
    [
        pytest.param({"operation": "DELETE", "object": None}, (), id="deletion"),
        pytest.param({"namespace": "other"}, ("ml",), id="a namespace of another operator"),
    ],
)
def test_what_is_not_for_this_operator_to_judge_passes(fields: JsonObject, namespaces: tuple[str, ...]) -> None:
    job = a_job(minReplicas=3)
    del job["metadata"]["namespace"]
    assert answer(a_review(job, **fields), namespaces).refused is None


HOSTILE = {
    "unknown fields": {f"x{index}": 1 for index in range(20_000)},
    "layers": {"topology": {"layers": [{}] * 20_000}},
    "containers": {"template": {"spec": {"containers": [{}] * 20_000}}},
    "exit codes": {"restart": {"fatalExitCodes": ["x"] * 20_000}},
    "resources": {"sidecar": {"resources": {"limits": {str(index): [] for index in range(20_000)}}}},
}


@pytest.mark.parametrize("wrong", HOSTILE.values(), ids=HOSTILE)
def test_a_spec_with_countless_faults_gets_one(wrong: JsonObject) -> None:
    """Each fault costs time and memory; those of both objects of a change were compared with each other one by one."""
    job = a_job(**wrong)
    told = ("spec: must have at most 10000 values, got more",)
    assert answer(a_review(job), ()).refused == InvalidSpec(told)
    assert answer(a_review(job, before=job), ()).warnings == told


@pytest.mark.parametrize("at", ["args", "key"])
def test_a_template_that_is_too_long_is_refused_with_its_length(at: str) -> None:
    """Each pod is a copy of it: 220 pods of 840 kB took the operator 640 MB."""
    refused: list[InvalidSpec | None] = []
    for num in (200_000, 300_000):
        part: JsonObject = {"args": ["x" * (num // 2)] * 2} if at == "args" else {"k" * num: 1}
        job = a_job(template={"spec": {"containers": [{**CONTAINER, **part}]}})
        refused.append(answer(a_review(job), ()).refused)
        assert refused[-1] == (found if isinstance(found := admit(job), InvalidSpec) else None)
    (told,) = refused[1].violations if refused[1] else ()
    assert refused[0] is None
    assert re.fullmatch(
        r"spec\.template: must have at most 262144 characters in keys and values together, got 3000\d\d", told
    )


def test_a_spec_of_endless_depth_is_refused() -> None:
    deep: Any = []
    for _ in range(500):
        deep = [deep]
    refused = answer(a_review(a_job(template={"spec": {"containers": [{**CONTAINER, "args": deep}]}})), ()).refused
    assert refused == InvalidSpec(("spec: must have at most 64 levels of values in each other, got more",))


def test_what_is_told_of_many_or_long_faults_is_bounded() -> None:
    many = a_job(**{f"{index:0>300}": "x" for index in range(500)})
    refused = answer(a_review(many), ()).refused
    assert refused is not None
    assert len(refused.violations) == 500
    assert len(refused.message) <= 2048, "a condition has no room for more"
    assert refused.message.endswith("more")
    warnings = answer(a_review(many, before=many), ()).warnings
    assert (len(warnings), warnings[-1]) == (9, "and 492 more")
    for wrong in (
        {"x" * 100_000: 1},
        {"replicas": "x" * 100_000},
        {"template": {"spec": {"containers": [CONTAINER, *([{**CONTAINER, "name": "x" * 50_000}] * 2)]}}},
    ):
        refused = answer(a_review(a_job(**wrong)), ()).refused
        assert refused is not None
        assert len(refused.message) <= 400


def test_names_in_a_review_are_bounded() -> None:
    job = a_job()
    job["metadata"]["name"] = "x" * 100_000
    made = answer(a_review(job), ())
    assert len(made.job) < 300
    assert made.refused is not None
    assert len(made.refused.message) <= 900
    with pytest.raises(InputError, match=r"request\.uid: must be a string of at most 253 characters"):
        answer(a_review(a_job(), uid="x" * 1000), ())


def test_a_job_that_is_being_deleted_may_lose_its_finalizers_whatever_its_spec() -> None:
    job = a_job(minReplicas=3)
    job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert answer(a_review(job, a_job()), ()).refused is None


def test_a_job_that_gets_its_name_from_the_server_is_checked_by_its_beginning() -> None:
    job = a_job()
    job["metadata"] = {"generateName": "digits-"}
    assert answer(a_review(job, name=""), ()) == ReviewAnswer("r1", "ml/digits-xxxxx")
    job["metadata"] = {"generateName": "9-"}
    refused = answer(a_review(job), ()).refused
    assert refused is not None
    assert refused.message.startswith("metadata.name: must be lowercase letters")


@pytest.mark.parametrize(
    ("review", "message"),
    [
        (None, "body: expected an AdmissionReview of admission.k8s.io/v1, got None of None"),
        ([1], "body: expected an AdmissionReview"),
        (a_review(a_job()) | {"apiVersion": "admission.k8s.io/v1beta1"}, "got AdmissionReview of admission.k8s.io/v1b"),
        (a_review(a_job()) | {"request": None}, "AdmissionReview.request.uid: must be a string of at most 253"),
        (a_review(a_job(), resource={"resource": "pods"}), "resource: expected resilienttrainingjobs, got pods"),
        (a_review("text"), "AdmissionReview.request.object: expected a ResilientTrainingJob, got str"),
        (a_review(a_job(), before=["x"]), "AdmissionReview.request.object: expected"),
    ],
)
def test_what_is_no_review_is_said_to_be_none(review: Any, message: str) -> None:
    with pytest.raises(InputError, match=message.replace(".", r"\.")):
        answer(review, ())


@pytest.mark.parametrize("part", ["metadata", "spec", "status"])
@pytest.mark.parametrize("value", [None, 1, "x", [], [1], {}, {"accepted": 1}, {"template": []}])
def test_no_object_however_malformed_breaks_the_review(part: str, value: Any) -> None:
    job = copy.deepcopy(a_job()) | {part: value}
    answer(a_review(job, a_job()), ())
    answer(a_review(a_job(), job), ())
    answer(a_review(job, job), ())


def _post(body: bytes) -> tuple[int, str, list[str]]:
    outcomes: list[str] = []

    async def scenario() -> tuple[int, str]:
        (route,) = webhook.make_application((), outcomes.append).router.routes()
        request = make_mocked_request("POST", webhook.PATH)
        request._read_bytes = body
        response: Any = await route.handler(request)
        return response.status, response.text

    return *asyncio.run(scenario()), outcomes


def test_reviews_are_answered_and_counted() -> None:
    for job, outcome in ((a_job(), "allowed"), (a_job(minReplicas=3), "refused")):
        status, text, outcomes = _post(json.dumps(a_review(job)).encode())
        assert (status, json.loads(text)["response"]["allowed"]) == (200, outcome == "allowed")
        assert outcomes == [outcome]


@pytest.mark.parametrize("body", [b"", b"{", b"\xff", b"[" * 100_000, b"{}"])
def test_an_unreadable_review_is_answered_as_a_failed_call(body: bytes) -> None:
    status, text, outcomes = _post(body)
    assert (status, outcomes) == (400, ["unreadable"])
    assert text.endswith("\n")


def write(made: Certificates, folder: Path, *keys: str) -> None:
    """Put a certificate, or these of its files, where the kubelet would, in new files: times may be coarse."""
    texts = {"tls.crt": made.certificate, "tls.key": made.key}
    for key in keys or texts:
        fresh = folder / f"{key}.new"
        fresh.write_text(texts[key])
        fresh.replace(folder / key)


def test_a_certificate_may_come_late_and_be_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (make_certificates(["localhost"]) for _ in range(2))
    certificate = webhook.ServingCertificate(tmp_path)
    assert [certificate.look(), certificate.look()] == [False, False]
    assert not shakes_hands(certificate.context, first.authority)
    (told,) = caplog.messages
    assert told.startswith(f"webhook waits for a certificate file={tmp_path / 'tls.crt'} error=FileNotFoundError")
    write(first, tmp_path)
    assert certificate.look()
    assert shakes_hands(certificate.context, first.authority)
    write(second, tmp_path, "tls.crt")
    assert certificate.look()
    assert shakes_hands(certificate.context, first.authority), "half of the new one has arrived: the old one is shown"
    write(second, tmp_path)
    assert certificate.look()
    assert shakes_hands(certificate.context, second.authority)
    assert not shakes_hands(certificate.context, first.authority)
