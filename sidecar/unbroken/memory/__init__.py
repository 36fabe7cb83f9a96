"""Checkpoints in memory, for training scripts. Standard library, torch and core only; nothing here is ever pickled.

`Checkpointer` for training loops, `Writer` and `Reader` for code that calls torch.distributed.checkpoint itself. The
memory is the keeper's (unbroken.keeper): it outlives an exception, the worker's process, the agent and the container.
"""

from unbroken.memory.arena import Saved, Skipped
from unbroken.memory.checkpointer import Checkpointer
from unbroken.memory.place import is_available
from unbroken.memory.storage import Reader, Writer

__all__ = ["Checkpointer", "Reader", "Saved", "Skipped", "Writer", "is_available"]
