"""Where a job says that its checkpoints are on the disk: all ranks take one place, whatever each was told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ports import free_port
from torch.distributed.checkpoint.state_dict_saver import save

from unbroken.memory.job_disk import JobDisk, read_job_disk

pytestmark = [pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]
LIMIT_S = 280.0
RANK = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from unbroken.memory import Checkpointer
torch.set_num_threads(1)
dist.init_process_group("gloo")
state = {"w": torch.zeros(1000)}
checkpoints = Checkpointer()
done = checkpoints.load(state)
handover = checkpoints._handover
written = None if handover is None else (handover._settings.every, handover._settings.keep)
Path(sys.argv[1]).write_text(f"{done} {state['w'].double().sum().item()} {written}")
dist.barrier()
dist.destroy_process_group()
"""


def run(folder: Path, *told: dict[str, str], script: str = RANK) -> list[str]:
    """Load on as many ranks, each told something of its own; return what each of them has then."""
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
    common["WORLD_SIZE"] = str(len(told))
    # Not by pipes: the processes that write to the disk would keep them open.
    files = [folder / f"rank-{rank}" for rank in range(len(told))]
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, file], env={**common, **one, "RANK": str(rank)})
        for rank, (file, one) in enumerate(zip(files, told, strict=True))
    ]
    try:
        assert [one.wait(LIMIT_S) for one in ranks] == [0] * len(ranks)
    finally:
        for one in ranks:
            one.kill()
            one.wait()
    return [file.read_text() for file in files]


def test_all_ranks_go_by_what_the_first_one_was_told(tmp_path: Path) -> None:
    """While pods of two templates train together."""
    values = torch.arange(1000.0)
    save({"w": values}, checkpoint_id=tmp_path / "d\u00efsk" / "step-3")
    told = {"UNBROKEN_MEMORY_DISK": str(tmp_path / "d\u00efsk"), "UNBROKEN_MEMORY_DISK_EVERY": "50"}
    elsewhere = {"UNBROKEN_MEMORY_DISK": str(tmp_path / "elsewhere"), "UNBROKEN_MEMORY_DISK_KEEP": "7"}
    restored, nothing = f"3 {values.double().sum().item()} (50, 3)", "None 0.0 None"
    assert run(tmp_path, told, {}, elsewhere) == [restored] * 3
    assert run(tmp_path, {}, told) == [nothing] * 2


UNLIKE = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from unbroken.memory import Checkpointer
torch.set_num_threads(1)
dist.init_process_group("gloo")
state, problem = {"w": torch.zeros(1000)}, ""
checkpoints = Checkpointer(**json.loads(os.environ["TEST_ASKED"]))
for _ in range(2):  # The second one after the ranks have agreed, or not.
    try:
        checkpoints.load(state)
    except ValueError as error:
        problem = str(error)
Path(sys.argv[1]).write_text(f"{problem}|{checkpoints.save(state, 6).reason}")
dist.barrier()
dist.destroy_process_group()
"""
ON_BOTH = "Checkpointer: want the same on all ranks, got "


@pytest.mark.parametrize(
    ("first", "second", "problem"),
    [
        ({"every": 2}, {"every": 3}, "every=2, no disk on rank 0, and every=3, no disk on rank 1"),
        ({}, {"every": 3}, "no every, no disk on rank 0, and every=3, no disk on rank 1"),
        ({"disk": "a"}, {}, "no every, a folder in `disk` on rank 0, and no every, no disk on rank 1"),
        (
            {"disk": "a", "disk_every": 10},
            {"disk": "a", "disk_every": 15},
            "no every, a folder in `disk`, disk_every=10, disk_keep=3 on rank 0, and "
            "no every, a folder in `disk`, disk_every=15, disk_keep=3 on rank 1",
        ),
    ],
)
def test_scripts_that_ask_for_different_things_are_refused_on_all_ranks(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], problem: str
) -> None:
    """Seen before: ranks waited in different collectives for ever, or tried to allocate 2 exabytes."""
    asked = [json.dumps(one | ({"disk": str(tmp_path / "a")} if "disk" in one else {})) for one in (first, second)]
    found = run(tmp_path, *({"TEST_ASKED": one} for one in asked), script=UNLIKE)
    assert [text.partition("|")[0] for text in found] == [ON_BOTH + problem] * 2


def test_pods_of_two_templates_save_as_the_first_rank_was_told(tmp_path: Path) -> None:
    """While one replaces the other."""
    told = ({"UNBROKEN_MEMORY_EVERY": "4"}, {"UNBROKEN_MEMORY_EVERY": "3"})
    found = run(tmp_path, *(one | {"TEST_ASKED": "{}"} for one in told), script=UNLIKE)
    assert found == ["|not due: every 4 steps"] * 2


def test_what_the_job_says_is_read_from_the_environment() -> None:
    assert read_job_disk({}) is None
    assert read_job_disk({"UNBROKEN_MEMORY_DISK": "", "UNBROKEN_MEMORY_DISK_EVERY": "5"}) is None
    assert read_job_disk({"UNBROKEN_MEMORY_DISK": "/data"}) == JobDisk(Path("/data"), None, 3)
    told = {"UNBROKEN_MEMORY_DISK": "/data", "UNBROKEN_MEMORY_DISK_EVERY": "1000", "UNBROKEN_MEMORY_DISK_KEEP": "5"}
    assert read_job_disk(told) == JobDisk(Path("/data"), 1000, 5)
    with pytest.raises(ValueError, match=r"UNBROKEN_MEMORY_DISK: want the path of a folder .*, got 's3://bucket'"):
        read_job_disk({"UNBROKEN_MEMORY_DISK": "s3://bucket"})


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "many", "\u0664", "2147483648", "9" * 5000])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="UNBROKEN_MEMORY_DISK_EVERY: want a number from 1 to 2147483647, got "):
        read_job_disk({"UNBROKEN_MEMORY_DISK": "/data", "UNBROKEN_MEMORY_DISK_EVERY": text})
