"""A cluster that was taken down comes up as it was."""

from pathlib import Path

import pytest

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.apiserver import snapshot
from unbroken_local.apiserver.store import Expired, Store

PODS = ("", "pods")


def test_snapshot_keeps_objects_revisions_and_owners(tmp_path: Path) -> None:
    store = Store()
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "o", "uid": "u0"}
    store.put(PODS, ("ns", "a"), {"metadata": {"name": "a", "uid": "u1", "ownerReferences": [owner]}})
    store.put(PODS, ("ns", "b"), {"metadata": {"name": "b", "uid": "u2"}})
    store.remove(PODS, ("ns", "b"))
    snapshot.save(tmp_path / "s", store)
    again = Store()
    snapshot.load(tmp_path / "s", again)
    assert again.revision == store.revision
    assert [(key, found.revision) for key, found in again.current(PODS)] == [(("ns", "a"), 2)]
    assert again.dependents("u0") == [(PODS, ("ns", "a"))]
    with pytest.raises(Expired):
        again.since(PODS, 2)


def test_missing_snapshot_is_an_empty_cluster(tmp_path: Path) -> None:
    store = Store()
    snapshot.load(tmp_path / "none", store)
    assert store.places() == []


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 99}'])
def test_broken_snapshot_is_refused_with_its_path(tmp_path: Path, content: str) -> None:
    path = tmp_path / "s"
    path.write_text(content)
    with pytest.raises(InputError, match=str(path)):
        snapshot.load(path, Store())
