"""The clocks and the chance of the operator's modules, for as long as one world runs: virtual, and from its seed."""

from __future__ import annotations

import contextlib
import datetime as real_datetime
import logging
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from unbroken_operator import jobs, worker
from unbroken_operator.adapters import executor, informer, job_secret, lease, listening, poller
from unbroken_operator.decisions import admission, assessment
from unbroken_operator.decisions import plan as planning
from unbroken_operator.decisions.objects import manifests

EPOCH = real_datetime.datetime(2026, 1, 1, tzinfo=real_datetime.timezone.utc)
_OF_TIME = (worker, jobs, executor, job_secret, poller, listening)
_OF_DAY = (worker, poller, lease)
_OF_CHANCE = (worker, poller, informer)


@contextlib.contextmanager
def virtual_time(clock: Callable[[], float], chance: random.Random, on_bug: Callable[[str], None]) -> Iterator[None]:
    """Let the operator's modules see this clock, and this chance; `on_bug` hears of what they log as their own bug."""
    time = SimpleNamespace(monotonic=clock)
    day = SimpleNamespace(
        datetime=SimpleNamespace(now=lambda _zone: EPOCH + real_datetime.timedelta(seconds=clock())),
        timezone=real_datetime.timezone,
        timedelta=real_datetime.timedelta,
    )
    secrets = SimpleNamespace(token_hex=lambda num: chance.randbytes(num).hex())
    wanted: list[tuple[Any, str, Any]] = [
        *((module, "time", time) for module in _OF_TIME if hasattr(module, "time")),
        *((module, "datetime", day) for module in _OF_DAY),
        *((module, "random", chance) for module in _OF_CHANCE),
        (job_secret, "randomness", secrets),
        (planning, "admit", _Verdicts()),
        (assessment, "settings_digest", _settings_digest),
        (manifests, "settings_digest", _settings_digest),
    ]
    before = [(module, name, getattr(module, name)) for module, name, _value in wanted]
    logger, handler = logging.getLogger("unbroken_operator"), _Bugs(on_bug)
    level, spreads = logger.level, logger.propagate
    try:
        for module, name, value in wanted:
            setattr(module, name, value)
        logger.addHandler(handler)
        logger.setLevel(logging.ERROR)
        logger.propagate = False
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = spreads
        for module, name, value in before:
            setattr(module, name, value)


_settings_digest = lru_cache(64)(manifests.settings_digest)


class _Verdicts:
    """Verdicts on jobs, each made once: a spec is the same object until it changes, and to check it takes long."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[Any, Any]] = {}

    def __call__(self, job: Any) -> Any:
        key = id(job.get("spec")), repr((job.get("status") or {}).get("accepted"))
        if key not in self._known:
            self._known[key] = job.get("spec"), admission.admit(job)
        return self._known[key][1]


class _Bugs(logging.Handler):
    """What is logged with a traceback is a bug that somebody has caught at a boundary."""

    def __init__(self, on_bug: Callable[[str], None]) -> None:
        super().__init__(logging.ERROR)
        self._on_bug = on_bug
        self._form = logging.Formatter()

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and record.exc_info[0] is not None:
            self._on_bug(self._form.format(record))


def wall_text(at_s: float) -> str:
    """Return virtual seconds as the rendezvous tells a time of day."""
    instant = EPOCH + real_datetime.timedelta(seconds=at_s)
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
