"""Who in the script keeps something alive: found through the garbage collector, for a message to people."""

import gc
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

SEARCH_S = 1.0
MAX_WIDTH = 256
"""The search takes at most so much processor time, and follows at most so many holders at a time: each look goes
through the whole heap."""

_COMPILER = ("torch._subclasses", "torch._dynamo", "torch._functorch", "torch._guards", "torch._inductor", "torch.fx")
"""What objects of these modules hold is left of a compilation. Cycles of it that lead through C++ stay for ever; no
script reaches them."""


def find_holder(things: list[Any]) -> str:
    """Return by what path a module or a running function keeps one of these; "" when neither does.

    Then only C++ holds them, such as a cache of another thread, or the compiler. A search that takes too long counts as
    one that has found somebody. Unfreezes the garbage collector's objects: they would not be seen.
    """
    gc.unfreeze()
    names = {id(vars(module)): f"module {name}" for name, module in list(sys.modules.items())}
    names |= {id(frame): f"{frame.f_code.co_name}() of {frame.f_code.co_filename}" for frame in _frames_of_others()}
    until_s = time.thread_time() + SEARCH_S
    layer = things
    held_by: dict[int, Any] = {}
    seen = {id(things), id(names), id(held_by)}
    while layer:
        if time.thread_time() > until_s or len(layer) > MAX_WIDTH:
            return f"{_path(layer[0], held_by)} in something that was not found in {SEARCH_S:g} s"
        ids = {id(one): one for one in layer}
        seen |= {id(layer), id(ids), *ids}
        found: list[Any] = []
        for one in gc.get_referrers(*layer):
            if id(one) in seen or _is_ours(one):
                continue
            inner = next(held for held in gc.get_referents(one) if id(held) in ids)
            held_by[id(one)] = inner
            if (name := names.get(id(one))) is not None:
                return f"{_path(inner, held_by)} in {_variable(one, inner)}{name}"
            found.append(one)
        layer = found
    return ""


def _is_ours(one: Any) -> bool:
    """Return whether this is part of the search itself, or of the compiler."""
    if isinstance(one, FrameType):
        return "/unbroken/inprocess/" in one.f_code.co_filename
    module = getattr(one, "__module__", None) or type(one).__module__
    return isinstance(module, str) and module.startswith(_COMPILER)


def _frames_of_others() -> Iterator[FrameType]:
    """Return the frames that run now, in all threads, but for the library's own."""
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if not _is_ours(frame):
                yield frame
            frame = frame.f_back


def _variable(holder: Any, held: Any) -> str:
    values = holder if isinstance(holder, dict) else holder.f_locals
    name = next((key for key, value in values.items() if value is held), "")
    return f"{name} of " if name else ""


def _path(one: Any, held_by: dict[int, Any]) -> str:
    """Name the types from the thing that is looked for to this one, which holds it in the end."""
    types = [type(one).__name__]
    while (one := held_by.get(id(one))) is not None:
        types.append(type(one).__name__)
    return " in ".join(reversed(types))
