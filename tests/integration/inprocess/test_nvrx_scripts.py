"""Scripts as users of NVIDIA's extension write them, unchanged: `python -m unbroken.nvrx` is all that differs."""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from .standalone_job import LIMIT_S, Job

pytestmark = pytest.mark.timeout(600)
"""Above the sum of the job's own limits, which say what they waited for."""

SCRIPTS = Path(__file__).parent / "nvrx_scripts"
PAUSE_S = 0.05
"""Between two steps, so that they last as long as those of a real script, and faults come some seconds apart."""
MANY = 12
"""More restarts than the very same fault is forgiven without the extension's ways."""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Return a job that has not started."""
    with Job(tmp_path) as started:
        yield started


def run(
    job: Job, name: str, num_workers: int, *words: str, codes: tuple[int, ...] = (0,), limit_s: float = LIMIT_S
) -> str:
    """Run a script to its end; return its output."""
    script = job.folder / f"{name}.py"
    script.write_text((SCRIPTS / f"{name}_script.txt").read_text())
    job.torchrun(num_workers, "-m", "unbroken.nvrx", str(script), "--folder", str(job.folder), *words)
    job.wait(codes, limit_s)
    job.wait_for_nobody()
    return (job.folder / "out-0").read_text()


def iterations(output: str, num_workers: int) -> int:
    """Return the iteration in which all ranks were done."""
    done = re.findall(rf"rank (\d) of {num_workers} done in (\d+)", output)
    assert sorted(rank for rank, _ in done) == [str(rank) for rank in range(num_workers)], output
    (last,) = {int(iteration) for _, iteration in done}
    return last


def test_example_that_makes_all_anew_goes_on_through_the_same_fault_again_and_again(job: Job) -> None:
    output = run(job, "basic", 2, "--steps", "150", "--fault-prob", "0.06")
    restarts = iterations(output, 2)
    assert restarts >= MANY
    assert len(re.findall(r"ERROR \| nvrx \| rank=\d fn_ex: RuntimeError\('example fault'\)", output)) >= restarts
    assert len(re.findall(r"WARNING \| nvrx \| rank=\d term_ex: RankShouldRestart", output)) == 2 * restarts
    assert len(re.findall(r"INFO \| nvrx \| rank=\d restart_ex: HealthCheckPassed", output)) == 2 * restarts
    # Said once by each, and no more.
    assert len(re.findall("ChainedGPUHealthCheck: not checked", output)) in (0, 2)


def test_example_whose_model_and_store_outlive_restarts(job: Job) -> None:
    output = run(job, "advanced", 3, "--steps", "150", "--fault-prob", "0.03")
    restarts = iterations(output, 3)
    assert restarts >= MANY
    said = re.findall(r"\[ALWAYS\] .* \[NestedRestarter\] name=\[InProcess\] (.*)$", output, re.MULTILINE)
    each = ["state=handling stage=starting", "state=handling stage=completed"]
    assert said == ["state=initialize", *(each * restarts), "state=finalized"]
    assert len({(job.folder / f"monitor-{rank}.pid").read_text() for rank in range(3)}) == 3


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("name", "num_workers"), [("basic", 2), ("advanced", 3)])
def test_example_with_a_fault_every_few_seconds_ends_with_the_bits_of_a_calm_run(
    tmp_path: Path, name: str, num_workers: int
) -> None:
    """For UNBROKEN_NVRX_SECONDS, ten minutes if left out."""
    steps = int(float(os.environ.get("UNBROKEN_NVRX_SECONDS", "600")) / PAUSE_S)
    words = {"calm": ["--fault-prob", "0"], "broken": ["--pause", str(PAUSE_S), "--fault-prob", "0.005"]}
    ends = {}
    for kind, more in words.items():
        (tmp_path / kind).mkdir()
        with Job(tmp_path / kind) as job:
            output = run(job, name, num_workers, "--steps", str(steps), *more, limit_s=20 * steps * PAUSE_S + 200)
            ends[kind] = torch.load(tmp_path / kind / "checkpoint.pt")
            restarts = iterations(output, num_workers)
        assert (restarts > 0) == (kind == "broken")
        print(f"{name}, {kind}: {steps} steps, {restarts} restarts")
    assert_same(ends["broken"], ends["calm"])


def assert_same(one: object, other: object, where: str = "checkpoint") -> None:
    """Compare what torch.save has written, bit for bit."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        assert torch.equal(one, other), where
    elif isinstance(one, dict) and isinstance(other, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same(one[key], other[key], f"{where}[{key!r}]")
    else:
        assert one == other, where


def test_module_shaped_like_megatron_bridge(job: Job) -> None:
    output = run(job, "megatron", 2)
    done = re.findall(r"rank (\d) of 2 done, resets=2 aborts=2", output)
    assert sorted(done) == ["0", "1"], output


def test_group_that_was_made_before_the_call_is_made_again_in_each_iteration(job: Job) -> None:
    """And `initialize`, which raises once, is called again."""
    output = run(job, "early_group", 2)
    seen = re.findall(r"rank (\d) saw 2 in (\d+) timeout=0:01:17", output)
    assert sorted(seen) == [("0", "2"), ("1", "2")], output
    assert output.count("initialize fails once") >= 1


def test_initialize_that_keeps_raising_is_called_again_after_pauses_that_grow(job: Job) -> None:
    output = run(job, "initialize", 2)
    assert iterations(output, 2) == 4
    said = re.findall(r"initialize failed (\d)x in a row: called again in ([\d.]+) s", output)
    assert said == [("1", "0.1"), ("2", "0.2"), ("3", "0.4"), ("4", "0.8")], output


def test_group_that_is_made_before_and_inside_is_said_plainly_and_ends_the_job(job: Job) -> None:
    output = run(job, "early_group", 2, "--inside", codes=(1,))
    assert "process group: made before the wrapped call and in the wrapped function as well; make it in one" in output
    # One that was still on its way when the other gave up is called once more, and then gives up by itself.
    assert output.count("restart_ex") <= 1, output
