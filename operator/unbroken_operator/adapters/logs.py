"""Log lines: one JSON object a line, or text."""

import json
import logging
import re
import sys
import time

from unbroken_core.conventions.printable import PrintableFormatter

_FIELD = re.compile(r"(?:^|(?<=\s))([a-z_]+)=(.*?)(?=\s[a-z_]+=|$)")
_PLACE = re.compile(r"%(?:%|[^a-zA-Z%]*[a-zA-Z])")
_OWN = frozenset(("time", "level", "logger", "event", "message", "exception"))


def fields_of(record: logging.LogRecord) -> dict[str, str]:
    """Return the event and the `key=value` pairs of a message, as the call in the code has them.

    They are taken from the template, so that what is filled in may hold blanks and equals signs.
    """
    template = str(record.msg)
    values = record.args if isinstance(record.args, tuple) else ()
    found: dict[str, str] = {}
    first = _FIELD.search(template)
    if first is None:
        return found
    found["event"] = template[: first.start()].strip() % values[: _num_places(template[: first.start()])]
    for match in _FIELD.finditer(template):
        start = _num_places(template[: match.start(2)])
        found[match[1]] = match[2] % values[start : start + _num_places(match[2])]
    return {key: value for key, value in found.items() if key not in _OWN or key == "event"}


def _num_places(template: str) -> int:
    return sum(place != "%%" for place in _PLACE.findall(template))


class JsonFormatter(logging.Formatter):
    """One JSON object a line, with the pairs of the message as fields of their own."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **fields_of(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(is_json: bool, level: str) -> None:
    """Set up the root logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if is_json else PrintableFormatter("%(asctime)s %(levelname)-7s %(name)s %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf tells at INFO what it does for each event; its warnings stay.
    logging.getLogger("kopf").setLevel(logging.WARNING if level != "DEBUG" else logging.DEBUG)
