"""What is said of a comparison, for people and for programs. Pure."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unbroken.comparing.comparison import MAX_NAMES_TOLD, Compared, FirstDifference, Sameness
from unbroken_core.protocol.messages import Recovery
from unbroken_core.vocabulary.plurals import counted

_SUMS = (
    "MKL's rounding (set MKL_CBWR=COMPATIBLE), DistributedDataParallel's order of sums (pass "
    "find_unused_parameters=True)"
)
_CALM = f"  usual causes: random numbers that are not seeded, those of a loader's workers among them; {_SUMS}"
_CALM_VALUES = "  usual causes: random numbers that are not seeded, a time of day, how long something took, a path"
_AFTER = f"  usual causes: {_SUMS}; else state that is in no checkpoint, and what follows from it"
_AFTER_VALUES = "  usual cause: state that is in no checkpoint"


@dataclass(frozen=True)
class RunReport:
    """One run, and how it compares with the first."""

    name: str
    compared: Compared
    recoveries: tuple[Recovery, ...] = ()


def outcome_of(reports: Sequence[RunReport], problem: str) -> Sameness:
    """Return what all of it comes to: a difference counts more than what could not be compared."""
    found = {one.compared.outcome for one in reports}
    if Sameness.DIFFERENT in found:
        return Sameness.DIFFERENT
    return (
        Sameness.NOT_COMPARABLE if problem or Sameness.NOT_COMPARABLE in found or len(reports) < 2 else Sameness.EQUAL
    )


def lines_of(reports: Sequence[RunReport], problem: str) -> list[str]:
    """Return the lines for people; `problem`: why there are no more runs."""
    lines = [line for one in reports for line in _lines_of_run(one)]
    if problem:
        lines.append(problem)
    words = {
        Sameness.EQUAL: f"equal: what was saved after each fault is what calm runs save, bit for bit{_but(reports)}",
        Sameness.DIFFERENT: "DIFFERENT: after a fault the training did not go on as without one",
        Sameness.NOT_COMPARABLE: "NOT COMPARABLE: nothing is proved",
    }
    return [*lines, words[outcome_of(reports, problem)]]


def value_of(reports: Sequence[RunReport], problem: str) -> dict[str, Any]:
    """Return the same for programs."""
    outcome = outcome_of(reports, problem)
    runs = []
    for one in reports:
        fields = asdict(one.compared)
        if fields["difference"] is not None:
            names = fields["difference"]["names"]
            fields["difference"] |= {"names": names[:MAX_NAMES_TOLD], "num_names": len(names)}
        recoveries = [_recovered(each) for each in one.recoveries]
        noise = {"noise": fields["noise"][:MAX_NAMES_TOLD], "num_noise": len(fields["noise"])}
        runs.append(
            {"run": one.name, **fields, **noise, "outcome": one.compared.outcome.name.lower(), "recoveries": recoveries}
        )
    return {"outcome": outcome.name.lower(), "exit_code": outcome.value, "problem": problem, "runs": runs}


def _lines_of_run(one: RunReport) -> list[str]:
    compared = one.compared
    word = {
        Sameness.EQUAL: "equal",
        Sameness.DIFFERENT: "DIFFERENT",
        Sameness.NOT_COMPARABLE: "NOT COMPARABLE",
    }
    lines = [f"{one.name}: {word[compared.outcome]}{f': {compared.reason}' if compared.reason else ''}"]
    if compared.struck is not None:
        struck = compared.struck
        lines.append(
            f"  rank {struck.rank} was hit in iteration {struck.iteration}, before it saved step {struck.step}"
        )
    lines += [f"  {_recovered(each)}" for each in one.recoveries]
    if compared.restored is not None and compared.restored.step >= 0:
        num_steps = max(compared.struck.step - compared.restored.step, 0) if compared.struck is not None else 0
        lines.append(
            f"  went on from step {compared.restored.step} ({compared.restored.source}): "
            f"{counted(num_steps, 'step')} made again"
        )
    extent = compared.extent
    if extent.num_parts:
        again = f" after the fault, {extent.num_redone} of them saved before it, too"
        lines.append(
            f"  compared {counted(extent.num_steps, 'step')}{again if compared.struck else ''}: "
            f"{counted(extent.num_parts, 'part')} with {counted(extent.num_tensors, 'tensor')} and "
            f"{counted(extent.num_values, 'other value')}"
        )
    if compared.difference is not None:
        lines += [*_lines_of_difference(compared.difference), _causes(compared, compared.difference)]
    if compared.noise and compared.struck:
        lines.append(f"  left out, since calm runs differ in them: {_some(compared.noise)}")
    return lines


def _but(reports: Sequence[RunReport]) -> str:
    return ", but for what is left out" if any(one.compared.noise for one in reports) else ""


def _causes(compared: Compared, difference: FirstDifference) -> str:
    if difference.num_tensors:
        return _AFTER if compared.struck else _CALM
    return _AFTER_VALUES if compared.struck else _CALM_VALUES


def _lines_of_difference(difference: FirstDifference) -> list[str]:
    ranks = ", ".join(map(str, difference.ranks[:MAX_NAMES_TOLD]))
    more = f" and {len(difference.ranks) - MAX_NAMES_TOLD} more" if len(difference.ranks) > MAX_NAMES_TOLD else ""
    return [
        f"  first difference: step {difference.step}, rank {ranks}{more}; "
        f"{counted(difference.num_steps, 'step differs', 'steps differ')}",
        f"  {counted(len(difference.names), 'value')} there, {counted(difference.num_tensors, 'tensor')} among them: "
        f"{_some(difference.names)}",
    ]


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES_TOLD} more" if len(names) > MAX_NAMES_TOLD else ""
    return f"{', '.join(names[:MAX_NAMES_TOLD])}{more}"


def _recovered(recovery: Recovery) -> str:
    sizes = f"{recovery.world_size_before} -> {counted(recovery.world_size_after, 'rank')}"
    how = f"rung {recovery.rung}" if recovery.ended_at and recovery.rung is not None else "not recovered"
    return f"{recovery.cause}: {how}, iteration {recovery.iteration_before} -> {recovery.iteration_after}, {sizes}"
