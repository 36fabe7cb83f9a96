"""What the operator asks of kopf."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import kopf
import pytest

from unbroken_operator import handlers
from unbroken_operator.jobs import Jobs


def test_operator_names_itself_so_that_kopf_does_not_ask_for_the_name_of_the_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The user of an image has none: kopf would raise KeyError, and no job would ever be seen."""
    seen: dict[str, Any] = {}

    async def operator(**options: Any) -> None:
        seen.update(options)

    async def always() -> bool:
        return True

    async def run() -> None:
        jobs = cast(Jobs, SimpleNamespace(restored=asyncio.Event()))
        await handlers.run_operator(jobs, None, (), asyncio.Event(), asyncio.Event(), is_served=always)
        configure: Any = handlers.configure
        await configure(settings=seen["settings"])

    monkeypatch.setattr(kopf, "operator", operator)
    asyncio.run(run())
    assert seen["identity"]
    assert seen["standalone"] is True
    storage = seen["settings"].persistence.diffbase_storage
    job = kopf.Body({"metadata": {"name": "digits"}, "status": {"history": [{}] * 20}})
    assert (storage.build(body=job), storage.fetch(body=job)) == ({}, None), "nothing is copied at every event"
