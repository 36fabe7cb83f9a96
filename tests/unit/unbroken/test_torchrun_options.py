"""What a user says to torchrun's plug-in: `--rdzv-endpoint`, `--rdzv-conf`, the environment."""

import os
from pathlib import Path
from typing import Any

import pytest

from unbroken import folders
from unbroken.network.token import FixedToken
from unbroken.rounds.restored_state import KnownRoundsFile, read_known_rounds
from unbroken.standalone.messages import make_key
from unbroken.torchrun_plugin.options import RendezvousOptions, read_options
from unbroken_core.torchrun_rounds.messages import Limits
from unbroken_core.vocabulary.errors import InputError

SECRET = "sixteen-letters-"


def _read(
    endpoint: str = "host:4711", environment: dict[str, str] | None = None, **config: object
) -> RendezvousOptions:
    return read_options(endpoint, "run", (2, 3), config, environment or {})


@pytest.mark.parametrize(
    ("endpoint", "wanted"),
    [
        pytest.param("host:4711", ("host", 4711), id="name and port"),
        pytest.param("host", ("host", 29400), id="the port of torch's own backend"),
        pytest.param("", ("localhost", 29400), id="nothing"),
        pytest.param("http://host:1/", ("host", 1), id="a URL"),
        pytest.param("[::1]:4711", ("::1", 4711), id="IPv6"),
        pytest.param("::1", ("::1", 29400), id="IPv6 without a port"),
    ],
)
def test_endpoint_is_read_as_torch_reads_it(endpoint: str, wanted: tuple[str, int]) -> None:
    options = _read(endpoint)
    assert (options.host, options.port) == wanted


def test_times_have_the_defaults_of_torch_and_are_whole_seconds() -> None:
    """3.2 and 3.37."""
    options = _read(last_call_timeout="7", is_host="1")
    assert options.limits == Limits(2, 3, 7.0, 15.0, 2.0, 40.0, 60.0)
    assert (options.join_s, options.close_s) == (600.0, 30.0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        pytest.param({"join_timeout": "0"}, "join_timeout: want whole seconds above 0, got '0'", id="no time"),
        pytest.param({"close_timeout": "1.5"}, "close_timeout: want whole seconds", id="half a second"),
        pytest.param({"last_call": "5"}, "want .*last_call_timeout.*, got 'last_call'", id="a word that is none"),
        pytest.param({"on_failure": "panic"}, "on_failure: want continue or close, got 'panic'", id="another word"),
        pytest.param({"certificate": "c.pem"}, "want certificate=FILE and key=FILE", id="half a certificate"),
        pytest.param({"token_file": "/nowhere/token"}, "token file /nowhere/token: No such file", id="no token"),
    ],
)
def test_bad_option_is_told_with_its_name(config: dict[str, Any], said: str) -> None:
    """3.37: a ValueError, as torch's own."""
    with pytest.raises(ValueError, match=said):
        _read(**config)


@pytest.mark.parametrize("endpoint", ["host:0", "host:port", "ftp://host:1", "host:70000", "://host:1"])
def test_bad_endpoint_is_told_with_what_is_wanted(endpoint: str) -> None:
    with pytest.raises(InputError, match="rdzv-endpoint: want"):
        _read(endpoint)


def test_encrypted_endpoint_wants_somebody_who_vouches_for_it() -> None:
    with pytest.raises(InputError, match="want ca=FILE"):
        _read("https://host:1")
    assert _read("https://host:1", {"UNBROKEN_RENDEZVOUS_CA": "/ca"}).authority_file == "/ca"


