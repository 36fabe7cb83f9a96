"""Code that torch.compile made: it has ranks, sizes and names of groups in it as constants."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

logger = logging.getLogger(__name__)


class CompiledCode:
    """Dropped where something that may be in it has changed; kept otherwise, since it costs minutes to make."""

    def __init__(self) -> None:
        self._ranks_by_name: dict[str, tuple[int, ...]] = {}
        """What each name of a group has meant since code was dropped last."""

    def drop(self, reason: str) -> None:
        """Let every function be compiled again when it is called; does nothing where the compiler was never loaded."""
        self._ranks_by_name.clear()
        if "torch._dynamo" not in sys.modules:
            return
        import torch  # noqa: PLC0415 - the package's import must stay cheap

        logger.info("compiled code dropped: reason=%s", reason)
        torch.compiler.reset()
        # The compiler's reset leaves these: results by the shapes of functions, which hold all that was compiled.
        shapes = getattr(sys.modules.get("torch.fx.experimental.symbolic_shapes"), "ShapeEnv", None)
        for method in vars(shapes or object).values():
            if hasattr(method, "cache_clear"):
                method.cache_clear()

    @contextmanager
    def named_groups(self) -> Iterator[None]:
        """Watch the names of groups: each iteration begins to count again, and a name may come to mean other ranks.

        Compiled collectives find their group by name. Does nothing with a torch that names groups elsewhere.
        """
        c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
        original = getattr(c10d, "_process_group_name", None)
        if original is None:
            yield
            return

        def name_group(ranks: Any, *args: Any, **options: Any) -> Any:
            name = original(ranks, *args, **options)
            meant = tuple(ranks or ())
            if self._ranks_by_name.setdefault(str(name), meant) != meant:
                self.drop(f"group {name} was of other ranks")
                self._ranks_by_name[str(name)] = meant
            return name

        c10d._process_group_name = name_group
        try:
            yield
        finally:
            c10d._process_group_name = original
