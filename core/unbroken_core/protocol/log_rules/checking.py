"""What is wrong with the log rules of a job, in the words of its spec. Loaded only where a job has rules."""

import re
from collections.abc import Iterator, Sequence
from functools import lru_cache

from unbroken_core.protocol.log_rules.rules import MAX_RULE_NAME, MAX_RULE_S, MAX_RULES, LogRule
from unbroken_core.protocol.log_rules.syntax import PatternError, parse


def rule_violations(rules: Sequence[LogRule]) -> Iterator[str]:
    """Yield one message for each broken rule; nothing when all are sound."""
    if len(rules) > MAX_RULES:
        yield f"health.logRules: want at most {MAX_RULES}, got {len(rules)}"
        return
    names = [rule.name for rule in rules]
    if len(set(names)) < len(names):
        yield f"health.logRules: want different names, got {names}"
    for index, rule in enumerate(rules):
        where = f"health.logRules[{index}]"
        if not re.fullmatch("[a-z]([a-z0-9-]*[a-z0-9])?", rule.name) or len(rule.name) > MAX_RULE_NAME:
            wanted = f"at most {MAX_RULE_NAME} small letters, digits and -, a letter first"
            yield f"{where}.name: want {wanted}, got {rule.name[:80]!r}"
        if rule.within_s is not None and rule.every_s is not None:
            yield f"{where}: want one of expectedWithinSeconds and recurringSeconds, got both"
        for field, seconds in (("expectedWithinSeconds", rule.within_s), ("recurringSeconds", rule.every_s)):
            if seconds is not None and not 1 <= seconds <= MAX_RULE_S:
                yield f"{where}.{field}: want 1 to {MAX_RULE_S} seconds, got {seconds:g}"
        if objection := _objection(rule.pattern):
            yield f"{where}.pattern: {objection}"


@lru_cache(maxsize=256)
def _objection(pattern: str) -> str:
    """Return what is wrong with a pattern, "" for nothing. An operator asks for each plan of a job."""
    try:
        parse(pattern)
    except PatternError as error:
        return str(error)
    return ""
