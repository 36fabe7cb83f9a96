"""`--log-rules`: the log rules of a job in JSON, with the fields of spec.health.logRules."""

from typing import Any

from unbroken.run.json_lists import read_json_list
from unbroken_core.protocol.log_rules.rules import MAX_RULES, LogRanks, LogRule, LogVerdict
from unbroken_core.vocabulary.errors import InputError

_WHERE = "--log-rules"
_FIELDS = {"name", "pattern", "verdict", "expectedWithinSeconds", "recurringSeconds", "ranks"}


def read_log_rules(given: str) -> tuple[LogRule, ...]:
    """Read a file, or the text itself where it begins with [. Raises InputError that says where and what is wrong."""
    data = read_json_list(_WHERE, given, "rules", MAX_RULES)
    return tuple(_rule(item, f"{_WHERE}[{index}]") for index, item in enumerate(data))


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
