"""`spec.memory`: a volume of the operator's own, paid for by the agent; nothing at all in a job without it."""

import json
from typing import Any

import celpy
import pytest
from celpy.adapter import json_to_cel
from tests.unit.unbroken_operator.decisions.reporting.test_operator_unschedulable import wants
from tests.unit.unbroken_operator.decisions.test_operator_review import a_review
from tests.unit.unbroken_operator.operator_world import CONTAINER, World, a_job

from unbroken_core.protocol.settings import COPIES_RULES
from unbroken_core.vocabulary.reasons import Role
from unbroken_operator.api import layout, memory_rules
from unbroken_operator.api.quantities import is_size, size_bytes, with_bytes
from unbroken_operator.decisions.admission import InvalidSpec, ValidSpec, admit
from unbroken_operator.decisions.objects.network_policy import network_policy
from unbroken_operator.decisions.objects.training_pods import template_digest, training_pod
from unbroken_operator.decisions.reporting.unschedulable import missing_on_nodes
from unbroken_operator.decisions.review import answer
from unbroken_operator.decisions.snapshot import NodeView, OperatorOptions, PolicyOptions

JsonObject = dict[str, Any]
MEMORY: JsonObject = {"sizeLimit": "4Gi"}
DISK: JsonObject = {"directory": "/data/run", "every": 1000}
CLAIM: JsonObject = {"persistentVolumeClaim": {"claimName": "c"}}
STATE = {"name": "unbroken-state", "mountPath": "/var/lib/unbroken-state"}


def pod_of(*, is_native: bool = True, defaults: JsonObject | None = None, **spec: Any) -> JsonObject:
    """Return the spec of a training pod."""
    verdict = admit(a_job(**spec))
    assert isinstance(verdict, ValidSpec), verdict
    options = OperatorOptions("sidecar:1", has_native_sidecars=is_native, sidecar_resources=defaults or {})
    pod: JsonObject = training_pod(verdict.spec, verdict.settings, 7, Role.ACTIVE, options)["spec"]
    return pod


def containers(pod: JsonObject) -> dict[str, JsonObject]:
    """Return all containers by name."""
    return {one["name"]: one for one in (*pod["initContainers"], *pod["containers"])}


def template(pod: JsonObject | None = None, **container: Any) -> JsonObject:
    """Return a pod template with more in it."""
    return {"spec": {"containers": [{**CONTAINER, **container}], **(pod or {})}}


def test_agent_and_trainer_alone_mount_a_volume_in_memory_with_a_limit() -> None:
    helper = {"name": "helper", "image": "h"}
    pod = pod_of(memory=MEMORY, template={"spec": {"containers": [CONTAINER, helper]}})
    (volume,) = (one for one in pod["volumes"] if one["name"] == "unbroken-state")
    assert volume == {"name": "unbroken-state", "emptyDir": {"medium": "Memory", "sizeLimit": "4Gi"}}
    mounting = {name for name, one in containers(pod).items() if STATE in (one.get("volumeMounts") or ())}
    assert mounting == {"trainer", "unbroken-agent"}


def test_agent_and_workers_know_the_limit_in_bytes_and_workers_the_steps() -> None:
    def memory_of(name: str) -> dict[str, str]:
        variables = containers(pod)[name]["env"]
        return {one["name"]: one["value"] for one in variables if one["name"].startswith("UNBROKEN_MEMORY")}

    pod = pod_of(memory={"sizeLimit": "4Gi", "every": 20})
    limit = {"UNBROKEN_MEMORY_LIMIT": str(4 << 30)}
    place = {"UNBROKEN_MEMORY_DIR": "/var/lib/unbroken-state", "UNBROKEN_MEMORY_PORT": "29603"}
    assert memory_of("unbroken-agent") == {**place, **limit}
    assert memory_of("trainer") == {**limit, "UNBROKEN_MEMORY_EVERY": "20"}
    pod = pod_of(memory=MEMORY)
    assert memory_of("trainer") == limit
    pod = pod_of(memory={**MEMORY, "disk": {"directory": "/data/$(X)"}}, template=mounted("/data", CLAIM))
    disk = {"UNBROKEN_MEMORY_DISK": "/data/$$(X)", "UNBROKEN_MEMORY_DISK_KEEP": "3"}
    assert memory_of("trainer") == {**limit, **disk}
    assert memory_of("unbroken-agent") == {**place, **limit}
    pod = pod_of(memory={**MEMORY, "disk": {**DISK, "keep": 5}}, template=mounted("/data", CLAIM))
    disk = {"UNBROKEN_MEMORY_DISK": "/data/run", "UNBROKEN_MEMORY_DISK_KEEP": "5", "UNBROKEN_MEMORY_DISK_EVERY": "1000"}
    assert memory_of("trainer") == {**limit, **disk}


