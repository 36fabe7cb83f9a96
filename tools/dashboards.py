"""Write the dashboards of the chart: charts/unbroken/dashboards/*.json, for Grafana 10 and newer.

A panel is a title, a unit and its queries; how panels look is said once, below the tables.
"""

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as looks
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as queries

TARGET = Path(__file__).resolve().parent.parent / "charts" / "unbroken" / "dashboards"
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
FLEET = '{namespace=~"$namespace"}'
JOB = '{namespace=~"$namespace", training_job=~"$training_job"}'
BY_JOB = "by (namespace, training_job)"
OPERATOR = "and on (instance, job) unbroken_operator_reconcile_errors_total"
WIDTH = 24

Query = tuple[str, str]
"""PromQL, and the legend of its series."""


@dataclass(frozen=True)
class Panel:
    """One panel: `kind` is a key of KINDS, `width` a number of Grafana's 24 columns."""

    kind: str
    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    width: int = 8


@dataclass(frozen=True)
class Board:
    """One dashboard: rows of panels by their title, and the variables below the data source."""

    uid: str
    title: str
    text: str
    variables: tuple[Query, ...]
    rows: dict[str, tuple[Panel, ...]]
    annotation: str = ""


def one(*query: str) -> tuple[Query, ...]:
    """Return a panel's only query and its legend."""
    return ((query[0], query[1] if len(query) > 1 else ""),)


def job(text: str) -> str:
    """Put the selectors of the job into a query: METRIC{} or METRIC{label="x", }."""
    return text.replace("{}", JOB).replace(", }", ", " + JOB[1:])


def fleet(text: str) -> str:
    """Put the selector of the namespaces into a query."""
    return text.replace("{}", FLEET).replace(", }", ", " + FLEET[1:])


def mean_seconds(select: Callable[[str], str]) -> tuple[Query, ...]:
    """Return the mean seconds of each phase in the time that is shown."""
    total, count = (
        f"sum by (phase) (increase(unbroken_recovery_seconds_{part}{{}}[$__range]))" for part in ("sum", "count")
    )
    return one(select(f"{total} / {count}"), "{{phase}}")


FLEET_BOARD = Board(
    uid="unbroken-fleet",
    title="Unbroken / Fleet",
    text="All jobs: how much of their time is progress, what interrupts them, and where.",
    variables=(("namespace", "label_values(unbroken_iteration, namespace)"),),
    rows={
        "Now": (
            Panel("number", "Jobs that run", "short", one('sum(unbroken_operator_jobs{state="Running"})'), width=4),
            Panel(
                "number", "Jobs that recover", "short", one('sum(unbroken_operator_jobs{state="Recovering"})'), width=4
            ),
            Panel("number", "Jobs that failed", "short", one('sum(unbroken_operator_jobs{state="Failed"})'), width=4),
            Panel("number", "Mean ETTR", "percentunit", one(fleet("avg(unbroken_ettr_ratio{})")), width=4),
            Panel(
                "number",
                "Recoveries",
                "short",
                one(fleet("sum(increase(unbroken_restarts_total{}[$__range]))")),
                width=4,
            ),
            Panel(
                "number",
                "GPU time lost",
                "s",
                one(fleet("sum(increase(unbroken_lost_gpu_seconds_total{}[$__range]))")),
                "Seconds without first-time progress, times active ranks.",
                width=4,
            ),
        ),
        "Progress": (
            Panel("lines", "Jobs by state", "short", one("sum by (state) (unbroken_operator_jobs)", "{{state}}")),
            Panel(
                "lines",
                "ETTR of the jobs",
                "percentunit",
                tuple(
                    (fleet(f"quantile({quantile}, max {BY_JOB} (unbroken_ettr_ratio{{}}))"), legend)
                    for quantile, legend in ((0.1, "worst tenth"), (0.5, "median"), (0.9, "best tenth"))
                ),
                "Seconds of first-time progress / wall seconds since the job first ran.",
            ),
            Panel(
                "bars",
                "Jobs with the lowest ETTR",
                "percentunit",
                one(fleet(f"bottomk(10, max {BY_JOB} (unbroken_ettr_ratio{{}}))"), "{{namespace}}/{{training_job}}"),
            ),
        ),
        "Interruptions": (
            Panel(
                "columns",
                "Recoveries by cause",
                "short",
                one(fleet("sum by (cause) (increase(unbroken_restarts_total{}[$__rate_interval])) > 0"), "{{cause}}"),
            ),
            Panel(
                "columns",
                "Recoveries by rung",
                "short",
                one(fleet("sum by (rung) (increase(unbroken_restarts_total{}[$__rate_interval])) > 0"), "{{rung}}"),
                "The highest rung of the ladder that each recovery needed: in-process is the cheapest.",
            ),
            Panel("bars", "Mean seconds of a recovery's phases", "s", mean_seconds(fleet)),
        ),
        "Where": (
            Panel(
                "table",
                "Worst nodes",
                "short",
                one(fleet('topk(10, sum by (node) (unbroken_recent_culprits{node!="", }))')),
                "Nodes of the culprits of each job's last 20 recoveries.",
            ),
            Panel(
                "table",
                "Worst domains",
                "short",
                one(fleet("topk(10, sum by (domain) (unbroken_recent_culprits{}))")),
                "The same by the innermost layer of the topology, such as the rack.",
            ),
            Panel(
                "lines",
                "Spare ranks",
                "short",
                (
                    (fleet('sum(unbroken_ranks{role="spare", })'), "ready"),
                    (fleet('sum(unbroken_wanted_ranks{role="spare", })'), "wanted"),
                ),
            ),
        ),
    },
)

