"""What others make of a pod's status is taken back, whichever is heard of first: theirs, or the answer to ours."""

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from unbroken_local.kube import Json
from unbroken_local.kube.client import KubeClient
from unbroken_local.kubelet.spec import read_pod
from unbroken_local.kubelet.status_writer import StatusWriter

POD: Json = {"metadata": {"name": "p", "namespace": "n", "uid": "1"}, "spec": {"containers": [{"name": "main"}]}}


def seen(status: str, version: int) -> Json:
    """Return the pod as the API server has it."""
    metadata = {**POD["metadata"], "resourceVersion": str(version)}
    return {**POD, "metadata": metadata, "status": ready(status)}


def ready(status: str) -> Json:
    return {"conditions": [{"type": "Ready", "status": status}]}


class Api:
    """Stands for the API server where the order of its answers matters: `before_answers` comes before each one's."""

    def __init__(self) -> None:
        self.version = 0
        self.before_answers: list[Callable[[], None]] = []
        self.written: asyncio.Queue[str] = asyncio.Queue()

    async def merge_patch(self, path: str, body: Json) -> Json:
        del path
        self.version += 1
        status: str = body["status"]["conditions"][0]["status"]
        answer = seen(status, self.version)
        if self.before_answers:
            self.before_answers.pop(0)()
        self.written.put_nowait(status)
        return answer


@pytest.mark.parametrize("when", ["before the answer", "after it"])
def test_what_others_write_is_taken_back(when: str) -> None:
    async def run() -> None:
        api = Api()
        writer = StatusWriter(cast(KubeClient, api), read_pod(POD), lambda: ready("True"))

        def deny() -> None:
            api.version += 1
            writer.observe(seen("False", api.version))

        if when == "before the answer":
            api.before_answers.append(deny)
        task = asyncio.create_task(writer.run())
        writer.touch()
        assert await api.written.get() == "True"
        if when == "after it":
            deny()
        assert await api.written.get() == "True"
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 20))


def test_an_own_write_that_is_observed_early_or_late_is_not_repeated() -> None:
    async def run() -> None:
        api, status = Api(), ["True"]
        writer = StatusWriter(cast(KubeClient, api), read_pod(POD), lambda: ready(status[0]))
        writer.observe(seen("False", 0))
        api.before_answers.append(lambda: writer.observe(seen("True", 1)))
        task = asyncio.create_task(writer.run())
        writer.touch()
        assert await api.written.get() == "True"
        writer.observe(seen("True", 1))
        status[0] = "Unknown"
        writer.touch()
        assert await api.written.get() == "Unknown", "the first one was written twice"
        task.cancel()
        assert api.written.empty()

    asyncio.run(asyncio.wait_for(run(), 20))
