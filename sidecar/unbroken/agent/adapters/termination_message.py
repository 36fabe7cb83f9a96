"""Why this agent is not in its job, as the container's termination message, which the kubelet reads."""

import logging
from pathlib import Path

from unbroken_core.conventions.printable import printable

logger = logging.getLogger(__name__)

_MAX_BYTES = 4096
"""The kubelet cuts off what is longer."""


class TerminationMessage:
    """The file that the kubelet reads when the container ends; `kubectl describe pod` shows it."""

    def __init__(self, path: Path | None) -> None:
        """None: nothing is written."""
        self._path = path
        self._text = ""

    def put(self, text: str) -> None:
        """Replace the text; "" when all is well."""
        text = printable(text)
        if self._path is None or text == self._text:
            return
        self._text = text
        try:
            # Not by a rename: the kubelet has mounted this file.
            self._path.write_bytes(text.encode()[:_MAX_BYTES])
        except OSError as error:
            logger.warning("termination message cannot be written: file=%s error=%s", self._path, error)
            self._path = None
