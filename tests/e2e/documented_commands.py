"""The commands that the documents show, in the order in which a reader meets them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"^```sh\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


def pages() -> list[str]:
    """Return every page with commands, by its path in the repository."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("charts/unbroken/*.md")]
    return sorted(str(page.relative_to(ROOT)) for page in found if SHOWN.search(page.read_text(encoding="utf-8")))


def commands(page: str) -> list[str]:
    """Return the commands of a page, without comments; one of several lines is one command."""
    text = "".join(SHOWN.findall((ROOT / page).read_text(encoding="utf-8"))).replace("\\\n", "")
    found: list[str] = []
    for line in text.splitlines():
        command = " ".join(re.sub(r"(^|\s)# .*", "", line).split())
        if found and found[-1].startswith("for ") and not found[-1].endswith("done"):
            found[-1] += f" {command}"
        elif command:
            found.append(command)
    return found
