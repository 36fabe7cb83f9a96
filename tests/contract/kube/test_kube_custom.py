"""Custom resources: schemas, defaults, rules, columns, scale."""

import secrets
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.waiting import wait_until

from .kube_target import Document, Target, definition, needs

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


class Widgets:
    """A custom kind that is served, and the path of its objects."""

    def __init__(self, target: Target, namespace: str, crd: Document) -> None:
        self._target = target
        self.group = crd["spec"]["group"]
        self.name = crd["metadata"]["name"]
        self.path = f"/apis/{self.group}/v1/namespaces/{namespace}/widgets"
        target.post(CRDS, crd).ok(201)
        wait_until(self._is_established, "the custom kind is established")
        wait_until(lambda: target.get(self.path).code == 200, "the custom kind is served")
        # The server may take a moment more until it takes objects.
        probe = self.body("probe", {})
        wait_until(lambda: target.post(self.path, probe, dryRun="All").code not in (404, 405), "it takes objects")

    def _is_established(self) -> bool:
        conditions = self._target.get(f"{CRDS}/{self.name}").ok().get("status", {}).get("conditions") or []
        return any(entry["type"] == "Established" and entry["status"] == "True" for entry in conditions)

    def body(self, name: str, spec: Any, **other: Any) -> Document:
        return {"apiVersion": f"{self.group}/v1", "kind": "Widget", "metadata": {"name": name}, "spec": spec, **other}


Make = Callable[..., Widgets]


@pytest.fixture
def make(target: Target, namespace: str) -> Iterator[Make]:
    """Make a custom kind whose spec has these properties."""
    made: list[Widgets] = []

    def widgets(
        properties: Document, *, required: list[str] | None = None, rules: list[Document] | None = None, **version: Any
    ) -> Widgets:
        spec: Document = {"type": "object", "properties": properties}
        if required:
            spec["required"] = required
        if rules:
            spec["x-kubernetes-validations"] = rules
        schema = {
            "type": "object",
            "properties": {"spec": spec, "status": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
        }
        made.append(Widgets(target, namespace, definition(schema, **version)))
        return made[-1]

    yield widgets
    for entry in made:
        target.delete(f"{CRDS}/{entry.name}")


@pytest.mark.parametrize(
    ("schema", "value", "reason", "text"),
    [
        pytest.param({"type": "integer"}, "x", "", "must be of type integer", id="type"),
        pytest.param({"type": "string"}, 5, "", "must be of type string", id="number for string"),
        pytest.param({"type": "integer"}, 1.5, "", "must be of type integer", id="fraction"),
        pytest.param(
            {"type": "string", "enum": ["a", "b"]},
            "c",
            "FieldValueNotSupported",
            'supported values: "a", "b"',
            id="enum",
        ),
        pytest.param(
            {"type": "string", "pattern": "^a+$"}, "b", "FieldValueInvalid", "should match '^a+$'", id="pattern"
        ),
        pytest.param(
            {"type": "integer", "minimum": 1}, 0, "FieldValueInvalid", "greater than or equal to 1", id="minimum"
        ),
        pytest.param(
            {"type": "integer", "maximum": 1}, 2, "FieldValueInvalid", "less than or equal to 1", id="maximum"
        ),
        pytest.param({"type": "string", "minLength": 2}, "a", "FieldValueInvalid", "at least 2 chars long", id="short"),
        pytest.param({"type": "string", "maxLength": 2}, "abc", "", "", id="long"),
        pytest.param({"type": "array", "maxItems": 1, "items": {"type": "string"}}, ["a", "b"], "", "", id="items"),
        pytest.param(
            {"type": "array", "minItems": 1, "items": {"type": "string"}},
            [],
            "FieldValueInvalid",
            "should have at least 1 items",
            id="few items",
        ),
        pytest.param({"x-kubernetes-int-or-string": True}, True, "", "", id="int or string"),
        pytest.param({"type": "string", "format": "date-time"}, "noon", "", "must be of type date-time", id="time"),
        pytest.param(
            {"type": "array", "x-kubernetes-list-type": "set", "items": {"type": "string"}},
            ["a", "a"],
            "FieldValueDuplicate",
            'Duplicate value: "a"',
            id="set",
        ),
        pytest.param(
            {
                "type": "array",
                "x-kubernetes-list-type": "map",
                "x-kubernetes-list-map-keys": ["name"],
                "items": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
            },
            [{"name": "a"}, {"name": "a"}],
            "FieldValueDuplicate",
            '{"name":"a"}',
            id="map",
        ),
    ],
)
def test_value_against_the_schema_is_refused(
    target: Target, make: Make, schema: Document, value: object, reason: str, text: str
) -> None:
    widgets = make({"field": schema})
    refused = target.post(widgets.path, widgets.body("w", {"field": value}))
    assert refused.status == (422, "Invalid")
    cause = refused.body["details"]["causes"][0]
    assert cause["field"].startswith("spec.field")
    assert not reason or cause["reason"] == reason
    assert text in cause["message"]
    assert refused.body["details"]["kind"] == "Widget"
    assert refused.body["details"]["group"] == widgets.group
    assert refused.body["message"].startswith(f'Widget.{widgets.group} "w" is invalid: ')
    assert "spec.field" in refused.body["message"]


def test_required_field_is_missed(target: Target, make: Make) -> None:
    widgets = make({"field": {"type": "string"}}, required=["field"])
    refused = target.post(widgets.path, widgets.body("w", {}))
    assert refused.status == (422, "Invalid")
    cause = refused.body["details"]["causes"][0]
    assert (cause["reason"], cause["field"], cause["message"]) == ("FieldValueRequired", "spec.field", "Required value")


def test_defaults_are_filled_in(target: Target, make: Make) -> None:
    inner = {"type": "object", "default": {}, "properties": {"deep": {"type": "integer", "default": 7}}}
    widgets = make(
        {
            "size": {"type": "integer", "default": 3},
            "inner": inner,
            "list": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {"mode": {"type": "string", "default": "fast"}, "name": {"type": "string"}},
                },
            },
        }
    )
    made = target.post(widgets.path, widgets.body("w", {"list": [{"name": "a"}], "size": None})).ok(201)
    assert made["spec"] == {"size": 3, "inner": {"deep": 7}, "list": [{"name": "a", "mode": "fast"}]}


