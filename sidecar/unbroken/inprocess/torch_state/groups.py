"""Process groups of torch: abort them, and take them out of torch's registry."""

import logging
import sys
import threading
import time
from typing import Any

logger = logging.getLogger(__name__)

NAMES_EACH = 1_000_000
"""More than the groups that any function makes."""


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
    """Return whether this is a group that may hold tensors of a device, of aborted collectives."""
    return bool(_device_backends(thing))


def current_groups() -> list[Any]:
    """Return all groups. Holding them keeps their slow end (10 ms per peer with gloo) out of the main thread."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return [] if c10d is None else list(c10d._world.pg_names)


def take_groups() -> list[Any]:
    """Empty torch's registry of groups, so that init_process_group works again; return the groups, still alive.

    This is quick; dropping the last reference is slow (10 ms per peer with gloo), see `deferred_destroyer`. Nothing is
    shut down in order, as `destroy_process_group` would do: that waits for collectives that will never finish and,
    after an error of NCCL, a minute for its watchdog. An interrupted init_process_group is forgotten as well: it has
    counted itself already, so the next group would have another name here than on the other ranks, and all would wait
    for each other for ever.
    """
    groups = current_groups()
    if not groups and "torch.distributed" not in sys.modules:
        return []
    _empty_registry()
    _unhook()
    return groups


def name_apart(number: int) -> None:
    """Give the groups that are made from now on new names; `number` is the same on all ranks.

    torch counts from 0 again once all groups are destroyed, but the store still has addresses for those names: a rank
    that reads one of them connects to nothing and waits.
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
        # From torchcomms, which older torch does not know.
        getattr(world, "comms", []),
    ):
        registry.clear()
    c10d._unregister_all_process_groups()  # type: ignore[attr-defined] # not exported by name
    world.group_count = 0


def _unhook() -> None:
    """Remove torch's hooks for uncaught exceptions.

    Each init_process_group adds one around the last, and destroying the group leaves it there: every line of a final
    traceback would name the rank once per restart, until the hooks are nested too deep to be called.
    """
    hook: Any = sys.excepthook
    while getattr(hook, "__module__", "") == "torch.distributed.distributed_c10d":
        cells = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))
        if "old_hook" not in cells:
            break
        hook = cells["old_hook"].cell_contents
    sys.excepthook = hook


def _device_backends(group: Any) -> list[Any]:
    """Return a group's backends except gloo's, each once; none for anything but a group."""
    gloo = getattr(sys.modules.get("torch.distributed"), "ProcessGroupGloo", ())
    found: list[Any] = []
    for device in getattr(group, "_device_types", ()):
        try:
            backend = group._get_backend(device)
        except RuntimeError:
            # A group of another class need not have backends.
            continue
        # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps each backend.
        backend = getattr(backend, "wrapped_pg", backend)
        if not isinstance(backend, gloo) and not any(backend is other for other in found):
            found.append(backend)
    return found


def _abort_backend(backend: Any) -> None:
    try:
        if hasattr(backend, "abort"):
            backend.abort()
        else:
            # torch before 2.6.
            backend._shutdown()
    except Exception as error:
        logger.warning("communicator not aborted: error=%s", error)
