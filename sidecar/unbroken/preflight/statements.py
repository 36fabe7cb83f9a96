"""What hosts say to their leader, read with suspicion: it may be anything. Pure."""

from dataclasses import dataclass
from typing import Any

_MAX_TEXT = 300
_MAX_CHECKS = 64
_MAX_GBITS = 1e6


@dataclass(frozen=True)
class Arrival:
    """What a host says of itself."""

    name: str
    domains: tuple[str, ...]
    gpus: int
    versions: dict[str, str]
    checks: tuple[dict[str, str], ...]

    @property
    def is_able(self) -> bool:
        """Whether all of its own checks have passed."""
        return all(check["verdict"] == "ok" for check in self.checks)

    @property
    def is_unknown(self) -> bool:
        """Whether none of them has failed, and one had no core to run on."""
        return not self.is_able and all(check["verdict"] in ("ok", "unknown") for check in self.checks)


def read_arrival(value: Any) -> Arrival | None:
    """Return what a host says, cut to what one may say; None where it says something else."""
    try:
        checks = tuple(
            {key: _text(check[key]) for key in ("check", "entity", "verdict", "message")}
            for check in value["checks"][:_MAX_CHECKS]
        )
        versions = {_text(key): _text(each) for key, each in list(value["versions"].items())[:_MAX_CHECKS]}
        domains = tuple(_text(each) for each in value["domains"][:16])
        gpus = value["gpus"]
        if type(gpus) is not int or not 0 <= gpus <= 1024 or not checks:
            return None
        return Arrival(_text(value["name"]), domains, gpus, versions, checks)
    except (KeyError, TypeError, AttributeError):
        return None


@dataclass(frozen=True)
class PairResult:
    """How a pair went, as one of the two says."""

    has_passed: bool
    why: str
    gbits: float
    """A second; 0 where that is not known."""


def read_result(value: Any) -> PairResult | None:
    """Return what a host says of its pair; None where it says something else."""
    try:
        has_passed, why, gbits = value["passed"], _text(value["why"]), value["gbits"]
    except (KeyError, TypeError):
        return None
    if type(has_passed) is not bool or type(gbits) not in (int, float) or not 0 <= gbits <= _MAX_GBITS:
        return None
    return PairResult(has_passed, why, float(gbits))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value[:_MAX_TEXT]