def test_unknown_fields_are_dropped(target: Target, make: Make) -> None:
    widgets = make(
        {"known": {"type": "string"}, "free": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    )
    made = target.post(widgets.path, widgets.body("w", {"known": "a", "typo": 1, "free": {"any": {"thing": 1}}})).ok(
        201
    )
    assert made["spec"] == {"known": "a", "free": {"any": {"thing": 1}}}


@needs("strict-fields")
def test_unknown_fields_are_refused_when_asked(target: Target, make: Make) -> None:
    widgets = make({"known": {"type": "string"}})
    body = widgets.body("w", {"knwon": "a"})
    refused = target.post(widgets.path, body, fieldValidation="Strict")
    assert refused.status == (400, "BadRequest")
    assert 'strict decoding error: unknown field "spec.knwon"' in refused.body["message"]
    warned = target.post(widgets.path, body, fieldValidation="Warn")
    warned.ok(201)
    assert 'unknown field \\"spec.knwon\\"' in warned.headers["Warning"]


@needs("strict-fields")
def test_field_given_twice_is_refused_when_asked(target: Target, make: Make) -> None:
    widgets = make({"known": {"type": "string"}})
    head = f'{{"apiVersion":"{widgets.group}/v1","kind":"Widget","metadata":{{"name":"w"}},'
    raw = head + '"spec":{"known":"a","known":"b"}}'
    refused = target.call("POST", widgets.path, raw=raw.encode(), fieldValidation="Strict")
    assert refused.status == (400, "BadRequest")
    assert 'duplicate field "spec.known"' in refused.body["message"]


def test_null_stays_where_it_may_be_and_is_forgotten_elsewhere(target: Target, make: Make) -> None:
    widgets = make({"maybe": {"type": "string", "nullable": True}, "never": {"type": "string"}})
    made = target.post(widgets.path, widgets.body("w", {"maybe": None, "never": None})).ok(201)
    assert made["spec"] == {"maybe": None}


def test_int_or_string_takes_both(target: Target, make: Make) -> None:
    widgets = make({"port": {"x-kubernetes-int-or-string": True}})
    assert target.post(widgets.path, widgets.body("a", {"port": 1})).ok(201)["spec"] == {"port": 1}
    assert target.post(widgets.path, widgets.body("b", {"port": "http"})).ok(201)["spec"] == {"port": "http"}


@needs("cel")
def test_rule_that_does_not_hold_is_told_with_its_message(target: Target, make: Make) -> None:
    rules = [{"rule": "self.soft < self.hard", "message": "soft must be below hard"}]
    widgets = make({"soft": {"type": "integer"}, "hard": {"type": "integer"}}, rules=rules)
    target.post(widgets.path, widgets.body("good", {"soft": 1, "hard": 2})).ok(201)
    refused = target.post(widgets.path, widgets.body("bad", {"soft": 2, "hard": 2}))
    assert refused.status == (422, "Invalid")
    cause = refused.body["details"]["causes"][0]
    assert (cause["reason"], cause["field"]) == ("FieldValueInvalid", "spec")
    assert cause["message"].startswith("Invalid value: ")
    assert cause["message"].endswith(": soft must be below hard")


@needs("cel")
def test_transition_rule_is_asked_on_update_only(target: Target, make: Make) -> None:
    fixed = {"type": "string", "x-kubernetes-validations": [{"rule": "self == oldSelf", "message": "is fixed"}]}
    widgets = make({"fixed": fixed, "other": {"type": "integer"}})
    target.post(widgets.path, widgets.body("w", {"fixed": "a"})).ok(201)
    target.merge(f"{widgets.path}/w", {"spec": {"other": 1}}).ok()
    refused = target.merge(f"{widgets.path}/w", {"spec": {"fixed": "b"}})
    assert refused.status == (422, "Invalid")
    assert refused.body["details"]["causes"][0]["field"] == "spec.fixed"


@needs("cel")
@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ("self.all(x, x.startsWith('a'))", ["ab"], ["b"]),
        ("self.exists(x, x == 'a')", ["a", "b"], ["b"]),
        ("self.exists_one(x, x == 'a')", ["a"], ["a", "a"]),
        ("self.map(x, size(x)).all(n, n > 1)", ["ab"], ["a"]),
        ("self.filter(x, x.endsWith('z')).size() == 1", ["az"], ["a"]),
        ("size(self) <= 2 && !('no' in self)", ["a"], ["no"]),
        ("self.isSorted()", ["a", "b"], ["b", "a"]),
        ("self.join('-').matches('^[a-z-]+$')", ["a", "b"], ["A"]),
        ("self[0].lowerAscii() == self[0]", ["a"], ["A"]),
        ("self.indexOf('b') == 1", ["a", "b"], ["b"]),
        ("self[0].split(',').size() == 2 && self[0].substring(0, 1) == 'a'", ["a,b"], ["b,a"]),
        ("self[0].contains('x') ? size(self) == 1 : true", ["x"], ["x", "y"]),
    ],
)
def test_rules_on_lists_and_texts(target: Target, make: Make, rule: str, good: list[str], bad: list[str]) -> None:
    shape = {
        "type": "array",
        "maxItems": 8,
        "items": {"type": "string", "maxLength": 40},
        "x-kubernetes-validations": [{"rule": rule}],
    }
    widgets = make({"texts": shape})
    target.post(widgets.path, widgets.body("good", {"texts": good})).ok(201)
    refused = target.post(widgets.path, widgets.body("bad", {"texts": bad}))
    assert refused.status == (422, "Invalid")
    assert rule in refused.body["message"]


