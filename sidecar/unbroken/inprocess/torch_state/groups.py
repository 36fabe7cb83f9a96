"""Process groups of torch: abort them, take them out of the registry, destroy them in the background."""

import logging
import sys
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

MAX_DESTROYING = 8
"""More old groups than this are not kept alive at once: the next restart waits for the oldest."""
DESTROY_TIMEOUT_S = 30.0
NAMES_EACH = 1_000_000
"""More groups than any function makes."""


def abort_communicators(timeout_s: float) -> bool:
    """Abort NCCL's communicators, or another device's, all at once, each from a thread of its own.

    Returns whether all have ended. In parallel, because an abort may wait for the other communicators' kernels.
    """
    backends = [backend for group in current_groups() for backend in _device_backends(group)]
    threads = [
        threading.Thread(target=_abort_backend, args=(backend,), name=f"unbroken-abort-{number}", daemon=True)
        for number, backend in enumerate(backends)
    ]
    for thread in threads:
        thread.start()
    deadline_s = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    return not any(thread.is_alive() for thread in threads)


def holds_device(thing: Any) -> bool:
    """Return whether this is a group that may hold tensors of a device: those of collectives that were aborted."""
    return bool(_device_backends(thing))


def current_groups() -> list[Any]:
    """Return all groups. Whoever holds them keeps their slow end (10 ms a peer with gloo) out of the main thread."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return [] if c10d is None else list(c10d._world.pg_names)


def take_groups() -> list[Any]:
    """Empty torch's registry of groups, so that init_process_group works again; return the groups, still alive.

    Quick: what is slow is dropping the last reference (10 ms a peer with gloo), see `Undertaker`. Nothing is shut down
    in order, as `destroy_process_group` would do it: that waits for collectives that nobody will finish, and, after an
    error of NCCL, a minute for its watchdog. An init_process_group that was interrupted half-way is forgotten, too: it
    has counted itself already, and the next group would have another name here than on the other ranks, which would
    wait for each other for ever.
    """
    groups = current_groups()
    if not groups and "torch.distributed" not in sys.modules:
        return []
    _empty_registry()
    _unhook()
    return groups


def name_apart(number: int) -> None:
    """Give the groups that are made from now on names of their own; the same number on all ranks.

    torch counts from 0 again once all groups are destroyed, but the store still has the addresses that were told under
    those names: a rank that reads one of them connects to nobody, and waits.
    """
    import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

    dist.distributed_c10d._world.group_count = number * NAMES_EACH


def _empty_registry() -> None:
    import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

    c10d = dist.distributed_c10d
    world = c10d._world
    c10d._update_default_pg(None)
    for registry in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
        # Of torchcomms, which older torch does not know.
        getattr(world, "comms", []),
    ):
        registry.clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined] # not exported by name
    world.group_count = 0


def _unhook() -> None:
    """Take torch's hooks for uncaught exceptions away.

    Each init_process_group puts one more around the last, and destroying the group leaves it there: every line of a
    final traceback would bear the rank once a restart, until the hooks are nested too deep to be called at all.
    """
    hook: Any = sys.excepthook
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        if "old_hook" not in cells:
            break
        hook = cells["old_hook"].cell_contents
    sys.excepthook = hook


def _device_backends(group: Any) -> list[Any]:
    """Return a group's backends but gloo's, each once; nothing for anything else than a group."""
    gloo = getattr(sys.modules.get("torch.distributed"), "ProcessGroupGloo", ())
    found: list[Any] = []
    for device in getattr(group, "_device_types", ()):
        try:
            backend = group._get_backend(device)
        except RuntimeError:
            # Groups of one's own class need not be made of backends.
            continue
        # TORCH_DISTRIBUTED_DEBUG=DETAIL puts another one around each.
        backend = getattr(backend, "wrapped_pg", backend)
        if not isinstance(backend, gloo) and not any(backend is other for other in found):
            found.append(backend)
    return found


def _abort_backend(backend: Any) -> None:
    try:
        if hasattr(backend, "abort"):
            backend.abort()
        else:
            # Before torch 2.6.
            backend._shutdown()
    except Exception as error:
        logger.warning("communicator not aborted: error=%s", error)


class Undertaker:
    """Drops the last references to old groups and stores in background threads."""

    def __init__(self) -> None:
        self._burials: list[_Burial] = []

    def bury(self, objects: list[Any], after_s: float = 0.0, wait_s: float = 0.0) -> bool:
        """Destroy these after a while; the caller keeps no reference. Waits for older ones when there are too many.

        Waits for these for at most `wait_s`, and returns whether they are gone.
        """
        if not objects:
            return True
        self._burials = [burial for burial in self._burials if burial.is_alive()]
        if len(self._burials) >= MAX_DESTROYING:
            self._burials[0].hurry()
            self._burials[0].join(DESTROY_TIMEOUT_S)
        burial = _Burial(objects, after_s)
        burial.start()
        self._burials.append(burial)
        burial.join(wait_s)
        return not burial.is_alive()

    def join(self, timeout_s: float) -> None:
        """Wait until all are destroyed, at most so long; nothing is put off any more."""
        for burial in self._burials:
            burial.hurry()
        deadline_s = time.monotonic() + timeout_s
        for burial in self._burials:
            burial.join(max(deadline_s - time.monotonic(), 0.0))
        self._burials = [burial for burial in self._burials if burial.is_alive()]


class _Burial(threading.Thread):
    """Destroys objects after a while."""

    def __init__(self, objects: list[Any], after_s: float) -> None:
        super().__init__(name="unbroken-destroy", daemon=True)
        self._objects = objects
        self._after_s = after_s
        self._is_due = threading.Event()

    def hurry(self) -> None:
        """Do not wait any longer."""
        self._is_due.set()

    def run(self) -> None:
        if self._after_s > 0:
            self._is_due.wait(self._after_s)
        self._objects.clear()
