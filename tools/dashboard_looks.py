"""How the panels of the dashboards look, said once for all of them: tools/dashboards.py says what they show."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")

Query = tuple[str, str]
"""PromQL, and the legend of its series."""
Marks = tuple[tuple[float | None, str], ...]
"""From which value on a number has which colour; None: from the lowest on."""

PLAIN: Marks = ((None, "text"),)
BLUE: Marks = ((None, "blue"),)
SHARE: Marks = ((None, "red"), (0.8, "orange"), (0.95, "green"))
"""Of time that is progress."""
GOOD: Marks = ((None, "orange"), (1, "green"))
FEW: Marks = ((None, "green"), (1, "orange"))
BAD: Marks = ((None, "green"), (1, "red"))

STATES = {
    "Forming": "blue",
    "Running": "green",
    "Recovering": "orange",
    "Suspended": "text",
    "Complete": "purple",
    "Failed": "red",
    "Invalid": "dark-red",
    "Unknown": "yellow",
    "Deleting": "semi-dark-blue",
}
"""Of jobs, as the operator calls them."""
PHASES = (
    ("forming", "blue"),
    ("running", "green"),
    ("interrupted", "red"),
    ("planned", "orange"),
    ("ending", "super-light-purple"),
    ("complete", "purple"),
    ("failed", "dark-red"),
)
"""Of a job, as the coordinator calls them."""
ROLES = {"active": "green", "spare": "blue", "lost": "red"}
WORKERS = {
    "starting": "yellow",
    "ready": "blue",
    "running": "green",
    "stopping": "orange",
    "completed": "purple",
    "gone": "red",
}
SAFE = {"on all ranks": "green", "protected": "blue", "on the disk": "purple"}
"""What a checkpoint outlives."""
SOURCES = {"from memory": "green", "from disk": "orange", "from nothing": "red"}
RUNGS = {"in-process": "green", "process": "yellow", "pod": "orange", "world": "red", "job": "dark-red"}
"""From the cheapest on."""
VERDICTS = {"degraded": "yellow", "suspect": "orange", "fatal": "red"}
"""Of checks, from the mildest on."""
SPENT = {
    "progress": "green",
    "checkpoint": "yellow",
    "redo": "red",
    "detect": "purple",
    "restart": "orange",
    "waiting": "blue",
    "suspended": "text",
}
LINES = {
    "connected": "green",
    "age": "green",
    "ready": "green",
    "worst tenth": "red",
    "median": "yellow",
    "best tenth": "green",
    "99 %": "orange",
}
"""Legends that are no labels."""
LIMITS = {"wanted": "text", "run": "text", "lost at": "red"}
"""Drawn as dashes: what another line of the panel should reach, or stay below."""
HIGHEST_AT_LEAST = {"short": 1.0, "locale": 1.0, "percentunit": 1.0}
"""By unit: where an axis ends when all values are small. Without it Grafana's axis of a zero ends at 100."""
WHOLE = frozenset(("short", "locale"))
"""Units of what is counted."""
COLUMN = "1m"
"""Width of a column at least: four of Prometheus' default scrapes, so that an event is in one column, not in four."""


@dataclass(frozen=True)
class Panel:
    """One panel: `kind` is a key of KINDS, `width` a number of Grafana's 24 columns."""

    kind: str
    title: str
    unit: str
    queries: tuple[Query, ...]
    text: str = ""
    width: int = 8
    marks: Marks = PLAIN
    """Of numbers and bars."""
    values: tuple[tuple[str, str], ...] = ()
    """Text and colour of the values 0, 1, 2, ... of a kind of state."""
    columns: tuple[str, ...] = ()
    """Of a table: its labels in order; the value follows, as "recoveries"."""
    colors: Mapping[str, str] = field(default_factory=dict)
    """Of the words that a label of a graph may have; others get colours in turn."""


@dataclass(frozen=True)
class Board:
    """One dashboard: rows of panels by their title, and the variables below the data source."""

    uid: str
    title: str
    text: str
    variables: tuple[Query, ...]
    rows: dict[str, tuple[Panel, ...]]
    annotation: str = ""
    is_of_many: bool = False
    """Whether several values of a variable may be chosen at once."""


def _legend(placement: looks.LegendPlacement = looks.LegendPlacement.BOTTOM) -> common.VizLegendOptions:
    return common.VizLegendOptions().display_mode(looks.LegendDisplayMode.LIST).placement(placement).show_legend(True)


def _lines() -> timeseries.Panel:
    tooltip = common.VizTooltipOptions().mode(looks.TooltipDisplayMode.MULTI).sort(looks.SortOrder.DESCENDING)
    return timeseries.Panel().legend(_legend()).tooltip(tooltip).fill_opacity(8).line_width(2).axis_soft_min(0)


def _stacked() -> timeseries.Panel:
    return _lines().stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL)).fill_opacity(40)


