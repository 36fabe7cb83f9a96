"""Pure parts of the standalone mode."""

import os
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from unbroken import folders, inprocess
from unbroken.inprocess.exception import NoAgentError
from unbroken.inprocess.standalone import hosting, joining
from unbroken.inprocess.standalone.hosting import Hosting, timeouts_of
from unbroken.inprocess.standalone.launched import Launched, is_open_to_strangers, read_launched
from unbroken.standalone import root
from unbroken.standalone.local_ranks import local_places
from unbroken.standalone.messages import (
    Attendance,
    Challenge,
    Placement,
    PodAssignment,
    Register,
    StandaloneConfig,
    ToHost,
    make_key,
    prove,
)
from unbroken_core.protocol import wire
from unbroken_core.protocol.settings import JobSettings, Timeouts
from unbroken_core.vocabulary.errors import InputError

PLAIN = {"RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.1.2.3", "MASTER_PORT": "30000"}
SECRET = "a secret that all hosts have"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        pytest.param(PLAIN, (3, 4, None, "10.1.2.3", 30002, ""), id="plain"),
        pytest.param(
            {**PLAIN, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "7"},
            (3, 4, 1, "10.1.2.3", 30002, "7"),
            id="torchrun",
        ),
        pytest.param({**PLAIN, "LOCAL_WORLD_SIZE": "2"}, (3, 4, None, "10.1.2.3", 30002, "1"), id="hosts are counted"),
        pytest.param({**PLAIN, "UNBROKEN_PORT": "40000"}, (3, 4, None, "10.1.2.3", 40000, ""), id="other ports"),
        pytest.param({**PLAIN, "MASTER_PORT": "65530"}, (3, 4, None, "10.1.2.3", 65520, ""), id="below the highest"),
        pytest.param({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1, None, "127.0.0.1", 29502, ""), id="one worker"),
        pytest.param(
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
                "MASTER_ADDR": "a",
            },
            (5, 8, 1, "a", 29502, "1"),
            id="mpirun of Open MPI",
        ),
        pytest.param(
            {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
            (1, 2, 1, "127.0.0.1", 29502, "0"),
            id="mpirun of MPICH, one host",
        ),
        pytest.param(
            {
                "SLURM_PROCID": "5",
                "SLURM_NTASKS": "8",
                "SLURM_LOCALID": "1",
                "SLURM_STEP_ID": "0",
                "SLURM_NODEID": "1",
                "MASTER_ADDR": "n1",
            },
            (5, 8, 1, "n1", 29502, "1"),
            id="srun",
        ),
    ],
)
def test_launchers_are_told_by_their_variables(environment: dict[str, str], expected: tuple[Any, ...]) -> None:
    """2.5: the state begins with what the environment says."""
    found = read_launched(environment)
    assert found is not None
    first_port = found.ports[0]
    assert (found.rank, found.world_size, found.local_rank, found.master_host, first_port, found.host) == expected
    assert found.ports == tuple(range(first_port, first_port + 8))


@pytest.mark.parametrize(
    "environment", [{}, {"RANK": "0"}, {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}], ids=["none", "half", "batch script"]
)
def test_no_launcher_is_seen_where_none_is(environment: dict[str, str]) -> None:
    """2.5."""
    assert read_launched(environment) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"RANK": "4"}, r"RANK: want 0 to 3 \(WORLD_SIZE\), got 4"),
        ({"RANK": "x"}, "RANK: want a number, got 'x'"),
        ({"WORLD_SIZE": "0"}, r"RANK: want 0 to -1 \(WORLD_SIZE\), got 3"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT: want a number, got 'http'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set, and"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: want at least 1, got 0"),
        ({"UNBROKEN_PORT": "65535"}, "port of the job's root: want 1 to 65528, got 65535"),
    ],
)
def test_wrong_variable_is_named(changes: dict[str, str], message: str) -> None:
    """2.2, 2.5."""
    with pytest.raises(NoAgentError, match=message):
        read_launched({**PLAIN, **changes})


