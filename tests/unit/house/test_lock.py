"""tools/lock.py: what the lock file says, and when it is out of date."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tools import lock

ROOT = Path(__file__).parents[3]


def test_lock_lists_exact_versions_by_name_without_torch_and_the_project() -> None:
    report = {
        "install": [
            {"metadata": {"name": "PyYAML", "version": "6.0.3"}},
            {"metadata": {"name": "torch", "version": "2.13.0+cpu"}},
            {"metadata": {"name": "aiohttp", "version": "3.14.5"}},
            {"metadata": {"name": "unbroken", "version": "0.1.0"}},
        ]
    }
    assert lock.versions(report) == {"aiohttp": "3.14.5", "pyyaml": "6.0.3"}


ONE, TWO = (f"    --hash=sha256:{digit * 64}" for digit in "12")
TEXT = f"{lock.HEADER}a-b==1 \\\n{ONE} \\\n{TWO}\nc==2.0 \\\n{TWO}\n"


def test_lock_reads_back_what_it_wrote_with_all_hashes() -> None:
    pinned, hashes = {"c": "2.0", "a-b": "1"}, {"a-b": [ONE, TWO], "c": [TWO]}
    assert lock.render_lock(lock.HEADER, pinned, hashes) == TEXT
    assert lock.parse_lock(TEXT) == pinned
    assert lock.parse_hashes(TEXT) == hashes
    assert lock.unhashed(TEXT) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("a==1\n", "want NAME==VERSION and its hashes, got 'a==1'", id="no hash"),
        pytest.param("a==1 \\\nb==1 \\\n" + ONE, "a: want at least one hash, got none", id="one of two"),
        pytest.param(f"a>=1 \\\n{ONE}", "got 'a>=1 \\\\'", id="no version"),
        pytest.param("a==1 \\\n    --hash=md5:12", "got '    --hash=md5:12'", id="weak hash"),
        pytest.param("a @ https://example.com/a.whl", "got 'a @ https://example.com/a.whl'", id="URL"),
        pytest.param("--index-url https://example.com", "got '--index-url https://example.com'", id="option"),
    ],
)
def test_a_package_without_a_hash_is_told(text: str, message: str) -> None:
    assert message in "; ".join(lock.unhashed(text))


def test_every_installation_asks_for_hashes() -> None:
    setup = (ROOT / "tools" / "setup.sh").read_text()
    assert '"${INSTALL[@]}" --require-hashes -r requirements-dev.lock' in setup
    for path in ROOT.glob("images/*/Dockerfile"):
        lines = path.read_text().replace("\\\n", " ").splitlines()
        installed = [line for line in lines if "pip install" in line]
        for command in (part for line in installed for part in line.split("&&") if "pip install" in part):
            assert "--require-hashes" in command or "--no-index ." in command, f"{path}: {command}"


@pytest.mark.parametrize("image", lock.IMAGES)
def test_the_lock_of_an_image_is_its_part_of_the_whole_lock(image: str) -> None:
    text = lock.LOCK.read_text()
    whole, hashes = lock.parse_lock(text), lock.parse_hashes(text)
    part = (ROOT / "images" / image / "requirements.lock").read_text()
    assert lock.unhashed(part) == []
    assert lock.parse_lock(part).items() <= whole.items()
    assert all(hashes[name] == found for name, found in lock.parse_hashes(part).items())
    named = {"operator": "kopf", "sidecar": "aiohttp", "trainer-example": "scikit-learn"}[image]
    assert {named, "setuptools"} <= lock.parse_lock(part).keys()


def test_an_isolated_build_takes_the_locked_setuptools() -> None:
    pinned = lock.parse_lock(lock.LOCK.read_text())
    assert lock._of_build(pinned) == []
    assert lock._of_build({**pinned, "setuptools": "1"})[0].startswith(
        "pyproject.toml: build-system.requires: want ['setuptools==1'], got "
    )


@pytest.mark.parametrize(
    ("pinned", "wanted", "expected"),
    [
        pytest.param({"ruff": "0.17.5"}, "ruff>=0.9", [], id="met"),
        pytest.param({}, "ruff>=0.9", ["ruff: want ruff>=0.9 in requirements-dev.lock, got nothing"], id="missing"),
        pytest.param(
            {"ruff": "0.8"}, "ruff>=0.9", ["ruff: want ruff>=0.9 in requirements-dev.lock, got 0.8"], id="too old"
        ),
        pytest.param({}, "torch>=9", [], id="torch is chosen elsewhere"),
    ],
)
def test_lock_is_compared_with_what_the_project_asks_for(
    pinned: dict[str, str], wanted: str, expected: list[str]
) -> None:
    assert lock.violations(pinned, [Requirement(wanted)]) == expected


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        pytest.param({"a": "1", "b": "2"}, ["all 2 packages are as they were"], id="same"),
        pytest.param({"a": "3", "c": "1"}, ["a: 1 -> 3", "b: 2 -> nothing", "c: nothing -> 1"], id="other"),
    ],
)
def test_what_locking_changed_is_told(after: dict[str, str], expected: list[str]) -> None:
    assert lock.changes({"a": "1", "b": "2"}, after) == expected


def test_lock_must_hold_what_a_locked_package_needs() -> None:
    found = lock.violations({"pytest-xdist": "3.8.0"}, [Requirement("pytest-xdist")])
    assert {message.split(":")[0] for message in found} == {"execnet", "pytest"}


@pytest.mark.parametrize(
    ("pinned", "beside", "expected"),
    [
        pytest.param({"numpy": "2"}, {"lightning": "2.6.6"}, [], id="all is there"),
        pytest.param({"numpy": "2"}, {}, ["lightning: want lightning<3,>=2.5, got nothing"], id="missing"),
        pytest.param({}, {"lightning": "2.4"}, ["lightning: want lightning<3,>=2.5, got 2.4"], id="too old"),
        pytest.param(
            {"numpy": "2"},
            {"lightning": "2.6.6", "numpy": "1"},
            ["numpy: want it in requirements-dev.lock alone"],
            id="two versions of one package",
        ),
    ],
)
def test_lock_of_frameworks_holds_what_is_asked_for_beside_the_main_one(
    pinned: dict[str, str], beside: dict[str, str], expected: list[str]
) -> None:
    text = lock.render_lock(lock.INTEGRATIONS_HEADER, beside, {name: [ONE] for name in beside})
    found = lock.of_frameworks("name.lock", pinned, text, [Requirement("lightning>=2.5,<3"), Requirement("torch")])
    assert found == [f"name.lock: {line}" for line in expected]


@pytest.mark.parametrize("path", lock.FRAMEWORK_LOCKS, ids=lambda path: path.name)
def test_the_locks_of_frameworks_are_up_to_date(path: Path) -> None:
    pinned = lock.parse_lock(lock.LOCK.read_text())
    _header, _resolution, extra = lock.FRAMEWORK_LOCKS[path]
    assert lock.of_frameworks(path.name, pinned, path.read_text(), lock._asked(extra)) == []


@pytest.mark.parametrize("package", ["transformers", "accelerate", "lightning"])
def test_the_older_lock_has_an_older_release_of_each_framework_than_the_other(package: str) -> None:
    newest, older = (lock.parse_lock(path.read_text()) for path in (lock.INTEGRATIONS_LOCK, lock.OLDER_LOCK))
    assert Version(older[package]).release[:2] < Version(newest[package]).release[:2]