def test_keepers_of_a_job_may_reach_each_other() -> None:
    """Their port is the agent's, who pays for them; no policy of ours selects training pods, so none shuts it."""
    (copies,) = (
        port for port in containers(pod_of(memory=MEMORY))["unbroken-agent"]["ports"] if port["name"] != "unbroken"
    )
    assert copies == {"name": "unbroken-copies", "containerPort": 29603, "protocol": "TCP"}
    assert [port["name"] for port in containers(pod_of())["unbroken-agent"]["ports"]] == ["unbroken"]
    verdict = admit(a_job(memory=MEMORY))
    assert isinstance(verdict, ValidSpec)
    policy = network_policy(verdict.settings, PolicyOptions("default", ()))
    assert policy["spec"]["podSelector"]["matchLabels"][layout.COMPONENT_LABEL] == layout.RENDEZVOUS


@pytest.mark.parametrize("is_native", [True, False])
@pytest.mark.parametrize(
    ("defaults", "own", "expected"),
    [
        pytest.param({}, None, {"requests": {"memory": "4096Mi"}}, id="nothing asked for: the pages alone"),
        pytest.param(
            {"requests": {"cpu": "50m", "memory": "64Mi"}}, None,
            {"requests": {"cpu": "50m", "memory": "4160Mi"}}, id="request"),
        pytest.param(
            {"requests": {"cpu": "50m"}}, None, {"requests": {"cpu": "50m", "memory": "4096Mi"}}, id="cpu only"),
        pytest.param(
            {}, {"limits": {"memory": "256Mi"}}, {"limits": {"memory": "4352Mi"}},
            id="limit, which is the request as well"),
        pytest.param(
            {}, {"limits": {"memory": "1G"}, "requests": {"memory": 1000}},
            {"limits": {"memory": "5294967296"}, "requests": {"memory": "4294968296"}}, id="both, no whole MiB"),
    ],
)  # fmt: skip
def test_the_agents_request_and_limit_grow_by_the_size(
    is_native: bool, defaults: JsonObject, own: JsonObject | None, expected: JsonObject
) -> None:
    sidecar = {} if own is None else {"resources": own}
    with_memory = pod_of(is_native=is_native, defaults=defaults, sidecar=sidecar, memory=MEMORY)
    without = pod_of(is_native=is_native, defaults=defaults, sidecar=sidecar)
    assert containers(with_memory)["unbroken-agent"]["resources"] == expected
    for name in ("trainer", "unbroken-install"):
        assert containers(with_memory)[name].get("resources") == containers(without)[name].get("resources")


def test_a_guaranteed_pod_stays_guaranteed() -> None:
    limits = {"cpu": "8", "memory": "64Gi"}
    pod = pod_of(memory=MEMORY, template=template(resources={"limits": limits}))
    resources = {name: one["resources"] for name, one in containers(pod).items()}
    assert resources["unbroken-agent"]["limits"] == {"cpu": "250m", "memory": "4352Mi"}
    assert all(found.get("requests", found["limits"]) == found["limits"] for found in resources.values())


@pytest.mark.parametrize(
    ("spec", "digest"),
    [
        ({}, "ca9e92c96fba19ce"),
        (
            {
                "template": template(
                    {"volumes": [{"name": "unbroken-state", "emptyDir": {}}]},
                    volumeMounts=[STATE],
                    resources={"limits": {"cpu": "8", "memory": "64Gi"}},
                )
            },
            "e5ae8da81c2ac82f",
        ),
    ],
)
def test_a_job_without_it_has_the_pods_of_the_release_before(spec: JsonObject, digest: str) -> None:
    """The digests are those that release 0.1.0 gave: pods with another one count as old, and may be replaced."""
    verdict = admit(a_job(**spec))
    assert isinstance(verdict, ValidSpec)
    assert template_digest(verdict.spec) == digest
    pod = pod_of(**spec)
    assert "UNBROKEN_MEMORY" not in json.dumps(pod)
    assert len([one for one in pod["volumes"] if one["name"] == "unbroken-state"]) == ("template" in spec)


COPIES_RULE = next(rule for rule in COPIES_RULES if rule.cel)


