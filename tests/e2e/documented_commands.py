"""The commands that the documents show, in the order in which a reader meets them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = re.compile(r"^```sh\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
RUNBOOKS = "docs/runbooks/"
IN_TEXT = re.compile(r"(?<!`)`((?:kubectl|unbroken) [^`]*\b(?:JOB|POD|NODE|NAMESPACE|RELEASE)\b[^`]*)`")


def pages() -> list[str]:
    """Return every page with commands, by its path in the repository."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("charts/unbroken/*.md")]
    names = sorted(str(page.relative_to(ROOT)) for page in found)
    return [name for name in names if commands(name)]


def commands(page: str) -> list[str]:
    """Return the commands of a page, without comments; one of several lines is one command.

    In a runbook those within its sentences count, too: at night they are typed as well.
    """
    whole = (ROOT / page).read_text(encoding="utf-8")
    text = "".join(SHOWN.findall(whole)).replace("\\\n", "")
    found: list[str] = []
    for line in text.splitlines():
        command = " ".join(re.sub(r"(^|\s)# .*", "", line).split())
        if found and found[-1].startswith("for ") and not found[-1].endswith("done"):
            found[-1] += f" {command}"
        elif command:
            found.append(command)
    if page.startswith(RUNBOOKS):
        found += (" ".join(command.split()) for command in IN_TEXT.findall(SHOWN.sub("", whole)))
    return list(dict.fromkeys(found))
