"""A digest says whether two values are equal, whoever made them; nothing else changes it."""

import collections
import copy
import io
import json
from typing import Any

import pytest
import torch
from torch import nn

from unbroken.checkpoint_records import DIGEST_CHARACTERS, MAX_NAME, MAX_NAMES
from unbroken.integrations import text_states
from unbroken.memory.recording.digests import digests_of
from unbroken.memory.shard import ShardReader


def of(state: dict[str, Any]) -> dict[str, str]:
    """Return the digests of a state by name."""
    names, _, _, digests = digests_of(ShardReader().read(state))
    return {name: digests[at * DIGEST_CHARACTERS :][:DIGEST_CHARACTERS] for at, name in enumerate(names)}


def test_a_state_that_was_read_from_a_checkpoint_has_the_digests_of_the_one_that_was_saved() -> None:
    """Its objects share others, and were made in another order."""
    shared = ["a", "b"]
    state = {"values": {"x": shared, "y": shared, "text": "ab" * 50, "set": {3, 1, 2}, "pair": (1, 2.5)}, "n": 1 << 80}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert of(torch.load(file, weights_only=True)) == of(state)
    assert of({"v": {"b": 1, "a": [2]}}) == of({"v": collections.OrderedDict(a=[2], b=1)})


def test_model_and_optimizer_are_named_by_tensor() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    before = of({"model": model, "optimizer": optimizer, "random numbers": torch.get_rng_state()})
    assert {"model.weight", "optimizer.state.weight.exp_avg", "random numbers"} <= before.keys() | {
        name.replace(".0.", ".weight.") for name in before
    }
    with torch.no_grad():
        model.bias[0] += 1
    after = of({"model": model, "optimizer": optimizer, "random numbers": torch.get_rng_state()})
    assert {name for name in before if before[name] != after[name]} == {"model.bias"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (0.0, -0.0),
        (1, True),
        (1, 1.0),
        (1.0, 1.0 + 2**-52),
        ("1", 1),
        ([1, [2]], [[1], 2]),
        ([[], [1]], [[1], []]),
        ({"a": 1}, {"a": 2}),
        ({1: 2}, {"1": 2}),
        (b"a", "a"),
        (["a", "b"], ["ab"]),
        (torch.float32, torch.float64),
        ({1, 2}, [1, 2]),
        (None, 0),
    ],
)
def test_values_that_differ_have_other_digests(one: Any, other: Any) -> None:
    assert of({"v": [one]}) != of({"v": [other]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_tensors_are_compared_by_their_bytes(dtype: torch.dtype) -> None:
    one = torch.tensor([0, 1, 0]).to(dtype)
    assert of({"t": one}) == of({"t": copy.deepcopy(one)}) == of({"t": torch.stack([one, one], 1)[:, 0]})
    assert of({"t": one}) != of({"t": torch.tensor([1, 1, 0]).to(dtype)})
    assert of({"t": one}) != of({"t": one.reshape(3, 1)})
    assert of({"t": torch.tensor([0.0])}) != of({"t": torch.tensor([-0.0])})
    assert len(of({"t": torch.empty(0)})) == 1


def test_names_are_bounded_and_what_lies_beyond_is_still_compared() -> None:
    state = {"s": {f"{'x' * 300}{number}": number for number in range(MAX_NAMES + 5)}}
    before = of(state)
    assert len(before) == MAX_NAMES + 1
    assert max(map(len, before)) <= MAX_NAME
    state["s"][f"{'x' * 300}9999"] = -1  # the last one, as text
    assert [name for name, each in of(state).items() if before[name] != each] == ["(6 more)"], "with the names' paths"


def test_tensors_of_floats_come_first_and_are_counted() -> None:
    state = {
        "a": torch.zeros(1, dtype=torch.uint8),
        "b": torch.zeros(1, dtype=torch.bfloat16),
        "c": 1,
        "d": torch.ones(1),
    }
    names, num_floats, num_tensors, _ = digests_of(ShardReader().read(state))
    assert (names[:4], num_floats, num_tensors) == (("b", "d", "a", "c"), 2, 3)


def test_a_text_that_holds_json_is_known_by_its_keys_and_one_time_of_day_hides_nothing_else() -> None:
    def log(runtime: float, count: int) -> dict[str, str]:
        rows = [{"loss": 1.5}, {"eval_runtime": runtime, "count": count}]
        return of({"progress": json.dumps({"rows": rows, "done": {"a": 1}, "none": []})})

    one, other, wrong = log(0.1, 3), log(0.2, 3), log(0.1, 4)
    assert {name for name in one if one[name] != other[name]} == {"progress.rows[].eval_runtime"}
    assert {name for name in one if one[name] != wrong[name]} == {"progress.rows[].count"}
    assert {"progress.rows[].loss", "progress.done.a", "progress.none"} <= one.keys()
    swapped = (json.dumps([1, 2]), json.dumps([2, 1]))
    assert len({of({"v": text})["v[]"] for text in swapped}) == 2


def test_a_text_that_holds_a_file_of_torch_is_known_by_its_keys_too() -> None:
    def kept(path: str) -> dict[str, str]:
        callbacks = {"path": path, "best": torch.tensor(2.0), 3: (1, 2)}
        return of({"progress": text_states.write({"callbacks": callbacks})})

    one, other = kept("/run/1"), kept("/run/2")
    assert {name for name in one if one[name] != other[name]} == {"progress.callbacks.path"}
    assert {"progress.callbacks.best", "progress.callbacks.3[]"} <= one.keys()


@pytest.mark.parametrize("text", ["{", "[1", "UEsDB", "UEsDB!!", "UEsDBAAAA", "[" * 5000, '{"a": 1'])
def test_a_text_that_holds_neither_is_a_text(text: str) -> None:
    assert {name for name in of({"v": text}) if name.startswith("v")} == {"v"}
    assert of({"v": text}) != of({"v": text + " "})


def test_a_text_of_very_many_keys_is_one_value() -> None:
    found = of({"v": json.dumps(dict.fromkeys(map(str, range(2001)), 1))})
    assert {name for name in found if name.startswith("v")} == {"v"}
