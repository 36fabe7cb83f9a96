"""What workers, pods and jobs say, made safe to show: in a terminal, in a line of a log, on a page.

Escape sequences repaint a terminal, line ends forge lines of a log, and marks of direction turn text around. So each
of these characters is shown as Python writes it in a string (`\\x1b`, `\\n`, `\\u202e`). Call it where text leaves our
processes, not where it comes in: what is stored stays as it was said. What a user's script prints itself is its own
affair, and stays as it is.
"""

import logging
from typing import Any

_INDENT = "  | "


def printable(text: str) -> str:
    """Return text as one line without control characters (C0, C1), marks of direction and other invisible ones."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def printable_lines(text: str) -> str:
    """Do the same with text of several lines, whose ends stay."""
    return "\n".join(map(printable, text.split("\n")))


def printable_value(value: Any) -> Any:
    """Do the same with all strings of a JSON value. Raises RecursionError where it is nested too deeply."""
    if isinstance(value, str):
        return printable_lines(value)
    if isinstance(value, list):
        return [printable_value(item) for item in value]
    if isinstance(value, dict):
        return {printable(key): printable_value(item) for key, item in value.items()}
    return value


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


class PrintableFormatter(logging.Formatter):
    """One line an event; a traceback's lines are indented, so that none can pass for another event."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the lines."""
        record.message = record.getMessage()
        if self.usesTime():
            record.asctime = self.formatTime(record, self.datefmt)
        details = [self.formatException(record.exc_info)] if record.exc_info else []
        details += [self.formatStack(record.stack_info)] if record.stack_info else []
        indented = [f"{_INDENT}{printable(line)}" for text in details for line in text.split("\n")]
        return "\n".join([printable(self.formatMessage(record)), *indented])
