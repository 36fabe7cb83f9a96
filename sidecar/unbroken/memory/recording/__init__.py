"""What a worker notes of its checkpoints when `unbroken compare` wants to compare them: a mode for checking.

Nothing else of it is imported where nothing is to be noted. Standard library and torch only.
"""

import os
from typing import TYPE_CHECKING

from unbroken.checkpoint_records import FOLDER

if TYPE_CHECKING:
    from unbroken.memory.recording.recorder import Recorder


def recorder() -> "Recorder | None":
    """Return this process' recorder; None where nothing is to be noted."""
    if FOLDER not in os.environ:
        return None
    from unbroken.memory.recording.recorder import recorder_of  # noqa: PLC0415 - no job but a compared one pays for it

    return recorder_of(os.environ)
