"""Pure: where the time goes, as stacked bars in SVG; readable on a light and on a dark page."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from reports.lost_time_terms import TERMS
from unbroken_cli.drawings import TIME_COLOURS

Json = Mapping[str, Any]
PICTURED_GPUS = 16384
_WIDTH, _LEFT, _RIGHT = 900, 190, 150
_BAR, _ROW, _HEAD, _TOP = 16, 24, 30, 74
_STYLE = """<style>
text { font: 13px system-ui, sans-serif; fill: #1f2328 } .head { font-weight: 600 } .page { fill: #ffffff }
line { stroke: #d0d7de }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } .page { fill: #0d1117 } line { stroke: #30363d } }
</style>"""
Bar = tuple[str, Mapping[str, float], str]
"""Its name, how long each term is, and what stands behind it."""


def measured_picture(data: Json) -> str:
    """Return the seconds that each fault has cost on the laptop; a group for each kind of fault."""
    groups: dict[str, list[Bar]] = {}
    for row in data["rows"]:
        after = f"{row['lost_s']:.1f} s, {row['steps_redone']:g} steps" if row["faults"] else _short(row["reason"])
        groups.setdefault(row["fault"], []).append((row["system"], row["terms"], after))
    return stacked("From a fault to the next new step, measured", list(groups.items()), TERMS, "s")


def sized_picture(data: Json) -> str:
    """Return the share of the time that each term takes on a cluster, without progress."""
    rates = next(iter(data["rates"]))
    bars = [
        (one["system"], {term: 100 * share for term, share in one["shares"].items()}, f"ettr {one['ettr']:.3f}")
        for one in data["sized"]
        if (one["rates"], one["gpus"], one["in_background"]) == (rates, PICTURED_GPUS, False)
    ]
    title = f"What did not train: {PICTURED_GPUS:,} GPUs, faults of {rates}"
    return stacked(title, [("percent of the time", bars)], TERMS[1:], "%")


def stacked(title: str, groups: Sequence[tuple[str, Sequence[Bar]]], terms: Sequence[str], unit: str) -> str:
    """Return a drawing of groups of bars on one scale."""
    longest = max((sum(bar[1].get(term, 0.0) for term in terms) for _name, bars in groups for bar in bars), default=0.0)
    scale = (_WIDTH - _LEFT - _RIGHT) / (longest or 1.0)
    height = _TOP + sum(_HEAD + _ROW * len(bars) for _name, bars in groups) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        _STYLE,
        f'<rect class="page" width="{_WIDTH}" height="{height}"/>',
        f'<text class="head" x="16" y="26">{escape(title)}</text>',
    ]
    for number, term in enumerate(terms):
        x = 16 + number * 110
        parts.append(f'<rect x="{x}" y="42" width="12" height="12" fill="{TIME_COLOURS[term]}"/>')
        parts.append(f'<text x="{x + 18}" y="53">{term}</text>')
    y = _TOP
    for name, bars in groups:
        parts.append(f'<text class="head" x="16" y="{y + 20}">{escape(name)}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{y + 26}" x2="{_LEFT}" y2="{y + _HEAD + _ROW * len(bars)}"/>')
        y += _HEAD
        for bar in bars:
            parts += _bar(bar, terms, y, scale, unit)
            y += _ROW
    return "\n".join([*parts, "</svg>", ""])


def _bar(bar: Bar, terms: Sequence[str], y: int, scale: float, unit: str) -> list[str]:
    name, lengths, after = bar
    parts = [f'<text x="{_LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>']
    x = float(_LEFT)
    for term in terms:
        width = lengths.get(term, 0.0) * scale
        if width > 0:
            words = f"{name}, {term}: {lengths[term]:.2f} {unit}"
            parts.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{TIME_COLOURS[term]}">'
                f"<title>{escape(words)}</title></rect>"
            )
            x += width
    parts.append(f'<text x="{x + 8:.1f}" y="{y + 13}">{escape(after)}</text>')
    return parts


def _short(reason: str) -> str:
    return reason.partition(":")[0]
