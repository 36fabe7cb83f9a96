"""The tree as a drawing: one box a domain, one square a worker. Plain SVG, nothing to load; one tree, one text."""

from dataclasses import dataclass
from html import escape

from unbroken_core.ranks.tree.domain import Domain
from unbroken_core.ranks.tree.picture import Label, name_or_unknown, worker_sign
from unbroken_core.ranks.tree.tree import RankTree

CELL, GAP, PAD, TITLE = 26, 4, 8, 18
"""Pixels: a worker's square, the room between things, a box' margin, a box' title."""

_STYLE = (
    "text{font:11px system-ui,sans-serif;fill:#1f2933}"
    ".box{fill:#fff;stroke:#9aa5b1}.barred{stroke:#b42318;stroke-dasharray:4 3}"
    ".active{fill:#2f6fde}.spare{fill:#d9e2ec}.lost{fill:#b42318}.aside{fill:#f0b429}"
    ".active+text,.lost+text{fill:#fff}"
)
_LEGEND = (("active", "active (rank)"), ("spare", "spare"), ("lost", "lost"), ("aside", "healthy, but below a minimum"))


@dataclass(frozen=True)
class _Box:
    width: int
    height: int
    parts: tuple[str, ...]
    """Elements, drawn at the box' own origin."""


def svg_picture(tree: RankTree, title: str = "", label: Label = name_or_unknown) -> str:
    """Return an SVG document. Its size grows with the number of workers: meant for hundreds, not for 100,000."""
    box = _draw(tree, tree.root, label)
    top = TITLE + GAP if title else 0
    width, height = max(box.width, 520) + 2 * PAD, top + box.height + CELL + 3 * PAD
    heading = [f'<text x="{PAD}" y="{TITLE}" font-weight="bold">{escape(title)}</text>'] if title else []
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *heading,
        _moved(PAD, PAD + top, box.parts),
        _moved(PAD, height - CELL - PAD // 2, tuple(_legend())),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _draw(tree: RankTree, domain: Domain, label: Label) -> _Box:
    name = "root" if domain is tree.root and not domain.name else label(domain.name)
    if domain.size:
        return _draw_place(tree, domain, name)
    boxes = [_draw(tree, child, label) for child in domain.children]
    are_places = all(child.size for child in domain.children)
    return _frame(tree, domain, name, _stack(boxes) if are_places else _row(boxes))


def _draw_place(tree: RankTree, host: Domain, name: str) -> _Box:
    is_usable = host.is_usable()
    parts: list[str] = []
    for column, leaf in enumerate(range(host.first, host.first + host.size)):
        sign = worker_sign(tree, leaf, is_usable)
        kind = {"x": "lost", "s": "spare", "-": "aside"}.get(sign, "active")
        x = column * (CELL + GAP)
        parts.append(
            f'<rect class="{kind}" x="{x}" width="{CELL}" height="{CELL}" rx="4"/>'
            f'<text x="{x + CELL // 2}" y="{CELL // 2 + 4}" text-anchor="middle">{sign}</text>'
        )
    box = _Box(host.size * (CELL + GAP) - GAP, CELL, tuple(parts))
    return _frame(tree, host, name, box)


def _frame(tree: RankTree, domain: Domain, name: str, inner: _Box) -> _Box:
    layer = tree.layers[domain.depth]
    limits = [f"at least {layer.min_ranks}"] if layer.min_ranks > 1 else []
    limits += [f"at most {layer.max_ranks}"] if layer.max_ranks is not None else []
    title = f"{name} ({', '.join(limits)})" if limits and not domain.size else name
    width = max(inner.width, 7 * len(title)) + 2 * PAD
    height = inner.height + TITLE + 2 * PAD
    kind = "box barred" if domain.is_barred else "box"
    return _Box(
        width,
        height,
        (
            f'<rect class="{kind}" width="{width}" height="{height}" rx="6"/>',
            f'<text x="{PAD}" y="{TITLE - 2}">{escape(title)}</text>',
            _moved(PAD, TITLE + PAD, inner.parts),
        ),
    )


def _row(boxes: list[_Box]) -> _Box:
    parts, x = [], 0
    for box in boxes:
        parts.append(_moved(x, 0, box.parts))
        x += box.width + PAD
    return _Box(x - PAD, max(box.height for box in boxes), tuple(parts))


def _stack(boxes: list[_Box]) -> _Box:
    parts, y = [], 0
    for box in boxes:
        parts.append(_moved(0, y, box.parts))
        y += box.height + GAP
    return _Box(max(box.width for box in boxes), y - GAP, tuple(parts))


def _moved(x: int, y: int, parts: tuple[str, ...]) -> str:
    return f'<g transform="translate({x} {y})">{"".join(parts)}</g>'


def _legend() -> list[str]:
    parts, x = [], 0
    for kind, text in _LEGEND:
        parts.append(f'<rect class="{kind}" x="{x}" width="14" height="14" rx="3"/>')
        parts.append(f'<g><text x="{x + 20}" y="11">{text}</text></g>')
        x += 40 + 7 * len(text)
    return parts
