"""docs/matrix.md: what was noted, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.matrix import Recovery, note, recoveries
from tools.matrix import TARGET, page

SAID = """\
unbroken   14.93s  recovered 1: rung in-process in 61 ms (stop 1 ms, plan 1 ms)
[pod-0/1] function raised: iteration=5 rank=1: recovered nothing
unbroken   20.01s  recovered 2: rung pod, job-3 took over in 2.5 s (stop 1 ms)
unbroken   30.01s  recovered 3: rung world, 2 -> 1 rank in 1.3 s (stop 1 ms)
unbroken   40.01s  recovered 4: rung world, 1 -> 2 ranks in 999 ms (stop 1 ms)
"""


def test_recoveries_are_those_that_the_job_told() -> None:
    assert recoveries(SAID) == [
        Recovery("in-process", 0.061, None),
        Recovery("pod", 2.5, None),
        Recovery("world", 1.3, (2, 1)),
        Recovery("world", 0.999, (1, 2)),
    ]


def test_page_is_refused_while_a_cell_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("UNBROKEN_MATRIX", str(notes))
    note("fsdp2", "exception", "bit for bit", Recovery("in-process", 0.061, None))
    rows = [json.loads(line) for line in notes.read_text().splitlines()]
    assert rows == [
        {
            "what": "fsdp2",
            "scenario": "exception",
            "exactness": "bit for bit",
            "recovery": {"rung": "in-process", "seconds": 0.061},
        }
    ]
    with pytest.raises(KeyError, match="no run showed fsdp2 x kill; fsdp2 x hang; "):
        page(rows, {"torch": "2.13.0"})


def test_page_has_each_cell_as_it_was_noted() -> None:
    text = page(Everything(), {"torch": "2.13.0"})
    assert "| Lightning | bit for bit; 61 ms, in-process |" in text
    assert "| TP+FSDP | bit for bit | bit for bit | bit for bit | bit for bit | bit for bit |" in text
    assert "torch 2.13.0 on CPUs" in text


class Everything(list[dict[str, Any]]):
    """A row for each cell."""

    def __init__(self) -> None:
        from tests.integration.inprocess.test_layouts import KINDS
        from tools.matrix import FAULTS, FRAMEWORKS, LAYOUTS

        seen = {"rung": "in-process", "seconds": 0.061}
        frameworks = [(what, fault, seen) for what in FRAMEWORKS for fault in FAULTS]
        layouts = [(kind, layout, None) for kind in KINDS for layout in LAYOUTS]
        super().__init__(
            {"what": what, "scenario": scenario, "exactness": "bit for bit", "recovery": recovery}
            for what, scenario, recovery in (*frameworks, *layouts)
        )


def test_committed_page_has_all_rows_and_no_empty_cell() -> None:
    from tests.integration.inprocess.test_layouts import KINDS
    from tools.matrix import FRAMEWORKS

    rows = [line for line in TARGET.read_text().splitlines() if line.startswith("| ") and "bit for bit" in line]
    assert [row.split("|")[1].strip() for row in rows] == [*FRAMEWORKS.values(), *KINDS]
    assert all(cell.strip() for row in rows for cell in row.split("|")[1:-1])