def test_port_and_host_of_the_scripts_store_are_taken() -> None:
    """2.1: store_kwargs."""
    found = read_launched(PLAIN, 41000, "10.9.9.9")
    assert found is not None
    assert (found.ports[0], found.master_host) == (41000, "10.9.9.9")


def test_environment_without_a_launcher_says_how_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5."""
    options = inprocess.Wrapper().options
    with pytest.raises(NoAgentError, match=r"RANK, WORLD_SIZE and MASTER_ADDR.*torchrun --nproc-per-node"):
        Hosting(options, {})
    with pytest.raises(TypeError, match=r"store_kwargs\['port'\]: want an integer, got '1'"):
        Hosting(inprocess.Wrapper(store_kwargs={"port": "1"}).options, PLAIN)


def test_timeouts_are_those_of_the_options() -> None:
    """2.1, 2.22."""
    options = inprocess.Wrapper(soft_timeout=timedelta(seconds=7), hard_timeout=timedelta(seconds=8)).options
    assert timeouts_of(options) == Timeouts(soft_s=7.0, hard_s=8.0, startup_s=120.0, reconnect_s=5.0, last_call_s=1.0)


@pytest.mark.parametrize(
    ("local_ranks", "expected"),
    [
        pytest.param({4: 1, 5: 0}, {4: 1, 5: 0}, id="kept"),
        pytest.param({4: 0, 6: 2}, {4: 0, 6: 2}, id="kept with a gap: a script has chosen its device by it"),
        pytest.param({6: -1, 4: -1}, {4: 0, 6: 1}, id="counted"),
        pytest.param({4: 0, 6: 0}, {4: 0, 6: 1}, id="counted where they do not tell workers apart"),
    ],
)
def test_local_ranks_are_kept_or_counted(local_ranks: dict[int, int], expected: dict[int, int]) -> None:
    """2.5."""
    assert local_places(local_ranks) == expected


def present(uid: str, ranks: tuple[int, ...], num_places: int) -> Attendance:
    """Return a host."""
    return Attendance("proof", uid, "node", ranks, num_places, False, Timeouts(soft_s=7.0))


def test_settings_let_every_worker_go_on_alone() -> None:
    """2.24: pods may be split, and nobody can start a process."""
    settings = root.settings_for([present("a", (0, 1), 2), present("b", (2,), 1)])
    assert settings.no_progress_limit is None
    assert (settings.replicas, settings.ranks_per_pod) == (2, 2)
    assert (settings.minimum_replicas, settings.minimum_ranks_per_pod) == (1, 1)
    assert [budget.rung.value for budget in settings.rungs] == ["in-process", "pod", "world"]
    assert settings.timeouts.soft_s == 7.0
    with pytest.raises(InputError, match="ranksPerPod: want 1 to 64, got 65"):
        root.settings_for([present("a", tuple(range(65)), 65)])


def test_limit_of_faults_is_that_of_the_lowest_rank() -> None:
    """Scripts of NVIDIA's extension may fail without limit; the first host speaks for the job, as with timeouts."""
    hosts = [replace(present("a", (0,), 1), no_progress_limit=2**31 - 1), present("b", (1,), 1)]
    assert root.settings_for(hosts).no_progress_limit == 2**31 - 1
    assert root.settings_for(hosts[::-1]).no_progress_limit is None
    register = Register(0, 0, 7, Timeouts(), 3)
    assert wire.decode(wire.encode(register), Register) == register


class _Writer:
    """Addresses of one connection."""

    def __init__(self, own: str, peer: str) -> None:
        self._addresses = {"sockname": (own, 1), "peername": (peer, 2)}

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return self._addresses[name]


