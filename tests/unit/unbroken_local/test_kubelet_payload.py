"""Volumes whose files are replaced all at once, and the tokens in them."""

import asyncio
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from unbroken_local.kubelet.payload import DATA, File, MountError, keep_part, write_files
from unbroken_local.kubelet.refresh import TokenCache


def names(folder: Path) -> list[str]:
    """Return all entries of a folder."""
    return sorted(path.name for path in folder.iterdir())


def shown(folder: Path) -> dict[str, str]:
    """Return what a user sees: the files by name, through the links."""
    return {name: (folder / name).read_text() for name in names(folder) if not name.startswith("..")}


def test_all_files_are_replaced_by_one_rename_and_nothing_old_is_left(tmp_path: Path) -> None:
    assert write_files(tmp_path, [File("a", b"1", 0o644), File("b", b"1", 0o600)])
    former = (tmp_path / DATA).resolve()
    assert (tmp_path / "a").readlink() == Path("..data/a")
    assert (former / "b").stat().st_mode & 0o777 == 0o600
    assert write_files(tmp_path, [File("a", b"2", 0o644), File("c", b"2", 0o644)])
    assert shown(tmp_path) == {"a": "2", "c": "2"}
    present = (tmp_path / DATA).resolve()
    assert present != former
    assert names(tmp_path) == [present.name, DATA, "a", "c"]


def test_the_same_files_again_change_nothing(tmp_path: Path) -> None:
    files = [File("deep/er/a", b"1", 0o644), File("b", b"", 0o400)]
    write_files(tmp_path, files)
    before = (tmp_path / DATA).readlink()
    assert not write_files(tmp_path, files)
    assert (tmp_path / DATA).readlink() == before
    assert (tmp_path / "deep" / "er" / "a").read_text() == "1"
    assert write_files(tmp_path, [files[0], File("b", b"", 0o444)])


def test_no_files_at_all_are_a_content_as_well(tmp_path: Path) -> None:
    write_files(tmp_path, [File("a", b"1", 0o644)])
    assert write_files(tmp_path, [])
    assert shown(tmp_path) == {}


@pytest.mark.parametrize("path", ["/etc/passwd", "../up", "a/../../up"])
def test_a_path_that_leads_out_of_the_volume_is_refused_before_anything_is_written(tmp_path: Path, path: str) -> None:
    with pytest.raises(MountError, match="want one inside of the volume"):
        write_files(tmp_path, [File("a", b"1", 0o644), File(path, b"1", 0o644)])
    assert names(tmp_path) == []


def test_a_part_that_is_mounted_by_itself_stays_what_it_was(tmp_path: Path) -> None:
    write_files(tmp_path, [File("deep/a", b"old", 0o600)])
    part = keep_part(tmp_path, PurePosixPath("deep/a"))
    whole = keep_part(tmp_path, PurePosixPath("deep"))
    write_files(tmp_path, [File("deep/a", b"new", 0o600)])
    assert (part.read_text(), (whole / "a").read_text()) == ("old", "old")
    assert part.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "deep" / "a").read_text() == "new"


def test_a_token_is_asked_for_again_when_most_of_its_life_is_over() -> None:
    now_s, asked = [100.0], list[str]()

    async def fetch(account: str, source: dict[str, Any]) -> str:
        asked.append(f"{account} {source.get('audience')}")
        return f"token-{len(asked)}"

    async def scenario() -> None:
        cache = TokenCache(fetch, lambda: now_s[0])
        source = {"path": "token", "expirationSeconds": 1000}
        assert await cache.fetch("default", source) == "token-1"
        now_s[0] += 799.0
        assert await cache.fetch("default", source) == "token-1"
        assert await cache.fetch("default", {**source, "audience": "vault"}) == "token-2"
        now_s[0] += 1.0
        assert await cache.fetch("default", source) == "token-3"

    asyncio.run(scenario())
    assert asked == ["default None", "default vault", "default None"]