JOB_BOARD = Board(
    uid="unbroken-job",
    title="Unbroken / Job",
    text="One job: its interruptions, what each cost, who caused them, and what is left to repair the next.",
    variables=(
        ("namespace", "label_values(unbroken_iteration, namespace)"),
        ("training_job", 'label_values(unbroken_iteration{namespace=~"$namespace"}, training_job)'),
    ),
    annotation=job("sum by (cause, rung) (increase(unbroken_restarts_total{}[1m])) > 0"),
    rows={
        "Now": (
            Panel("number", "Iteration", "short", one(job("max(unbroken_iteration{})")), width=3),
            Panel(
                "number",
                "Step",
                "short",
                one(job("max(unbroken_step{})")),
                "-1 where the script reports none.",
                width=3,
            ),
            Panel("number", "ETTR", "percentunit", one(job("max(unbroken_ettr_ratio{})")), width=3),
            Panel(
                "number",
                "Goodput",
                "percentunit",
                one(job("sum(increase(unbroken_progress_seconds_total{}[$__range])) / $__range_s")),
                "Share of the time shown that was first-time progress.",
                width=3,
            ),
            Panel(
                "number",
                "GPU time lost",
                "s",
                one(job("sum(increase(unbroken_lost_gpu_seconds_total{}[$__range]))")),
                width=3,
            ),
            Panel(
                "number", "Recoveries", "short", one(job("sum(increase(unbroken_restarts_total{}[$__range]))")), width=3
            ),
            Panel("number", "Ranks lost", "short", one(job('max(unbroken_ranks{role="lost", })')), width=3),
            Panel("number", "Spare ranks", "short", one(job('max(unbroken_ranks{role="spare", })')), width=3),
        ),
        "Training": (
            Panel(
                "states", "State", "short", one(job("max by (phase) (unbroken_phase{}) == 1"), "{{phase}}"), width=12
            ),
            Panel(
                "lines",
                "Goodput",
                "percentunit",
                one(job("sum(rate(unbroken_progress_seconds_total{}[$__rate_interval]))"), "first-time progress"),
                width=12,
            ),
            Panel(
                "lines",
                "Step",
                "short",
                one(job("max(unbroken_step{})"), "step"),
                "A fall is work done again.",
                width=12,
            ),
            Panel(
                "layers", "Ranks by role", "short", one(job("max by (role) (unbroken_ranks{})"), "{{role}}"), width=12
            ),
        ),
        "Interruptions": (
            Panel(
                "columns",
                "Recovery seconds by phase",
                "s",
                one(
                    job("sum by (phase) (increase(unbroken_recovery_seconds_sum{}[$__rate_interval])) > 0"), "{{phase}}"
                ),
            ),
            Panel("bars", "Mean seconds of a recovery's phases", "s", mean_seconds(job)),
            Panel(
                "columns",
                "Recoveries",
                "short",
                one(
                    job("sum by (cause, rung) (increase(unbroken_restarts_total{}[$__rate_interval])) > 0"),
                    "{{cause}}, by {{rung}}",
                ),
            ),
            Panel(
                "table",
                "Culprits of the last 20 recoveries",
                "short",
                one(job("sum by (node, domain, cause) (unbroken_recent_culprits{})")),
                width=16,
            ),
            Panel(
                "bars", "Spare ranks by domain", "short", one(job("max by (domain) (unbroken_spares{})"), "{{domain}}")
            ),
        ),
        "Pods": (
            Panel(
                "layers",
                "Workers by phase",
                "short",
                one(job("sum by (phase) (unbroken_agent_workers{})"), "{{phase}}"),
            ),
            Panel(
                "checks",
                "Health checks",
                "short",
                one(job("min by (check) (unbroken_health_check{})"), "{{check}}"),
                "Of the script: fails where its last run failed on a worker of any pod.",
            ),
            Panel(
                "lines",
                "Agents",
                "short",
                (
                    (job("count(unbroken_agent_connected{})"), "run"),
                    (job("sum(unbroken_agent_connected{})"), "connected"),
                ),
            ),
            Panel(
                "lines",
                "Oldest heartbeat",
                "s",
                (
                    (job("max(unbroken_heartbeat_age_seconds{})"), "age"),
                    (job("max(unbroken_heartbeat_timeout_seconds{})"), "lost at"),
                ),
            ),
            Panel(
                "lines",
                "Refused",
                "short",
                one(job("sum by (reason) (increase(unbroken_refused_total{}[$__rate_interval]))"), "{{reason}}"),
            ),
            Panel(
                "lines",
                "Generation of the rendezvous",
                "short",
                one(job("max(unbroken_generation{})"), "generation"),
            ),
        ),
    },
)