@pytest.mark.parametrize(
    ("connections", "expected"),
    [
        pytest.param([("127.0.0.1", "127.0.0.1")], ["127.0.0.1"], id="one machine"),
        pytest.param([("10.0.0.1", "10.0.0.1"), ("10.0.0.1", "10.0.0.2")], ["10.0.0.1", "10.0.0.2"], id="two"),
        pytest.param(
            [("127.0.0.1", "127.0.0.1"), ("10.0.0.1", "10.0.0.2")],
            ["10.0.0.1", "10.0.0.2"],
            id="the first came by loopback",
        ),
        pytest.param([("::ffff:10.0.0.1", "::ffff:10.0.0.2")], ["10.0.0.2"], id="IPv4 in IPv6"),
        pytest.param([("fe80::1%eth0", "fe80::2%eth0")], ["fe80::2"], id="zone"),
    ],
)
def test_hosts_are_reached_where_they_came_from(connections: list[tuple[str, str]], expected: list[str]) -> None:
    """2.5."""
    hosts: Any = [
        root.RegisteredHost(present("a", (0,), 1), cast(Any, _Writer(own, peer))) for own, peer in connections
    ]
    assert root.addresses_of(hosts) == expected


def test_proofs_tell_sides_keys_and_numbers_apart() -> None:
    """2.5: whoever does not know the key is passed over, and no proof can be used twice."""
    proofs = {
        prove(key, role, own, other) for key in "ab" for role in ("root", "host") for own in "12" for other in "34"
    }
    assert len(proofs) == 16
    assert make_key("a", "bc") != make_key("ab", "c")


def test_messages_survive_the_wire() -> None:
    """2.5."""
    timeouts = Timeouts(soft_s=7.0)
    messages: list[Any] = [
        Register(1, -1, 7, timeouts),
        Placement(0, 2, "10.0.0.1", True),
        PodAssignment("host-0", JobSettings("j"), 1, "token", "10.0.0.1"),
        StandaloneConfig("key", 2, "host", (1, 2), 3.0, is_first=True),
        Challenge("1"),
        present("a", (0, 1), 2),
    ]
    for message in messages:
        assert wire.decode(wire.encode(message), type(message)) == message
    assert wire.decode(wire.encode(messages[2]), ToHost) == messages[2]


def request(**changes: Any) -> joining.JoinRequest:
    """Return what a worker knows."""
    launched = Launched(0, 2, 0, "127.0.0.1", (30002,), "0", ("30002", "run"))
    return replace(joining.JoinRequest(launched, 0, 2, Timeouts(), 1.0), **changes)


def test_jobs_and_calls_and_hosts_do_not_meet() -> None:
    """2.3: each call is a job of its own."""
    first = request()
    others = [request(call=1), request(secret="s"), request(world_size=3)]
    other_host = request(launched=replace(first.launched, host="1"))
    other_rank = request(launched=replace(first.launched, rank=1, local_rank=1))
    assert len({first.key, *(other.key for other in others)}) == 4
    assert other_host.key == first.key
    assert other_host.folder_name != first.folder_name
    assert (other_rank.key, other_rank.folder_name) == (first.key, first.folder_name)
    later = joining.next_request(first, 1, True)
    assert (later.call, later.world_size, later.is_first) == (1, 1, True)