@pytest.mark.parametrize(
    ("across", "topology", "is_sound"),
    [
        pytest.param("", None, True, id="the outermost"),
        pytest.param("host", None, True, id="host"),
        pytest.param("rack", None, False, id="no layers"),
        pytest.param("rack", {"layers": [{"name": "rack", "label": "example.com/rack"}]}, True, id="a layer"),
        pytest.param("zone", {"layers": [{"name": "rack", "label": "example.com/rack"}]}, False, id="another layer"),
        pytest.param("zone", {"preset": "Kubernetes"}, True, id="a layer of a preset"),
    ],
)
def test_copies_are_asked_for_across_a_layer_that_there_is(
    across: str, topology: JsonObject | None, is_sound: bool
) -> None:
    memory = {**MEMORY, "replicas": 2, "across": across}
    job = a_job(memory=memory) if topology is None else a_job(memory=memory, topology=topology)
    verdict = admit(job)
    environment = celpy.Environment()
    program = environment.program(environment.compile(COPIES_RULE.cel))
    assert bool(program.evaluate({"self": json_to_cel(job["spec"])})) is is_sound
    if is_sound:
        assert isinstance(verdict, ValidSpec), verdict
        assert (verdict.settings.copies, verdict.settings.across) == (2, across)
    else:
        assert isinstance(verdict, InvalidSpec)
        assert verdict.violations[0].startswith("spec.memory.across: want 'host' or the name of a layer of")


def test_more_copies_are_no_change_of_the_pods() -> None:
    verdicts = [admit(a_job(memory={**MEMORY, **more})) for more in ({}, {"replicas": 2, "across": "host"})]
    first, second = [template_digest(one.spec) for one in verdicts if isinstance(one, ValidSpec)]
    assert first == second


def test_pods_are_old_once_memory_is_asked_for_or_changed() -> None:
    def digest(**spec: Any) -> str:
        verdict = admit(a_job(**spec))
        assert isinstance(verdict, ValidSpec)
        return template_digest(verdict.spec)

    found = {
        digest(),
        digest(memory=MEMORY),
        digest(memory={"sizeLimit": "5Gi"}),
        digest(memory={**MEMORY, "every": 2}),
    }
    assert len(found) == 4
    disks = ({"directory": "/data/a"}, DISK, {**DISK, "every": 2000}, {**DISK, "keep": 4})
    of_disks = {digest(memory={**MEMORY, "disk": one}, template=mounted("/data", CLAIM)) for one in disks}
    assert len(of_disks) == 4
    usual = {"directory": "/data/a", "keep": 3}
    assert digest(memory={**MEMORY, "disk": usual}, template=mounted("/data", CLAIM)) in of_disks


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [
        (1_000_000, 1_000_000),
        ("1000000", 1_000_000),
        ("1M", 1_000_000),
        ("1000k", 1_000_000),
        ("1024Ki", 1 << 20),
        ("1Mi", 1 << 20),
        ("512Mi", 512 << 20),
        ("4G", 4_000_000_000),
        ("999Ti", 999 << 40),
        ("999999Gi", 999_999 << 30),
        (999_999_999_999_999, 999_999_999_999_999),
    ],
)
def test_a_size_means_what_kubernetes_means(value: str | int, num_bytes: int) -> None:
    assert is_size(value)
    assert size_bytes(value) == num_bytes
    assert refused_by_cel({"memory": {"sizeLimit": value}, **a_job()["spec"]}) == []
    assert isinstance(admit(a_job(memory={"sizeLimit": value})), ValidSpec)