@needs("cel")
def test_rule_that_cannot_be_compiled_is_refused_with_its_definition(target: Target) -> None:
    schema = {"type": "object", "x-kubernetes-validations": [{"rule": "self.. == ("}]}
    refused = target.post(CRDS, definition(schema))
    assert refused.status == (422, "Invalid")
    assert "compilation failed" in refused.body["message"]


@needs("cel")
def test_message_expression_makes_the_message(target: Target, make: Make) -> None:
    rules = [
        {
            "rule": "self.n < 3",
            "messageExpression": "self.n < 5 ? 'n is 3 or 4' : 'n is more'",
            "reason": "FieldValueForbidden",
            "fieldPath": ".n",
        }
    ]
    widgets = make({"n": {"type": "integer"}}, rules=rules)
    refused = target.post(widgets.path, widgets.body("w", {"n": 4}))
    assert refused.status == (422, "Invalid")
    cause = refused.body["details"]["causes"][0]
    assert (cause["reason"], cause["field"], cause["message"]) == (
        "FieldValueForbidden",
        "spec.n",
        "Forbidden: n is 3 or 4",
    )


def test_definition_with_a_wrong_name_is_refused(target: Target) -> None:
    crd = definition({"type": "object"})
    crd["metadata"]["name"] = "gadgets.contract.test"
    refused = target.post(CRDS, crd)
    assert refused.status == (422, "Invalid")
    assert refused.body["details"]["causes"][0]["field"] == "metadata.name"


