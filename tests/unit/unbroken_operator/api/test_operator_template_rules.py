"""A template does not let a trainer reach what is its agent's; what the node would have to allow is warned of."""

from typing import Any, get_args

import celpy
import pytest
from celpy.adapter import json_to_cel
from tests.unit.unbroken_operator.decisions.test_operator_review import a_review
from tests.unit.unbroken_operator.operator_world import CONTAINER, World, a_job, running_world

from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.api import layout, template_rules
from unbroken_operator.api.pod_models import Volume
from unbroken_operator.decisions import plan
from unbroken_operator.decisions.admission import MAX_WARNINGS, InvalidSpec, ValidSpec, admit
from unbroken_operator.decisions.objects.manifests import rendezvous_pod
from unbroken_operator.decisions.objects.rendezvous_place import made_from
from unbroken_operator.decisions.objects.training_pods import template_digest, training_pod
from unbroken_operator.decisions.review import answer
from unbroken_operator.decisions.snapshot import OperatorOptions

JsonObject = dict[str, Any]
SECRET = "digits-rendezvous"
IN_PROC = "must be false or left out: in /proc the trainer could read"
HELD = "Secrets whose names end with -rendezvous hold the tokens of jobs, got 'digits-rendezvous'"


def pod(*, container: JsonObject | None = None, **fields: Any) -> JsonObject:
    """Return a pod's spec with these fields, and those of its container."""
    return {"containers": [{**CONTAINER, **(container or {})}], **fields}


def from_secret(name: str) -> JsonObject:
    """Return a variable from a Secret."""
    return {"name": "T", "valueFrom": {"secretKeyRef": {"name": name, "key": "token"}}}


def referring(*path: str) -> tuple[JsonObject, str]:
    """Return a pod with a volume that names the Secret at this path, and what is said of it."""
    volume: JsonObject = {"name": "v"}
    place = volume
    for key in path[:-1]:
        place = place.setdefault(key, {})
    place[path[-1]] = SECRET
    return pod(volumes=[volume]), f"volumes[0].{'.'.join(path)}: {HELD}"


HAZARDS: dict[str, tuple[JsonObject, str]] = {
    **{
        f"Secret for {kind}": referring(kind, "secretRef", "name")
        for kind in ("cephfs", "cinder", "flexVolume", "iscsi", "rbd", "scaleIO", "storageos")
    },
    "Secret for csi": referring("csi", "nodePublishSecretRef", "name"),
    "Secret for azureFile": referring("azureFile", "secretName"),
    "pull secret": (
        pod(imagePullSecrets=[{"name": "mine"}, {"name": SECRET}]), f"imagePullSecrets[1].name: {HELD}"),
    "process namespace of the pod": (
        pod(shareProcessNamespace=True), f"shareProcessNamespace: {IN_PROC} its agent's token"),
    "process namespace of the node": (
        pod(hostPID=True), f"hostPID: {IN_PROC} the tokens of all agents on its node"),
    "Secret as a volume": (
        pod(volumes=[{"name": "a", "emptyDir": {}}, {"name": "v", "secret": {"secretName": SECRET}}]),
        f"volumes[1].secret.secretName: {HELD}"),
    "projected Secret": (
        pod(volumes=[{"name": "v", "projected": {"sources": [{"secret": {"name": SECRET}}]}}]),
        f"volumes[0].projected.sources[0].secret.name: {HELD}"),
    "variable from the Secret": (
        pod(container={"env": [from_secret(SECRET)]}), f"containers[0].env[0].valueFrom.secretKeyRef.name: {HELD}"),
    "variables from the Secret": (
        pod(container={"envFrom": [{"secretRef": {"name": SECRET}}]}),
        f"containers[0].envFrom[0].secretRef.name: {HELD}"),
    "mount of the token": (
        pod(container={"volumeMounts": [{"name": "unbroken-token", "mountPath": "/t"}]}),
        "containers[0].volumeMounts[0].name: is the operator's, who mounts it where it belongs: 'unbroken-token'"),
    "mount in an init container": (
        pod(initContainers=[{**CONTAINER, "name": "i", "volumeMounts": [{"name": "unbroken-run", "mountPath": "/t"}]}]),
        "initContainers[0].volumeMounts[0].name: is the operator's, who mounts it where it belongs: 'unbroken-run'"),
    "volume of our name": (
        pod(volumes=[{"name": "unbroken-lib", "emptyDir": {}}]),
        "volumes[0].name: is reserved for the operator: 'unbroken-lib'"),
    "init container of our name": (
        pod(initContainers=[{**CONTAINER, "name": "unbroken-install"}]),
        "initContainers[0].name: is reserved for the operator: 'unbroken-install'"),
}  # fmt: skip
"""A pod's spec, and what is said of it."""

