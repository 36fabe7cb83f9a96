"""Settings that make no sense are refused with the field, what was wanted and what was seen."""

from dataclasses import replace
from typing import Any

import pytest

from unbroken_core.protocol.settings import JobSettings, RungBudget, Timeouts
from unbroken_core.protocol.wire import settings_from_json, settings_to_json
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Rung

GOOD = JobSettings("digits", replicas=4, ranks_per_pod=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"job": ""}, "job: want a name, got an empty string"),
        ({"replicas": 0}, "replicas: want 1 to 65536, got 0"),
        ({"min_replicas": 5}, "minReplicas: want 1 to replicas (4), got 5"),
        ({"spares": -1}, "spares.count: want 0 to 65536, got -1"),
        ({"ranks_per_pod": 65}, "ranksPerPod: want 1 to 64, got 65"),
        ({"min_ranks_per_pod": 3}, "world.minRanksPerPod: want 1 to ranksPerPod (2), got 3"),
        ({"divisible_by": 9}, "world.divisibleBy: want 1 to replicas x ranksPerPod (8), got 9"),
        ({"divisible_by": 4, "max_ranks": 3}, "world.maxRanks: want at least world.divisibleBy (4), got 3"),
        ({"layers": (Layer("a", "x"), Layer("a", "y"))}, "topology.layers: want distinct names, got ['a', 'a']"),
        ({"layers": (Layer("", "x"),)}, "topology.layers: want a name for each layer, got ['']"),
        ({"layers": (Layer("a", "x", 0),)}, "topology.layers[a].minRanks: want at least 1, got 0"),
        ({"layers": (Layer("a", "x", 4, 3),)}, "topology.layers[a].maxRanks: want at least minRanks (4), got 3"),
        (
            {"layers": (Layer("a", "x", 11),), "spares": 1},
            "topology.layers[a].minRanks: want at most (replicas + spares.count) x ranksPerPod (10), since no domain "
            "can have more, got 11",
        ),
        (
            {"layers": (Layer("a", "x", 1, 1),)},
            "topology.layers[a].maxRanks: want at least ranksPerPod (2), because pods are kept whole unless "
            "world.minRanksPerPod allows otherwise, got 1",
        ),
        ({"rungs": ()}, "restart.rungs: want at least one rung, got an empty list"),
        (
            {"rungs": (RungBudget(Rung.POD), RungBudget(Rung.POD))},
            "restart.rungs: want each rung at most once, got ['pod', 'pod']",
        ),
        ({"rungs": (RungBudget(Rung.POD, -1),)}, "restart.rungs[pod].limit: want at least 0, got -1"),
        ({"rungs": (RungBudget(Rung.POD, 1, 0.0),)}, "restart.rungs[pod].windowSeconds: want more than 0, got 0.0"),
        ({"timeouts": Timeouts(heartbeat_s=0)}, "timeouts.heartbeatSeconds: want more than 0 seconds, got 0"),
        ({"timeouts": Timeouts(soft_s=90)}, "timeouts.softSeconds: want less than timeouts.hardSeconds (90.0), got 90"),
        (
            {"timeouts": Timeouts(hard_s=120)},
            "timeouts.hardSeconds: want less than timeouts.barrierSeconds (120.0), got 120",
        ),
    ],
)
def test_violation(changes: dict[str, Any], message: str) -> None:
    """1.2, 3.2, 3.30"""
    with pytest.raises(InputError) as caught:
        replace(GOOD, **changes)
    assert str(caught.value) == message


def test_a_layer_may_hold_less_than_a_pod_where_pods_may_be_split() -> None:
    split = replace(GOOD, min_ranks_per_pod=1, layers=(Layer("a", "x", 1, 1),))
    assert split.layers[0].max_ranks == 1


def test_settings_survive_their_environment_variable() -> None:
    """3.3"""
    settings = replace(
        GOOD, layers=(Layer("rack", "topology/rack", 2, 4, False, True),), rungs=(RungBudget(Rung.POD, 3, 60.0),)
    )
    assert settings_from_json(settings_to_json(settings)) == settings


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "UNBROKEN_SETTINGS: "),
        ('{"job":"a","repl":1}', "UNBROKEN_SETTINGS: settings.repl: unknown field"),
        ('{"job":1}', "UNBROKEN_SETTINGS: settings.job: want a JSON str, got 1"),
        ('{"job":"a","replicas":0}', "UNBROKEN_SETTINGS: replicas: want 1 to 65536, got 0"),
        ("{}", "UNBROKEN_SETTINGS: settings: missing 1 required positional argument: 'job'"),
        pytest.param('{"\\ud800":1}', "UNBROKEN_SETTINGS: settings.?: unknown field", id="half of a character"),
        pytest.param("[" * 100_000, "UNBROKEN_SETTINGS: ", id="nested without end"),
    ],
)
def test_bad_settings_name_the_variable_and_the_field(text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        settings_from_json(text)
    assert str(caught.value).startswith(message)
