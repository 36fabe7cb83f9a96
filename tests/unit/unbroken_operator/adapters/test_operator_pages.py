"""A list is read in pages of a bounded size, and of each object is held what is needed."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest
from kubernetes.aio.client import ApiClient
from tests.unit.unbroken_operator.decisions.test_operator_memory import a_pod

from unbroken_operator.adapters.informer import Informer
from unbroken_operator.adapters.kube import PAGE_BYTES, PAGE_SIZE, Kube
from unbroken_operator.adapters.stores import PodStore, Seen

PIECE = 64 << 10
LARGE = 900_000


class Answer:
    """An answer whose bytes are counted as they are read."""

    def __init__(self, body: bytes, sizes: list[int]) -> None:
        self.content = self
        self._body = body
        self._sizes = sizes
        self.is_closed = False
        sizes.append(0)

    async def iter_any(self) -> AsyncIterator[bytes]:
        """See aiohttp.StreamReader."""
        for start in range(0, len(self._body), PIECE):
            piece = self._body[start : start + PIECE]
            self._sizes[-1] += len(piece)
            yield piece

    async def read(self) -> bytes:
        """Return all of it."""
        self._sizes[-1] += len(self._body)
        return self._body

    def release(self) -> None:
        """Give the connection back."""

    def close(self) -> None:
        """Close the connection."""
        self.is_closed = True


class Paged(Kube):
    """An API server with some pods, which it lists in pages as it is asked."""

    def __init__(self, items: list[dict[str, Any]]) -> None:
        super().__init__(cast(ApiClient, None), lambda *_: None)
        self._items = items
        self.sizes: list[int] = []
        """Bytes that were read of each answer."""
        self.answers: list[Answer] = []

    async def _request(  # type: ignore[override] # the rest of what it takes does not matter here
        self, _method: str, _path: str, *, query: Mapping[str, str] | None = None, **_: Any
    ) -> Any:
        asked = query or {}
        first, num = int(asked.get("continue", "0")), int(asked["limit"])
        rest = {"continue": str(first + num)} if first + num < len(self._items) else {}
        page = {"items": self._items[first : first + num], "metadata": {"resourceVersion": "7", **rest}}
        self.answers.append(Answer(json.dumps(page).encode(), self.sizes))
        return self.answers[-1]


def pods(num: int, num_characters: int) -> list[dict[str, Any]]:
    """Return pods with so much in their specs."""
    large = [a_pod(f"digits-{number}", version=1, uid=f"uid-{number}") for number in range(num)]
    for item in large:
        item["spec"] = {**(item.get("spec") or {}), "containers": [{"args": ["x" * num_characters]}]}
    return large


@pytest.mark.parametrize(
    ("sizes", "most_answers"),
    [
        pytest.param([(3 * PAGE_SIZE, 10_000)], 3, id="pods as they are"),
        pytest.param([(40, LARGE)], 24, id="large pods"),
        pytest.param([(2 * PAGE_SIZE, 10), (12, LARGE), (2 * PAGE_SIZE, 10)], 24, id="large ones among small ones"),
    ],
)
def test_no_page_of_a_list_is_longer_than_the_bound_however_large_pods_are(
    sizes: list[tuple[int, int]], most_answers: int
) -> None:
    """Before, 220 pods of 840 kB were one page: 640 MB at each start of the operator."""
    items = [item for num, size in sizes for item in pods(num, size)]
    server = Paged(items)
    names, version = asyncio.run(server.list("/api/v1/pods", read=lambda item: item["metadata"]["name"]))
    assert (names, version) == ([item["metadata"]["name"] for item in items], "7")
    assert max(server.sizes) <= PAGE_BYTES + PIECE
    assert len(server.sizes) <= most_answers
    cut = [answer.is_closed for answer in server.answers]
    assert cut == [size > PAGE_BYTES for size in server.sizes], "what is left of an answer is not read"


def test_an_object_that_is_longer_than_a_page_is_read_by_itself() -> None:
    server = Paged(pods(2, PAGE_BYTES + 1))
    assert len(asyncio.run(server.list("/api/v1/pods"))[0]) == 2


def test_a_watch_keeps_of_a_list_what_its_store_needs() -> None:
    """Before, all pods of the cluster were held as they are until the last page was there."""
    taken: list[Any] = []

    class Store(PodStore):
        """A store that shows what it is given."""

        def replace(self, items: list[Any], version: str, mark: int = 0, namespace: str | None = None) -> None:
            """See Store."""
            taken.extend(items)
            super().replace(items, version, mark, namespace)

    store = Store(lambda _: None)
    asyncio.run(Informer(Paged(pods(3, 100)), "/api/v1/pods", store)._list())
    assert [type(item) for item in taken] == [Seen] * 3
    assert [pod.name for pod in store.of_job(("ml", "digits"))] == ["digits-0", "digits-1", "digits-2"]


def test_of_a_list_that_is_bounded_the_rest_is_not_asked_for() -> None:
    server = Paged(pods(4 * PAGE_SIZE, 1))
    items, _ = asyncio.run(server.list("/api/v1/pods", most=PAGE_SIZE + 1))
    assert len(items) == PAGE_SIZE + 1
    assert len(server.answers) == 2