HARMLESS = pod(
    container={
        "env": [from_secret("rendezvous-of-mine"), {"name": "X", "value": "digits-rendezvous"}, {"name": "EMPTY"}],
        "envFrom": [{"secretRef": {"name": "mine"}}, {"configMapRef": {"name": SECRET}}],
        "volumeMounts": [{"name": "data", "mountPath": "/etc/unbroken"}],
    },
    shareProcessNamespace=False,
    hostPID=False,
    hostIPC=True,
    hostNetwork=True,
    securityContext={"runAsUser": 0, "fsGroup": 0},
    imagePullSecrets=[{"name": "rendezvous-registry"}],
    volumes=[
        {"name": "c", "csi": {"driver": SECRET, "nodePublishSecretRef": {"name": "mine"}}},
        {"name": "d", "csi": {"driver": "example.com", "volumeAttributes": {"secretRef": SECRET}}},
        {"name": "r", "rbd": {"monitors": ["m"], "image": SECRET, "secretRef": {"name": "mine"}}},
        {"name": "z", "azureFile": {"secretName": "mine", "shareName": SECRET}},
        {"name": "data", "hostPath": {"path": "/var/data"}},
        {"name": "s", "secret": {"secretName": "digits-rendezvous-copy", "optional": True}},
        {"name": "p", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}, {"secret": {"name": "mine"}}]}},
    ],
)

DIGESTS = ("5fcd00b03056e5e2", "48ff06dd85ce3c79")
"""Those that a release computed which did not know the fields."""


def refused_by_cel(spec: JsonObject) -> list[str]:
    """Return the messages of the CEL rules that a pod's spec breaks."""
    environment = celpy.Environment()
    parts: list[tuple[JsonObject, tuple[template_rules.TemplateRule, ...]]] = [(spec, template_rules.POD_RULES)]
    for kind in ("containers", "initContainers"):
        parts += [(container, template_rules.CONTAINER_RULES) for container in spec.get(kind, ())]
    return [
        rule.message
        for part, found in parts
        for rule in found
        if not environment.program(environment.compile(rule.cel)).evaluate({"self": json_to_cel(part)})
    ]


@pytest.mark.parametrize("name", HAZARDS)
def test_what_breaks_the_wall_is_refused_with_its_place_by_operator_webhook_and_schema(name: str) -> None:
    spec, message = HAZARDS[name]
    job = a_job(template={"spec": spec})
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    assert verdict.violations == (f"spec.template.spec.{message}",)
    assert answer(a_review(job), ()).refused == verdict
    assert len(refused_by_cel(spec)) == 1


def test_every_field_of_a_pod_that_names_a_secret_is_in_the_table() -> None:
    """What Kubernetes' own API has: a field that it adds is to be added here as well."""
    paths = {".".join(path) for path in template_rules._VOLUME_SECRETS}
    assert paths == {
        "azureFile.secretName", "cephfs.secretRef.name", "cinder.secretRef.name", "csi.nodePublishSecretRef.name",
        "flexVolume.secretRef.name", "iscsi.secretRef.name", "rbd.secretRef.name", "scaleIO.secretRef.name",
        "secret.secretName", "storageos.secretRef.name",
    }  # fmt: skip
    # All of them are fields of the schema: the API server's rules see no others.
    for path in paths:
        model: Any = Volume
        for key in path.split("."):
            (field,) = [item for item in model.model_fields.values() if item.alias == key]
            model = next((part for part in get_args(field.annotation) if part is not type(None)), None)


