"""Log lines: one JSON object a line, or text."""

import json
import logging
import sys
import time


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure(is_json: bool, level: str) -> None:
    """Set up the root logger."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        JsonFormatter() if is_json else logging.Formatter("%(asctime)s %(levelname)-7s %(name)s %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # kopf tells at INFO what it does for each event; its warnings stay.
    logging.getLogger("kopf").setLevel(logging.WARNING if level != "DEBUG" else logging.DEBUG)
