"""Pure: drawings of faults for the report, as SVG inside of a page that has their colours of text and lines."""

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from html import escape

from unbroken_cli.job import FaultSummary, moment
from unbroken_cli.text import culprit, phases_of
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Rung

PHASE_COLOURS = {
    "detect": "#d55e00",
    "stop": "#e69f00",
    "plan": "#56b4e9",
    "enter": "#0072b2",
    "first-progress": "#009e73",
}
"""Told apart by people who are colour-blind, too."""
TIME_COLOURS = {
    "progress": "#009e73",
    "checkpoint": "#f0e442",
    "redo": "#d55e00",
    "detect": "#cc79a7",
    "restart": "#e69f00",
    "waiting": "#0072b2",
    "suspended": "#bbbbbb",
    "open": "#56b4e9",
}
_OTHER_COLOUR = "#999999"
_WIDTH, _LEFT, _RIGHT = 1000, 130, 90
_ROW = 26


def time_line(faults: Sequence[FaultSummary]) -> str:
    """Return faults on an axis of time, a row for each rung that was needed."""
    times = [moment(fault.started_at) for fault in faults]
    known = [time for time in times if time is not None]
    if not known:
        return ""
    first, last = min(known), max(known)
    span = max(last - first, timedelta(seconds=1))
    rungs = [rung.value for rung in Rung if any(fault.rung == rung.value for fault in faults)]
    rows = [*rungs, *(["(none yet)"] if any(fault.rung not in rungs for fault in faults) else [])]
    room = _WIDTH - _LEFT - _RIGHT
    parts = []
    for index, row in enumerate(rows):
        y = _ROW * (index + 0.5)
        parts.append(f'<text x="0" y="{y + 4:g}">{escape(row)}</text>')
        parts.append(f'<line x1="{_LEFT}" y1="{y:g}" x2="{_WIDTH - _RIGHT}" y2="{y:g}"/>')
    for fault, time in zip(faults, times, strict=True):
        if time is not None:
            x = _LEFT + room * ((time - first) / span)
            y = _ROW * (rows.index(fault.rung if fault.rung in rungs else rows[-1]) + 0.5)
            colour = "#0072b2" if fault.is_recovered else "#d55e00"
            words = escape(f"fault {fault.id}, {fault.started_at}: {fault.cause}, {culprit(fault)}")
            parts.append(f'<circle cx="{x:.1f}" cy="{y:g}" r="6" fill="{colour}"><title>{words}</title></circle>')
    foot = _ROW * len(rows) + 14
    parts.append(_tick(_LEFT, foot, first, "start"))
    parts.append(_tick(_WIDTH - _RIGHT, foot, last, "end"))
    return _svg(foot + 6, f"{counted(len(faults), 'fault')} over time, by rung", parts)


def bars(faults: Sequence[FaultSummary]) -> str:
    """Return a bar for each recovery, made of its phases."""
    longest_s = max((sum(fault.seconds.values()) for fault in faults), default=0.0) or 1.0
    room = _WIDTH - _LEFT - _RIGHT
    parts = []
    for index, fault in enumerate(faults):
        x, y = float(_LEFT), _ROW * index
        parts.append(f'<text x="0" y="{y + 17}">{escape(f"{fault.id}  {fault.cause}"[:22])}</text>')
        for phase, seconds in phases_of(fault):
            width = room * seconds / longest_s
            words = escape(f"{phase} {seconds:.3f} s")
            colour = PHASE_COLOURS.get(phase, _OTHER_COLOUR)
            box = f'x="{x:.1f}" y="{y + 5}" width="{width:.1f}" height="16" fill="{colour}"'
            parts.append(f"<rect {box}><title>{words}</title></rect>")
            x += width
        total = f"{sum(fault.seconds.values()):.3f} s" if fault.is_recovered else "not over"
        parts.append(f'<text class="soft" x="{x + 6:.1f}" y="{y + 17}">{total}</text>')
    return _svg(
        _ROW * len(faults),
        f"seconds of {counted(len(faults), 'recovery', 'recoveries')} by phase; the table has the numbers",
        parts,
    )


def shares_bar(seconds: Mapping[str, float]) -> str:
    """Return one stacked bar of all time, and its key."""
    wall_s = sum(seconds.values()) or 1.0
    x, parts, keys = 0.0, [], []
    for word, part in seconds.items():
        if part <= 0:
            continue
        width, colour = _WIDTH * part / wall_s, TIME_COLOURS.get(word, _OTHER_COLOUR)
        words = escape(f"{word} {part:.1f} s, {part / wall_s:.2%}")
        parts.append(
            f'<rect x="{x:.1f}" y="2" width="{width:.1f}" height="22" fill="{colour}"><title>{words}</title></rect>'
        )
        keys.append(f'<span><i style="background:{colour}"></i>{escape(word)}</span>')
        x += width
    label = "the time since the job first ran, by what it was for; the line below has the shares"
    return f'<div class="key">{"".join(keys)}</div>{_svg(_ROW, label, parts)}'


def _tick(x: float, y: float, time: datetime, anchor: str) -> str:
    return f'<text class="soft" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{time:%Y-%m-%d %H:%M:%S}</text>'


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(label)}">'
        f"{''.join(parts)}</svg>"
    )
