"""The pure parts of the API server: store, selectors, patches, columns, rules."""

from ipaddress import IPv4Network
from typing import Any

import pytest

from unbroken_local.addresses import BLOCKS
from unbroken_local.apiserver.defaults import SERVICE_NETWORK, complete_create
from unbroken_local.apiserver.jsonpath import find
from unbroken_local.apiserver.kinds import Catalogue, version_order
from unbroken_local.apiserver.ownership import fields_from_json, fields_to_json, path_text
from unbroken_local.apiserver.patches import merge_patch, strategic_merge
from unbroken_local.apiserver.problems import ApiProblem
from unbroken_local.apiserver.requests import accepted_form
from unbroken_local.apiserver.rules import BadRule, compile_rules, rule_violations
from unbroken_local.apiserver.store import Expired, Store
from unbroken_local.apiserver.tables import duration_text

PODS = ("", "pods")


def _document(name: str) -> dict[str, dict[str, str]]:
    return {"metadata": {"name": name, "uid": f"uid-{name}"}}


def test_store_shows_every_revision_that_its_history_reaches() -> None:
    store = Store(history_limit=10)
    store.collection(PODS)
    states = {store.revision: set[str]()}
    for name in ("a", "b"):
        store.put(PODS, ("", name), dict(_document(name)))
        states[store.revision] = states[store.revision - 1] | {name}
    store.remove(PODS, ("", "a"))
    states[store.revision] = {"b"}
    assert {revision: {key[1] for key in store.at(PODS, revision)} for revision in states} == states


def test_store_forgets_what_is_beyond_its_history() -> None:
    store = Store(history_limit=2)
    first = store.put(PODS, ("", "a"), dict(_document("a"))).revision
    for _ in range(3):
        store.put(PODS, ("", "a"), dict(_document("a")))
    with pytest.raises(Expired):
        store.since(PODS, first)
    with pytest.raises(Expired):
        store.at(PODS, first)
    assert [change.revision for change in store.since(PODS, store.revision - 2)] == [store.revision - 1, store.revision]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (185, "3m5s"), (600, "10m"), (10800, "3h"), (18180, "5h3m"), (43200, "12h"),
     (172800, "2d"), (180000, "2d2h"), (2592000, "30d"), (-5, "<invalid>")],
)  # fmt: skip
def test_durations_read_as_kubectl_writes_them(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize(
    ("path", "found"),
    [(".a.b", [1]), (".list[*].n", [1, 2]), ('.list[?(@.k=="y")].n', [2]), (".list[0].k", ["x"]), (".a['b']", [1]),
     (r".dotted\.name", [3]), (".nowhere.at.all", []), ("..[broken", [])],
)  # fmt: skip
def test_json_path_finds(path: str, found: list[object]) -> None:
    document = {"a": {"b": 1}, "list": [{"k": "x", "n": 1}, {"k": "y", "n": 2}], "dotted.name": 3}
    assert find(document, path) == found


def test_merge_patch_follows_rfc_7386() -> None:
    assert merge_patch({"a": {"b": 1, "c": 2}, "l": [1]}, {"a": {"b": None}, "l": [2], "n": {"x": None}}) == {
        "a": {"c": 2},
        "l": [2],
        "n": {},
    }


def test_strategic_patch_keeps_the_order_that_it_is_told() -> None:
    entry = {"type": "object", "properties": {"name": {"type": "string"}, "v": {"type": "integer"}}}
    merged = {
        "type": "array",
        "items": entry,
        "x-kubernetes-patch-strategy": "merge",
        "x-kubernetes-patch-merge-key": "name",
    }
    schema = {"type": "object", "properties": {"l": merged}}
    target = {"l": [{"name": "a", "v": 1}, {"name": "b", "v": 2}]}
    patch = {
        "$setElementOrder/l": [{"name": "c"}, {"name": "b"}, {"name": "a"}],
        "l": [{"name": "c", "v": 3}, {"name": "a", "v": 9}],
    }
    assert strategic_merge(target, patch, schema) == {
        "l": [{"name": "c", "v": 3}, {"name": "b", "v": 2}, {"name": "a", "v": 9}]
    }


def test_field_sets_survive_their_written_form() -> None:
    fields = frozenset(
        {("f:spec", "f:n"), ("f:l", 'k:{"name":"a"}', "."), ("f:l", 'k:{"name":"a"}', "f:v"), ("f:s", 'v:"x"')}
    )
    assert fields_from_json(fields_to_json(fields)) == fields
    assert path_text(("f:l", 'k:{"name":"a"}', "f:v")) == '.l[name="a"].v'


def test_versions_are_ordered_as_kubernetes_does() -> None:
    names = ["foo", "v1alpha1", "v1beta2", "v10", "v1beta10", "v2", "v1"]
    assert sorted(names, key=version_order) == ["v10", "v2", "v1", "v1beta10", "v1beta2", "v1alpha1", "foo"]


def test_form_is_the_first_that_can_be_served() -> None:
    tables = [f"application/json;as=Table;v={version};g=meta.k8s.io" for version in ("v1beta1", "v1")]
    accept = ",".join([*tables, "application/json"])
    assert accepted_form(accept).kind == "Table"
    with pytest.raises(ApiProblem, match="only the following media types"):
        accepted_form("application/vnd.kubernetes.protobuf")


def test_rules_without_any_cost_nothing_and_broken_ones_are_refused() -> None:
    assert compile_rules({"type": "object", "properties": {"a": {"type": "string"}}}) is None
    with pytest.raises(BadRule, match="compilation failed"):
        compile_rules({"x-kubernetes-validations": [{"rule": "self ++"}]})


def test_reserved_names_are_escaped_in_rules() -> None:
    schema = {"type": "object", "properties": {"namespace": {"type": "string"}, "a-b": {"type": "integer"}},
              "x-kubernetes-validations": [{"rule": "self.__namespace__ == 'x' && self.a__dash__b == 1"}]}  # fmt: skip
    rules = compile_rules(schema)
    assert rules is not None
    assert list(rule_violations(rules, {"namespace": "x", "a-b": 1}, None, "")) == []
    assert len(list(rule_violations(rules, {"namespace": "y", "a-b": 1}, None, ""))) == 1


def _new_service(uid: str, store: Store) -> dict[str, Any]:
    catalogue = Catalogue()
    resource = catalogue.find("", "v1", "services")
    assert resource is not None
    service: dict[str, Any] = {"metadata": {"name": uid, "uid": uid}, "spec": {"type": "ClusterIP"}}
    complete_create(resource, service, store)
    return service


def test_services_of_two_clusters_on_one_machine_have_addresses_of_their_own() -> None:
    first, second = (_new_service(uid, Store())["spec"]["clusterIP"] for uid in ("u-1", "u-2"))
    assert first != second
    store = Store()
    store.put(("", "services"), ("n", "other"), {"metadata": {"uid": "u-0"}, "spec": {"clusterIP": first}})
    assert _new_service("u-1", store)["spec"]["clusterIP"] not in (first, second)
    assert not any(SERVICE_NETWORK.overlaps(IPv4Network(f"127.{number}.0.0/16")) for number in BLOCKS)
