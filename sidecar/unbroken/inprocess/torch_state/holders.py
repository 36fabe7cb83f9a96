"""Who in the script keeps something alive: found through the garbage collector, for a message to people."""

import gc
import sys
import time
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

    Then only C++ holds them, such as a cache of another thread, or the compiler. Unfreezes the garbage collector's
    objects: they would not be seen.
    """
    gc.unfreeze()
    names = {id(vars(module)): f"module {name}" for name, module in list(sys.modules.items()) if name != "__main__"}
    names[id(vars(sys.modules["__main__"]))] = "module __main__"
    variables = _local_variables()
    until_s = time.thread_time() + SEARCH_S
    layer = things
    held_by: dict[int, Any] = {}
    seen = {id(things), id(names), id(variables), id(held_by)}
    while layer:
        if time.thread_time() > until_s or len(layer) > MAX_WIDTH:
            return f"{_path(layer[0], held_by)} in something that was not found in {SEARCH_S:g} s"
        ids = {id(one): one for one in layer}
        seen |= {id(layer), id(ids), *ids}
        for one in layer:
            if (variable := variables.get(id(one))) is not None:
                return f"{_path(one, held_by)} in {variable}"
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


def _local_variables() -> dict[int, str]:
    """Return the names of what functions that run now have in variables, in all threads, by the value's id.

    The garbage collector knows nothing of these: a frame that runs is not among the objects that it shows.
    """
    found: dict[int, str] = {}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            if not _is_ours(frame) and frame.f_locals is not frame.f_globals:
                where = f"{frame.f_code.co_name}() of {frame.f_code.co_filename}"
                found |= {id(value): f"{name} of {where}" for name, value in frame.f_locals.items()}
            frame = frame.f_back
    return found


def _variable(holder: dict[str, Any], held: Any) -> str:
    name = next((key for key, value in holder.items() if value is held), "")
    return f"{name} of " if name else ""


def _path(one: Any, held_by: dict[int, Any]) -> str:
    """Name the types from the thing that is looked for to this one, which holds it in the end."""
    types = [type(one).__name__]
    while (one := held_by.get(id(one))) is not None:
        types.append(type(one).__name__)
    return " in ".join(reversed(types))
