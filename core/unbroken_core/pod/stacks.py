"""The Python stack of a worker's main thread, written at a signal without the GIL: who asks, where it lies, its text.

agent: no progress for most of the soft timeout ──DumpStack──> launcher ──signal──> worker
worker: faulthandler appends to the file `stack-<local rank>` of the pod's folder
agent: reads it when the worker is named as the one that hangs; launcher: copies it into the worker's log
"""

import re
from pathlib import Path

MAX_STACK_BYTES = 64 << 10
MAX_FRAMES = 24
"""Innermost frames that are kept."""
MAX_FRAME_CHARACTERS = 300

_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')


def stack_path(folder: Path, local_rank: int) -> Path:
    """Return the file of a worker's stack."""
    return folder / f"stack-{local_rank}"


def parse_stack(text: str) -> tuple[str, ...]:
    """Return the frames of the newest stack in what faulthandler wrote, "file:line in function", innermost last."""
    frames: list[str] = []
    for line in text.splitlines():
        frame = _FRAME.match(line)
        if frame is not None:
            frames.append("{file}:{line} in {function}".format(**frame.groupdict())[-MAX_FRAME_CHARACTERS:])
        elif line.endswith("(most recent call first):"):
            frames.clear()
    return tuple(reversed(frames[:MAX_FRAMES]))


def bounded(frames: tuple[str, ...]) -> tuple[str, ...]:
    """Return the innermost frames as far as they are kept, whatever was sent."""
    return tuple(frame[-MAX_FRAME_CHARACTERS:] for frame in frames[-MAX_FRAMES:])


def where(frames: tuple[str, ...]) -> str:
    """Return the innermost frames as one clause, "" when there are none; the library's own are left out."""
    own = [frame for frame in frames if "/unbroken/inprocess/" not in frame]
    return f"; stands at {' < '.join(reversed(own[-3:]))}" if own else ""
