"""Dashboards name metrics that exist, and the chart's values are all explained and checked."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools import chart_values, dashboard_looks, dashboards

from unbroken_core.vocabulary.reasons import JobPhase, Rung
from unbroken_operator.api.status_models import JobStateWord

from .test_alerts import ROOT, metric_names

CHART = ROOT / "charts" / "unbroken"
BOARDS = sorted((CHART / "dashboards").glob("*.json"))


@pytest.mark.parametrize("path", BOARDS, ids=[path.stem for path in BOARDS])
def test_metrics_of_a_dashboard_exist(path: Path) -> None:
    names = {
        name
        for name in re.findall(r"\bunbroken_\w+", path.read_text())
        if not name.startswith("unbroken_operator_reconcile_seconds")
    }
    assert names - metric_names() == set()
    assert names


@pytest.mark.parametrize("path", BOARDS, ids=[path.stem for path in BOARDS])
def test_panels_fill_rows_and_have_what_grafana_needs(path: Path) -> None:
    board = json.loads(path.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references) > 0, panel["title"]


def test_docs_show_a_small_picture_of_each_dashboard() -> None:
    text = (ROOT / "docs" / "dashboards.md").read_text()
    pictures = sorted((ROOT / "docs" / "dashboards").iterdir())
    assert [picture.name for picture in pictures] == [f"{path.stem}.png" for path in BOARDS]
    for picture in pictures:
        assert picture.stat().st_size < 300_000, picture
        assert f"](dashboards/{picture.name})" in text


def test_every_kind_of_panel_can_be_drawn_for_the_docs() -> None:
    source = (ROOT / "tools" / "dashboard_pictures" / "page" / "panels.jsx").read_text()
    table = source[source.index("export const KINDS") :]
    drawn = {"row", *re.findall(r"^  '?([a-z-]+)'?:", table, re.MULTILINE)}
    panels = [panel for path in BOARDS for panel in json.loads(path.read_text())["panels"]]
    assert {panel["type"] for panel in panels} <= drawn
    assert {change["id"] for panel in panels for change in panel.get("transformations", ())} <= {"organize"}


def test_files_are_those_of_the_code() -> None:
    assert {path.stem: path.read_text() for path in BOARDS} == {
        name: dashboard_looks.render(board) for name, board in dashboards.BOARDS.items()
    }


def keys(values: Any, before: str = "") -> set[str]:
    """Return the names of all values."""
    if not isinstance(values, dict) or not values:
        return {before}
    return set().union(*(keys(value, f"{before}.{name}".lstrip(".")) for name, value in values.items()))


def test_every_value_of_the_chart_is_explained_and_checked() -> None:
    text = (CHART / "values.yaml").read_text()
    explained = {value.name for value in chart_values.find_values(text)}
    values = keys(yaml.safe_load(text))
    assert {name for name in values if not any(f"{name}.".startswith(f"{word}.") for word in explained)} == set()
    schema = json.loads((CHART / "values.schema.json").read_text())
    top = {name.split(".")[0] for name in values}
    assert top | {"global"} == set(schema["properties"])


def test_each_state_and_each_phase_has_a_colour_of_its_own() -> None:
    """Seen before: a job that was ending looked as if it were forming."""
    assert set(dashboard_looks.STATES) == {word.value for word in JobStateWord}
    assert [word for word, _colour in dashboard_looks.PHASES] == [phase.value for phase in JobPhase]
    for colours in (list(dashboard_looks.STATES.values()), [colour for _word, colour in dashboard_looks.PHASES]):
        assert len(set(colours)) == len(colours)


def test_each_rung_has_a_colour_on_the_dashboards() -> None:
    assert list(dashboard_looks.RUNGS) == [rung.value for rung in Rung]
