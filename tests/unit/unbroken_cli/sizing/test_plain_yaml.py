"""Numbers with an exponent are numbers in an input of `unbroken size`, and no field is there twice."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.unbroken_cli.sizing.scenes import small

from unbroken_cli.commands import size
from unbroken_cli.sizing.plain_yaml import read_yaml
from unbroken_core.vocabulary.errors import InputError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E3", 1000.0),
        ("2.5e2", 250.0),
        ("-.5e+1", -5.0),
        ("+4.e1", 40.0),
        ("1e400", float("inf")),
        ("0.5", 0.5),
        ("12", 12),
        ("'1e-3'", "1e-3"),
        ("1e", "1e"),
        ("e3", "e3"),
        ("1e3s", "1e3s"),
        ("20s", "20s"),
        ("24:00", "24:00"),
        ("1:30:00.5", "1:30:00.5"),
        ("0100", "0100"),
        ("'0100'", "0100"),
        ("0x10", 16),
        ("1_000", 1000),
        ("0", 0),
        ("00", "00"),
        ("0.10", 0.1),
        ("", None),
        ("a: {b: [1e2]}", {"a": {"b": [100.0]}}),
    ],
)
def test_a_number_is_what_its_author_means(text: str, value: Any) -> None:
    found = read_yaml(text)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("faults[3].repair=24:00", "faults[3].repair: want a duration such as 8m, or one of exponential"),
        ("job.gpus=0100", "job.gpus: want a whole number from 1 to 1000000, got '0100'"),
    ],
)
def test_what_yaml_1_1_takes_for_base_8_or_60_is_refused(
    field: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A repair of 24:00 was one of 24 minutes, and 0100 GPUs were 64."""
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(small(), sort_keys=False))
    assert size.main([str(file), "--runs", "2", "--quick", "--set", field]) == 2
    assert capsys.readouterr().err.startswith(f"unbroken size: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "a: is there twice, in lines 1 and 3; want it once"),
        (
            "faults:\n- rate: 1\n- hits: gpu\n  rate: 1\n  rate: 2",
            r"faults\[1\]\.rate: is there twice, in lines 4 and 5",
        ),
        ("a: {b: {c: 1, 'c': 2}}", r"a\.b\.c: is there twice, in lines 1 and 1"),
        ("x" * 100 + ": 1\n" + "x" * 100 + ": 2", "^" + "x" * 40 + ": is there twice"),
        ("a: &a {b: 1, b: 2}\nc: *a", r"a\.b: is there twice"),
    ],
)
def test_a_field_that_is_there_twice_is_refused_by_its_name(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_yaml(text)


def test_aliases_are_looked_at_once_however_many_they_make() -> None:
    lines = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {{l: *a{n - 1}, r: *a{n - 1}}}" for n in range(1, 60))]
    assert read_yaml("\n".join(lines))["a3"]["l"]["r"]["l"] == {"x": 1}
    itself = read_yaml("&a [*a]")
    assert itself[0] is itself


@pytest.mark.parametrize("text", ["a: [", "a: b: c", "[" * 5000, "%", "a: 2020-13-45", "? [1]\n: 2"])
def test_what_is_no_yaml_raises_what_callers_catch(text: str) -> None:
    with pytest.raises((yaml.YAMLError, ValueError, RecursionError)):
        read_yaml(text)


def test_a_rate_may_have_an_exponent_in_the_file_and_in_an_option(tmp_path: Path) -> None:
    """Seen before: 1e-3 was text, "want a number above 0"."""
    file = tmp_path / "job.yaml"
    text = yaml.safe_dump(small(), sort_keys=False)
    assert "rate: 20" in text
    file.write_text(text.replace("rate: 20", "rate: 2e1", 1))
    assert size.main([str(file), "--runs", "2", "--quick", "--set", "faults[1].rate=1e-3"]) == 0


def test_a_scenario_with_a_field_twice_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Seen before: the last one counted, and nobody said so."""
    file = tmp_path / "job.yaml"
    file.write_text("job:\n  gpus: 8\n  duration: 1d\n  gpus: 16\n")
    assert size.main([str(file)]) == 2
    said = capsys.readouterr().err
    assert said == f"unbroken size: FILE {file}: job.gpus: is there twice, in lines 2 and 4; want it once\n"
    file.write_text(yaml.safe_dump(small(), sort_keys=False))
    assert size.main([str(file), "--set", "spares={shared: 1, shared: 2}"]) == 2
    said = capsys.readouterr().err
    assert said == "unbroken size: --set spares: shared: is there twice, in lines 1 and 1; want it once\n"
