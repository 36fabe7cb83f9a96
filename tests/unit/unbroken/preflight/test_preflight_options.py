"""What options and environment make of a preflight."""

import re
from pathlib import Path

import pytest

from unbroken.preflight.options import PAIR_S, Options, read_options
from unbroken.preflight.versions import KNOWN_BAD, NAMES, BadVersion, differences, listed
from unbroken_core.vocabulary.errors import InputError

ROOT = Path(__file__).parents[4]
TORCHRUN = {
    "RANK": "8",
    "WORLD_SIZE": "32",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "MASTER_ADDR": "n0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "run",
    "TORCHELASTIC_RESTART_COUNT": "2",
    "UNBROKEN_DOMAINS": "zone/rack",
    "UNBROKEN_POD": "digits-1",
}


def read(words: str, environment: dict[str, str] | None = None) -> Options:
    return read_options(words.split(), environment or {})


def test_without_options_or_environment_this_host_alone_is_tested() -> None:
    options = read("")
    assert (options.num_hosts, options.rank, options.is_idle) == (1, None, False)


def test_torchrun_says_which_host_this_is() -> None:
    options = read("", TORCHRUN)
    assert (options.num_hosts, options.rank, options.leader) == (4, 1, ("n0", 29500))
    assert (options.name, options.domains, options.attempt) == ("digits-1", ("zone", "rack"), "run.2")
    assert not options.is_idle


def test_one_process_a_host_takes_part() -> None:
    assert read("", {**TORCHRUN, "RANK": "9", "LOCAL_RANK": "1"}).is_idle


def test_a_plain_environment_has_a_process_a_host() -> None:
    plain = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n0", "MASTER_PORT": "1"}
    options = read("", plain)
    assert (options.num_hosts, options.rank) == (4, 3)


def test_options_say_which_host_this_is() -> None:
    options = read("--hosts 3 --host-rank 2 --leader [fe80::1]:7 --name a --domains r1/h2", TORCHRUN)
    assert (options.num_hosts, options.rank, options.leader) == (3, 2, ("fe80::1", 7))
    assert (options.name, options.domains, options.is_idle) == ("a", ("r1", "h2"), False)


def test_pods_of_one_host_test_with_gloo_as_they_share_its_gpus() -> None:
    assert read("--pods 3").backend == "gloo"
    assert read("").backend == "auto"


def test_a_pair_has_the_time_that_it_has_in_a_job_unless_it_is_said() -> None:
    assert read("").pair_s == PAIR_S
    assert read("--pair-timeout 7").pair_s == 7


def test_all_waits_together_are_bounded() -> None:
    options = read("--hosts 256 --host-rank 0 --leader a:1 --pair-timeout 5")
    assert 16 * 10 < options.total_s < 1200


@pytest.mark.parametrize(
    ("words", "environment", "message"),
    [
        pytest.param("--pods 0", {}, "want 1 to 64, got 0", id="no pods"),
        pytest.param("--pods 65", {}, "want 1 to 64", id="too many pods"),
        pytest.param("--pods 2 --hosts 2", {}, "--pods: want none of", id="pods and hosts"),
        pytest.param("--hosts 2", {}, "want both of them", id="no rank"),
        pytest.param("--leader a:1", {}, "want both of them", id="only a leader"),
        pytest.param("--hosts 2 --host-rank 2 --leader a:1", {}, "want 0 to 1, got 2", id="rank"),
        pytest.param("--hosts 2 --host-rank 1", {}, "want HOST:PORT, or MASTER_ADDR", id="no leader"),
        pytest.param("--hosts 2 --host-rank 1 --leader a", {}, "want HOST:PORT, got 'a'", id="no port"),
        pytest.param("--hosts 2 --host-rank 1 --leader a:0", {}, "want HOST:PORT", id="port 0"),
        pytest.param("--hosts 5000 --host-rank 1 --leader a:1", {}, "want 1 to 4096", id="too many hosts"),
        pytest.param("--pair-timeout 0", {}, "--pair-timeout: want 1 to 3600", id="no time"),
        pytest.param("--pair-timeout nan", {}, "--pair-timeout: want 1 to 3600", id="no number"),
        pytest.param("--min-gbits nan", {}, "--min-gbits: want 0 or more", id="no speed"),
        pytest.param("--devices -1", {}, "--devices: want 0 or more", id="negative"),
        pytest.param("--bad-version gloo=1", {}, "--bad-version: want NAME=VERSION", id="unknown name"),
        pytest.param("--bad-version nccl", {}, "--bad-version: want NAME=VERSION", id="no version"),
        pytest.param("", {**TORCHRUN, "RANK": "x"}, "RANK: want a number", id="rank of the environment"),
        pytest.param("", {**TORCHRUN, "GROUP_RANK": "9"}, "want 0 to 3, got 9", id="group's rank"),
    ],
)
def test_bad_input_is_refused(words: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        read(words, environment)


def test_a_version_matches_whatever_it_was_built_for() -> None:
    bad = BadVersion("torch", "2.9.*", "")
    assert bad.matches({"torch": "2.9.1+cu128"})
    assert BadVersion("torch", "2.9.1", "").matches({"torch": "2.9.1+cu128"})
    assert not bad.matches({"torch": "2.10.0"})
    assert not bad.matches({"torch": ""})
    assert not bad.matches({})


def test_each_version_that_is_known_to_be_bad_has_a_source_and_a_row_in_the_documents() -> None:
    rows = [line for line in (ROOT / "docs" / "health.md").read_text().splitlines() if line.startswith("| NCCL ")]
    assert len(rows) == len(KNOWN_BAD) > 0
    for bad, row in zip(KNOWN_BAD, rows, strict=True):
        assert bad.name in NAMES
        assert row.startswith(f"| {bad.name.upper()} {bad.pattern} |")
        assert row.endswith(f"({bad.source}) |")


def test_versions_that_differ_are_said_with_who_has_them() -> None:
    hosts = {"a": {"nccl": "1"}, "b": {"nccl": "2", "driver": "5"}, "c": {"nccl": "2"}}
    assert differences(hosts) == ["nccl: 2 on b, c; 1 on a", "driver: none on a, c; 5 on b"]
    assert differences({"a": {"nccl": "1"}, "b": {"nccl": "1"}}) == []
    assert listed("abcdef") == "a, b, c, d and 2 more"
