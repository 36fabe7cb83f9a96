"""Storage: whether each path that the job names answers, can be written, and has room. Looked at by a child."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from unbroken.watch.checks.check import Judgement, quantity, verdicts
from unbroken.watch.child import CommandRunner
from unbroken.watch.counters import Looks, look_again
from unbroken.watch.errors import NotCheckedError
from unbroken_core.vocabulary.findings import NOT_TOLD, Finding, Verdict

STORAGE: Final = "storage"
MAX_PATHS: Final = 8
_TIMEOUT_S: Final = 10.0
_LEAST_SHARE: Final = 0.02
_PROBE: Final = (
    "import os,sys;s=os.statvfs(sys.argv[1]);next(os.scandir(sys.argv[1]),0);"
    "print(s.f_blocks,s.f_bavail,s.f_files,s.f_favail,int(bool(s.f_flag&os.ST_RDONLY)))"
)
"""It writes nothing: the storage is the job's."""


@dataclass(frozen=True)
class PathSample:
    """What a child has seen of one path."""

    state: str
    """answered, silent, absent or unknown."""
    free: float = 1.0
    """Share of the blocks, or of the files, that are left."""
    is_read_only: bool = False


@dataclass(frozen=True)
class StorageHistory:
    """What is remembered of the samples before."""

    looks: Looks
    answered: frozenset[str]
    writable: frozenset[str]


class StorageReader:
    """Samples the paths, one after the other."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._children = {path: CommandRunner() for path in paths[:MAX_PATHS]}
        self.cpu_s = 0.0
        """CPU time of the children so far."""

    def sample(self) -> dict[str, PathSample]:
        """Raises NotCheckedError where no path is named."""
        if not self._children:
            raise NotCheckedError("no path is named (health.storage)")
        return {path: self._look(path, child) for path, child in self._children.items()}

    def _look(self, path: str, child: CommandRunner) -> PathSample:
        command = [sys.executable, "-I", "-S", "-c", _PROBE, path]
        try:
            answer = child.run(command, _TIMEOUT_S, {"PATH": os.environ.get("PATH", "")})
        except OSError:
            return PathSample("unknown")
        self.cpu_s += answer.cpu_s
        if answer.exit_code is None:
            return PathSample("silent")
        return read_answer(answer.exit_code, answer.output)


def read_answer(exit_code: int, output: str) -> PathSample:
    """Return what the child's words say."""
    words = output.split()
    if exit_code != 0:
        return PathSample("absent" if exit_code > 0 else "unknown")
    if len(words) != 5 or not all(word.isascii() and word.isdigit() and len(word) <= 20 for word in words):
        return PathSample("unknown")
    blocks, free_blocks, files, free_files, read_only = map(int, words)
    shares = [free / total for free, total in ((free_blocks, blocks), (free_files, files)) if total]
    return PathSample("answered", min(shares, default=1.0), bool(read_only))


def judge_storage(history: StorageHistory | None, sample: Mapping[str, PathSample]) -> Judgement:
    """Return what the paths say."""
    before = history or StorageHistory({}, frozenset(), frozenset())
    answered = before.answered | {path for path, seen in sample.items() if seen.state == "answered"}
    writable = before.writable | {
        path for path, seen in sample.items() if seen.state == "answered" and not seen.is_read_only
    }
    amiss = {(path, code) for path, seen in sample.items() if (code := _code(path, seen, answered, writable))}
    after = StorageHistory(look_again(before.looks, amiss), answered, writable)
    found = [_finding(path, code, sum(look)) for (path, code), look in sorted(after.looks.items())]
    unknown = sorted(
        path
        for path, seen in sample.items()
        if seen.state != "answered" and (path, _code(path, seen, answered, writable)) not in amiss
    )
    if unknown:
        text = f"nothing can be said of {', '.join(unknown)}"[:300]
        found.append(Finding(STORAGE, "", Verdict.UNKNOWN, NOT_TOLD, message=text))
    return Judgement(verdicts(STORAGE, found, quantity(len(answered), "path")), after)


def _code(path: str, seen: PathSample, answered: frozenset[str], writable: frozenset[str]) -> str:
    if seen.state == "silent":
        return "storage-silent"
    if seen.state == "absent":
        return "storage-absent" if path in answered else ""
    if seen.state != "answered":
        return ""
    if seen.is_read_only and path in writable:
        return "storage-read-only"
    return "storage-full" if seen.free < _LEAST_SHARE else ""


def _finding(path: str, code: str, seen: int) -> Finding:
    verdict, text = {
        "storage-silent": (Verdict.SUSPECT, f"does not answer within {_TIMEOUT_S:.0f} s"),
        "storage-absent": (Verdict.SUSPECT, "could be read before, and cannot any more"),
        "storage-read-only": (Verdict.SUSPECT, "could be written before, and cannot any more"),
        "storage-full": (Verdict.DEGRADED, f"less than {_LEAST_SHARE:.0%} of it is free"),
    }[code]
    return Finding(STORAGE, path, verdict, code, "look at the storage", text, seen)
