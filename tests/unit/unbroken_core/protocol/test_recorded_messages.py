"""What each release said is read today, and today's code says it again (docs/design/0009-version-skew.md)."""

import json
from pathlib import Path
from typing import Any, Union

import pytest
from tools.record_messages import FOLDER, KINDS, recorded

import unbroken_core
from unbroken_core.protocol.settings import JobSettings
from unbroken_core.protocol.wire import decode, encode, settings_from_json, settings_to_json
from unbroken_core.vocabulary.errors import WireError

LINES = [
    pytest.param(line, id=f"{path.stem} line {number}")
    for path in sorted(FOLDER.glob("*.jsonl"))
    for number, line in enumerate(path.read_text().splitlines(), 1)
]
_UNION: Any = Union
ANY_MESSAGE = _UNION[KINDS]


def missing(recorded_value: Any, present: Any, where: str = "") -> list[str]:
    """Return where a value lacks what was recorded; fields that came later may be there as well."""
    if isinstance(recorded_value, dict) and isinstance(present, dict):
        return [
            fault
            for key, item in recorded_value.items()
            for fault in (missing(item, present[key], f"{where}.{key}") if key in present else [f"{where}.{key}"])
        ]
    if isinstance(recorded_value, list) and isinstance(present, list) and len(recorded_value) == len(present):
        pairs = zip(recorded_value, present, strict=True)
        return [fault for index, (one, other) in enumerate(pairs) for fault in missing(one, other, f"{where}[{index}]")]
    return [] if recorded_value == present else [f"{where}: {recorded_value!r} became {present!r}"]


@pytest.mark.parametrize("line", LINES)
def test_what_a_release_said_is_read_and_said_again(line: str) -> None:
    said = json.loads(line)
    again = encode(decode(line, ANY_MESSAGE)) if "type" in said else settings_to_json(settings_from_json(line))
    assert missing(said, json.loads(again)) == []


@pytest.mark.parametrize("line", LINES)
def test_a_message_of_a_release_with_garbage_in_it_is_still_refused(line: str) -> None:
    said = json.loads(line)
    if "type" not in said:
        return
    for name in said:
        with pytest.raises(WireError):
            decode(json.dumps({**said, name: {"garbage": [None]}}), ANY_MESSAGE)


def test_the_recording_of_this_release_has_every_message_and_every_field() -> None:
    path = FOLDER / f"{unbroken_core.__version__}.jsonl"
    assert path.read_text().splitlines() == list(recorded()), "run `make generate`"


def test_settings_at_their_default_are_those_of_the_first_release() -> None:
    """An image of an earlier release refuses a setting that it does not know: a later one is left out while unused."""
    first = min(FOLDER.glob("*.jsonl"), key=lambda path: [int(part) for part in path.stem.split(".")])
    lines = [json.loads(line) for line in Path(first).read_text().splitlines()]
    (usual, _) = (line for line in lines if "type" not in line)
    present = json.loads(settings_to_json(JobSettings("digits")))
    assert missing(present, usual) == []
