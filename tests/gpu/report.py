"""What the notes of a job on a GPU say, as rows of one table. Pure: no process, no clock."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from xml.etree.ElementTree import Element

MIB = 1 << 20
GPU_MIB = 64
"""Of device memory, for all processes on it: one group of NCCL takes more, and there are as many as restarts."""
HOST_KIB = 16 * 1024
"""Of the host. The tensor that is reduced has 4 MiB, and a copy or two of it come and go (seen over gloo: 10 MiB)."""
NUM_THREADS = NUM_DESCRIPTORS = 3
MAX_SEEN = 300
"""Characters of a cell."""


class Result(StrEnum):
    """What became of a row."""

    OK = "ok"
    FAILED = "failed"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    phase: str
    seconds: float
    result: Result
    seen: str


def of_tests(suite: Element, seconds: float) -> Row:
    """Return the row of the tests marked gpu, from pytest's own report."""
    counts = {name: sum(int(one.get(name, "0")) for one in suite.iter("testsuite")) for name in _COUNTS}
    passed = counts["tests"] - counts["failures"] - counts["errors"] - counts["skipped"]
    names = [case.get("name", "") for case in suite.iter("testcase") if _is_bad(case)]
    reasons = sorted({one.get("message", "") for one in suite.iter("skipped")})
    bad = counts["failures"] + counts["errors"]
    seen = f"{passed} passed, {bad} failed, {counts['skipped']} skipped"
    told = [one.get("value", "") for one in suite.iter("property") if one.get("name") == "seen"]
    seen += "".join(f"; {text}" for text in (*names, *reasons, *told))
    return Row("tests marked gpu", seconds, Result.FAILED if bad or not passed else Result.OK, seen)


_COUNTS = ("tests", "failures", "errors", "skipped")


def _is_bad(case: Element) -> bool:
    return any(case.find(kind) is not None for kind in ("failure", "error"))


def of_job(notes: Sequence[Mapping[str, Any]], restarts: int, ranks: int, seconds: float, ending: str) -> list[Row]:
    """Return the rows of a job of `tests/gpu/job.py`; `ending`: "" when it ended well, else how."""
    refused = [one for one in notes if one["event"] == "refused"]
    name = f"{ranks} ranks on one device" if ranks > 1 else "1 rank"
    if refused:
        return [Row(name, seconds, Result.NOT_RUN, f"NCCL does not let them: {refused[0]['words']}")]
    works = [one for one in notes if one["event"] == "works"]
    done = {one["rank"] for one in works if one["iteration"] == restarts}
    pids = {one["pid"] for one in works}
    problems = [ending] if ending else []
    if len(done) < ranks:
        problems.append(f"{len(done)} of {ranks} ranks got to restart {restarts}")
    elif len(pids) != ranks:
        problems.append(f"{len(pids)} processes for {ranks} ranks: some were started again")
    seen = "; ".join(problems) or f"{restarts} restarts in the same processes"
    rows = [Row(name, seconds, Result.FAILED if problems else Result.OK, seen)]
    if ranks > 1:
        rows.append(_of_abort(notes))
    return [*rows, _of_recovery(notes, works, restarts), *_of_memory(notes)]


def _of_abort(notes: Sequence[Mapping[str, Any]]) -> Row:
    raised = [one["at_s"] for one in notes if one["event"] == "raised" and one["iteration"] == 0]
    freed = [one for one in notes if one["event"] == "freed"]
    name = "abort of a blocked collective"
    if not raised or not freed:
        return Row(name, 0.0, Result.FAILED, "rank 0 was not freed" if raised else "rank 0 never blocked")
    took_s = freed[0]["at_s"] - raised[0]
    seen = f"rank 0 was free {abs(1000 * took_s):.0f} ms {'before' if took_s < 0 else 'after'} rank 1 raised"
    by = freed[0]["by"]
    seen += f", by {by}" if by else ", by itself: its function went on"
    return Row(name, took_s, Result.OK if by and took_s >= 0 else Result.FAILED, seen)


