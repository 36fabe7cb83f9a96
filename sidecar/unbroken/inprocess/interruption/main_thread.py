"""Where the main thread stands, told by another thread: its frames, and what it is calling outside of Python.

`work.wait()` and `tensor.item()` have no frame of their own: in a stack they look like any line of the script. So the
name of what is called is read from the bytecode. Nothing is opened or imported: what hangs may be the file system.
"""

import dis
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from unbroken.inprocess.interruption.gate import Gate
from unbroken.inprocess.torch_state.device import devices_in_use
from unbroken.inprocess.torch_state.group_states import read_groups
from unbroken_core.pod.activities import read
from unbroken_core.pod.pod_messages import MainThread
from unbroken_core.pod.stacks import MAX_FRAME_CHARACTERS, MAX_FRAMES
from unbroken_core.protocol.bounds import MAX_PLACE
from unbroken_core.vocabulary.reasons import Doing

_OWN_THREADS = "unbroken-"
_WAITS = frozenset(
    (
        "allgather",
        "allreduce",
        "alltoall",
        "barrier",
        "broadcast",
        "cpu",
        "gather",
        "get",
        "is_completed",
        "item",
        "monitored_barrier",
        "numpy",
        "recv",
        "reduce",
        "reduce_scatter",
        "result",
        "scatter",
        "send",
        "synchronize",
        "tolist",
        "wait",
        "wait_event",
        "wait_stream",
        "wait_tensor",
    )
)
"""Calls into C++ that may wait for other ranks, whatever they are called on."""
_LOADS = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_DEREF")
_CALLS = ("CALL", "PRECALL")
_MAX_THREADS = 256
_MAX_CODE_BYTES = 1 << 16
"""Of a function whose bytecode is read: longer ones take milliseconds."""
_MAX_KNOWN = 1024
_known: dict[tuple[int, ...], tuple[Doing, tuple[CodeType, ...]]] = {}
"""What the main thread does where it stands, by the identity of codes and the offset in each. Of one thread."""


def main_thread(iteration: int, *, is_leaving: bool) -> MainThread | None:
    """Return where the main thread stands; None when it has no frames. From any thread, with the GIL."""
    frames_by_thread = sys._current_frames()
    ident = threading.main_thread().ident or 0
    innermost = frames_by_thread.get(ident)
    if innermost is None:
        return None
    stack = _stack(innermost)
    beside, hook = _others(frames_by_thread, ident)
    if hook is not None and read(MainThread(iteration, stack), True).what == "backward":
        # A hook of the script, which torch's engine runs in a thread of its own.
        innermost, stack = hook, _stack(hook)
    call, may_wait = _calls(innermost)
    sequence, num_groups, groups = read_groups()
    return MainThread(
        iteration, stack, call, may_wait, beside, _is_raising(ident), is_leaving, sequence, num_groups, groups
    )


def is_waiting() -> bool:
    """Return whether the main thread, which sleeps, may wait for other ranks, or nobody knows. From any thread."""
    frames_by_thread = sys._current_frames()
    ident = threading.main_thread().ident or 0
    innermost = frames_by_thread.get(ident)
    if innermost is None:
        return True
    doing = _doing(innermost)
    if doing is not Doing.OWN_CODE:
        return doing in (Doing.COLLECTIVE, Doing.WAITING, Doing.UNKNOWN)
    # It may wait for another thread, which waits for other ranks.
    return bool(_others(frames_by_thread, ident)[0])


