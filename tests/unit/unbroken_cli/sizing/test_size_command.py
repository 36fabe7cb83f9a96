"""`unbroken size`: what it reads, what it says, and what it refuses in one line."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from tests.unit.unbroken_cli.sizing.scenes import LLAMA_3, small

from unbroken.rendezvous.metrics import BUCKETS_S
from unbroken_cli.commands import size
from unbroken_cli.sizing.measured import measured_spreads
from unbroken_cli.sizing.reading import read_scenario
from unbroken_cli.sizing.study import best_interval, run_many
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.reasons import Phase


def _metrics(observations: dict[str, list[float]]) -> str:
    registry = CollectorRegistry()
    seconds = Histogram("unbroken_recovery_seconds", "...", ["phase"], buckets=BUCKETS_S, registry=registry)
    for phase in Phase:
        seconds.labels(phase.value)
        for value in observations.get(phase.value, []):
            seconds.labels(phase.value).observe(value)
    return generate_latest(registry).decode()


def _set(value: dict[str, Any], path: str, new: Any) -> dict[str, Any]:
    *keys, last = path.replace("[", ".").replace("]", "").split(".")
    place: Any = value
    for key in keys:
        place = place[int(key)] if isinstance(place, list) else place.setdefault(key, {})
    place[int(last) if isinstance(place, list) else last] = new
    return value


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("faults[0].rate", 0, "faults[0].rate: want a number above 1e-09 and up to 100000, got 0"),
        ("faults[0].rate", 1e-320, "faults[0].rate: want a number above 1e-09 and up to 100000, got 1e-320"),
        ("faults[0].rate", -3, "faults[0].rate: want a number above 1e-09 and up to 100000, got -3"),
        ("faults[0].rate", 1e9, "faults[0].rate: want a number above 1e-09 and up to 100000, got 1000000000.0"),
        ("faults[0].rate", float("nan"), "faults[0].rate: want a number above 1e-09 and up to 100000, got nan"),
        ("faults[0].rate", True, "faults[0].rate: want a number above 1e-09 and up to 100000, got True"),
        ("faults[0].count", 3, "faults[0].rate: want either rate (per 1,000 node-days), or count and over"),
        ("faults[0].hits", "cosmos", "faults[0].hits: want one of process, gpu, node, domain, switch, software, got"),
        ("faults[0].repair", "4h", "faults[0].repair: want none, since software takes no node out"),
        ("faults[1].rungs", {"pod": 0.5}, "faults[1].rungs: want probabilities that sum to 1, got 0.5"),
        ("faults[1].rungs", {"prayer": 1}, "faults[1].rungs.prayer: unknown; want one of in-process, process"),
        ("faults[2].share", 0.5, "faults[2].share: want 1 of a fault that hits one gpu, got 0.5"),
        ("faults[2].repair", "soon", "faults[2].repair: want a duration such as 8m, or one of exponential"),
        ("faults[2].repair", {"histogram": {"5s": 0}}, "faults[2].repair.histogram: want a count above 0"),
        ("faults[2].repair", {"histogram": {"5s": 1, "2s": 1}}, "faults[2].repair.histogram: want ascending durations"),
        ("faults[2].name", "node", "faults: want names that differ, got"),
        ("faults", [{}] * 65, "faults: want a list of at most 64, got"),
        ("spares.shared", 65, "spares.shared: want at most as many spare nodes as the job has (64), got 65"),
        ("spares.perDomain", 9, "spares.perDomain: want at most as many spare nodes as the job has (64), got 72"),
        ("spares.shared", -1, "spares.shared: want a whole number from 0 to 1000000, got -1"),
        ("checkpoints[1].every", "10s", "checkpoints[1].every: want more than blocking (15 s), got 10 s"),
        ("checkpoints[1].survives", "all", "checkpoints[1].survives: want one of process, node, domain, rack, job"),
        ("job.gpus", 10**9, "job.gpus: want a whole number from 1 to 1000000, got 1000000000"),
        ("job.gpus", 511, "job.gpus: want a multiple of gpusPerNode (8), got 511"),
        ("job.minReplicas", 65, "job.minReplicas: want a whole number from 1 to 64, got 65"),
        ("job.duration", "1000000d", "job.duration: want a duration such as 20s, 8m, 4h or 54d, 60 s to 10 years"),
        ("job.gpu", 8, "job.gpu: unknown; want one of name, gpus, gpusPerNode"),
        ("restart.pod", None, "restart.pod: is required"),
        ("lemons.factor", 0.5, "lemons.factor: want a number above 1 and up to 10000, got 0.5"),
    ],
)
def test_bad_input_is_said_in_one_line_with_the_fields_name(path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_scenario(_set(small(), path, value))
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_more_faults_than_can_be_simulated_are_refused() -> None:
    value = _set(_set(small(), "faults[1].rate", 100_000), "job.duration", "3650d")
    with pytest.raises(InputError, match=r"job\.duration, faults: want at most 2000000 faults in one run, got"):
        read_scenario(value)


def test_more_faults_in_all_runs_than_minutes_suffice_for_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(_set(small(), "faults[1].rate", 50_000), sort_keys=False))
    assert size.main([str(file), "--runs", "2000"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("unbroken size: --runs: want at most 10000000 faults in all runs, got ")
    assert said.endswith(" in each of 2000\n")


def test_more_checkpoints_than_can_be_simulated_are_refused() -> None:
    """Two kinds a millisecond apart took hours: each of the slower kind is simulated by itself."""
    value = _set(_set(small(), "checkpoints[0].blocking", 0), "checkpoints[1].blocking", 0)
    value = _set(_set(value, "checkpoints[0].every", 0.001), "checkpoints[1].every", "2ms")
    with pytest.raises(InputError, match=r"checkpoints: want at most 10000000 checkpoints in one run .* got 302400000"):
        read_scenario(value)
    read_scenario(value | {"checkpoints": value["checkpoints"][:1]})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param(
            ["job.gpus=1000000", "job.gpusPerNode=1", "job.duration=1m"],
            "want at most 200000000 nodes in all runs, got 2000008000: 1000004 in each of 2000",
            id="nodes",
        ),
        pytest.param(
            ["job.gpus=131072", "job.replaceWithin=rack", "job.duration=1m"],
            "want at most 1000000 nodes in all runs where spares stay within their rack, got 32776000: 16388 in each",
            id="the planner's nodes",
        ),
        pytest.param(
            ["job.replaceWithin=domain", "faults[1].rate=2000"],
            "want at most 1000000 faults in all runs where spares stay within their domain, got 2",
            id="the planner's faults",
        ),
        pytest.param(
            ["checkpoints[1].every=2s", "checkpoints[1].blocking=0", "checkpoints[0].every=1s", "job.duration=30d"],
            "want at most 100000000 checkpoints in all runs of all kinds but the most frequent, got 2592000000: ",
            id="checkpoints",
        ),
    ],
)
def test_more_of_anything_than_minutes_suffice_for_is_refused(
    fields: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(small(), sort_keys=False))
    assert size.main([str(file), "--runs", "2000", *(f"--set={field}" for field in fields)]) == 2
    assert capsys.readouterr().err.startswith(f"unbroken size: --runs: {message}")


def test_an_interval_too_short_to_be_looked_at_is_dalys() -> None:
    """The best one of the disk is far below that of the memory, which then would stop training again and again."""
    value = _set(_set(small(), "checkpoints[1].blocking", "1us"), "checkpoints[0].every", 0.01)
    scenario = read_scenario(_set(value, "checkpoints[0].blocking", 0))
    found = best_interval(run_many(scenario, 1, 2), 1, seed=1)
    assert found.best_s == found.daly_s is not None


def test_an_answer_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("w") as full:
        code = "import sys; from unbroken_cli.commands import size; sys.exit(size.main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, str(LLAMA_3), "--runs", "2", "--quick"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=100)
    assert done.returncode == 1
    assert done.stderr.startswith("unbroken size: cannot write what was found: No space left on device\n")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("value", [None, [], "text", {"job": []}, {"job": None}, {}])
def test_an_input_that_is_no_job_is_refused(value: Any) -> None:
    with pytest.raises(InputError):
        read_scenario(value)


def test_example_is_simulated_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert size.main([str(LLAMA_3), "--runs", "3", "--quick", "--html", str(page)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Llama 3 405B: 16384 GPUs on 2048 nodes, 14 spares, 54 d; 3 runs, seed 1")
    assert "goodput_allocated" in text
    assert f"wrote {page}" in text
    assert page.read_text().count("<svg") == 3


def test_answer_for_programs_has_ratios_shares_and_hours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(small(), sort_keys=False))
    arguments = [str(file), "--runs", "2", "-o", "json", "--set", "spares.shared=5", "--set", "faults[1].rate=10"]
    assert size.main(arguments) == 0
    value = json.loads(capsys.readouterr().out)
    assert set(value["ratios"]) == {"ettr", "ettr_capacity", "goodput_allocated"}
    assert set(value["ratios"]["ettr"]) == {"mean", "margin", "low", "high"}
    assert sum(value["shares"].values()) == pytest.approx(1.0)
    assert value["spares"] == 5
    assert value["one_more_spare"]["ettr"]["margin"] >= 0
    assert {"gpu", "idle spares"} <= set(value["gpu_hours"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--runs", "1"], "--runs: want 2 to 2000, got 1"),
        (["--set", "job.duration=2020-13-45"], "--set job.duration: not a value: '2020-13-45'"),
        (["--set", "job.gpus=0x_"], "--set job.gpus: not a value: '0x_'"),
        (["--set", "job.gpus=" + "[" * 3000], f"--set job.gpus: not a value: {'[' * 80!r}"),
        (["--set", "job.gpus"], "--set: want FIELD=VALUE such as job.gpus=131072, got 'job.gpus'"),
        (["--set", "faults[9].rate=3"], "--set faults[9].rate: the input has no such field"),
        (["--set", "job.gpus=-1"], "job.gpus: want a whole number from 1 to 1000000, got -1"),
        (["--from-metrics", "/does/not/exist"], "--from-metrics /does/not/exist: No such file or directory"),
    ],
)
def test_bad_options_are_said_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert size.main([str(LLAMA_3), *arguments]) in (1, 2)
    assert capsys.readouterr().err == f"unbroken size: {message}\n"


def test_a_missing_numpy_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("unbroken_cli.sizing.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert size.main([str(LLAMA_3)]) == 2
    assert capsys.readouterr().err == "unbroken size: the package numpy is missing: pip install 'unbroken[size]'\n"


# -------------------------------------------------------------------------------------------------- a real job's costs


def test_recoveries_of_a_job_become_histograms_never_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick, slow = [0.02] * 90, [200.0] * 10
    text = _metrics({"detect": [0.3] * 100, "stop": quick + slow, "plan": [0.001] * 100, "enter": [0.2] * 100})
    spreads, notes = measured_spreads(text, "x")
    assert list(spreads) == ["detect", "stop", "plan", "enter"]
    assert any("first-progress was never measured" in note for note in notes)
    assert spreads["stop"].mean_s == pytest.approx(0.9 * 0.0175 + 0.1 * 210, rel=0.01)
    scenario = read_scenario(small(), spreads)
    assert {spread.mean_s for _rung, spread in scenario.restart} == {scenario.restart[0][1].mean_s}
    assert all(tier.restore_s == 0 for tier in scenario.tiers), "first-progress has it"
    file = tmp_path / "metrics"
    file.write_text(text)
    assert size.main([str(LLAMA_3), "--runs", "2", "--quick", "--from-metrics", str(file)]) == 0
    assert "note: --from-metrics" in capsys.readouterr().out


class OneJob:
    """A cluster with a job, and what its rendezvous has measured."""

    namespace = "team"

    def __init__(self, text: str) -> None:
        self.text = text

    def job(self, namespace: str, name: str) -> dict[str, Any]:
        return {"metadata": {"namespace": namespace, "name": name}}

    def service_text(self, namespace: str, service: str, port: str, path: str) -> str:
        assert (namespace, service, port, path) == ("team", "digits-rendezvous", "metrics", "metrics")
        return self.text


@pytest.mark.parametrize(
    ("observations", "code", "said"),
    [
        pytest.param({"detect": [0.1], "stop": [0.2]}, 0, "only 1 recoveries are counted", id="one recovery"),
        pytest.param({}, 2, "--from-job digits: has no recovery in unbroken_recovery_seconds", id="none"),
    ],
)
def test_a_job_is_asked_for_its_recoveries(
    observations: dict[str, list[float]],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(size, "connect", lambda _arguments: OneJob(_metrics(observations)))
    assert size.main([str(LLAMA_3), "--runs", "2", "--quick", "--from-job", "digits"]) == code
    streams = capsys.readouterr()
    assert said in streams.out + streams.err


@pytest.mark.parametrize(
    "line",
    [
        'unbroken_recovery_seconds_bucket{phase="lunch",le="1.0"} 3.0',
        'unbroken_recovery_seconds_bucket{phase="stop",le="x"} 3.0',
        'unbroken_recovery_seconds_bucket{phase="stop",le="1.0"} -3.0',
        'unbroken_recovery_seconds_bucket{phase="stop",le="1.0"} NaN',
        'unbroken_recovery_seconds_bucket{phase="stop",le="-1.0"} 3.0',
        'unbroken_recovery_seconds_bucket{phase="stop",le="1"} 3\n'
        'unbroken_recovery_seconds_bucket{phase="stop",le="2"} 1',
    ],
)
def test_metrics_that_make_no_sense_are_refused(line: str) -> None:
    with pytest.raises(InputError, match=r"^m: "):
        measured_spreads(line, "m")


def test_metrics_of_which_a_part_would_be_left_out_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what was too long the rest was dropped without a word, slow buckets with it."""
    text = _metrics({"stop": [0.02] * 50 + [200.0] * 50})
    with pytest.raises(
        InputError, match=r"^m: want at most 200000 lines, got 200\d\d\d; take those of unbroken_recovery"
    ):
        measured_spreads("# a line\n" * 200_000 + text, "m")
    file = tmp_path / "metrics"
    file.write_text(text)
    monkeypatch.setattr(size, "_MAX_METRICS_BYTES", len(text) - 1)
    assert size.main([str(LLAMA_3), "--quick", "--from-metrics", str(file)]) == 2
    assert capsys.readouterr().err == f"unbroken size: --from-metrics {file}: want at most {len(text) - 1} bytes\n"


def test_a_phase_that_was_never_measured_counts_as_nothing_also_where_it_is_detection() -> None:
    spreads, notes = measured_spreads(_metrics({"stop": [0.2] * 50}), "m")
    assert "m: phase detect was never measured, and counts as 0 s" in notes
    value = small()
    del value["faults"][0]["detect"]
    found = read_scenario(value, spreads)
    assert [fault.detect.mean_s for fault in found.faults[:2]] == [0.0, 1.0]
