"""`unbroken status`, `why` and `timeline` as processes: on real API servers, and where there is none."""

import asyncio
import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.cli.kubectl_standin import kubectl_standin
from tests.integration.operator import operator_bench as tools
from tests.waiting import eventually

from unbroken_cli.errors import CommandError
from unbroken_cli.page_proxy.upstream import API_PORT, ClusterRendezvous, PortForward
from unbroken_core.protocol.messages import PROTOCOL, JobStatus, PodStatus, Recovery
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, Role, Rung, WorkerPhase


def ask(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    command = [sys.executable, "-m", "unbroken", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=False, env={**os.environ, **variables}
    )


def _report(pods: list[dict[str, Any]]) -> JobStatus:
    """Return what the rendezvous says after one recovery: the last pod took over from the second."""
    names = [pod["metadata"]["name"] for pod in pods]
    members = tuple(
        PodStatus(name, pod["metadata"]["uid"], "", role, ranks, (), (WorkerPhase.RUNNING,), True)
        for name, pod, role, ranks in zip(
            names, pods, (Role.ACTIVE, Role.SPARE, Role.ACTIVE), ((0,), (), (1,)), strict=True
        )
    )
    recovery = Recovery(
        number=1,
        cause=Cause.PROCESS_SIGNAL,
        rung=Rung.POD,
        rank=1,
        pod=names[1],
        node="node-a",
        domain="rack-1",
        detail="signal 9",
        iteration_before=0,
        iteration_after=1,
        replaced_by=(names[2],),
        phase_s={"detect": 0.001, "stop": 0.01, "plan": 0.002, "enter": 0.02},
        started_at="2026-01-01T00:00:00Z",
        ended_at="2026-01-01T00:00:01Z",
    )
    return JobStatus(
        protocol=PROTOCOL,
        job="digits",
        term=1,
        revision=1,
        phase=JobPhase.RUNNING,
        reason=Reason.TRAINING,
        message="2 ranks train",
        iteration=1,
        world_size=2,
        spare_ranks=1,
        lost_ranks=0,
        pods=members,
        restarts_by_rung={"pod": 1},
        restarts_by_cause={"process-signal": 1},
        recoveries=(recovery,),
        max_step=-1,
        ettr=0.5,
    )


def test_commands_tell_what_the_operator_wrote_of_a_recovery(kubeconfig: Path, tmp_path: Path) -> None:

    async def scenario() -> None:
        async with tools.bench(kubeconfig, tmp_path) as made:
            await made.apply("digits", replicas=2, spares={"count": 1})
            with tools.operator(made, "--namespace", made.namespace, "--lease", f"{made.namespace}/operator"):
                await made.wait_for_pods("digits-0", "digits-1", "digits-2")
                rendezvous = await made.rendezvous("digits")
                async with rendezvous.serving() as address:
                    await made.run_pod("digits-rendezvous-0", address)
                    await rendezvous.say(_report(await made.pods()))

                    async def is_told() -> bool:
                        return bool(await made.events("Recovered"))

                    await eventually(is_told, "the Event of the recovery")

                    async def is_running() -> bool:
                        return bool((await made.condition("digits", "Running")).get("status") == "True")

                    await eventually(is_running, "Running")
                    await asyncio.to_thread(_check_words, kubeconfig, made.namespace)
                    files = _files(await made.secret("digits"), tmp_path)
                    unnamed = await asyncio.to_thread(ask, "status", "--url", f"https://{address}:29600", *files)
                    assert (unnamed.returncode, "certificate is not valid for" in unnamed.stderr) == (1, True), unnamed
                    async with _forwarded(address, 29600) as port:
                        asked = await asyncio.to_thread(ask, "status", "--url", f"https://localhost:{port}", *files)
                    assert asked.stdout.startswith("digits: TRAINING, iteration 1: 2 ranks train"), asked
                    place = ("--kubeconfig", str(kubeconfig), "-n", made.namespace)
                    with kubectl_standin(tmp_path, STANDIN_TARGET=f"{address}:29600") as told:
                        paged = await asyncio.to_thread(ask, "page", "digits", *place)
                    # The Secret was read and the certificate good: a token that is not answers 401.
                    assert "the rendezvous answers 404: it has no page" in paged.stderr, paged
                    assert paged.returncode == 1
                    way = f"port-forward --address 127.0.0.1 service/digits-rendezvous :{API_PORT}"
                    assert told.read_text() == (f"--kubeconfig={kubeconfig} --namespace {made.namespace} {way}\n")

    asyncio.run(scenario())


def _files(secret: dict[str, Any], folder: Path) -> tuple[str, ...]:
    for key in ("token", "ca.crt"):
        (folder / key).write_bytes(base64.b64decode(secret["data"][key]))
    return ("--token-file", str(folder / "token"), "--ca-file", str(folder / "ca.crt"))


@contextlib.asynccontextmanager
async def _forwarded(address: str, port: int) -> AsyncIterator[int]:
    """Do what `kubectl port-forward` does; yields the port on localhost."""

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(address, port)
        await asyncio.gather(copy(reader, back), copy(there, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def _check_words(kubeconfig: Path, namespace: str) -> None:
    place = ("--kubeconfig", str(kubeconfig), "-n", namespace)
    status = ask("status", "digits", *place)
    assert (status.returncode, status.stderr) == (0, "")
    assert status.stdout.startswith(f"digits in namespace {namespace}: TRAINING, iteration 1: 2 ranks train")
    why = ask("why", "digits", "1", *place)
    assert why.stdout.startswith(f"fault 1 of digits in namespace {namespace}: process-signal: signal 9"), why
    assert "digits-2 took over" in why.stdout
    told = json.loads(ask("timeline", "digits", *place, "-o", "json").stdout)
    assert [fault["detail"] for fault in told["faults"]] == ["signal 9"]
    assert "Recovered" in [event["reason"] for event in told["events"]]
    assert "digits" in ask("status", *place).stdout.splitlines()[1]
    tree = ask("topology", "digits", *place)
    assert tree.stdout.startswith(f"digits in namespace {namespace}: 0 active, 0 spare, 3 not running\n"), tree
    aimed = ("inject", "digits", "--fault", "lose-rendezvous", "-o", "json", *place)
    refused = ask(*aimed)
    assert (refused.returncode, "nothing was done. Add --yes" in refused.stderr) == (2, True), refused
    assert json.loads(ask(*aimed, "--yes").stdout)["pod"] == "digits-rendezvous-0"
    unknown = ask("status", "nope", *place)
    assert unknown.returncode == 1
    assert unknown.stderr.rstrip().endswith("jobs there: digits"), unknown.stderr
    typo = ask("status", *place[:2], "-n", f"{namespace}-x")
    assert (typo.returncode, typo.stdout) == (1, "")
    assert typo.stderr.startswith(f"unbroken status: namespace '{namespace}-x': there is none on "), typo.stderr
    not_kept = ask("why", "digits", "7", *place)
    assert not_kept.returncode == 2
    assert "numbers 1; got '7'" in not_kept.stderr


def test_an_api_server_that_is_away_is_said_in_one_sentence(tmp_path: Path) -> None:
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "away",
        "clusters": [{"name": "away", "cluster": {"server": "http://127.0.0.1:1"}}],
        "users": [{"name": "away", "user": {}}],
        "contexts": [{"name": "away", "context": {"cluster": "away", "user": "away"}}],
    }
    file = tmp_path / "config"
    file.write_text(json.dumps(config))
    result = ask("status", "digits", KUBECONFIG=str(file))
    assert (result.returncode, result.stdout) == (1, "")
    assert "the API server http://127.0.0.1:1 does not answer" in result.stderr
    assert len(result.stderr.splitlines()) == 1
    wrong = ask("status", "digits", "--context", "nope", KUBECONFIG=str(file))
    assert wrong.returncode == 2
    assert "nope" in wrong.stderr
    assert len(wrong.stderr.splitlines()) == 1


def test_no_kubeconfig_is_said_in_one_sentence(tmp_path: Path) -> None:
    result = ask("status", "digits", KUBECONFIG=str(tmp_path / "nothing"))
    assert result.returncode == 2
    assert result.stderr.startswith("unbroken status: kubeconfig: ")
    assert "does not exist" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "missing"),
    [
        (("why",), "does not exist; see --kubeconfig"),
        (("timeline",), "does not exist; see --kubeconfig"),
        (("status", "--url", "http://127.0.0.1:1"), "--url: needs --token-file"),
    ],
)
def test_what_is_missing_on_the_command_line_is_named(arguments: tuple[str, ...], missing: str) -> None:
    result = ask(*arguments)
    assert result.returncode == 2
    assert missing in result.stderr


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        pytest.param(b"0123456789abcdef-secret\nsecret-of-line-two", "a token in one line of ASCII", id="two lines"),
        pytest.param(b"\xff\xfe" * 20, "a token in one line of ASCII", id="bytes that are no text"),
        pytest.param("schlüssel-0123456789".encode(), "a token in one line of ASCII", id="other letters"),
        pytest.param(b"", "a token of at least 16 characters, got 0", id="nothing"),
        pytest.param(b"x" * 4_000_000, "a token of at most 512 characters, got more", id="a huge file"),
    ],
)
@pytest.mark.parametrize("command", ["status", "page"])
def test_a_file_that_holds_no_token_is_named_and_its_content_never_shown(
    tmp_path: Path, command: str, content: bytes, wanted: str
) -> None:
    """Before, two lines showed the token in an error about headers, and bytes that are no text a traceback."""
    path = tmp_path / "token"
    path.write_bytes(content)
    result = ask(command, "--url", "http://127.0.0.1:1", "--token-file", str(path))
    assert result.returncode == 2
    assert (
        result.stderr == f"unbroken {command}: --token-file {path}: want {wanted}{result.stderr.partition(wanted)[2]}"
    )
    assert len(result.stderr.splitlines()) == 1
    assert "secret" not in result.stderr.replace(str(path), "")


def test_a_secret_that_holds_no_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"metadata": {"name": "digits-rendezvous"}, "data": {"token": base64.b64encode(b"one\ntwo").decode()}}
    forward = PortForward([])
    monkeypatch.setattr(forward, "port", lambda: 1)
    with pytest.raises(CommandError) as raised:
        ClusterRendezvous(lambda: secret, forward).ask("/page/status")
    assert str(raised.value) == (
        "Secret digits-rendezvous: token: want a token in one line of ASCII characters without blanks, got other "
        "characters; delete the Secret, and the operator recreates it"
    )