def test_the_rendezvous_pulls_no_image_with_a_jobs_secret() -> None:
    job = a_job(rendezvous={"imagePullSecrets": ["mine", SECRET]})
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    assert verdict.violations == (f"spec.rendezvous.imagePullSecrets[1]: {HELD}",)
    assert answer(a_review(job), ()).refused == verdict
    environment = celpy.Environment()
    program = environment.program(environment.compile(template_rules.PULL_SECRETS_CEL))
    for names, is_sound in (([SECRET], False), (["mine"], True), ([], True)):
        assert program.evaluate({"self": json_to_cel({"imagePullSecrets": names})}) == is_sound
    assert program.evaluate({"self": json_to_cel({})})


def test_a_template_that_pulls_with_its_own_secrets_makes_the_same_pods_as_before() -> None:
    """The fields are read now; what pods are made from, and the digests by which they are replaced, stay the same."""
    secrets = [{"name": "mine"}]
    verdict = admit(a_job(template={"spec": pod(imagePullSecrets=secrets, volumes=HARMLESS["volumes"])}))
    assert isinstance(verdict, ValidSpec)
    options = OperatorOptions("sidecar:1")
    made = training_pod(verdict.spec, verdict.settings, 0, Role.ACTIVE, options)["spec"]
    assert made["imagePullSecrets"] == secrets
    assert made["volumes"][: len(HARMLESS["volumes"])] == HARMLESS["volumes"]
    assert rendezvous_pod(verdict.spec, verdict.settings, 0, options)["spec"]["imagePullSecrets"] == secrets
    assert (template_digest(verdict.spec), made_from(verdict.spec)) == DIGESTS


def test_ephemeral_containers_are_refused_and_an_empty_list_of_them_is_none() -> None:
    """An API server makes no pod with any, whatever they mount."""
    mounting = {**CONTAINER, "name": "e", "volumeMounts": [{"name": "unbroken-token", "mountPath": "/t"}]}
    job = a_job(template={"spec": pod(ephemeralContainers=[mounting])})
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    assert verdict.violations == (f"spec.template.spec.{template_rules.EPHEMERAL}",)
    assert answer(a_review(job), ()).refused == verdict
    assert isinstance(admit(a_job(template={"spec": pod(ephemeralContainers=[])})), ValidSpec)


def test_a_refused_template_makes_no_pods() -> None:
    world = World(a_job(template={"spec": HAZARDS["mount of the token"][0]}))
    world.settle()
    assert (world.created, world.condition("Admitted")) == ([], ("False", "InvalidSpec"))


def test_what_only_looks_alike_is_the_users() -> None:
    verdict = admit(a_job(template={"spec": HARMLESS}))
    assert isinstance(verdict, ValidSpec)
    assert (verdict.warnings, refused_by_cel(HARMLESS)) == ((), [])


@pytest.mark.parametrize(
    ("spec", "warning"),
    [
        pytest.param(
            pod(container={"securityContext": {"privileged": True}}),
            "containers[0].securityContext.privileged: is root on the node, and can read the tokens of all jobs there",
            id="privileged",
        ),
        pytest.param(
            pod(container={"securityContext": {"capabilities": {"add": ["IPC_LOCK", "SYS_ADMIN"]}}}),
            "containers[0].securityContext.capabilities.add: SYS_ADMIN is as good as root on the node, which can read "
            "the tokens of all jobs there",
            id="capability",
        ),
        *(
            pytest.param(
                pod(volumes=[{"name": "v", "hostPath": {"path": path}}]),
                f"volumes[0].hostPath.path: shows the tokens of other jobs on the node, got {path!r}",
                id=path,
            )
            for path in ("/", "/var/lib", "/var/lib/kubelet/pods", "//proc/", "/data/../proc/1")
        ),
    ],
)
def test_what_makes_a_trainer_root_on_its_node_is_warned_of(spec: JsonObject, warning: str) -> None:
    job = a_job(template={"spec": spec})
    verdict = admit(job)
    assert isinstance(verdict, ValidSpec)
    assert verdict.warnings == (f"spec.template.spec.{warning}",)
    assert answer(a_review(job), ()).warnings == verdict.warnings
    world = World(job)
    world.settle()
    assert warning in next(item["message"] for item in world.job["status"]["conditions"] if item["type"] == "Admitted")