@pytest.mark.parametrize(
    "value",
    [0, -1, 999_999, 10**15, "", "0", "04Gi", "4", "4gi", "4 Gi", "1.5Gi", "-4Gi", "4Gi\n", "1000Ti", "1Pi", "1e9",
     "500m", "٤Gi", "9" * 17, "99999999Gi"],
)  # fmt: skip
def test_a_size_out_of_bounds_is_refused_by_operator_webhook_and_schema(value: str | int) -> None:
    job = a_job(memory={"sizeLimit": value})
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    (violation,) = verdict.violations
    assert violation.startswith("spec.memory.sizeLimit: want 1M to 999Ti")
    assert answer(a_review(job), ()).refused == verdict
    assert len(refused_by_cel(job["spec"])) == 1


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param({}, id="no size"),
        pytest.param({"sizeLimit": None}, id="no size either"),
        pytest.param({"sizeLimit": True}, id="bool"),
        pytest.param({"sizeLimit": ["4Gi"]}, id="list"),
        pytest.param({"sizeLimit": 4.5}, id="float"),
        pytest.param({"sizeLimit": "4Gi", "every": 0}, id="every 0"),
        pytest.param({"sizeLimit": "4Gi", "every": "2"}, id="every in words"),
        pytest.param({"sizeLimit": "4Gi", "replicas": 4}, id="too many copies"),
        pytest.param({"sizeLimit": "4Gi", "disk": {}}, id="no folder"),
        pytest.param({"sizeLimit": "4Gi", "disk": {"directory": "data/run"}}, id="a relative folder"),
        pytest.param({"sizeLimit": "4Gi", "disk": {"directory": f"/data/{'x' * 4096}"}}, id="a long folder"),
        pytest.param({"sizeLimit": "4Gi", "disk": {**DISK, "every": 0}}, id="every 0 to the disk"),
        pytest.param({"sizeLimit": "4Gi", "disk": {**DISK, "keep": 0}}, id="none stays"),
        pytest.param({"sizeLimit": "4Gi", "disk": {**DISK, "keep": 1001}}, id="too many stay"),
        pytest.param({"sizeLimit": "4Gi", "disk": {**DISK, "path": "/data"}}, id="an unknown field"),
    ],
)
def test_what_is_no_memory_is_refused(memory: JsonObject) -> None:
    assert isinstance(admit(a_job(memory=memory, template=mounted("/data", CLAIM))), InvalidSpec)


OURS = "unbroken-state is the operator's in a job with spec.memory: rename yours"
PLACE = "/var/lib/unbroken-state is where the operator mounts the checkpoints of a job with spec.memory: mount yours"


def mounted(path: str, kind: JsonObject | None = None, **mount: Any) -> JsonObject:
    """Return a template whose trainer mounts a volume of its own there."""
    volume = {"name": "v", **({"emptyDir": {}} if kind is None else kind)}
    return template({"volumes": [volume]}, volumeMounts=[{"name": "v", "mountPath": path, **mount}])


def inner(template: JsonObject, path: str) -> JsonObject:
    """Return a template that mounts an emptyDir there as well."""
    (container,) = template["spec"]["containers"]
    mounts = [*container["volumeMounts"], {"name": "w", "mountPath": path}]
    volumes = [*template["spec"]["volumes"], {"name": "w", "emptyDir": {}}]
    return {"spec": {"containers": [{**container, "volumeMounts": mounts}], "volumes": volumes}}


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(mounted("/data", CLAIM), id="below"),
        pytest.param(mounted("/data/run", CLAIM), id="the mount itself"),
        pytest.param(mounted("/data/", CLAIM), id="with a slash"),
        pytest.param(mounted("/", CLAIM), id="everything"),
        pytest.param(inner(mounted("/data", CLAIM), "/data/cache"), id="beside another one"),
    ],
)
def test_checkpoints_go_to_a_volume_of_the_template(template: JsonObject) -> None:
    job = a_job(memory={**MEMORY, "disk": DISK}, template=template)
    assert isinstance(admit(job), ValidSpec)
    assert refused_by_cel(job["spec"]) == []


WANTED = "spec.memory.disk.directory: want a folder on a volume that the template's first container mounts"


@pytest.mark.parametrize(
    ("directory", "template", "message", "is_seen_by_schema"),
    [
        pytest.param("/data/run", template(), ", got '/data/run'", True, id="no volume"),
        pytest.param("/database", mounted("/data", CLAIM), ", got '/database'", True, id="another folder"),
        pytest.param("/" + "x" * 100, template(), f", got '/{'x' * 76}...'", True, id="a long name"),
        pytest.param("/data/../run", mounted("/data", CLAIM), ", got '/data/../run'", False, id="away again"),
        pytest.param("/var/lib/unbroken-state/x", mounted("/var/lib", CLAIM), ", got '/var/lib/unbroken-state/x'",
            False, id="in the memory"),
        pytest.param("/data/run", mounted("/data", CLAIM, readOnly=True),
            ", got '/data/run', where v is mounted readOnly", False, id="read only"),
        pytest.param("/data/run", mounted("/data"),
            " and that outlives the pod, got '/data/run', where v is an emptyDir", False, id="a folder of the pod"),
        pytest.param("/data/run", inner(mounted("/data", CLAIM), "/data/run"),
            " and that outlives the pod, got '/data/run', where w is an emptyDir", False, id="the inner mount"),
    ],
)  # fmt: skip
def test_checkpoints_that_would_end_with_the_pod_are_refused(
    directory: str, template: JsonObject, message: str, is_seen_by_schema: bool
) -> None:
    job = a_job(memory={**MEMORY, "disk": {"directory": directory}}, template=template)
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    assert verdict.violations == (WANTED + message,)
    assert answer(a_review(job), ()).refused == verdict
    assert len(refused_by_cel(job["spec"])) == is_seen_by_schema


