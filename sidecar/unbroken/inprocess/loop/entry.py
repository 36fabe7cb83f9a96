"""Whether a wrapped function may be called now."""

import threading

from unbroken.inprocess.exception import InternalError, RestartAbort, RestartError
from unbroken_core.pod.pod_messages import Release
from unbroken_core.vocabulary.reasons import JobPhase

_last_release: list[Release] = []
"""The end of the job, once a call of this process has learned of it."""


def note_end(release: Release) -> None:
    """Remember that the job is over."""
    _last_release[:] = [release]


def forget_end() -> None:
    """The next call is in a job of its own."""
    _last_release.clear()


def refuse_other_threads() -> None:
    """Raises InternalError outside the main thread: only that one can be interrupted."""
    if threading.current_thread() is not threading.main_thread():
        raise InternalError(
            f"wrapped function: want a call in the main thread, got one in {threading.current_thread().name}"
        )


def refuse_a_group() -> None:
    """Raises ValueError when torch.distributed is missing, or initialised already."""
    import torch.distributed as dist  # noqa: PLC0415 - the package's import must stay cheap

    if not dist.is_available():
        raise ValueError("this torch was built without torch.distributed")
    if dist.is_initialized() and _last_release:
        # The group is that of the first call's function, or what the script made after it: it is not the mistake.
        raise ValueError(
            "wrapped function: this is the second call in this process, and a process group is open. Call both from "
            "inside one wrapped function; a script that no `unbroken run` or operator started may call "
            "torch.distributed.destroy_process_group() before the second call instead"
        )
    if dist.is_initialized():
        raise ValueError(
            "torch.distributed is already initialised when the wrapped function is called; "
            "call init_process_group inside the function"
        )


def refuse_after_the_end() -> None:
    """Raises RestartError when the job is complete, RestartAbort when it has failed."""
    for release in _last_release:
        if release.outcome is not JobPhase.COMPLETE:
            raise RestartAbort(f"the job has failed: {release.message}")
        raise RestartError(
            "wrapped function: this is the second call in this process, but the training is over once the first has "
            "returned on all ranks. Call both from inside one wrapped function"
        )