@pytest.mark.parametrize("path", ["/mnt/nvme", "/var/lib/kubelets", "/run/shm", "/procs", "/tmp/unbroken-digits"])
def test_other_folders_of_the_node_are_nobodys_business(path: str) -> None:
    verdict = admit(a_job(template={"spec": pod(volumes=[{"name": "v", "hostPath": {"path": path}}])}))
    assert isinstance(verdict, ValidSpec)
    assert verdict.warnings == ()


def test_warnings_are_few_and_short_whatever_the_template() -> None:
    volumes = [{"name": f"v{index}", "hostPath": {"path": f"/proc/{'x' * 1900}"}} for index in range(128)]
    verdict = admit(a_job(template={"spec": pod(volumes=volumes)}))
    assert isinstance(verdict, ValidSpec)
    assert verdict.warnings[-1] == f"and {128 - MAX_WARNINGS} more warnings"
    assert max(map(len, verdict.warnings)) < 256, "what kubectl shows of one"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param(pod(volumes=[{"name": "v", "hostPath": "no"}]), id="volume"),
        pytest.param(pod(container={"securityContext": 7}), id="security context"),
        pytest.param(pod(container={"securityContext": {"capabilities": ["x"]}}), id="capabilities"),
        pytest.param(pod(container={"securityContext": {"capabilities": {"add": "ALL"}}}), id="a word for a list"),
    ],
)
def test_nonsense_in_a_template_is_left_to_the_api_server(spec: JsonObject) -> None:
    verdict = admit(a_job(template={"spec": spec}))
    assert isinstance(verdict, ValidSpec)
    assert verdict.warnings == ()


LIMIT = {"cpu": "abc"}
MISSHAPEN = {
    "terminationGracePeriodSeconds: must be a whole number, got 'x'": pod(terminationGracePeriodSeconds="x"),
    "terminationGracePeriodSeconds: must be a whole number, got True": pod(terminationGracePeriodSeconds=True),
    "containers[0].resources: must be an object": pod(container={"resources": "x"}),
    "containers[0].resources.limits: must be an object, got 5": pod(container={"resources": {"limits": 5}}),
    "containers[0].resources.requests": pod(container={"resources": {"requests": ["x"]}}),
    "affinity: must be an object": pod(affinity="x"),
    "affinity.nodeAffinity: must be an object": pod(affinity={"nodeAffinity": ["x"]}),
    "affinity.podAntiAffinity.preferredDuringSchedulingIgnoredDuringExecution: must be a list": pod(
        affinity={"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": "x" * 1000}}
    ),
    "nodeSelectorTerms[1]: must be an object, got 'x'": pod(
        affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{}, "x"]}}}
    ),
}


GIB = {"requests": {"storage": "1Gib"}}
NO_QUANTITIES = {
    "spec.containers[0].resources.limits.cpu: must be a quantity": pod(container={"resources": {"limits": LIMIT}}),
    "spec.containers[0].resources.requests.cpu: must be": pod(container={"resources": {"requests": {"cpu": True}}}),
    "spec.initContainers[0].resources.limits.cpu": pod(
        initContainers=[{"name": "i", "image": "i:1", "resources": {"limits": LIMIT}}]
    ),
    "spec.volumes[0].emptyDir.sizeLimit": pod(volumes=[{"name": "v", "emptyDir": {"sizeLimit": "1 Gi"}}]),
    "spec.volumes[0].ephemeral.volumeClaimTemplate.spec.resources.requests.storage": pod(
        volumes=[{"name": "v", "ephemeral": {"volumeClaimTemplate": {"spec": {"resources": GIB}}}}]
    ),
}


