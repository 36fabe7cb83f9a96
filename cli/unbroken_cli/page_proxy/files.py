"""The files of the live page, as they lie in `assets`: nothing is built, and nothing is loaded from elsewhere.

They are this command's own. A job's rendezvous runs the tenant's image: its files would be code in the browser of
whoever looks at the job.
"""

from functools import cache
from pathlib import Path

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@cache
def page_files() -> dict[str, tuple[bytes, str]]:
    """Return content and type of each file, by name."""
    known = [file for file in Path(__file__).with_name("assets").glob("*") if file.suffix in _TYPES]
    return {file.name: (file.read_bytes(), f"{_TYPES[file.suffix]}; charset=utf-8") for file in known}
