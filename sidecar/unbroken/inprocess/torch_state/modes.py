"""Switches that torch has for each thread: gradients, autocast, default dtype, and stacks of modes and hooks.

A `with` block or a decorator turns such a switch back when it is left. An interruption may come in between, after the
switch was turned and before Python knows that the block was entered: nobody turns it back then. With gradients off
every later iteration fails in `backward`; with autocast on, or another default dtype, it would go on and be wrong.
"""

import sys
from dataclasses import dataclass
from typing import Any

from unbroken.inprocess.exception import StaleStateError

_DEVICES = ("cpu", "cuda")
_MAX_DEPTH = 1_000


@dataclass(frozen=True)
class Modes:
    """How the switches of this thread stand; by default as in a new process."""

    grad: bool = True
    dtype: Any = None
    """None: torch's own."""
    autocast: tuple[tuple[bool, Any], ...] = ()
    """(whether it is on, its dtype) of each device; none: off."""
    autocast_cache: bool = True
    autocast_depth: int = 0
    """Blocks that are entered. The last one that is left empties the cache of weights in another dtype: with one too
    many nobody does, and training goes on with the weights of an earlier step."""
    function_modes: int = 0
    dispatch_modes: int = 0
    saves_tensors_elsewhere: bool = False
    inference: bool = False

    @classmethod
    def read(cls) -> "Modes":
        """Return those of this thread."""
        torch = sys.modules.get("torch")
        if torch is None:
            return cls()
        return cls(
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            tuple((torch.is_autocast_enabled(name), torch.get_autocast_dtype(name)) for name in _DEVICES),
            torch.is_autocast_cache_enabled(),
            _autocast_depth(torch),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
            torch.is_inference_mode_enabled(),
        )

    def restore(self) -> None:
        """Turn the switches of this thread back. Raises StaleStateError for what cannot be turned."""
        torch = sys.modules.get("torch")
        if torch is None or self.read() == self:
            return
        torch.set_grad_enabled(self.grad)
        torch.set_default_dtype(self.dtype or torch.float32)
        for index, name in enumerate(_DEVICES):
            is_on, dtype = self.autocast[index] if self.autocast else (False, torch.get_autocast_dtype(name))
            torch.set_autocast_enabled(name, is_on)
            torch.set_autocast_dtype(name, dtype)
        torch.set_autocast_cache_enabled(self.autocast_cache)
        torch.clear_autocast_cache()
        for _ in range(min(max(_autocast_depth(torch) - self.autocast_depth, 0), _MAX_DEPTH)):
            torch.autocast_decrement_nesting()
        for _ in range(_MAX_DEPTH):
            now = self.read()
            if now.function_modes > self.function_modes:
                torch._C._pop_torch_function_stack()
            elif now.dispatch_modes > self.dispatch_modes:
                torch.utils._python_dispatch._pop_mode()
            elif now.saves_tensors_elsewhere and not self.saves_tensors_elsewhere:
                torch._C._autograd._pop_saved_tensors_default_hooks()
            else:
                break
        now = self.read()
        for name in ("function_modes", "dispatch_modes", "saves_tensors_elsewhere", "inference"):
            if getattr(now, name) != getattr(self, name):
                raise StaleStateError(
                    f"torch's {name.replace('_', ' ')} of this thread: want {getattr(self, name)}, as before the call, "
                    f"got {getattr(now, name)}"
                )


def _autocast_depth(torch: Any) -> int:
    depth: int = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth
