"""What the operator asks of kopf."""

import asyncio
import re
from types import SimpleNamespace
from typing import Any, cast

import kopf
import pytest
from kopf._cogs.structs.finalizers import is_deletion_blocked

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


QUALIFIED_NAME = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?")
"""What the API server takes for a finalizer."""


def test_kopf_leaves_every_finalizer_that_a_job_can_have_alone() -> None:
    """Seen before: kopf's own one on a job kept kopf patching that job, which the operator may not do, and not looking.

    So a job has the finalizers that people put there, and none of ours: it can be deleted while no operator runs.
    """
    settings, configure = kopf.OperatorSettings(), cast(Any, handlers.configure)
    public = settings.persistence.finalizer
    assert QUALIFIED_NAME.fullmatch(public), "the pattern knows a real one"
    asyncio.run(configure(settings=settings))
    assert not QUALIFIED_NAME.fullmatch(settings.persistence.finalizer)
    job = kopf.Body(
        {"metadata": {"name": "digits", "finalizers": [public, "example.com/backup", "foregroundDeletion"]}}
    )
    assert not is_deletion_blocked(body=job, finalizer=settings.persistence.finalizer)
