"""Rights that the operator lacks are named at its start."""

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest

from unbroken_operator.adapters import permissions
from unbroken_operator.adapters.errors import KubeUnavailable
from unbroken_operator.adapters.kube import Kube
from unbroken_operator.adapters.lease import LeaseName
from unbroken_operator.adapters.permissions import Right, describe, report_missing_rights, rights


class Reviews:
    """An API server that answers reviews: what is refused changes with each round of questions."""

    def __init__(self, wanted: tuple[Right, ...], *rounds: set[tuple[str, str]] | None) -> None:
        self._size = len(wanted)
        self._rounds = list(rounds)
        self._asked = 0

    async def create(self, path: str, item: Mapping[str, Any]) -> dict[str, Any]:
        assert path == permissions.REVIEWS
        refused = self._rounds[0]
        self._asked += 1
        if refused is None or self._asked == self._size:
            self._rounds.pop(0)
            self._asked = 0
        if refused is None:
            raise KubeUnavailable("away")
        attributes = item["spec"]["resourceAttributes"]
        return {"status": {"allowed": (attributes["verb"], attributes["resource"]) not in refused}}


def told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *rounds: set[tuple[str, str]] | None
) -> list[str]:
    """Return what is logged until nothing is missing."""
    monkeypatch.setattr(permissions, "LOOK_S", 0.0)
    monkeypatch.setattr(permissions, "RETRY_S", 0.0)
    caplog.set_level("INFO")
    wanted = tuple(rights(("ml",), LeaseName("ops", "unbroken")))
    asyncio.run(report_missing_rights(cast(Kube, Reviews(wanted, *rounds)), wanted))
    return [f"{record.levelname} {record.getMessage()}" for record in caplog.records]


def test_all_that_is_missing_is_said_in_one_line_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    some = {
        ("list", "pods"),
        ("watch", "pods"),
        ("patch", "resilienttrainingjobs"),
        ("list", "nodes"),
        ("get", "leases"),
    }
    assert told(monkeypatch, caplog, some, some, {("list", "nodes")}, set()) == [
        "ERROR permissions are missing: set rbac.create in the chart, or grant these "
        "rights=patch resilienttrainingjobs/status.unbroken.dev in namespace ml; list, watch pods in namespace ml; "
        "list nodes; get leases.coordination.k8s.io unbroken in namespace ops",
        "ERROR permissions are missing: set rbac.create in the chart, or grant these rights=list nodes",
        "INFO permissions are complete",
    ]


def test_an_operator_that_may_do_all_says_nothing_and_one_without_an_api_server_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(monkeypatch, caplog, None, None, set()) == []


def test_rights_in_all_namespaces_are_said_so() -> None:
    assert (
        describe([Right("", "secrets", "get"), Right("", "secrets", "create")])
        == "get, create secrets in all namespaces"
    )