@pytest.mark.parametrize("words", NO_QUANTITIES)
def test_what_is_no_quantity_is_refused_with_its_place_and_a_job_that_trains_goes_on(words: str) -> None:
    """Before, the CRD took it, the status advised to delete pods, and no pod could be made in their place."""
    world = running_world()
    world.job["spec"]["template"] = {"spec": NO_QUANTITIES[words]}
    world.job["metadata"]["generation"] = 2
    world.remove_pod("digits-2")
    world.settle()
    (admitted,) = (item for item in world.job["status"]["conditions"] if item["type"] == "Admitted")
    assert (admitted["status"], admitted["reason"]) == ("False", "InvalidSpec")
    assert words in admitted["message"]
    assert "the spec before it stays in force" in admitted["message"]
    assert world.created[-1] == "digits-3", "a pod of the spec before takes its place"


@pytest.mark.parametrize("part", ["sidecar", "rendezvous"])
def test_the_resources_of_our_own_containers_must_be_quantities_as_well(part: str) -> None:
    job = a_job()
    job["spec"][part] = {"resources": {"limits": LIMIT}}
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    assert verdict.violations == (
        f'spec.{part}.resources.limits.cpu: must be a quantity such as "500m", "8" or "2Gi", got \'abc\'',
    )


@pytest.mark.parametrize(
    "value",
    ["8", 8, 0.5, "500m", "1.5k", "2Gi", ".5", "1.", "1e3", "1E3", "1e-3", "1E", "+1", " 1 ", "-1", "9" * 200, 10**400],
    ids=lambda value: str(value)[:12],
)
def test_what_the_api_server_takes_for_a_quantity_is_left_to_it(value: object) -> None:
    assert isinstance(
        admit(a_job(template={"spec": pod(container={"resources": {"limits": {"x": value}}})})), ValidSpec
    )


@pytest.mark.parametrize(
    "value",
    ["", "abc", "1Xi", "1ki", "1Gib", "1e", "1 Gi", ".", "--1", "\u0661", "1\n", True, [], {}, "9" * 200_000 + "x"],
    ids=lambda value: str(value)[:12],
)
def test_what_is_no_quantity_is_told_in_few_words_and_soon_however_long_it_is(value: object) -> None:
    verdict = admit(a_job(template={"spec": pod(container={"resources": {"limits": {"x": value}}})}))
    assert isinstance(verdict, InvalidSpec)
    assert len(verdict.message) < 200


@pytest.mark.parametrize("words", MISSHAPEN)
def test_a_field_of_another_type_is_refused_with_its_place(words: str) -> None:
    """Before, planning failed on it for ever, and a status of long ago stayed."""
    verdict = admit(a_job(template={"spec": MISSHAPEN[words]}))
    assert isinstance(verdict, InvalidSpec)
    assert any(words in text for text in verdict.violations), verdict.violations
    assert max(map(len, verdict.violations)) < 400
    world = World(a_job(template={"spec": MISSHAPEN[words]}))
    world.settle()
    assert (world.created, world.condition("Admitted")) == ([], ("False", "InvalidSpec"))


def test_a_template_of_which_no_pod_can_be_made_is_told_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_given: Any, **_named: Any) -> None:
        raise KeyError("something that no check knows")

    monkeypatch.setattr(plan, "training_pod", fail)
    world = World(a_job())
    world.settle()
    assert (world.created, world.condition("Admitted")) == ([], ("False", "InvalidSpec"))


def test_every_name_of_the_operator_is_in_the_schemas_rules() -> None:
    text = "".join(rule.cel for rule in (*template_rules.POD_RULES, *template_rules.CONTAINER_RULES))
    assert all(text.count(f"'{name}'") == 3 for name in layout.RESERVED_NAMES)
