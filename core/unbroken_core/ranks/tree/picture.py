"""The tree as text, for logs and terminals."""

from collections.abc import Callable, Iterator
from itertools import islice

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.ranks.tree.tree import RankTree
from unbroken_core.vocabulary.plurals import counted

MAX_LINES = 200
"""Larger trees end with the number of lines that are left out."""

Label = Callable[[str], str]
"""Returns what to show for the name of a domain or place; "" is the unknown one."""


def name_or_unknown(name: str) -> str:
    """Return the name as it is."""
    return name or "unknown"


def picture(tree: RankTree, max_lines: int = MAX_LINES, label: Label = name_or_unknown) -> str:
    """Draw one line a domain: its name, what it counts, and for a place the rank of each worker.

    A number is an active rank, `s` a spare, `x` a lost worker, `-` a healthy one in a domain below its minimum. Lines
    that are left out cost next to nothing.
    """
    below = _below(tree, tree.root, "", label)
    lines = [f"{tree.root.name or 'root'}  {_counts(tree, tree.root)}", *islice(below, max_lines - 1)]
    num_lines = 1 + (sum(1 for _ in _domains(tree.root)) if tree.root.children else 1)
    if num_lines > len(lines):
        lines.append(f"... {counted(num_lines - len(lines), 'more line')}")
    return "\n".join(lines) + "\n"


def worker_sign(tree: RankTree, leaf: int, is_usable: bool) -> str:
    """Return what stands for a worker in a picture."""
    if tree.is_lost[leaf]:
        return "x"
    if tree.rank_of[leaf] >= 0:
        return str(tree.rank_of[leaf])
    return "s" if is_usable else "-"


def _below(tree: RankTree, domain: Domain, margin: str, label: Label) -> Iterator[str]:
    if not domain.children and domain is tree.root:
        yield f"└─ {_workers(tree, domain)}"
    for child in domain.children:
        is_last = child is domain.children[-1]
        what: Callable[[RankTree, Domain], str] = _workers if child.size else _counts
        yield f"{margin}{'└' if is_last else '├'}─ {label(child.name)}  {what(tree, child)}"
        yield from _below(tree, child, margin + ("   " if is_last else "│  "), label)


def _domains(domain: Domain) -> Iterator[Domain]:
    for child in domain.children:
        yield child
        yield from _domains(child)


def _counts(tree: RankTree, domain: Domain) -> str:
    size = sum(host.size for host in domain.innermost())
    lost = sum(tree.is_lost.count(1, host.first, host.first + host.size) for host in domain.innermost())
    limits = [f"at least {domain.minimum}"] if domain.minimum > 1 else []
    limits += [f"at most {domain.maximum}"] if tree.layers[domain.depth].max_ranks is not None else []
    state = f"{domain.active} active, {size - domain.active - lost} spare, {lost} lost"
    return f"{state}{' (' + ', '.join(limits) + ')' if limits else ''}{' BELOW MINIMUM' if domain.is_barred else ''}"


def _workers(tree: RankTree, host: Domain) -> str:
    is_usable = host.is_usable()
    return (
        "[" + " ".join(worker_sign(tree, leaf, is_usable) for leaf in range(host.first, host.first + host.size)) + "]"
    )
