"""Pure: the answer for people, as text and as a page."""

from collections.abc import Iterator, Sequence
from html import escape

from unbroken_cli.sizing.study import IDLE, Difference, Estimate, SizingAnswer
from unbroken_core.conventions.printable import printable_lines
from unbroken_core.vocabulary.plurals import counted

TERM_COLOURS = {
    "progress": "#009e73",
    "checkpoint": "#f0e442",
    "redo": "#d55e00",
    "detect": "#cc79a7",
    "restart": "#e69f00",
    "waiting": "#0072b2",
    "suspended": "#999999",
    "idle": "#56b4e9",
}
"""Told apart by people who are colour-blind, too."""
_MEANING = {
    "ettr": "progress / wall time",
    "ettr_capacity": "progress x active / wanted GPUs",
    "goodput_allocated": "progress GPU time / GPU time held",
}


def answer_lines(found: SizingAnswer) -> list[str]:
    """Return the answer as text."""
    return [*_head(found), *_ratio_lines(found), *_where_lines(found), *_advice_lines(found), *_notes(found)]


def _head(found: SizingAnswer) -> Iterator[str]:
    spares = counted(found.spares, "spare")
    yield (
        f"{found.name}: {found.gpus} GPUs on {counted(found.nodes, 'node')}, {spares}, {_span(found.duration_s)}; "
        f"{counted(found.replicates, 'run')}, seed {found.seed}"
    )
    if found.mtbf_s is None:
        yield "  no faults"
        return
    one = found.interruptions
    yield (
        f"  interrupted every {_span(found.mtbf_s)}: {counted(round(one.mean), 'time')} ({one.low:.0f} to "
        f"{one.high:.0f} in nine runs of ten)"
    )


def _ratio_lines(found: SizingAnswer) -> Iterator[str]:
    yield ""
    yield f"  {'':<20}{'mean':>8}{'':>11}  nine runs of ten"
    for name, value in found.ratios.items():
        yield (
            f"  {name:<20}{value.mean:>8.4f}  +- {value.margin:.4f}  {value.low:.4f} to {value.high:.4f}   "
            f"{_MEANING[name]}"
        )
    if found.daly_ettr is not None:
        yield (
            f"  {'ettr by formula':<20}{found.daly_ettr:>8.4f}             "
            f"Daly's, of mean costs, with checkpoints on {found.daly_tier} alone, without waiting"
        )


def _where_lines(found: SizingAnswer) -> Iterator[str]:
    yield ""
    yield "  where the time goes: " + ", ".join(f"{term} {share:.2%}" for term, share in found.shares.items())
    yield "  GPU-hours lost in one run, by cause"
    for cause, terms in _losses(found):
        parts = ", ".join(f"{term} {_hours(hours)}" for term, hours in terms.items() if hours >= 0.5)
        yield f"    {cause:<20}{_hours(sum(terms.values())):>12}   {parts}"


def _losses(found: SizingAnswer) -> list[tuple[str, dict[str, float]]]:
    """Return GPU-hours by term of what was no progress, by cause, the most first."""
    lost = {
        cause: {term: hours for term, hours in terms.items() if term != "progress"}
        for cause, terms in found.gpu_hours.items()
    }
    rows = [(cause, terms) for cause, terms in lost.items() if sum(terms.values()) >= 0.5]
    return sorted(rows, key=lambda row: -sum(row[1].values()))


def _advice_lines(found: SizingAnswer) -> Iterator[str]:
    yield ""
    waits = f"in {found.wait_in_a_run:.0%} of the runs at least once, {found.waits:.2f} times a run"
    yield f"  waits for a node: {waits}"
    out = found.most_out
    yield (
        f"  nodes out: at most {found.out_p99} at a time (99 %, by formula); most in a run {out.mean:.0f} "
        f"({out.low:.0f} to {out.high:.0f})"
    )
    spare = found.one_more_spare
    if spare is not None:
        gain = spare.goodput
        worth = (
            "not worth it" if gain.mean + gain.margin < 0 else "worth it" if gain.mean > gain.margin else "no matter"
        )
        yield f"  one more spare: ettr {_points(spare.ettr)}, goodput_allocated {_points(gain)}: {worth}"
    for each in found.intervals:
        if each.best_s is None:
            yield f"  interval of {each.tier}: {_span(each.every_s)}; no fault goes back to it, or it costs nothing"
        else:
            daly = "" if each.daly_s is None else f" (Daly: {_span(each.daly_s)})"
            yield f"  interval of {each.tier}: {_span(each.every_s)}, best {_span(each.best_s)}{daly}"
    if found.matters:
        yield "  what matters most: half of it changes goodput_allocated by"
        for item in found.matters[:6]:
            yield f"    {item.name:<32}{_points(item.goodput)}"


def _notes(found: SizingAnswer) -> Iterator[str]:
    for note in found.notes:
        yield f"  note: {note}"