def _doing(innermost: FrameType) -> Doing:
    """Return what the main thread does by its frames, which are mostly the same as at the last look."""
    codes: list[CodeType] = []
    key: list[int] = []
    frame: FrameType | None = innermost
    while frame is not None and len(codes) < MAX_FRAMES:
        codes.append(frame.f_code)
        key += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    known = _known.get(tuple(key))
    if known is None:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        call, may_wait = _calls(innermost)
        doing = read(MainThread(0, _stack(innermost), call, may_wait), True).doing
        # The codes keep their identity as long as they are here.
        known = _known[tuple(key)] = doing, tuple(codes)
    return known[0]


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    found: list[str] = []
    while frame is not None and len(found) < MAX_FRAMES:
        code = frame.f_code
        found.append(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"[-MAX_FRAME_CHARACTERS:])
        frame = frame.f_back
    return tuple(reversed(found))


def _others(frames_by_thread: dict[int, FrameType], main: int) -> tuple[str, FrameType | None]:
    """Return the collective in which another thread waits, and the innermost frame of a thread of torch's engine."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    hook = None
    for ident, frame in list(frames_by_thread.items())[:_MAX_THREADS]:
        thread = threads.get(ident)
        if ident == main or _is_own(thread, frame):
            continue
        reading = read(MainThread(0, _stack(frame)), True)
        if reading.doing is Doing.COLLECTIVE:
            return reading.what, hook
        if thread is None or isinstance(thread, threading._DummyThread):
            hook = frame
    return "", hook


def _is_own(thread: threading.Thread | None, frame: FrameType) -> bool:
    if thread is not None:
        return thread.name.startswith(_OWN_THREADS)
    outermost = frame
    while outermost.f_back is not None:
        outermost = outermost.f_back
    return outermost.f_code is Gate.keep_signalling.__code__


def _is_raising(ident: int) -> bool:
    exceptions = getattr(sys, "_current_exceptions", None)
    if exceptions is None:
        return False  # Before Python 3.11.
    found = exceptions().get(ident)
    return found is not None and found != (None, None, None)


# -------------------------------------------------------------------------------------------------- what it is calling


def _calls(innermost: FrameType) -> tuple[str, bool | None]:
    """Return what is called outside of Python, and whether it may wait for others; None: not known.

    Below torch's own frames the script's call says more: `torch.ops.ns.wait_tensor(x)` ends in a frame of torch.
    """
    on_device = has_device()
    found: list[tuple[str, bool | None]] = []
    frame: FrameType | None = innermost
    while frame is not None and len(found) < MAX_FRAMES:
        names = _called(frame.f_code, frame.f_lasti)
        found.append(_judge(names, on_device))
        if "/torch/" not in frame.f_code.co_filename.replace("\\", "/"):
            break
        frame = frame.f_back
    for wanted in (True, None):
        name = next((name for name, may_wait in found if may_wait is wanted), None)
        if name is not None:
            return name, wanted
    return found[0]


def _judge(names: tuple[str, ...], on_device: bool) -> tuple[str, bool | None]:
    """Return the name of a call, from the dotted name of what is called, and whether it may wait for other ranks."""
    if not names:
        # An operator: on a device it may wait for the device, which may wait for other ranks.
        return "", None if on_device else False
    waits = next((name for name in reversed(names) if name in _WAITS or "c10d" in name), None)
    if waits is not None:
        return waits[:MAX_PLACE], True
    name = names[-1][:MAX_PLACE]
    torch: Any = sys.modules.get("torch")
    is_of_torch = on_device and torch is not None and (hasattr(torch.Tensor, name) or "torch" in names)
    return name, is_of_torch


def _called(code: CodeType, last: int) -> tuple[str, ...]:
    """Return the dotted name of what the instruction at this offset calls; () when it calls nothing.

    Where Python does not know the columns of its code, all names of the line.
    """
    if len(code.co_code) > _MAX_CODE_BYTES:
        return ()
    instructions = list(dis.get_instructions(code))
    at = next((index for index, each in enumerate(instructions) if each.offset >= last), None)
    if at is None:
        return ()
    call = instructions[at]
    positions = getattr(call, "positions", None)
    if positions is None or positions.col_offset is None:
        return tuple(_names_of_line(instructions, at))
    if not call.opname.startswith(_CALLS):
        return ()
    start, end = (positions.lineno, positions.col_offset), (positions.end_lineno, positions.end_col_offset)
    names = []
    for each in instructions[:at]:
        where = getattr(each, "positions", None)
        if where is None or each.opname not in _LOADS or (where.lineno, where.col_offset) != start:
            continue
        if (where.end_lineno, where.end_col_offset) < end and isinstance(each.argval, str):
            names.append(each.argval)
    return tuple(names)


def _names_of_line(instructions: list[dis.Instruction], at: int) -> Iterator[str]:
    begin = next((i for i in range(at, -1, -1) if instructions[i].starts_line), 0)
    for each in instructions[begin : at + 1]:
        if each.opname in _LOADS and isinstance(each.argval, str):
            yield each.argval


# -------------------------------------------------------------------------------------------------------------- torch


def has_device() -> bool:
    """Return whether the script uses a GPU or its like. Imports nothing."""
    return bool(devices_in_use())
