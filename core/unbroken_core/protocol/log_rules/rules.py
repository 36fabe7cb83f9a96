"""What a job may ask of the lines that its workers print."""

from dataclasses import dataclass

from unbroken_core.vocabulary.reasons import Word

MAX_RULES = 16
MAX_RULE_NAME = 40
MAX_PATTERN = 256
"""Characters."""
MAX_RULE_S = 86_400
MAX_SHOWN = 200
"""Characters of a line that are told."""


class LogVerdict(Word):
    """What a rule that speaks means."""

    HANG = "hang"
    """Somebody hangs: as after timeouts.softSeconds, and who it is is judged by what all ranks do."""
    SLOW = "slow"
    """The condition Straggling says so; nothing else happens."""
    FATAL_RESTART = "fatal-restart"
    """A fault of the worker: the iteration ends, and the ladder says how it goes on."""
    FATAL_STOP = "fatal-stop"
    """The job fails."""


class LogRanks(Word):
    """Of which ranks a line is expected."""

    FIRST = "First"
    """Rank 0."""
    EVERY = "Every"


@dataclass(frozen=True)
class LogRule:
    """One rule. Without `within_s` and `every_s` it speaks when a line of a worker matches."""

    name: str
    pattern: str
    """In the language of `syntax`; it may be anywhere in the line."""
    verdict: LogVerdict
    within_s: float | None = None
    """It speaks when no line has matched so long after the worker entered an iteration."""
    every_s: float | None = None
    """It speaks when a line of this iteration has matched, and none for so long since."""
    ranks: LogRanks = LogRanks.FIRST
    """From whom lines are expected; without meaning where a match speaks."""

    @property
    def is_on_match(self) -> bool:
        """Whether a match speaks, and not its absence."""
        return self.within_s is None and self.every_s is None
