"""Names as a job's status has them: those of Kubernetes, since people copy them into commands.

Nodes and domains are named by pods and scripts, which may say anything. An operator that gets a name of another kind
refuses the whole report, whoever is to blame for it; so what a status is made of is put into this form first.
"""

import re
from collections.abc import Sequence

NAME = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?", re.ASCII)
MAX_NAME = 253
MAX_DOMAINS = 16
"""Of one pod, outermost first."""
_MAX_ALL_DOMAINS = 1000
"""Characters of the domains of one pod: a report has room for so many of each."""
_OTHERS = re.compile(r"[^-A-Za-z0-9_.]+", re.ASCII)
_NAMELESS = "unnamed"


def plain_name(text: str, most: int = MAX_NAME) -> str:
    """Return it in the form of a name: with "-" for what no name has; "" stays."""
    if len(text) <= most and NAME.fullmatch(text):
        return text
    return _OTHERS.sub("-", text[: 2 * most])[:most].strip("-_.") or _NAMELESS


def plain_domains(names: Sequence[str]) -> tuple[str, ...]:
    """Return the domains of a pod, as many and as much of them as a status has."""
    shown = names[:MAX_DOMAINS]
    return tuple(plain_name(name, min(MAX_NAME, _MAX_ALL_DOMAINS // len(shown))) for name in shown)
