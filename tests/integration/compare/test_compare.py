"""`unbroken compare` with real jobs: what is right is equal, what is wrong is named, all else is called neither."""

import signal
from pathlib import Path

import pytest

from .conftest import Compare

pytestmark = pytest.mark.timeout(600)


def test_a_loop_that_saves_all_of_its_state_is_equal_after_each_fault(compare: Compare) -> None:
    said = compare("--pods=2", "right")
    assert (said.code, said.value["outcome"]) == (0, "equal")
    calm, *broken = said.value["runs"]
    assert calm["extent"] == {
        "num_steps": 12,
        "num_redone": 0,
        "num_parts": 24,
        "num_tensors": 120,
        "num_values": 0,
    } | {"num_values": calm["extent"]["num_values"]}
    assert [one["run"] for one in broken] == ["run 3, exception", "run 4, kill"]
    for one in broken:
        assert (one["outcome"], one["reason"], one["difference"]) == ("equal", "", None)
        assert one["struck"]["rank"] == 1
        assert one["struck"]["step"] == 6
        assert one["restored"]["source"] == "memory"
        assert one["restored"]["step"] in (4, 5)
        assert one["extent"]["num_steps"] == 11 - one["restored"]["step"]
        assert len(one["recoveries"]) == 1
        assert one["recoveries"][0].endswith("iteration 0 -> 1, 2 -> 2 ranks")
    assert "rung in-process" in broken[0]["recoveries"][0]
    assert "rung process" in broken[1]["recoveries"][0]


def test_a_counter_that_is_in_no_checkpoint_is_found_by_what_it_changes(compare: Compare) -> None:
    said = compare("--fault=exception", "counter")
    assert (said.code, said.value["outcome"]) == (1, "different")
    found = said.run(3)["difference"]
    assert (found["step"], found["ranks"], found["num_steps"]) == (6, [0], 6)
    assert {"model.weight", "model.bias", "optimizer.param_groups.0.lr"} <= set(found["names"])


@pytest.mark.nightly
def test_a_fault_strikes_between_two_saves(compare: Compare) -> None:
    said = compare("--fault=kill", "seldom")
    assert said.code == 0
    assert said.run(3)["struck"]["step"] == 22
    assert said.run(3)["restored"]["step"] == 20


@pytest.mark.nightly
def test_a_rank_that_hangs_and_a_pod_that_is_lost_are_faults_as_well(compare: Compare) -> None:
    said = compare("--fault=hang", "--fault=lose-pod", "--soft-timeout=5", "--pods=2", "--spares=1", "right")
    assert said.code == 0
    for number, word in ((3, "timeout"), (4, "pod")):
        assert said.run(number)["restored"]["step"] in (4, 5)
        assert word in said.run(number)["recoveries"][0]


def test_a_script_that_is_not_deterministic_is_said_and_not_broken(compare: Compare) -> None:
    said = compare("random")
    assert (said.code, said.value["outcome"]) == (2, "not_comparable")
    assert len(said.value["runs"]) == 1
    assert said.run(2)["difference"]["step"] == 0
    assert "model.weight" in said.run(2)["difference"]["names"]
    assert "not deterministic" in said.run(2)["reason"]


@pytest.mark.nightly
def test_a_time_of_day_and_a_generator_without_a_seed_are_left_out_and_said(compare: Compare) -> None:
    said = compare("--fault=exception", "clock")
    assert said.code == 0
    assert said.run(3)["noise"] == ["generator", "saved at"]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        pytest.param(("nothing",), "it saved no checkpoint in memory", id="saves nothing"),
        pytest.param(("fails",), "it ended with exit code 3; each run begins in an empty folder", id="fails"),
        pytest.param(("--memory=64Ki", "right"), "the memory took none of its checkpoints", id="no room"),
    ],
)
def test_a_first_run_that_is_no_measure_ends_the_comparison(
    compare: Compare, words: tuple[str, ...], problem: str
) -> None:
    said = compare(*words)
    assert (said.code, said.value["runs"]) == (2, [])
    assert problem in said.value["problem"]


@pytest.mark.nightly
def test_a_training_that_ends_before_the_fault_proves_nothing(compare: Compare) -> None:
    said = compare("--fault=kill", "--at-step=100", "right")
    assert said.code == 2
    assert said.run(3)["reason"].startswith("the training ended before the fault was due")


def test_a_training_that_begins_anew_after_the_fault_proves_nothing(compare: Compare) -> None:
    said = compare("--fault=exception", "no load")
    assert said.code == 2
    assert "no rank called `load` after the fault" in said.run(3)["reason"]


def test_a_training_that_does_not_survive_the_fault_is_not_equal(compare: Compare) -> None:
    said = compare("--fault=exception", "fails later")
    assert said.code == 1
    assert said.run(3)["reason"].startswith("it ended with exit code")


def test_a_run_that_finds_what_another_one_left_is_no_measure(compare: Compare, tmp_path: Path) -> None:
    said = compare("--here", "own file")
    assert said.code == 2
    assert "it found what an earlier run had left" in said.run(2)["reason"]
    (tmp_path / "own").unlink()
    assert compare("--fault=exception", "own file").code == 0, "in folders of their own they find nothing"
    assert compare("--fault=exception", "--here", "own file", "{run}").code == 0
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_between_two_runs_ends_the_command_and_leaves_no_folder(compare: Compare, name: str) -> None:
    patch = "from unbroken.comparing import command; import os, signal, sys; "
    patch += f"command.read_record = lambda folder: os.kill(os.getpid(), signal.{name}); "
    said = compare("fails", program=f"{patch}sys.exit(command.run(None))")
    assert said.code == 128 + signal.Signals[name]
    assert said.errors.endswith(f"unbroken compare: ended by {name}: nothing is proved\n")


def test_a_script_that_dies_each_time_ends_the_comparison(compare: Compare) -> None:
    said = compare("dies")
    assert (said.code, said.value["runs"]) == (2, [])
    assert "it ended with exit code 1" in said.value["problem"]
    assert "6 faults: giving up" in said.errors


def test_what_a_script_writes_among_the_records_is_no_result(compare: Compare) -> None:
    said = compare("garbage")
    assert said.code == 2
    assert "what a worker has recorded cannot be read, mine.lines" in said.value["problem"]