def test_definition_without_a_schema_is_refused(target: Target) -> None:
    crd = definition({"type": "object"})
    del crd["spec"]["versions"][0]["schema"]
    assert target.post(CRDS, crd).status == (422, "Invalid")


def test_schema_that_is_not_structural_is_refused(target: Target) -> None:
    refused = target.post(CRDS, definition({"type": "object", "properties": {"a": {"minLength": 1}}}))
    # A real server takes it, says so in a condition, and keeps no unknown fields; or refuses it.
    if refused.code == 201:
        path = f"{CRDS}/{refused.body['metadata']['name']}"

        def is_told() -> bool:
            conditions = target.get(path).ok().get("status", {}).get("conditions") or []
            return any(entry["type"] == "NonStructuralSchema" and entry["status"] == "True" for entry in conditions)

        wait_until(is_told, "the definition tells that its schema is not structural")
        target.delete(path)
    else:
        assert refused.status == (422, "Invalid")


def test_objects_go_with_their_definition(target: Target, make: Make) -> None:
    widgets = make({})
    target.post(widgets.path, widgets.body("w", {})).ok(201)
    target.delete(f"{CRDS}/{widgets.name}")
    wait_until(lambda: target.get(f"{CRDS}/{widgets.name}").code == 404, "the definition goes")
    wait_until(lambda: target.get(widgets.path).code == 404, "the kind is served no longer")