def _points(value: Estimate) -> str:
    return f"{100 * value.mean:+.3f} +- {100 * value.margin:.3f} points"


def _hours(hours: float) -> str:
    return f"{hours:,.0f}"


def _span(seconds: float) -> str:
    for size, unit in ((172800.0, "d"), (5400.0, "h"), (120.0, "min")):
        if seconds >= size:
            return f"{seconds / {'d': 86400.0, 'h': 3600.0, 'min': 60.0}[unit]:.3g} {unit}"
    return f"{seconds:.3g} s"


# ------------------------------------------------------------------------------------------------------------ picture

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --dim: #57606a; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --ink: #e6edf3; --dim: #9198a1; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 68rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; } pre { font: 13px/1.5 ui-monospace, monospace; overflow-x: auto; }
svg { display: block; height: auto; width: 100%; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.key span { display: inline-block; margin-right: 1rem; }
.key i { border-radius: 2px; display: inline-block; height: .7em; margin-right: .35em; width: .7em; }
""".strip()
_WIDTH, _LEFT, _RIGHT, _ROW = 1000, 190, 110, 28


def answer_page(found: SizingAnswer) -> str:
    """Return the answer as one HTML page that needs nothing else."""
    lost = _losses(found)
    rows = [("the time", {term: share for term, share in found.shares.items() if share > 0}, "")]
    held = sum(sum(terms.values()) for terms in found.gpu_hours.values()) or 1.0
    by_term: dict[str, float] = {}
    for terms in found.gpu_hours.values():
        for term, hours in terms.items():
            by_term[term] = by_term.get(term, 0.0) + hours / held
    rows.append(("the GPU time held", {term: by_term[term] for term in TERM_COLOURS if by_term.get(term)}, ""))
    body = [
        f"<h1>{escape(found.name)}: where the time goes</h1>",
        _key(),
        stacked(rows, "shares of the time, and of the GPU time that is held"),
        "<h2>GPU-hours lost in one run, by cause</h2>",
        stacked([(cause, terms, _hours(sum(terms.values()))) for cause, terms in lost], "GPU-hours lost by cause"),
        "<h2>What matters: gain in goodput_allocated from half of each input, in points</h2>",
        _gains(found.matters[:10]),
        f"<pre>{escape(chr(10).join(answer_lines(found)))}</pre>",
    ]
    return printable_lines(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(found.name)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _key() -> str:
    items = (
        f'<span><i style="background:{colour}"></i>{escape(IDLE if term == "idle" else term)}</span>'
        for term, colour in TERM_COLOURS.items()
        if term != "suspended"
    )
    return f'<div class="key">{"".join(items)}</div>'


def stacked(rows: Sequence[tuple[str, dict[str, float], str]], label: str) -> str:
    """Return stacked bars, each with a name, its parts by term, and a note at its end; the longest fills the width."""
    longest = max((sum(parts.values()) for _name, parts, _note in rows), default=0.0) or 1.0
    drawn = []
    for index, (name, parts, note) in enumerate(rows):
        x, y = float(_LEFT), _ROW * index
        drawn.append(f'<text x="0" y="{y + 18}">{escape(name[:28])}</text>')
        for term, value in parts.items():
            width = (_WIDTH - _LEFT - _RIGHT) * value / longest
            colour = TERM_COLOURS.get(term, "#999999")
            title = f"{term} {value / sum(parts.values()):.2%}" if value else term
            drawn.append(
                f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="18" fill="{colour}">'
                f"<title>{escape(title)}</title></rect>"
            )
            x += width
        drawn.append(f'<text x="{x + 6:.1f}" y="{y + 18}">{escape(note)}</text>')
    return _svg(_ROW * len(rows), label, drawn)


def _gains(items: Sequence[Difference]) -> str:
    longest = max((abs(item.goodput.mean) + item.goodput.margin for item in items), default=0.0) or 1.0
    room = (_WIDTH - _LEFT - _RIGHT) / 2
    middle = _LEFT + room
    drawn = [f'<line x1="{middle}" x2="{middle}" y1="0" y2="{_ROW * len(items)}" stroke="#999999"/>']
    for index, item in enumerate(items):
        y = _ROW * index
        width = room * abs(item.goodput.mean) / longest
        x = middle if item.goodput.mean >= 0 else middle - width
        drawn.append(f'<text x="0" y="{y + 18}">{escape(item.name[:28])}</text>')
        drawn.append(f'<rect x="{x:.1f}" y="{y + 4}" width="{width:.1f}" height="18" fill="#0072b2"/>')
        drawn.append(f'<text x="{_WIDTH - _RIGHT + 6}" y="{y + 18}">{100 * item.goodput.mean:+.3f}</text>')
    return _svg(_ROW * len(items), "gain from half of each input", drawn)


def _svg(height: float, label: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {max(height, 1):g}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
