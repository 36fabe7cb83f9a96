"""Which releases of a framework an integration is for."""

import logging
import re
from importlib import metadata

logger = logging.getLogger(__name__)

MAX_SHOWN = 40


def require(package: str, oldest: tuple[int, int], newest: tuple[int, int]) -> None:
    """Refuse a release below `oldest`, and warn of one of a later major than `newest`, the newest that was tested.

    Before 1.0 each minor counts as a major.

    Integrations call it when they are imported, which is once a process. Raises ImportError.
    """
    seen = _version(package)
    wanted = ".".join(map(str, oldest))
    text = ".".join(map(str, seen)) if seen else "nothing that can be read"
    if seen < oldest:
        raise ImportError(f"{package}: want {wanted} or newer, got {text}; pip install '{package}>={wanted}'")
    if seen[0] > newest[0] or (newest[0] == 0 and seen > newest):
        tested = ".".join(map(str, newest))
        logger.warning("%s %s is newer than what this was tested with (%s): compare your losses", package, text, tested)


def _version(package: str) -> tuple[int, ...]:
    """Return the first two numbers of its release; none where it has none."""
    try:
        # Nothing, in what a broken installation has left.
        text = (metadata.version(package) or "")[:MAX_SHOWN]
    except metadata.PackageNotFoundError:
        return ()
    match = re.match(r"([0-9]{1,6})(?:\.([0-9]{1,6}))?(?![0-9!])", text)
    return (int(match[1]), int(match[2] or 0)) if match else ()
