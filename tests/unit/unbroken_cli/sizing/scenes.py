"""Scenarios for the tests of `unbroken size`."""

from pathlib import Path
from typing import Any

import yaml

from unbroken_cli.sizing.reading import read_scenario
from unbroken_cli.sizing.scenario import Scenario

LLAMA_3 = Path(__file__).parents[4] / "examples" / "llama3.yaml"


def example() -> dict[str, Any]:
    """Return the example's input, to be changed."""
    value: dict[str, Any] = yaml.safe_load(LLAMA_3.read_text())
    return value


def llama_3() -> Scenario:
    """Return the example."""
    return read_scenario(example())


def interrupted(mtbf_s: float, interval_s: float, blocking_s: float, restart_s: float, days: float) -> Scenario:
    """Return a job of one node whose script fails, exponentially, and which checkpoints on disk."""
    return read_scenario(
        {
            "job": {"gpus": 8, "duration": days * 86400},
            "faults": [{"hits": "software", "rate": 1000 * 86400 / mtbf_s, "detect": 0}],
            "checkpoints": [
                {"name": "disk", "every": interval_s, "blocking": blocking_s, "restore": 0, "survives": "job"}
            ],
            "restart": {"in-process": restart_s},
        }
    )


def small(**job: Any) -> dict[str, Any]:
    """Return the input of a job of 64 nodes with all kinds of faults and two tiers, for a week."""
    return {
        "job": {"gpus": 512, "nodesPerDomain": 8, "racks": 4, "duration": "7d", "minReplicas": 56, **job},
        "spares": {"perDomain": 0, "shared": 4, "refill": {"nodes": 2, "after": {"exponential": "10m"}}},
        "lemons": {"share": 0.05, "factor": 20, "removedAfter": 3},
        "faults": [
            {"name": "script", "hits": "software", "rate": 20, "detect": {"histogram": {"1s": 5, "60s": 1}}},
            {
                "name": "process",
                "hits": "process",
                "rate": 60,
                "detect": "1s",
                "rungs": {"in-process": 0.5, "process": 0.5},
            },
            {"name": "gpu", "hits": "gpu", "rate": 150, "detect": "5s", "repair": {"exponential": "4h"}, "shape": 0.7},
            {
                "name": "node",
                "hits": "node",
                "rate": 80,
                "detect": "30s",
                "repair": {"weibull": {"mean": "12h", "shape": 1.5}},
                "rungs": {"pod": 0.8, "job": 0.2},
            },
            {"name": "nvlink", "hits": "domain", "rate": 3, "detect": "30s", "repair": "2h"},
            {"name": "cooling", "hits": "switch", "rate": 2, "detect": "30s", "repair": "3h", "share": 0.3},
        ],
        "checkpoints": [
            {"name": "memory", "every": "1m", "blocking": "0.2s", "restore": "1s", "survives": "node"},
            {"name": "disk", "every": "25m", "blocking": "15s", "restore": "3m", "survives": "job"},
        ],
        "restart": {
            "in-process": {"histogram": {"1s": 10, "5s": 30, "60s": 2}},
            "process": "10s",
            "pod": {"exponential": "40s"},
            "job": "5m",
        },
    }
