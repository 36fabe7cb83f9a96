"""`--log-rules`: the log rules of a job in JSON, with the fields of spec.health.logRules."""

import json
from pathlib import Path
from typing import Any

from unbroken_core.protocol.log_rules.rules import MAX_RULES, LogRanks, LogRule, LogVerdict
from unbroken_core.vocabulary.errors import InputError

_WHERE = "--log-rules"
_MAX_BYTES = 64 << 10
_FIELDS = {"name", "pattern", "verdict", "expectedWithinSeconds", "recurringSeconds", "ranks"}


def read_log_rules(given: str) -> tuple[LogRule, ...]:
    """Read a file, or the text itself where it begins with [. Raises InputError that says where and what is wrong."""
    if not given.strip():
        raise InputError(f"{_WHERE}: want a list in JSON, or a file with one, got {given!r}; want [] for no rules")
    text = given if given.lstrip().startswith("[") else _content(Path(given))
    if len(text) > _MAX_BYTES:
        raise InputError(f"{_WHERE}: want at most {_MAX_BYTES} bytes, got {len(text)}")
    try:
        data = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{_WHERE}: want JSON, got {text[:80]!r}: {error}") from None
    if not isinstance(data, list) or len(data) > MAX_RULES:
        raise InputError(f"{_WHERE}: want a list of at most {MAX_RULES} rules, got {text[:80]!r}")
    return tuple(_rule(item, f"{_WHERE}[{index}]") for index, item in enumerate(data))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _value in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"{_WHERE}: the key {twice[:80]!r} is in one object twice; want it once")
    return found


def _content(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_BYTES + 1).decode()
    except (OSError, ValueError) as error:
        raise InputError(
            f"{_WHERE}: want a list in JSON, or a file with one, got {str(path)[:200]!r}: {error}"
        ) from None


def _rule(item: Any, where: str) -> LogRule:
    if not isinstance(item, dict):
        raise InputError(f"{where}: want an object, got {str(item)[:80]!r}")
    unknown = sorted(str(name)[:80] for name in item.keys() - _FIELDS)
    if unknown:
        raise InputError(f"{where}.{unknown[0]}: unknown field; want only {sorted(_FIELDS)}")
    return LogRule(
        name=_text(item, "name", where),
        pattern=_text(item, "pattern", where),
        verdict=LogVerdict(_word(item, "verdict", [word.value for word in LogVerdict], where)),
        within_s=_seconds(item, "expectedWithinSeconds", where),
        every_s=_seconds(item, "recurringSeconds", where),
        ranks=LogRanks(_word({"ranks": "First", **item}, "ranks", [word.value for word in LogRanks], where)),
    )


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InputError(f"{where}.{name}: want a text, got {str(value)[:80]!r}")
    return value


def _word(item: dict[str, Any], name: str, words: list[str], where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or value not in words:
        raise InputError(f"{where}.{name}: want one of {words}, got {str(value)[:80]!r}")
    return value


def _seconds(item: dict[str, Any], name: str, where: str) -> float | None:
    value = item.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}.{name}: want seconds, got {str(value)[:80]!r}")
    try:
        return float(value)
    except OverflowError:
        raise InputError(f"{where}.{name}: want seconds, got {len(str(value))} digits") from None