def test_token_is_that_of_the_file_then_the_environment_then_worked_out(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("token-of-the-file\n")
    known = {"UNBROKEN_TOKEN": "token-of-the-environment"}
    options = _read(environment=known, token_file=str(file))
    assert options.token() == "token-of-the-file"
    file.write_text("rotated-token-of-the-file")
    assert options.token() == "rotated-token-of-the-file"
    assert _read(environment=known).token() == "token-of-the-environment"
    made = {_read(environment={"UNBROKEN_SECRET": secret}).token() for secret in ("", SECRET, f"{SECRET}2")}
    assert len(made) == 3
    assert (_read().is_guessable, _read(environment={"UNBROKEN_SECRET": SECRET}).is_guessable) == (True, False)
    assert all(FixedToken(token).accepts(f"Bearer {token}") for token in made)


@pytest.mark.parametrize(
    ("secret", "said"),
    [
        pytest.param(SECRET[:-1], "want at least 16 characters, the same on all hosts, .*, got 15$", id="a short one"),
        pytest.param(f"  {SECRET[:-1]}\n", "got 15$", id="a short one with blanks around it"),
        pytest.param("   ", "got 0$", id="blanks"),
        pytest.param(f"{SECRET}\udcff", "want printable text in UTF-8, got other characters$", id="no UTF-8"),
        pytest.param(f"{SECRET}\x1b[2J{SECRET}", "want printable text", id="what repaints a terminal"),
    ],
)
def test_a_secret_that_could_be_guessed_is_refused_and_not_shown(secret: str, said: str) -> None:
    with pytest.raises(InputError, match=f"^UNBROKEN_SECRET: .*{said}") as raised:
        _read(environment={"UNBROKEN_SECRET": secret})
    assert SECRET[:8] not in str(raised.value)
    # Nobody asks for it where there is a token.
    token = "token-of-the-environment"
    assert _read(environment={"UNBROKEN_SECRET": secret, "UNBROKEN_TOKEN": token}).token() == token


def test_white_space_around_a_secret_keeps_no_node_out() -> None:
    made = {_read(environment={"UNBROKEN_SECRET": secret}).token() for secret in (SECRET, f" {SECRET}\n")}
    assert len(made) == 1


@pytest.mark.parametrize("endpoint", ["", "localhost:4711", "127.0.0.1:4711", "[::1]:4711"])
def test_nodes_of_one_host_share_a_random_secret_that_only_their_user_can_read(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows the run's name cannot work the token out."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(folders, "_MAX_FOLDER_CHARACTERS", 500)
    first, second = _read(endpoint), _read(endpoint)
    assert first.token() == second.token()
    assert not first.is_guessable
    assert first.token() != make_key("rounds", "run", "")
    (kept,) = (tmp_path / f"unbroken-{os.getuid()}").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600
    kept.unlink()
    assert _read(endpoint).token() != first.token()
    # Without a folder of this user's own the token follows from the name, as between hosts, and that is said.
    kept.parent.chmod(0o777)
    assert (_read(endpoint).token(), _read(endpoint).is_guessable) == (make_key("rounds", "run", ""), True)


@pytest.mark.parametrize(
    "content", ["", "short", "a" * 600, "a" * 20 + "\n" + "b" * 20, "a" * 20 + "\x1b[2J", "é" * 20]
)
def test_a_token_that_no_request_can_carry_is_told_at_the_start(content: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(content)
    with pytest.raises(InputError, match=r"token file .*/token: want a token "):
        _read(token_file=str(tmp_path / "token"))
    if content:
        with pytest.raises(InputError, match=r"UNBROKEN_TOKEN: want a token "):
            _read(environment={"UNBROKEN_TOKEN": content})


def test_domains_and_name_are_passed_on() -> None:
    options = _read(environment={"UNBROKEN_DOMAINS": "row/rack"}, name="n")
    assert (options.domains, options.name) == (("row", "rack"), "n")
    assert _read(domains="a/b/c").domains == ("a", "b", "c")


def test_past_is_kept_in_a_file_and_a_bad_file_is_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = KnownRoundsFile(tmp_path / "past")
    assert file.read() == {}
    file.write({"run": (3, 4)})
    assert file.read() == {"run": (3, 4)}
    (tmp_path / "past").write_text('{"run": [3]}')
    assert file.read() == {}
    assert "rounds not known" in caplog.text
    with pytest.raises(InputError, match="--known: want rounds from 0"):
        read_known_rounds('{"run": [-1, 4]}', "--known")
