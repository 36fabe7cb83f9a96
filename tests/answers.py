"""Asks HTTP servers that a test has started, or is about to."""

import urllib.error
import urllib.request

from tests.waiting import LIMIT_S


def ask(request: str | urllib.request.Request) -> tuple[int, str]:
    """Return status and text of what a server answers; 0 while there is none."""
    try:
        with urllib.request.urlopen(request, timeout=LIMIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError:
        return 0, ""
