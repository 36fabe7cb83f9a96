"""Write tests/data/messages/VERSION.jsonl: every message of the present release, for the tests of all later ones.

Two lines each: with all of its fields, and with those alone that have no default. Once a release is out its file stays
as it is: change the version (core/unbroken_core/__init__.py) before the messages.
"""

import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import unbroken_core
from unbroken_core.protocol import messages
from unbroken_core.protocol.settings import JobSettings, Timeouts
from unbroken_core.protocol.wire import encode, settings_to_json
from unbroken_core.torchrun_rounds import messages as rounds
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "tests" / "data" / "messages"
KINDS: tuple[type, ...] = (
    *typing.get_args(messages.AgentMessage),
    *typing.get_args(messages.RendezvousMessage),
    messages.Observation,
    messages.Earlier,
    messages.JobStatus,
    rounds.NodeReport,
    *typing.get_args(rounds.ToNode),
)
"""What parts of different releases say to each other; what is said within a pod comes from one image."""


def recorded() -> Iterator[str]:
    """Yield the lines."""
    for kind in KINDS:
        for has_all in (True, False):
            yield encode(_sample(kind, has_all))
    layers = (Layer("rack", "example.com/rack", min_ranks=2, max_ranks=4, replace_from=False, close_gaps=True),)
    full = JobSettings(
        "digits",
        namespace="ml",
        uid="u1",
        replicas=4,
        min_replicas=2,
        spares=1,
        ranks_per_pod=2,
        layers=layers,
        divisible_by=2,
        max_ranks=8,
        min_ranks_per_pod=1,
        max_faults_per_rank=3,
        no_progress_limit=5,
        fatal_exit_codes=(7,),
        uncounted_causes=(Cause.NODE_LOST,),
        grow_back_s=60.0,
        timeouts=Timeouts(isolation_s=200.0),
        copies=2,
        across="host",
    )
    for settings in (JobSettings("digits"), full):
        yield settings_to_json(settings)


def _sample(kind: Any, has_all: bool) -> Any:
    """Return a value of a type that messages are made of; the same one each time."""
    plain: dict[Any, Any] = {int: 1, str: "a", bool: True, float: 0.5}
    if kind in plain:
        return plain[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind))
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind, vars(messages) | {"Layer": Layer})
        chosen = [
            item for item in fields(kind) if has_all or (item.default, item.default_factory) == (MISSING, MISSING)
        ]
        build: Any = kind
        return build(**{item.name: _sample(hints[item.name], has_all) for item in chosen})
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        kinds = parts[:1] if parts[-1] is Ellipsis else parts
        return tuple(_sample(part, has_all) for part in kinds)
    if origin is dict:
        return {"a": _sample(parts[1], has_all)}
    if origin not in (typing.Union, types.UnionType):
        raise TypeError(f"{kind!r} is not a message type")
    (inner,) = (part for part in parts if part is not types.NoneType)
    return _sample(inner, has_all)


def main() -> int:
    """Write the file of this release."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{unbroken_core.__version__}.jsonl").write_text("".join(f"{line}\n" for line in recorded()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