def test_custom_columns_are_printed(target: Target, make: Make) -> None:
    columns = [
        {"name": "Size", "type": "integer", "jsonPath": ".spec.size"},
        {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
        {"name": "Wide", "type": "string", "jsonPath": ".spec.mode", "priority": 1},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    widgets = make(
        {"size": {"type": "integer"}, "mode": {"type": "string"}},
        additionalPrinterColumns=columns,
        subresources={"status": {}},
    )
    target.post(widgets.path, widgets.body("w", {"size": 3})).ok(201)
    conditions = [{"type": "Other", "status": "False"}, {"type": "Ready", "status": "True"}]
    target.merge(f"{widgets.path}/w/status", {"status": {"conditions": conditions}}).ok()
    accept = {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    table = target.call("GET", widgets.path, headers=accept).ok()
    assert [column["name"] for column in table["columnDefinitions"]] == ["Name", "Size", "Ready", "Wide", "Age"]
    cells = table["rows"][0]["cells"]
    assert cells[:4] == ["w", 3, "True", None]
    assert cells[4].endswith("s")
    assert table["rows"][0]["object"]["kind"] == "PartialObjectMetadata"


def test_custom_scale_is_read_and_written(target: Target, make: Make) -> None:
    scale = {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.active",
        "labelSelectorPath": ".status.sel",
    }
    widgets = make({"replicas": {"type": "integer", "maximum": 9}}, subresources={"status": {}, "scale": scale})
    target.post(widgets.path, widgets.body("w", {"replicas": 2})).ok(201)
    target.merge(f"{widgets.path}/w/status", {"status": {"active": 1, "sel": "a=b"}}).ok()
    found = target.get(f"{widgets.path}/w/scale").ok()
    assert (found["kind"], found["spec"], found["status"]) == (
        "Scale",
        {"replicas": 2},
        {"replicas": 1, "selector": "a=b"},
    )
    found["spec"]["replicas"] = 4
    target.put(f"{widgets.path}/w/scale", found).ok()
    after = target.get(f"{widgets.path}/w").ok()
    assert (after["spec"]["replicas"], after["metadata"]["generation"]) == (4, 2)
    assert target.merge(f"{widgets.path}/w/scale", {"spec": {"replicas": 10}}).code == 422


def test_replacement_of_a_custom_object_needs_its_revision(target: Target, make: Make) -> None:
    widgets = make({"n": {"type": "integer"}})
    target.post(widgets.path, widgets.body("w", {"n": 1})).ok(201)
    refused = target.put(f"{widgets.path}/w", widgets.body("w", {"n": 2}))
    assert refused.status == (422, "Invalid")
    assert refused.body["details"]["causes"][0]["field"] == "metadata.resourceVersion"


def test_strategic_patch_is_not_for_custom_objects(target: Target, make: Make) -> None:
    widgets = make({"n": {"type": "integer"}})
    target.post(widgets.path, widgets.body("w", {"n": 1})).ok(201)
    refused = target.strategic(f"{widgets.path}/w", {"spec": {"n": 2}})
    assert refused.status == (415, "UnsupportedMediaType")


def test_custom_kind_without_type_is_refused(target: Target, make: Make) -> None:
    widgets = make({})
    assert target.post(widgets.path, {"metadata": {"name": "w"}}).status == (400, "BadRequest")


def test_apply_makes_and_shares_custom_objects(target: Target, make: Make) -> None:
    widgets = make(
        {"a": {"type": "string"}, "b": {"type": "string"}, "l": {"type": "array", "items": {"type": "string"}}}
    )
    path = f"{widgets.path}/w"
    target.apply(path, widgets.body("w", {"a": "1", "l": ["x"]}), "one").ok(201)
    both = target.apply(path, widgets.body("w", {"b": "2"}), "two").ok()
    assert both["spec"] == {"a": "1", "b": "2", "l": ["x"]}
    assert target.apply(path, widgets.body("w", {"l": ["y"]}), "two").status == (409, "Conflict")
    less = target.apply(path, widgets.body("w", {"a": "1"}), "one").ok()
    assert less["spec"] == {"a": "1", "b": "2"}


def test_custom_kind_is_discovered(target: Target, make: Make) -> None:
    widgets = make({}, subresources={"status": {}})
    # A real server takes objects of a kind before it tells of the kind, and of its group.
    path = f"/apis/{widgets.group}/v1"
    wait_until(lambda: target.get(path).code == 200, "the group's version is told")
    found = target.get(path).ok()
    entries = {entry["name"]: entry for entry in found["resources"]}
    assert entries["widgets"]["shortNames"] == ["wdg"]
    assert entries["widgets"]["categories"] == ["things"]
    assert set(entries["widgets"]["verbs"]) == {
        "create",
        "delete",
        "deletecollection",
        "get",
        "list",
        "patch",
        "update",
        "watch",
    }
    assert entries["widgets/status"]["verbs"]

    def is_told() -> bool:
        return widgets.group in {entry["name"] for entry in target.get("/apis").ok()["groups"]}

    wait_until(is_told, "the group is told")


def test_two_versions_show_one_object(target: Target, namespace: str) -> None:
    group = f"g{secrets.token_hex(4)}.contract.test"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    crd = definition(schema, group=group)
    crd["spec"]["versions"].append(
        {"name": "v1beta1", "served": True, "storage": False, "schema": {"openAPIV3Schema": schema}}
    )
    widgets = Widgets(target, namespace, crd)
    target.post(widgets.path, widgets.body("w", {"n": 1})).ok(201)
    older = widgets.path.replace("/v1/", "/v1beta1/")
    wait_until(lambda: target.get(f"{older}/w").code == 200, "the other version is served")
    assert target.get(f"{older}/w").ok()["apiVersion"] == f"{group}/v1beta1"
    target.merge(f"{older}/w", {"spec": {"n": 2}}).ok()
    assert target.get(f"{widgets.path}/w").ok()["spec"] == {"n": 2}
    target.delete(f"{CRDS}/{widgets.name}")
