"""Who may use the agent's socket and page."""

from pathlib import Path


def shared_mode(folder: Path) -> int:
    """Return the mode of a file that all who may write into the folder may read and write.

    In a pod the folder is an emptyDir, which all may write into, and the trainer often runs as another user than the
    agent; a folder of one user's own stays that user's. Raises OSError when there is no such folder.
    """
    may_write = folder.stat().st_mode & 0o022
    return 0o600 | may_write | may_write << 1
