"""`benchmarks/cost.py`: what it refuses, what it makes of measured rows, and the pages that it writes."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import pytest
import yaml

from unbroken_cli.sizing.reading import read_scenario
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Rung

ROOT = Path(__file__).parents[4]
BENCHMARKS = ROOT / "benchmarks"
# For as long as these tests' process lives: the modules import each other by their names.
sys.path.append(str(BENCHMARKS))

if TYPE_CHECKING:
    from reports.cost_feed import Settings

pytestmark = pytest.mark.timeout(600)
TERMS = ("progress", "checkpoint", "redo", "detect", "restart", "waiting")


def row(system: str, fault: str, *, detect: float = 0.1, restart: float = 2.0, waiting: float = 0.0) -> dict[str, Any]:
    terms = dict(zip(TERMS, (0.5, 0.0, 4.0, detect, restart, waiting), strict=True))
    lost = round(sum(terms.values()), 4)
    phases = {"restart": 0.25, "join": 0.125, "model": 0.75, "restore": 0.25}
    phases["redo"] = round(lost - sum(phases.values()), 4)
    one = {"lost_s": lost, "steps_redone": 8, "terms": terms, "phases": phases, "is_known": True}
    medians = {"lost_s": lost, "steps_redone": 8, "terms": terms, "phases": phases}
    return {"system": system, "fault": fault, **medians, "step_s": 0.5, "faults": [one], "reason": ""}


def rows() -> list[dict[str, Any]]:
    from lost_time import CANNOT, KINDS, SYSTEMS

    found = []
    for kind in KINDS:
        for system in SYSTEMS:
            made = row(system, kind, detect=5.5 if kind == "hang" else 0.1)
            if (system, kind) in CANNOT:
                nothing: dict[str, Any] = {
                    "lost_s": None,
                    "steps_redone": None,
                    "step_s": None,
                    "terms": {},
                    "phases": {},
                }
                made |= {**nothing, "faults": [], "reason": CANNOT[system, kind]}
            found.append(made)
    return found


def settings_value() -> Any:
    return yaml.safe_load((BENCHMARKS / "cost.yaml").read_text())


def settings() -> "Settings":
    from reports.cost_feed import read_settings

    return read_settings(settings_value())


ROWS_THAT_ARE_REFUSED = [
    pytest.param(lambda found: {}, r"rows: want a list of 1 to 200 rows, got dict", id="no list"),
    pytest.param(lambda found: [], r"rows: want a list of 1 to 200 rows, got list", id="no rows"),
    pytest.param(lambda found: [3], r"rows: rows\[0\]: want a mapping, got 3", id="no row"),
    pytest.param(
        lambda found: found[:3] + found[4:],
        r"rows: rows: want torchrun × exception, got none; measure it",
        id="a missing row",
    ),
    pytest.param(
        lambda found: found.append(found[0]), r"want one row of unbroken-memory × exception, got another", id="twice"
    ),
    pytest.param(lambda found: found[0].update(system="mine"), r"rows\[0\]\.system: want one of .*'mine'", id="system"),
    pytest.param(lambda found: found[0].update(speed=1), r"rows\[0\]\.speed: unknown", id="an unknown field"),
    pytest.param(lambda found: found[0].update(faults=[]), r"rows\[0\]\.reason: want either a reason or", id="nothing"),
    pytest.param(lambda found: found[0].update(faults={}), r"rows\[0\]\.faults: want a list", id="faults are no list"),
    pytest.param(
        lambda found: found[1]["faults"][0].update(lost_s=0),
        r"rows\[1\]\.faults\[0\]\.lost_s: want a number above 0 .*got 0",
        id="zero",
    ),
    pytest.param(
        lambda found: found[1]["faults"][0]["terms"].update(detect=-0.1),
        r"rows\[1\]\.faults\[0\]\.terms\.detect: want a number .*got -0.1",
        id="negative",
    ),
    pytest.param(
        lambda found: found[1]["faults"][0]["terms"].update(restart=1e9),
        r"terms\.restart: want a number .*up to 3600, got 1000000000",
        id="absurd",
    ),
    pytest.param(
        lambda found: found[1]["faults"][0]["terms"].update(restart=float("nan")), r"terms\.restart: want", id="NaN"
    ),
    pytest.param(
        lambda found: found[1]["faults"][0]["terms"].update(redo="4"), r"terms\.redo: want a number", id="text"
    ),
    pytest.param(
        lambda found: found[1]["faults"][0]["terms"].__delitem__("waiting"),
        r"terms\.waiting: is required",
        id="a missing term",
    ),
    pytest.param(
        lambda found: found[1]["faults"][0]["terms"].update(redo=4.1),
        r"faults\[0\]\.terms: want parts that sum to lost_s \(6\.6\), got 6\.7",
        id="terms that do not sum",
    ),
    pytest.param(
        lambda found: found[1]["faults"][0]["phases"].update(model=0.5), r"phases: want parts that sum", id="phases"
    ),
]


@pytest.mark.parametrize(("change", "message"), ROWS_THAT_ARE_REFUSED)
def test_rows_that_cannot_be_are_one_line_with_the_field(change: Callable[[Any], Any], message: str) -> None:
    from reports.cost_feed import read_rows

    value = rows()
    changed = change(value)
    value = value if changed is None else changed
    with pytest.raises(InputError, match=message) as raised:
        read_rows(json.dumps(value).encode(), "rows")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        pytest.param(b"{", r"^mine: not JSON: ", id="cut off"),
        pytest.param(b"\xff", r"^mine: not JSON: ", id="no text"),
        pytest.param(b"[" * 100_000, r"^mine: not JSON: ", id="too deep"),
        pytest.param(b" " * (4 << 20) + b"[]", r"^mine: want at most 4194304 bytes", id="too long"),
    ],
)
def test_what_is_no_json_is_refused(data: bytes, message: str) -> None:
    from reports.cost_feed import read_rows

    with pytest.raises(InputError, match=message):
        read_rows(data, "mine")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda value: value["assumptions"]["groupInit"].update(value="-3s"), "assumptions.groupInit.value: want"),
        (lambda value: value["assumptions"]["podsPerSecond"].update(value=0), "assumptions.podsPerSecond.value: want"),
        (lambda value: value["assumptions"].pop("repair"), "assumptions.repair: is required"),
        (lambda value: value["assumptions"]["repair"].pop("source"), "assumptions.repair.source: is required"),
        (lambda value: value["assumptions"].update(luck={"value": 1}), "assumptions.luck: unknown"),
        (lambda value: value["rates"][0].update(rate=0), r"rates\[0\].rate: want a number above 0"),
        (lambda value: value["rates"][1].update(rate=1e7), r"rates\[1\].rate: want a number above 0 and up to"),
        (lambda value: value.update(rates=[]), "rates: want at least one"),
        (lambda value: value.update(sizes=[12]), r"sizes\[0\]: want GPUs from 8 .* a multiple of gpusPerNode, got 12"),
        (lambda value: value["faults"][0].update(count=0), r"faults\[0\].count: want a whole number from 1"),
        (lambda value: value["faults"][0].update({"as": "fire"}), r"faults\[0\].as: want one of exception"),
        (lambda value: value.update(duration="1s"), "duration: want a duration"),
    ],
)
def test_settings_that_cannot_be_are_one_line_with_the_field(change: Callable[[Any], Any], message: str) -> None:
    from reports.cost_feed import read_settings

    value = settings_value()
    change(value)
    with pytest.raises(InputError, match=message):
        read_settings(value)


def test_restarts_are_what_was_measured_and_what_a_cluster_adds() -> None:
    from reports.cost_feed import MODELS, Cluster, read_rows, scenario_of

    value = rows()
    place = next(index for index, one in enumerate(value) if (one["system"], one["fault"]) == ("recreate", "pod-lost"))
    value[place] = row("recreate", "pod-lost", detect=0.3, restart=3.0, waiting=1.5)
    measured = read_rows(json.dumps(value).encode(), "rows")
    # Known after 0.3 s; of the 4.5 s from then on the model and its checkpoint took one.
    assert measured["recreate", "pod-lost"].detect_s == (0.3,)
    assert measured["recreate", "pod-lost"].regroup_s == (3.5,)
    scenario = read_scenario(scenario_of(MODELS["recreate"], measured, settings(), Cluster(16384, 3.79)))
    # 3.5 s are in a bucket that is 30 % wide; 30 s for the group, 20 for the model, 60 for a process, and for pods 60
    # and 20.48 for 2,048 of them.
    assert dict(scenario.restart)[Rung.POD].mean_s == pytest.approx(190.48 + 3.5, abs=0.6)
    lost = next(fault for fault in scenario.faults if fault.name == "gpu")
    assert lost.detect.mean_s == pytest.approx(0.3, rel=0.3)
    in_process = read_scenario(scenario_of(MODELS["nvrx"], measured, settings(), Cluster(16384, 3.79)))
    assert dict(in_process.restart)[Rung.POD].mean_s == pytest.approx(51.1, abs=0.3)
    assert sum(fault.rate for fault in scenario.faults) == pytest.approx(3.79)


def test_a_hang_costs_the_timeout_of_a_cluster() -> None:
    from reports.cost_feed import MODELS, Cluster, read_rows, scenario_of

    measured = read_rows(json.dumps(rows()).encode(), "rows")

    def detect_s(system: str) -> float:
        scenario = read_scenario(scenario_of(MODELS[system], measured, settings(), Cluster(1024, 6.5)))
        return next(fault for fault in scenario.faults if fault.name == "hang").detect.mean_s

    # Found half a second after the laptop's timeout of five; nobody looks for one in torchrun.
    assert detect_s("unbroken-memory") == pytest.approx(60.5, abs=0.15)
    assert detect_s("torchrun") == 600


def test_checkpoints_are_made_as_often_as_is_best_for_each() -> None:
    from reports.cost_feed import MODELS, Cluster, read_rows, scenario_of

    measured = read_rows(json.dumps(rows()).encode(), "rows")

    def tiers(system: str, in_background: bool) -> list[tuple[str, int, float]]:
        value = scenario_of(MODELS[system], measured, settings(), Cluster(16384, 3.79, in_background))
        return [(tier.name, round(tier.every_s), tier.blocking_s) for tier in read_scenario(value).tiers]

    # Daly's interval with 11,131 s between faults.
    assert tiers("torchrun", False) == [("disk", 654, 20.0)]
    assert tiers("torchrun", True) == [("disk", 149, 1.0)]
    assert tiers("unbroken-memory", True) == [("memory", 105, 0.5), ("disk", 1800, 0.0)]


def test_no_more_than_is_needed_is_measured_or_simulated_for_a_system_that_did_not_come_back(tmp_path: Path) -> None:
    from cost import main

    value = rows()
    lost = next(one for one in value if (one["system"], one["fault"]) == ("nvrx", "sigkill"))
    lost |= {
        "faults": [],
        "reason": "did not come back: want 1 recoveries, got 0 within 9 s",
        "terms": {},
        "phases": {},
    }
    lost |= {"lost_s": None, "steps_redone": None, "step_s": None}
    data = _written(tmp_path, value, main)
    assert {one["system"] for one in data["sized"]} == {
        *("unbroken-memory", "unbroken-disk", "unbroken-process", "torchrun", "ft_launcher", "recreate")
    }
    page = (tmp_path / "docs" / "cost.md").read_text()
    assert "- NVRx, in-process, SIGKILL: did not come back: want 1 recoveries" in page
    assert "| NVRx, in-process | 6.6 s | 6.6 s | - |" in (tmp_path / "README.md").read_text()


def _written(folder: Path, value: Any, main: Callable[[list[str]], int]) -> Any:
    """Write rows, simulate a small cluster, and write pages of a checkout in the folder; return the figures."""
    given = settings_value() | {"sizes": [1024], "runs": 3}
    (folder / "settings.yaml").write_text(yaml.safe_dump(given))
    (folder / "rows.json").write_text(json.dumps(value))
    (folder / "docs").mkdir()
    for name in ("README.md", "docs/cost.md", "docs/benchmarks.md"):
        (folder / name).write_text((ROOT / name).read_text())
    file = folder / "docs" / "cost" / "cost.json"
    arguments = ["--rows", str(folder / "rows.json"), "--settings", str(folder / "settings.yaml")]
    assert main([*arguments, "--file", str(file), "--pages", str(folder)]) == 0
    return json.loads(file.read_text())


def test_figures_pages_and_pictures_say_the_same(tmp_path: Path) -> None:
    from cost import main

    data = _written(tmp_path, rows(), main)
    assert len(data["sized"]) == 2 * (7 + 6)
    by_system = {one["system"]: one for one in data["sized"] if (one["rates"], one["in_background"]) == ("RSC", False)}
    for one in by_system.values():
        assert sum(one["shares"].values()) == pytest.approx(1.0, abs=1e-5)
        assert one["shares"]["progress"] == pytest.approx(one["ettr"], abs=1e-5)
        assert one["lost_gpu_hours"] == pytest.approx(1024 * 54 * 24 * (1 - one["ettr"]), abs=15)
    assert by_system["unbroken-memory"]["ettr"] > by_system["torchrun"]["ettr"] > by_system["recreate"]["ettr"]
    # The same costs were given to both, so neither is better: that is said.
    assert by_system["torchrun"]["against"]["unbroken-process"] == "same"
    page = (tmp_path / "docs" / "cost.md").read_text()
    assert re.search(
        r"\*Unbroken, a plain script\* is .*no\s+better than .*torchrun\s+\(1,024\s+GPUs\)", page, re.DOTALL
    )
    torchrun = by_system["torchrun"]
    assert f"| RSC | 1,024 | torchrun | {torchrun['ettr']:.4f} ± {torchrun['margin']:.4f} |" in page
    assert "| exception | torchrun | 6.60 | 8 | 0.50 | 0.00 | 4.00 | 0.10 | 2.00 | 0.00 |" in page
    assert (
        "| exception | torchrun | 6.60 | 0.25 | 0.12 | 0.75 | 0.25 |" in (tmp_path / "docs/benchmarks.md").read_text()
    )
    drawing = ElementTree.fromstring((tmp_path / "docs" / "cost" / "measured.svg").read_text())
    titles = [found.text for found in drawing.iter("{http://www.w3.org/2000/svg}title")]
    assert "torchrun, redo: 4.00 s" in titles
    assert "prefers-color-scheme: dark" in "".join(drawing.itertext())
    # A bar is as long as what it stands for.
    space = "{http://www.w3.org/2000/svg}"
    widths = {found.findtext(f"{space}title"): float(found.get("width", 0)) for found in drawing.iter(f"{space}rect")}
    long, short = widths["torchrun, redo: 4.00 s"], widths["torchrun, restart: 2.00 s"]
    assert long == pytest.approx(2 * short, abs=0.2)


def test_a_system_of_ours_that_was_slower_is_named_on_both_pages(tmp_path: Path) -> None:
    from cost import main

    value = rows()
    for kind, seconds in (("exception", 6.7), ("sigkill", 6.8)):
        slow = next(one for one in value if (one["system"], one["fault"]) == ("unbroken-process", kind))
        slow["lost_s"] = seconds
    _written(tmp_path, value, main)
    said = {name: " ".join((tmp_path / name).read_text().split()) for name in ("README.md", "docs/cost.md")}
    begins = "- *Unbroken, a plain script* took longer than others, as measured: exception 6.7 s (torchrun 6.6 s"
    assert begins in said["README.md"]
    assert "SIGKILL 6.8 s" not in said["README.md"]
    assert begins in said["docs/cost.md"]
    assert "; SIGKILL 6.8 s (torchrun 6.6 s" in said["docs/cost.md"]
    assert "*Unbroken, disk only* took longer" not in said["docs/cost.md"]


def test_a_page_without_a_place_for_a_table_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cost import main

    _written(tmp_path, rows(), main)
    page = tmp_path / "docs" / "cost.md"
    page.write_text(page.read_text().replace("<!-- /cost-sized -->", ""))
    file = str(tmp_path / "docs" / "cost" / "cost.json")
    assert main(["--only-write", "--file", file, "--pages", str(tmp_path)]) == 2
    assert "docs/cost.md: want one <!-- cost-sized -->" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "0"], "--faults: want 1 to 100, got 0"),
        (["--runs", "1", "--reuse"], "--runs: want 2 to 1000, got 1"),
        (["--reuse", "--file", "{tmp}/none"], "want the figures of a run, got .*; run `make cost`"),
        (["--rows", "{tmp}/none"], "No such file"),
        (["--only-write", "--file", "{tmp}/half"], "half: sized: is required; run `make cost`"),
        (["--only-write", "--file", "{tmp}/list"], "list: measured: is required; run `make cost`"),
    ],
)
def test_options_that_cannot_be_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    from cost import main

    (tmp_path / "half").write_text('{"measured": {}, "rows": []}')
    (tmp_path / "list").write_text("[]")
    assert main([word.replace("{tmp}", str(tmp_path)) for word in arguments] + ["--pages", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        ({"source": "--rows"}, "The rows came from a file."),
        (
            {"faults": 1, "load_before": 0.2, "load_after": 3.1, "quick": False},
            "one fault each; the load average was 0.2",
        ),
        (
            {"faults": 5, "load_before": 9.5, "load_after": 3.1, "quick": False},
            "5 faults each; .*Others used the machine",
        ),
        ({"faults": 2, "load_before": 0.1, "load_after": 3.1, "quick": True}, "A small model: these are no figures."),
    ],
)
def test_a_page_says_how_its_figures_came_to_be(measured: dict[str, Any], words: str) -> None:
    from reports.cost_pages import run_words

    said = run_words({"measured": {"cpus": 2, "minutes": 11.0, **measured}, "runs": 10, "duration_s": 86400.0})
    assert re.search(words, " ".join(said.split()))
    assert ("Others used" in said) is ("Others used" in words)


def test_stored_figures_are_those_of_the_pages(tmp_path: Path) -> None:
    from reports.cost_pages import PARTS, PICTURES, with_parts

    file = ROOT / "docs" / "cost" / "cost.json"
    data = json.loads(file.read_text()) if file.exists() else None
    for name, parts in PARTS.items():
        text = (ROOT / name).read_text()
        assert with_parts(text, data, parts, name) == text, f"{name}: run `make cost ARGS=--only-write`"
    if data is None:
        return
    for name, draw in PICTURES.items():
        assert (ROOT / name).read_text() == draw(data), f"{name}: run `make cost ARGS=--only-write`"
    assert not data["measured"].get("quick"), "a small model makes no figures"
