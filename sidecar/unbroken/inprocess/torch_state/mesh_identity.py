"""Makes the meshes of one iteration unlike those of every other, and checks that torch sees the difference.

`DeviceMesh` compares ranks, layout, names of dimensions and `_thread_id`, a number by which torch tells apart the
meshes of ranks that are threads of one process. No iteration has meshes of another one's, either: the number of the
iteration, the same on all ranks, goes there. The first iteration of a job leaves it as torch has it.
"""

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from unbroken.inprocess.exception import StaleStateError
from unbroken.inprocess.torch_state.caches import DTENSOR

logger = logging.getLogger(__name__)

STAMP = "_thread_id"


class Meshes:
    """The meshes that were made in this process during the wrapped call."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[Any]] = []
        """Those of the iteration that runs, or was left last, and older ones that were alive when it began."""
        self.are_made = False
        """Whether the iteration that runs, or was left last, made a mesh."""
        self._stamp: int | None = None
        self.has_changed = False
        """Whether rank or world are others than in the iteration before."""
        self.problem = ""
        """What the check found in this iteration; every mesh that is made from then on raises it again."""
        self._has_run = False
        self._is_checked = True
        """Whether a mesh of this iteration was checked."""

    def left_over(self) -> list[Any]:
        """Return those that are still alive; between two iterations there should be none."""
        return [mesh for made in self._made if (mesh := made()) is not None]

    @contextmanager
    def stamped(self, iteration: int, has_run: bool) -> Iterator[None]:
        """Stamp what is made meanwhile; does nothing with a torch that has no meshes.

        `has_run`: this process has run an earlier iteration, from which something may have stayed.
        """
        cls: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", None)
        self._made = [made for made in self._made if made() is not None]
        self.are_made = False
        self._stamp = iteration or None
        self._has_run, self._is_checked = has_run, False
        self.has_changed, self.problem = False, ""
        if not isinstance(cls, type):
            yield
            return
        original = {name: cls.__dict__.get(name) for name in ("__init__", "__setstate__", "__getstate__")}
        for name, method in original.items():
            if method is not None:
                setattr(cls, name, _unstamped(method) if name == "__getstate__" else self._watched(method))
        try:
            yield
        finally:
            for name, method in original.items():
                if method is not None:
                    setattr(cls, name, method)

    def _watched(self, method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def make(mesh: Any, *args: Any, **options: Any) -> None:
            method(mesh, *args, **options)
            self._take(mesh, is_new=method.__name__ == "__init__")

        return make

    def _take(self, mesh: Any, is_new: bool) -> None:
        if not is_new and not _is_as_made_now(mesh):
            # Unpickled, and of another rank or world: unlike those of this iteration, whatever it is used for.
            return
        if getattr(mesh, STAMP, None) is None or not is_new:
            setattr(mesh, STAMP, self._stamp)
            mesh._hash = None
        self._made.append(weakref.ref(mesh))
        self.are_made = True
        if is_new and not self._is_checked and is_of_this_rank(mesh):
            self._is_checked = True
            problem = check(mesh, may_fail=not self.has_changed)
            # In the first iteration for what it leaves in torch's caches: the next ones see whether they find it.
            self.problem = problem if self._has_run else ""
        if self.problem:
            raise StaleStateError(self.problem)


def _unstamped(method: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """What is pickled bears no number: another program, or a later iteration, is to find what torch would write."""

    @functools.wraps(method)
    def state_of(mesh: Any) -> dict[str, Any]:
        return {**method(mesh), STAMP: None, "_hash": None}

    return state_of


def is_of_this_rank(mesh: Any) -> bool:
    """Return whether this rank has a place in the mesh, and groups to go with it."""
    return mesh.get_coordinate() is not None and hasattr(mesh, "_dim_group_names")


def check(mesh: Any, may_fail: bool = False) -> str:
    """Return how torch takes this mesh for an older one, or computes another rank's part of it; "" when it does not.

    `may_fail`: a check that cannot be made counts as passed, since the rank is the former one.
    """
    tensor: Any = sys.modules.get(DTENSOR)
    if tensor is None:
        # Nothing that this process has loaded knows of sharded tensors.
        return ""
    try:
        return _problem(mesh, tensor)
    except Exception as error:
        problem = f"the check of torch's caches failed: {type(error).__name__}: {error}"
        logger.debug("%s", problem)
        return "" if may_fail else problem


def _problem(mesh: Any, tensor: Any) -> str:
    import torch  # noqa: PLC0415 - the package's import must stay cheap
    from torch.distributed.tensor import _utils  # noqa: PLC0415 - likewise

    other = copy.copy(mesh)
    setattr(other, STAMP, -1)
    other._hash = None
    if other == mesh or hash(other) == hash(mesh):
        return "torch cannot tell this iteration's meshes from those of the one before"
    placements = [tensor.Shard(0), *(tensor.Replicate() for _ in range(mesh.ndim - 1))]
    # The script may be making a model without memory, on the device "meta".
    with torch.device("cpu"), torch.inference_mode(False):
        local = torch.zeros(1, device=mesh.device_type)
        probe = tensor.DTensor.from_local(local, mesh, placements, run_check=False)
        if probe.detach().device_mesh is not mesh:
            return "an operation on a sharded tensor returns the mesh of an earlier iteration"
        rank = torch.distributed.get_rank()
        wanted = int((mesh.mesh == rank).nonzero()[0][0])
    _shape, offset = _utils.compute_local_shape_and_global_offset((mesh.size(0),), mesh, placements)
    if offset[0] != wanted:
        return f"torch computes the part of a sharded tensor for place {offset[0]} of a mesh, not for {wanted}"
    return ""


def _is_as_made_now(mesh: Any) -> bool:
    """Return whether an unpickled mesh says of this process what a mesh that is made now would say."""
    import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

    if not dist.is_initialized() or getattr(mesh, "_rank", None) != dist.get_rank():
        return False
    place = (mesh.mesh == dist.get_rank()).nonzero().flatten().tolist()
    coordinate = mesh.get_coordinate()
    return (None if coordinate is None else list(coordinate)) == (place or None)