def _columns() -> timeseries.Panel:
    return _stacked().draw_style(looks.GraphDrawStyle.BARS).fill_opacity(80).line_width(1).interval(COLUMN)


def _timeline() -> statetimeline.Panel:
    return statetimeline.Panel().legend(_legend()).show_value(looks.VisibilityMode.NEVER).fill_opacity(80)


def _reduced() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"])


def _bars() -> bargauge.Panel:
    built = bargauge.Panel().reduce_options(_reduced()).orientation(looks.VizOrientation.HORIZONTAL)
    return built.display_mode(looks.BarGaugeDisplayMode.BASIC)


KINDS: dict[str, Callable[[], Any]] = {
    "lines": _lines,
    "many lines": lambda: _lines().legend(_legend(looks.LegendPlacement.RIGHT)),
    "mean lines": lambda: _lines().interval(COLUMN),
    "layers": _stacked,
    "columns": _columns,
    "state": _timeline,
    "states": _timeline,
    "number": lambda: stat.Panel().reduce_options(_reduced()).graph_mode(looks.BigValueGraphMode.NONE),
    "bars": _bars,
    "table": table.Panel,
}
GRAPHS = frozenset(("lines", "many lines", "mean lines", "layers", "columns"))
INSTANT = frozenset(("number", "bars", "table"))
HEIGHTS = {"number": 4, "state": 5}
BAR_HEIGHTS_PX = {"sizing": "manual", "minVizHeight": 16, "maxVizHeight": 40}
"""Else one bar fills its panel. The builder does not know them yet."""


def _panel(panel: Panel) -> Builder[models.Panel]:
    built = KINDS[panel.kind]().title(panel.title).description(panel.text).unit(panel.unit).datasource(SOURCE).min(0)
    built = built.span(panel.width).height(HEIGHTS.get(panel.kind, 8))
    if panel.unit in WHOLE:
        built = built.decimals(0)
    if panel.kind in GRAPHS:
        built = _colored(built, panel)
    elif panel.kind == "table":
        built = _ordered(built, panel.columns)
    elif panel.values:
        built = built.mappings([_words(panel.values)])
    else:
        steps = [models.Threshold(value=value, color=color) for value, color in panel.marks]
        built = built.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    for number, (expression, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + number))
        if panel.kind in INSTANT:
            query = query.instant()
        if panel.kind == "table":
            query = query.format(queries.PromQueryFormat.TABLE)
        built = built.with_target(query)
    finished: Builder[models.Panel] = built
    return finished


def _colored(built: Any, panel: Panel) -> Any:
    """Give words their colours, the same on all panels."""
    if (highest := HIGHEST_AT_LEAST.get(panel.unit)) is not None:
        built = built.axis_soft_max(highest)
    legends = {legend for _, legend in panel.queries}
    known = {word: color for word, color in LINES.items() if word in legends}
    for word, color in {**known, **panel.colors}.items():
        built = built.override_by_name(word, [_color(color)])
    for word in sorted(LIMITS.keys() & legends):
        dashes = models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 6]})
        empty = models.DynamicConfigValue("custom.fillOpacity", 0)
        built = built.override_by_name(word, [_color(LIMITS[word]), dashes, empty])
    return built


def _color(color: str) -> models.DynamicConfigValue:
    return models.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": color})


def _ordered(built: Any, columns: tuple[str, ...]) -> Any:
    options = {
        "excludeByName": {"Time": True},
        "indexByName": {name: number for number, name in enumerate((*columns, "Value"))},
        "renameByName": {"Value": "recoveries"},
    }
    sorting = common.TableSortByFieldState().display_name("recoveries").desc(True)
    return built.with_transformation(models.DataTransformerConfig(id_val="organize", options=options)).sort_by(
        [sorting]
    )


def _words(values: tuple[tuple[str, str], ...]) -> models.ValueMap:
    return models.ValueMap(
        options={
            str(number): models.ValueMappingResult(text=text, color=color, index=number)
            for number, (text, color) in enumerate(values)
        }
    )


def _variables(board: Board) -> Iterator[Builder[models.VariableModel]]:
    yield dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    for name, query in board.variables:
        variable = dashboard.QueryVariable(name).label(name.replace("_", " ")).query(query).datasource(SOURCE)
        variable = variable.refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED).sort(
            models.VariableSort.ALPHABETICAL_ASC
        )
        yield variable.multi(board.is_of_many).include_all(board.is_of_many)


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
        if panel["type"] == "bargauge":
            panel["options"] |= BAR_HEIGHTS_PX
    if board.annotation:
        # The builder of annotations knows no title yet.
        text["annotations"]["list"] = [
            {
                "name": "Interruptions",
                "datasource": {"type": "prometheus", "uid": "${datasource}"},
                "enable": True,
                "iconColor": "red",
                "expr": board.annotation,
                "step": "15s",
                "titleFormat": "{{cause}}",
                "textFormat": "recovered by {{rung}}",
            }
        ]
    return json.dumps(text, indent=1, sort_keys=True) + "\n"