@pytest.mark.parametrize(
    ("found", "message"),
    [
        pytest.param(
            template({"volumes": [{"name": "a", "emptyDir": {}}, {"name": "unbroken-state", "emptyDir": {}}]}),
            f"volumes[1].name: {OURS}", id="volume"),
        pytest.param(
            template(volumeMounts=[{"name": "unbroken-state", "mountPath": "/mine"}]),
            f"containers[0].volumeMounts[0].name: {OURS}", id="mount"),
        pytest.param(
            template({"initContainers": [{**CONTAINER, "name": "i", "volumeMounts": [STATE]}]}),
            f"initContainers[0].volumeMounts[0].name: {OURS}", id="mount of an init container"),
        pytest.param(
            mounted("/var/lib/unbroken-state"),
            f"containers[0].volumeMounts[0].mountPath: {PLACE} elsewhere, got '/var/lib/unbroken-state'", id="place"),
        pytest.param(
            mounted("/var/lib/unbroken-state/x"),
            f"containers[0].volumeMounts[0].mountPath: {PLACE} elsewhere, got '/var/lib/unbroken-state/x'", id="below"),
    ],
)  # fmt: skip
def test_a_template_that_has_its_name_or_place_is_refused_by_operator_webhook_and_schema(
    found: JsonObject, message: str
) -> None:
    job = a_job(template=found, memory=MEMORY)
    verdict = admit(job)
    assert isinstance(verdict, InvalidSpec)
    assert verdict.violations == (f"spec.template.spec.{message}",)
    assert answer(a_review(job), ()).refused == verdict
    assert len(refused_by_cel(job["spec"])) == 1
    assert isinstance(admit(a_job(template=found)), ValidSpec), "without spec.memory it stays the user's"


@pytest.mark.parametrize(
    "path", ["//var/lib/unbroken-state/", "/var/lib/./unbroken-state", "/var/lib/x/../unbroken-state"]
)
def test_its_place_in_other_words_is_refused_by_operator_and_webhook(path: str) -> None:
    assert isinstance(admit(a_job(template=mounted(path), memory=MEMORY)), InvalidSpec)


@pytest.mark.parametrize("path", ["/var/lib", "/var/lib/unbroken-state-2", "/var/lib/unbroken-state2", "relative"])
def test_what_only_looks_alike_is_the_users(path: str) -> None:
    spec = a_job(template=mounted(path), memory=MEMORY)["spec"]
    assert isinstance(admit(a_job(template=mounted(path), memory=MEMORY)), ValidSpec)
    assert refused_by_cel(spec) == []


def refused_by_cel(spec: JsonObject) -> list[str]:
    """Return the messages of the CEL rules that a spec breaks."""
    environment = celpy.Environment()
    rows = [(memory_rules.cel_of(row), row.message, spec) for row in memory_rules.MEMORY_RULES]
    if "memory" in spec:
        rows.append((memory_rules.SIZE_CEL, memory_rules.SIZE_MESSAGE, spec["memory"]))
    return [
        message
        for cel, message, part in rows
        if not environment.program(environment.compile(cel)).evaluate({"self": json_to_cel(part)})
    ]


def test_a_refused_template_makes_no_pods() -> None:
    world = World(a_job(memory=MEMORY, template=mounted("/var/lib/unbroken-state")))
    world.settle()
    assert (world.created, world.condition("Admitted")) == ([], ("False", "InvalidSpec"))


def test_a_node_that_is_too_small_for_the_checkpoints_is_named() -> None:
    nodes = {"a": NodeView("a", {}, True, allocatable={"memory": "4Gi", "cpu": "8"})}
    small = wants(resources={"requests": {"memory": "1Gi"}})
    assert missing_on_nodes(small, nodes) == ""
    expected = f"each pod needs {5 << 30} memory, the largest node has 4Gi"
    assert missing_on_nodes(small, nodes, "4Gi") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("256Mi", "257Mi"), ("0.5Gi", "513Mi"), (0, "1Mi"), ("100m", str((1 << 20) + 1)), ("nonsense", "nonsense")],
)
def test_quantities_are_added(text: object, expected: object) -> None:
    assert with_bytes(text, 1 << 20) == expected