OPERATOR_BOARD = Board(
    uid="unbroken-operator",
    title="Unbroken / Operator",
    text="The operator itself: what it does, how long it takes, and what the API server says.",
    variables=(),
    rows={
        "Work": (
            Panel("lines", "Jobs by state", "short", one("sum by (state) (unbroken_operator_jobs)", "{{state}}")),
            Panel(
                "lines",
                "Actions",
                "ops",
                one("sum by (action) (rate(unbroken_operator_actions_total[$__rate_interval]))", "{{action}}"),
            ),
            Panel(
                "lines",
                "Plans that could not be carried out",
                "ops",
                one("sum(rate(unbroken_operator_reconcile_errors_total[$__rate_interval]))", "failed"),
            ),
        ),
        "Speed": (
            Panel(
                "lines",
                "Seconds of a plan",
                "s",
                tuple(
                    (
                        f"histogram_quantile({quantile}, sum by (le) "
                        "(rate(unbroken_operator_reconcile_seconds_bucket[$__rate_interval])))",
                        legend,
                    )
                    for quantile, legend in ((0.5, "median"), (0.99, "99 %"))
                ),
            ),
            Panel(
                "lines",
                "Calls to the API server",
                "reqps",
                one(
                    "sum by (verb, resource) (rate(unbroken_operator_api_calls_total[$__rate_interval]))",
                    "{{verb}} {{resource}}",
                ),
            ),
            Panel(
                "lines",
                "Answers of the API server",
                "reqps",
                one("sum by (outcome) (rate(unbroken_operator_api_calls_total[$__rate_interval]))", "{{outcome}}"),
                "HTTP status, or error where there was no answer.",
            ),
        ),
        "Process": (
            Panel(
                "lines", "Memory", "bytes", one(f"process_resident_memory_bytes {OPERATOR}", "{{instance}}"), width=12
            ),
            Panel(
                "lines",
                "CPU cores",
                "short",
                one(f"rate(process_cpu_seconds_total[$__rate_interval]) {OPERATOR}", "{{instance}}"),
                width=12,
            ),
        ),
    },
)

# --------------------------------------------------------------------------------------------------------------- looks


def _legend() -> common.VizLegendOptions:
    return (
        common.VizLegendOptions()
        .display_mode(looks.LegendDisplayMode.LIST)
        .placement(looks.LegendPlacement.BOTTOM)
        .show_legend(True)
    )


