"""Pictures of a snapshot, of the story so far and of its end, for a terminal. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from unbroken_core.vocabulary.reasons import Phase, WorkerPhase
from unbroken_local.demo.snapshot import NodeView, PodView, Snapshot
from unbroken_local.kube import Json

_STYLE: Mapping[WorkerPhase, str] = {
    WorkerPhase.STARTING: "yellow",
    WorkerPhase.READY: "cyan",
    WorkerPhase.RUNNING: "bold green",
    WorkerPhase.STOPPING: "magenta",
    WorkerPhase.COMPLETED: "bold blue",
    WorkerPhase.GONE: "bold red",
}
PHASE_TITLES: Mapping[Phase, str] = {
    Phase.DETECT: "detect",
    Phase.STOP: "stop",
    Phase.PLAN: "plan",
    Phase.ENTER: "enter",
    Phase.FIRST_PROGRESS: "1st step",
}


@dataclass(frozen=True)
class Line:
    """One line of the story."""

    at_s: float
    """Seconds since the demonstration began."""
    text: str
    style: str = ""


@dataclass(frozen=True)
class Row:
    """One fault in the closing table, and the operator's record of the recovery."""

    fault: str
    record: Json | None
    """An item of `.status.history`; None when the operator recorded none."""
    lost: int | None = None
    """How many steps were made again after it; None where nobody has said so."""


def describe_pod(pod: PodView) -> Text:
    """Return a pod in one line: its name and its ranks, or what it does instead."""
    text = Text(f"{pod.name} ", style="dim" if pod.is_ending else "")
    if not pod.is_trainer:
        return text.append(pod.phase.lower(), style="blue")
    if pod.is_ending or pod.phase in {"Failed", "Succeeded"}:
        return text.append("ending" if pod.is_ending else pod.phase.lower(), style="red")
    if not pod.workers:
        return text.append("starting", style="yellow")
    for place, phase in enumerate(pod.workers):
        label = str(pod.ranks[place]) if place < len(pod.ranks) else "s"
        text.append(f" {label} ", style=f"reverse {_STYLE[phase]}").append(" ")
    return text


def describe_node(node: NodeView) -> tuple[Text, Text]:
    """Return a node's name and its pods."""
    name = Text(f"  {node.name}", style="" if node.is_ready else "bold red")
    if not node.is_ready:
        name.append(" down")
    return name, Text("  ").join(describe_pod(pod) for pod in node.pods)


def describe_cluster(snapshot: Snapshot) -> RenderableType:
    """Return racks, NVLink domains and nodes with the ranks on them."""
    racks: list[RenderableType] = []
    for rack, nodes in groupby(snapshot.nodes, key=lambda node: node.rack):
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=14)
        table.add_column(min_width=40)
        for nvlink, members in groupby(nodes, key=lambda node: node.nvlink):
            table.add_row(Text(f"NVLink {nvlink}" if nvlink else "no NVLink", style="dim"))
            for node in members:
                table.add_row(*describe_node(node))
        racks.append(Panel(table, title=f"rack {rack}", title_align="left", box=box.SQUARE, border_style="dim"))
    return Columns(racks, padding=(0, 1))


def describe_job(snapshot: Snapshot) -> Text:
    """Return the job's state in one line."""
    status = snapshot.status
    if status is None:
        return Text(f"job {snapshot.state or 'applied'}: waiting for its rendezvous")
    facts = [
        f"step {status.max_step}",
        f"iteration {status.iteration}",
        f"{status.world_size} active ranks",
        f"{status.spare_ranks} spare",
        f"{len(snapshot.finished_recoveries)} recoveries",
    ]
    style = "bold green" if snapshot.is_training else "bold yellow"
    return Text.assemble(
        (f" {status.phase} ", f"reverse {style}"), "  ", " · ".join(facts), "  ", (status.message, "dim")
    )


def describe_legend() -> Text:
    """Return what the colours mean."""
    text = Text("number = active rank, s = spare:  ", style="dim")
    for phase, style in _STYLE.items():
        text.append(f" {phase.value} ", style=f"reverse {style}").append(" ")
    return text


def describe_story(lines: Sequence[Line], num_lines: int) -> Text:
    """Return the last lines of the story."""
    text = Text()
    for line in lines[-num_lines:]:
        text.append(f"{line.at_s:6.1f} s  ", style="dim").append(f"{line.text}\n", style=line.style)
    return text


def describe_all(snapshot: Snapshot, lines: Sequence[Line], height: int) -> Group:
    """Return the whole live view; `height` is the terminal's number of rows."""
    num_lines = max(4, min(24, height - 16))
    return Group(
        describe_cluster(snapshot),
        describe_legend(),
        Text(),
        describe_job(snapshot),
        Text(),
        describe_story(lines, num_lines),
    )


def describe_result(rows: Iterable[Row]) -> Table:
    """Return the closing table: fault, rung, who took over, and seconds for each phase."""
    title = "What broke, and what became of it"
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold", padding=0)
    for title in ("fault", "cause", "rung", "took over"):
        table.add_column(title, overflow="fold")  # never cut: a user looks these words up
    for title in ("lost", *PHASE_TITLES.values(), "all"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.fault, *_record_cells(row))
    table.caption = (
        "lost = steps made again, as the rendezvous says; then the seconds of each phase, from .status.history; "
        "all = from the fault to the first step of every rank"
    )
    return table


def _record_cells(row: Row) -> list[str]:
    record, lost = row.record, "-" if row.lost is None else str(row.lost)
    if record is None:
        return ["-"] * 3 + [lost] + ["-"] * (1 + len(PHASE_TITLES))
    seconds = record.get("seconds") or {}
    cells = [str(record["cause"]), str(record["rung"]), ", ".join(record.get("replacedBy") or ()) or "same process"]
    cells += [_seconds(seconds.get(phase.value)) for phase in PHASE_TITLES]
    return [*cells[:3], lost, *cells[3:], _seconds(sum(seconds.values()))]


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"
