"""What all ranks go back to in this iteration, as the wrapper was told: for the checkpoints in memory of this process.

No environment variable: glibc keeps every value that one was ever given, and this is a new one of some KiB in each
iteration. 1,000 restarts kept 4 to 10 MiB.
"""

from unbroken_core.vocabulary.checkpoints import Restore

VARIABLE = "UNBROKEN_RESTORE"
"""Where there is no wrapper, a new process finds it here. If it is set, it counts."""


class Told:
    """Of this process."""

    restore: Restore | None = None


told = Told()