def _lines() -> timeseries.Panel:
    tooltip = common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING)
    return timeseries.Panel().legend(_legend()).tooltip(tooltip).fill_opacity(8).line_width(2).axis_soft_min(0)


def _stacked() -> timeseries.Panel:
    return _lines().stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL)).fill_opacity(40)


def _columns() -> timeseries.Panel:
    return _stacked().draw_style(looks.GraphDrawStyle.BARS).fill_opacity(80).line_width(1)


def _timeline() -> statetimeline.Panel:
    return statetimeline.Panel().legend(_legend()).show_value(looks.VisibilityMode.NEVER).fill_opacity(80)


def _reduced() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


CHECKED = models.ValueMap(
    options={
        "0": models.ValueMappingResult(text="fails", color="red", index=1),
        "1": models.ValueMappingResult(text="passes", color="green", index=0),
    }
)
KINDS: dict[str, Callable[[], Any]] = {
    "lines": _lines,
    "layers": _stacked,
    "columns": _columns,
    "checks": lambda: _timeline().mappings([CHECKED]),
    "states": _timeline,
    "number": lambda: stat.Panel().reduce_options(_reduced()).graph_mode(looks.BigValueGraphMode.NONE),
    "bars": lambda: (
        bargauge.Panel()
        .reduce_options(_reduced())
        .orientation(looks.VizOrientation.HORIZONTAL)
        .display_mode(looks.BarGaugeDisplayMode.GRADIENT)
    ),
    "table": table.Panel,
}
INSTANT = frozenset(("number", "bars", "table"))
HEIGHTS = {"number": 4}


def _panel(panel: Panel) -> Builder[models.Panel]:
    built = KINDS[panel.kind]().title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE).min(0)
    built = built.span(panel.width).height(HEIGHTS.get(panel.kind, 8))
    if panel.kind == "table":
        hidden = models.DataTransformerConfig(id_val="organize", options={"excludeByName": {"Time": True}})
        built = built.with_transformation(hidden)
    for number, (expression, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        if panel.kind in INSTANT:
            query = query.instant()
        if panel.kind == "table":
            query = query.format(queries.PromQueryFormat.TABLE)
        built = built.with_target(query)
    finished: Builder[models.Panel] = built
    return finished


def _variables(board: Board) -> Iterator[Builder[models.VariableModel]]:
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    for name, query in board.variables:
        variable = dashboard.QueryVariable(name).label(name.replace("_", " ")).query(query).datasource(SOURCE)
        variable = variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
            models.VariableSort.ALPHABETICAL_ASC
        )
        is_many = board is FLEET_BOARD
        yield variable.multi(is_many).include_all(is_many)


def render(board: Board) -> str:
    """Return the dashboard as Grafana reads it."""
    built = dashboard.Dashboard(board.title).uid(board.uid).description(board.text).tags(["unbroken"]).refresh("30s")
    built = built.time("now-6h", "now").timezone("browser").tooltip(models.DashboardCursorSync.CROSSHAIR)
    for variable in _variables(board):
        built = built.with_variable(variable)
    for title, panels in board.rows.items():
        built = built.with_row(dashboard.Row(title))
        for panel in panels:
            built = built.with_panel(_panel(panel))
    text: dict[str, Any] = json.loads(JSONEncoder().encode(built.build()))
    for number, panel in enumerate(text["panels"]):
        panel["id"] = number + 1
    if board.annotation:
        # The builder of annotations knows no title yet.
        text["annotations"]["list"] = [
            {
                "name": "Interruptions",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "enable": True,
                "iconColor": "red",
                "expr": board.annotation,
                "step": "60s",
                "titleFormat": "{{cause}}",
                "textFormat": "recovered by {{rung}}",
            }
        ]
    return json.dumps(text, indent=1, sort_keys=True) + "\n"


BOARDS = {"fleet": FLEET_BOARD, "job": JOB_BOARD, "operator": OPERATOR_BOARD}


def main() -> int:
    """Write the dashboards; return the exit code."""
    TARGET.mkdir(exist_ok=True)
    for name, board in BOARDS.items():
        (TARGET / f"{name}.json").write_text(render(board), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
