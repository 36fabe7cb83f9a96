"""What answers of the API server mean."""

import asyncio
import json
from typing import Any, cast

import aiohttp
import pytest

from unbroken_operator.adapters.errors import (
    KubeConflict,
    KubeError,
    KubeGone,
    KubeNotFound,
    KubeNotServed,
    KubeRefused,
)
from unbroken_operator.adapters.kube import _error


class ReviewAnswer:
    """A response whose body is unread."""

    def __init__(self, status: int, body: str) -> None:
        self.status = status
        self.headers: dict[str, str] = {}
        self._body = body

    async def text(self) -> str:
        return self._body

    def release(self) -> None:
        """Nothing is held."""


STATUS = json.dumps({"kind": "Status", "message": "as the API server says"})


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        pytest.param(404, STATUS, KubeNotFound, id="there is no such object"),
        pytest.param(404, "404 page not found\n", KubeNotServed, id="the path is not served, or not yet"),
        pytest.param(404, "[]", KubeNotServed, id="whoever else answers"),
        pytest.param(409, STATUS, KubeConflict, id="conflict"),
        pytest.param(410, STATUS, KubeGone, id="history is gone"),
        pytest.param(422, STATUS, KubeRefused, id="refused"),
    ],
)
def test_what_a_bad_answer_means(status: int, body: str, kind: type[KubeError]) -> None:
    """That a job is not served by an API server that has just started must not be taken for its end."""
    found: Any = asyncio.run(_error(cast(aiohttp.ClientResponse, ReviewAnswer(status, body)), "GET /x"))
    assert type(found) is kind
