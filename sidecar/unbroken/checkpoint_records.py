"""What `unbroken compare` asks of a worker, and what the worker writes for it: one line of JSON for each checkpoint.

Standard library only. Who reads the lines trusts none of them: the script could write there as well.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

FOLDER = "UNBROKEN_RECORD"
"""Variable with the folder that a worker writes to; without it nothing is recorded."""
STRIKE = "UNBROKEN_RECORD_STRIKE"
"""Variable with the one fault of this run."""
MAX_FILE_BYTES = 256 << 20
"""Of one process. After that it only says that there was more."""
MAX_NAMES = 20_000
"""The values beyond these are one."""
MAX_NAME = 200
MAX_WORLD_SIZE = 1 << 20
"""Of a world that a file tells of: who reads it counts its ranks."""
MAX_LINE_BYTES = 16 << 20
DIGEST_CHARACTERS = 16
SUFFIX = ".lines"
FULL = b"full\n"
"""The last line of a file that has no room for more."""
STRUCK = "struck"
"""A file that is there once the fault has begun: nobody else makes it again."""
KINDS = ("exception", "kill", "hang", "lose-pod")


@dataclass(frozen=True)
class FaultAtStep:
    """A fault: the worker with this rank is hit once, at the first save from this step on, before it is made."""

    kind: str
    rank: int
    step: int

    def text(self) -> str:
        """Return the value of the variable."""
        return f"{self.kind}:{self.rank}:{self.step}"


def read_strike(text: str) -> FaultAtStep | None:
    """Return what a variable says; None of anything else."""
    kind, *numbers = text.split(":")
    if kind not in KINDS or len(numbers) != 2 or not all(one.isdecimal() and len(one) < 19 for one in numbers):
        return None
    return FaultAtStep(kind, int(numbers[0]), int(numbers[1]))


@dataclass(frozen=True)
class SavedPart:
    """One rank's part of a checkpoint, as it was when it was saved."""

    iteration: int
    rank: int
    world_size: int
    step: int
    names: tuple[str, ...]
    """Tensors of floating-point numbers first, then other tensors, then other values."""
    num_floats: int
    num_tensors: int
    """All of them, these first ones included."""
    digests: str
    """Of each name, one after the other."""
    skipped: str = ""
    """Why the memory did not take it; "" where it did."""


@dataclass(frozen=True)
class LoadedStep:
    """What a rank began an iteration with."""

    iteration: int
    rank: int
    source: str
    step: int
    """-1: nothing was there."""


@dataclass(frozen=True)
class Struck:
    """The fault is about to happen."""

    iteration: int
    rank: int
    step: int
    """Whose save it came before."""
    pod: str = ""


Line = SavedPart | LoadedStep | Struck
_TYPES: dict[str, type[Line]] = {"saved": SavedPart, "loaded": LoadedStep, "struck": Struck}


class LineWriter:
    """Lines of one process. Names are written again only when they are others."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] | None = None

    def line(self, one: Line) -> bytes:
        """Return a line with its end."""
        kind = next(name for name, each in _TYPES.items() if each is type(one))
        data = asdict(one)
        if isinstance(one, SavedPart):
            if one.names == self._names:
                del data["names"]
            self._names = one.names
        return json.dumps({kind: data}, separators=(",", ":")).encode() + b"\n"


class LineReader:
    """The same the other way round."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()

    def read(self, line: bytes) -> Line:
        """Return what a line says. Raises ValueError."""
        try:
            ((kind, data),) = json.loads(line).items()
            made = _TYPES[kind]
            if made is SavedPart:
                data = {**data, "names": tuple(data.get("names", self._names))}
            one = made(**data)
        except (AttributeError, KeyError, RecursionError, TypeError) as error:
            raise ValueError(f"not a line of a record: {error}") from error
        _check(one)
        if isinstance(one, SavedPart):
            self._names = one.names
        return one


def _check(one: Line) -> None:
    """Raise ValueError for what no worker writes."""
    numbers: list[Any] = [one.iteration, one.rank]
    texts: list[Any] = []
    if isinstance(one, SavedPart):
        numbers += [one.world_size, one.step, one.num_floats, one.num_tensors]
        texts += [one.digests, one.skipped, *one.names]
    elif isinstance(one, LoadedStep):
        numbers += [one.step + 1] if type(one.step) is int else [None]
        texts += [one.source]
    else:
        numbers += [one.step]
        texts += [one.pod]
    if not all(type(each) is int and 0 <= each <= 1 << 62 for each in numbers):
        raise ValueError("a number is none")
    if not all(isinstance(each, str) for each in texts):
        raise ValueError("a text is none")
    if isinstance(one, SavedPart) and not (
        one.rank < one.world_size <= MAX_WORLD_SIZE
        and one.num_floats <= one.num_tensors <= len(one.names)
        and len(one.digests) == DIGEST_CHARACTERS * len(one.names)
    ):
        raise ValueError("its numbers do not fit together")
