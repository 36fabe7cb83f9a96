"""Pure: what happened to a job as one HTML page that needs nothing else: no network, no scripts, light or dark."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from html import escape

from unbroken_cli.advice import next_steps
from unbroken_cli.drawings import PHASE_COLOURS, bars, shares_bar, time_line
from unbroken_cli.job import FaultSummary, JobRecord
from unbroken_cli.text import also, clock, count_text, culprit, done, headline, iteration_text, phases_of, time_text
from unbroken_core.conventions.printable import printable_lines

_STYLE = """
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --dim: #57606a; --line: #d0d7de; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --page: #0d1117; --ink: #e6edf3; --dim: #9198a1; --line: #30363d; --card: #161b22; }
}
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto;
  max-width: 68rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
.dim { color: var(--dim); } .state { font-size: 1.1rem; margin: .3rem 0 1.2rem; }
.tiles { display: flex; flex-wrap: wrap; gap: .6rem; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: .5rem; min-width: 6.5rem;
  padding: .5rem .8rem; }
.tile b { display: block; font-size: 1.4rem; font-variant-numeric: tabular-nums; }
table { border-collapse: collapse; width: 100%; } .wide { overflow-x: auto; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .6rem .3rem 0; text-align: left; vertical-align: top; }
th { color: var(--dim); font-weight: 600; } td.time { font-variant-numeric: tabular-nums; white-space: nowrap; }
td { overflow-wrap: anywhere; } td:nth-child(n + 4) { min-width: 9rem; }
pre { font: 13px/1.5 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; }
.chart { display: block; height: auto; width: 100%; }
.chart text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.chart .soft { fill: var(--dim); } .chart line { stroke: var(--line); }
.key span { display: inline-block; margin-right: 1rem; }
.key i { border-radius: 2px; display: inline-block; height: .7em; margin-right: .35em; width: .7em; }
""".strip()


def html_report(job: JobRecord, now: datetime) -> str:
    """Return the page. Whatever comes from the job is escaped, and its control characters are shown."""
    body = "\n".join(_sections(job, now))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return printable_lines(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(job.title)}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _sections(job: JobRecord, now: datetime) -> Iterator[str]:
    yield f"<h1>{escape(job.title)}</h1>"
    yield f'<div class="state">{escape(headline(job))}</div>'
    yield _tiles(job)
    if job.time is not None and sum(job.time.values()) > 0:
        yield "<h2>Where the time went</h2>"
        yield shares_bar(job.time)
        yield f"<pre>{escape(time_text(job, now))}</pre>"
    if job.faults:
        yield "<h2>When, and on which rung</h2>"
        yield time_line(job.faults)
        yield "<h2>Seconds of each recovery</h2>"
        yield _key(job.faults)
        yield bars(job.faults)
        yield "<h2>Faults</h2>"
        yield _faults(job)
    else:
        yield "<p>It had no recovery.</p>" if job.state == "Failed" else "<p>No fault so far.</p>"
    yield "<h2>What to do next</h2>"
    yield f"<pre>{escape(chr(10).join(next_steps(job, now)))}</pre>"
    if job.notes:
        yield "<h2>Events</h2>"
        rows = ((clock(note.time), note.reason, note.message) for note in job.notes)
        yield _table(("Time (UTC)", "Reason", "Message"), rows)
    yield f'<p class="dim">Read {now:%Y-%m-%d %H:%M:%S} UTC. The last 20 faults are kept; Events for an hour or so.</p>'


def _tiles(job: JobRecord) -> str:
    ettr = "-" if job.ettr is None else f"{job.ettr:.3f}"
    values = (
        ("active ranks", count_text(job.active_ranks)),
        ("spare", count_text(job.spare_ranks)),
        ("lost", count_text(job.lost_ranks)),
        ("iteration", iteration_text(job)),
        ("restarts", str(job.restarts)),
        ("ETTR", ettr),
    )
    tiles = "".join(f'<div class="tile"><b>{value}</b><span class="dim">{name}</span></div>' for name, value in values)
    return f'<div class="tiles">{tiles}</div>'


def _key(faults: Sequence[FaultSummary]) -> str:
    used = [phase for phase in PHASE_COLOURS if any(phase in fault.seconds for fault in faults)]
    items = (f'<span><i style="background:{PHASE_COLOURS[phase]}"></i>{phase}</span>' for phase in used)
    return f'<div class="key">{"".join(items)}</div>'


def _faults(job: JobRecord) -> str:
    rows = (
        (
            clock(fault.started_at),
            fault.id,
            ", ".join([f"{fault.cause}: {fault.detail}" if fault.detail else fault.cause, *also(fault)]),
            culprit(fault),
            done(fault, job),
            ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in phases_of(fault)),
        )
        for fault in job.faults
    )
    return _table(("Started (UTC)", "Fault", "What", "Culprit", "Repaired by", "Seconds"), rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = (
        f'<tr><td class="time">{escape(first)}</td>{"".join(f"<td>{escape(cell)}</td>" for cell in rest)}</tr>'
        for first, *rest in rows
    )
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