def _of_recovery(notes: Sequence[Mapping[str, Any]], works: Sequence[Mapping[str, Any]], restarts: int) -> Row:
    raised = {one["iteration"]: one["at_s"] for one in notes if one["event"] == "raised"}
    back: dict[int, float] = {}
    for one in works:
        back[one["iteration"]] = max(back.get(one["iteration"], 0.0), one["at_s"])
    took_s = sorted(back[n + 1] - at_s for n, at_s in raised.items() if n < restarts and n + 1 in back)
    if not took_s:
        return Row("recovery", 0.0, Result.FAILED, "no restart was seen")
    group_s = statistics.median(one["seconds"] for one in works)
    middle, most = 1000 * statistics.median(took_s), 1000 * took_s[-1]
    seen = (
        f"of {len(took_s)}: {middle:.0f} ms from the exception until all ranks have reduced again, most {most:.0f} ms"
    )
    seen += f"; {1000 * group_s:.0f} ms of it make the group and reduce"
    return Row("recovery", sum(took_s), Result.OK, seen)


def _of_memory(notes: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = []
    for rank in sorted({one["rank"] for one in notes}):
        held = [one for one in notes if one["event"] == "holds" and one["rank"] == rank]
        name = f"memory of rank {rank}"
        if len(held) < 2:
            rows.append(Row(name, 0.0, Result.FAILED, f"want 2 samples, got {len(held)}"))
            continue
        first, last = held[0], held[-1]
        grown = {
            "MiB used on the device": ((last["gpu_used"] - first["gpu_used"]) / MIB, GPU_MIB),
            "B allocated by torch": (last["gpu_allocated"] - first["gpu_allocated"], 0),
            "KiB of the host": (last["memory_kib"] - first["memory_kib"], HOST_KIB),
            "threads": (_count(last, "threads") - _count(first, "threads"), NUM_THREADS),
            "descriptors": (_count(last, "descriptors") - _count(first, "descriptors"), NUM_DESCRIPTORS),
        }
        seen = ", ".join(f"{value:+.0f} {what}" for what, (value, _) in grown.items())
        seen = f"from restart {first['iteration']} to {last['iteration']}: {seen}"
        bad = [what for what, (value, margin) in grown.items() if value > margin]
        rows.append(Row(name, last["at_s"] - first["at_s"], Result.FAILED if bad else Result.OK, seen))
    return rows


def of_training(kind: str, calm: Mapping[str, Any], broken: Mapping[str, Any], faults: int, seconds: float) -> Row:
    """Return the row of a training with so many faults, beside the same one without."""
    differing = sorted(
        step for step in calm["steps"].keys() | broken["steps"].keys()
        if calm["steps"].get(step) != broken["steps"].get(step)
    )  # fmt: skip
    problems = []
    if broken["iteration"] < faults:
        problems.append(f"{broken['iteration']} restarts for {faults} faults")
    if differing:
        first = differing[0]
        seen = f"{str(broken['steps'].get(first))[-120:]} for {str(calm['steps'].get(first))[-120:]}"
        problems.append(f"other samples, numbers or losses in {len(differing)} steps, the first {first}: {seen}")
    if calm["digest"] != broken["digest"]:
        problems.append("other weights at the end")
    again = broken["lines"] - len(broken["steps"])
    seen = f"{len(calm['steps'])} steps and {faults} faults, bit for bit as without; {again} steps done twice"
    return Row(f"training: {kind}", seconds, Result.FAILED if problems else Result.OK, "; ".join(problems) or seen)


def _count(held: Mapping[str, Any], what: str) -> int:
    return sum(held[what].values())


def table(title: str, rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [f"# {title}", "", "| phase | seconds | result | seen |", "|---|---:|---|---|"]
    lines += [f"| {row.phase} | {row.seconds:.1f} | {row.result} | {_cell(row.seen)} |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= MAX_SEEN else text[: MAX_SEEN - 3] + "..."