@pytest.mark.parametrize(
    ("master_host", "is_one_host", "secret", "is_open"),
    [
        pytest.param("10.0.0.1", False, "", True, id="hosts without a secret"),
        pytest.param("10.0.0.1", False, "s", False, id="hosts with one"),
        pytest.param("127.0.0.1", False, "", False, id="on loopback"),
        pytest.param("10.0.0.1", True, "", False, id="one host: its key is random"),
    ],
)
def test_hosts_that_strangers_could_join_are_known(
    master_host: str, is_one_host: bool, secret: str, is_open: bool
) -> None:
    launched = replace(request().launched, master_host=master_host, is_one_host=is_one_host)
    assert is_open_to_strangers(launched, secret) is is_open


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        pytest.param({"RANK": "0"}, True, id="rank 0 tells"),
        pytest.param({"RANK": "1"}, False, id="once, not by each rank"),
        pytest.param({"RANK": "0", "UNBROKEN_SECRET": SECRET}, False, id="with a secret"),
        pytest.param({"RANK": "0", "LOCAL_WORLD_SIZE": "4"}, False, id="one host: its key is random"),
    ],
)
def test_several_hosts_without_a_secret_are_told_once_who_could_join_and_what_prevents_it(
    changes: dict[str, str], is_told: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They share nothing before they meet: nobody can make a random secret for all of them."""
    wanted = []

    def leave(request: joining.JoinRequest) -> None:
        wanted.append(request.secret)
        raise TimeoutError

    monkeypatch.setattr(hosting, "join", leave)
    with pytest.raises(TimeoutError):
        Hosting(inprocess.Wrapper().options, {**PLAIN, **changes})
    assert wanted == [changes.get("UNBROKEN_SECRET", "")]
    assert [record.getMessage() for record in caplog.records] == is_told * [
        "anyone who reaches port 30002 of 10.1.2.3 and knows the numbers of this job can join it: set UNBROKEN_SECRET "
        "to the same random text on all hosts, such as that of `openssl rand -hex 32`"
    ]


@pytest.mark.parametrize("secret", ["s", SECRET[:15]])
def test_a_short_secret_is_refused_by_each_rank_before_it_says_a_word(
    secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosting, "join", lambda _request: pytest.fail("it joined"))
    wanted = (
        "UNBROKEN_SECRET: want at least 16 characters, the same on all hosts, such as those of `openssl rand -hex 32`, "
        f"got {len(secret)}"
    )
    with pytest.raises(InputError) as raised:
        Hosting(inprocess.Wrapper().options, {**PLAIN, "UNBROKEN_SECRET": secret})
    assert str(raised.value) == wanted


@pytest.mark.parametrize("is_one_host", [True, False])
def test_key_of_a_job_on_one_host_is_random_and_lies_in_a_private_file(
    is_one_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "_spawn", lambda *_: None)
    wanted = request(launched=replace(request().launched, is_one_host=is_one_host))
    keys = []
    for name in ("a", "b"):
        assert joining._start_host(tmp_path / name, wanted, 0.0)
        file = tmp_path / name / "config.json"
        assert file.stat().st_mode & 0o777 == 0o600
        keys.append(wire.decode(file.read_bytes(), StandaloneConfig).key)
    assert (keys[0] != keys[1]) is is_one_host
    assert (wanted.key in keys) is not is_one_host
    assert {len(key) for key in keys} == {64}


def test_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5: sockets and token lie in it."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / "t"))
    monkeypatch.setattr(folders, "_MAX_FOLDER_CHARACTERS", 500)
    (tmp_path / "t").mkdir()
    folder = joining.base_folder()
    assert folder == tmp_path / "t" / f"unbroken-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o770)
    with pytest.raises(NoAgentError, match="with mode 700, but has owner"):
        joining.base_folder()


def test_folder_is_locked_once_and_free_when_it_was_removed(tmp_path: Path) -> None:
    """2.5: exactly one worker of a host starts the host process."""
    folder = tmp_path / "job"
    first = folders.lock_folder(folder)
    assert first is not None
    assert folders.lock_folder(folder) is None
    folder.rmdir()
    second = folders.lock_folder(folder)
    assert second is not None
    os.close(first)
    assert folders.lock_folder(folder) is None
    os.close(second)


def test_folders_that_nobody_has_are_removed(tmp_path: Path) -> None:
    """2.5: a process that was killed could not do it."""
    kept = folders.lock_folder(tmp_path / "kept")
    assert kept is not None
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "workers.sock").touch()
    folders.sweep(tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["kept"]
    os.close(kept)


def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2.5: the training process needs nothing but torch; the processes beside it do."""
    monkeypatch.setattr(joining, "base_folder", lambda: tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(NoAgentError, match=r"aiohttp is not installed, .*pip install 'unbroken\[sidecar\]'"):
        joining.join(request())
    assert not list(tmp_path.iterdir())
