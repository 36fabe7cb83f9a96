"""Orders to break something in a pod on purpose, as `unbroken inject` writes them and a pod reads them. Pure.

Both sides check them: who writes one may be of another release than who reads it.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.findings import Verdict

ALLOW: Final = "UNBROKEN_ALLOW_FAULTS"
"""A variable of the trainer: without it a pod takes no order at all."""
MAX_ORDER_BYTES: Final = 4096
MAX_SECONDS: Final = 3600.0
USUAL_SECONDS: Final = 60.0
MAX_FULL_BYTES: Final = 1 << 40
_ID: Final = re.compile(r"[0-9a-f]{8,32}", re.ASCII)
_CHECK: Final = re.compile(r"[a-z]([a-z0-9-]{0,37}[a-z0-9])?", re.ASCII)
_MAX_PATH: Final = 1024
VERDICTS: Final = tuple(verdict.value for verdict in (Verdict.DEGRADED, Verdict.SUSPECT, Verdict.FATAL))


@dataclass(frozen=True)
class FaultOrder:
    """One fault. What its kind does not use stays at its default."""

    id: str
    """The same order twice is one fault."""
    kind: str
    rank: int | None = None
    """The worker must have this active rank; None: whichever it has."""
    code: int = 1
    """Of an exit, 1 to 255; of an XID, 1 to 1023."""
    seconds: float = USUAL_SECONDS
    """How long it lasts at most."""
    milliseconds: float = 0.0
    """By how much longer each step takes."""
    factor: float = 0.0
    """The same as a multiple of the step."""
    check: str = ""
    """Name of the check that fails."""
    verdict: str = Verdict.SUSPECT.value
    path: str = ""
    """Folder whose file system is filled."""
    max_bytes: int = 0
    """So many bytes are written at most."""


WORKER: Final = {
    "exception": (),
    "exit": ("code",),
    "hang-gil": ("seconds",),
    "slow": ("seconds", "milliseconds", "factor"),
    "oom": ("seconds",),
    "mismatch": (),
}
"""Kinds that one worker makes in its own process, each with the numbers that it takes."""
POD: Final = {
    "check": ("seconds", "check", "verdict"),
    "xid": ("seconds", "code"),
    "link-down": ("seconds",),
    "disk-full": ("seconds", "path", "max_bytes"),
    "partition": ("seconds",),
}
"""Kinds that are made beside the workers, in their container."""
FINDINGS: Final = ("check", "xid", "link-down")
"""Those that only the pod's watch says: nothing is broken."""


def is_allowed(environment: Mapping[str, str]) -> bool:
    """Return whether this pod takes orders."""
    return environment.get(ALLOW, "") in ("1", "true")


def write_order(order: FaultOrder) -> str:
    """Return one line. Raises InputError as `read_order`."""
    check_order(order)
    return json.dumps(
        {
            field.name: value
            for field in fields(order)
            if (value := asdict(order)[field.name]) != field.default or field.name in ("id", "kind")
        }
    )


def read_order(text: str) -> FaultOrder:
    """Raises InputError that says what was seen and what is wanted."""
    try:
        data = json.loads(text) if len(text) <= MAX_ORDER_BYTES else None
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict):
        raise InputError(f"order: want a JSON object of at most {MAX_ORDER_BYTES} bytes, got {text[:80]!r}")
    known = {field.name for field in fields(FaultOrder)}
    if not {"id", "kind"} <= data.keys() <= known:
        raise InputError(f"order: want id, kind and some of {sorted(known)}, got {str(sorted(data))[:200]}")
    order = FaultOrder(**data)
    check_order(order)
    return order


def check_order(order: FaultOrder) -> None:
    """Raise InputError unless all of it is within its bounds."""
    if not isinstance(order.id, str) or not _ID.fullmatch(order.id):
        raise InputError(f"id: want 8 to 32 hexadecimal digits, got {order.id!r}")
    takes = {**WORKER, **POD}.get(order.kind if isinstance(order.kind, str) else "")
    if takes is None:
        raise InputError(f"kind: want one of {', '.join((*WORKER, *POD))}, got {str(order.kind)[:80]!r}")
    for field in fields(order)[3:]:
        value = getattr(order, field.name)
        if field.name in takes:
            _check(order.kind, field.name, value)
        elif value != field.default:
            raise InputError(f"{field.name}: {order.kind} does not take it, got {str(value)[:80]!r}")
    if order.rank is not None:
        _check_number("rank", order.rank, 0, 1 << 20, int)
    if order.kind == "slow" and (order.milliseconds > 0) == (order.factor > 0):
        raise InputError(
            f"slow: want either milliseconds or factor, got milliseconds {order.milliseconds:g} and factor "
            f"{order.factor:g}"
        )


def _check(kind: str, name: str, value: Any) -> None:
    if name == "code":
        _check_number(name, value, 1, 1023 if kind == "xid" else 255, int)
    elif name == "seconds":
        _check_number(name, value, 1.0, MAX_SECONDS, float)
    elif name == "milliseconds":
        _check_number(name, value, 0.0, 60_000.0, float)
    elif name == "factor" and value != 0:
        _check_number(name, value, 1.01, 100.0, float)
    elif name == "max_bytes":
        _check_number(name, value, 1, MAX_FULL_BYTES, int)
    elif name == "verdict" and value not in VERDICTS:
        raise InputError(f"verdict: want one of {', '.join(VERDICTS)}, got {str(value)[:80]!r}")
    elif name == "check" and not (isinstance(value, str) and _CHECK.fullmatch(value)):
        raise InputError(f"check: want small letters, digits and dashes, at most 39, got {str(value)[:80]!r}")
    elif name == "path" and not _is_path(value):
        raise InputError(f"path: want an absolute path of at most {_MAX_PATH} characters, got {str(value)[:80]!r}")


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("/") and len(value) <= _MAX_PATH and "\0" not in value


def _check_number(name: str, value: Any, least: float, most: float, kind: type) -> None:
    # A bool is an int, and a whole number of seconds may be written as one; NaN is in no range.
    is_number = type(value) is int or (kind is float and type(value) is float)
    if not is_number or not least <= value <= most:
        raise InputError(f"{name}: want {least:g} to {most:g}, got {str(value)[:40]}")
