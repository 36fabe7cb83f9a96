"""What a slot says of where its tensors lie is read as bounded words, or the slot cannot be read."""

import pytest
import torch

from unbroken.memory.new_state.places import Places
from unbroken.memory.sources import Source, UnreadableError
from unbroken_core.pod.memory_slots import Head, Moment, SlotState


def source_of(tensor_paths: str) -> Source:
    head = Head(SlotState.SEALED, 1, b"job", Moment(1, 0, 1), 0, 1, b"", 0, 0, 0, 0)
    return Source("0-0.slot", head, torch.empty(0), [], None, _objects={}, _tensor_paths=tensor_paths)


def test_paths_and_groups_are_read() -> None:
    places = source_of('[{"a": [["it", 7, [0]], "cpu", 0]}, [["a", "b"]]]').places
    assert places == Places({}, {"a": (("it", 7, [0]), "cpu", 0)}, [["a", "b"]])
    assert source_of("").places == Places({}, {}, [])


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("{", id="no JSON"),
        pytest.param("[" * 100_000, id="deep"),
        pytest.param("[]", id="nothing"),
        pytest.param("[[], []]", id="no names"),
        pytest.param('[{"a": []}, []]', id="no path"),
        pytest.param('[{"a": [[], "cpu", -1]}, []]', id="an empty path"),
        pytest.param('[{"a": [[[0], "it"], "cpu", -1]}, []]', id="a list in the place of a part of the state"),
        pytest.param('[{"a": [[{}], "cpu", -1]}, []]', id="a key that is none"),
        pytest.param('[{"a": [["it", [-1]], "cpu", -1]}, []]', id="a place before a list"),
        pytest.param('[{"a": [["it"], "cpu", 1]}, [["a"]]]', id="a group that is not there"),
        pytest.param('[{"a": [["it"], "cpu", "x"]}, []]', id="a group without a number"),
        pytest.param('[{"a": [["it"], "cpu", -1]}, 5]', id="no groups"),
    ],
)
def test_anything_else_is_unreadable(text: str) -> None:
    with pytest.raises(UnreadableError, match=r"0-0\.slot: where its parts lie cannot be read: "):
        source_of(text).places  # noqa: B018  # the property reads it


def test_an_object_that_lies_in_no_part_of_the_state_is_unreadable() -> None:
    source = source_of("")
    source._paths = {"a": ([0], "it")}
    with pytest.raises(UnreadableError, match=r"where its parts lie cannot be read: no place of a: "):
        source.places  # noqa: B018  # the property reads it
