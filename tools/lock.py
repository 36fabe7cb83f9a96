"""Write requirements-dev.lock: the exact version of everything that development needs, but torch, with its hashes.

    python tools/lock.py [--check | --keep]

pip resolves pyproject's [dev] and what torch needs; torch itself stays out, because a machine may bring its own build
(tools/setup.sh chooses). uv adds the hashes of all files of each version, for every platform. What each image needs of
it goes to images/*/requirements.lock, and what the frameworks of unbroken.integrations need beside it to
requirements-integrations.lock; with the oldest releases of them that pyproject.toml allows, to
requirements-integrations-older.lock; and torchtitan, which does not go with them, to
requirements-integrations-torchtitan.lock. --check changes nothing and fails when a lock does not hold all that is asked
for, or an image's lock says something else. --keep chooses no versions: it writes hashes and the images' locks again.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import tomllib
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-dev.lock"
TORCH = "torch==2.13.0+cpu"
INTEGRATIONS_LOCK = ROOT / "requirements-integrations.lock"
OLDER_LOCK = ROOT / "requirements-integrations-older.lock"
TORCHTITAN_LOCK = ROOT / "requirements-integrations-torchtitan.lock"
UNBOUND = ("fsspec",)
"""Packages of which a framework wants an older release than requirements-dev.lock has, and has it all the same."""
LEFT_OUT = {"torch", "unbroken", "pip"}
HEADER = """\
# Every package of the development environment but torch, exact; made by `make lock`. tools/setup.sh installs it.
"""
IMAGE_HEADER = """\
# Every package of this image, exact, and setuptools, which builds ours; `make lock` makes it of requirements-dev.lock.
"""
INTEGRATIONS_HEADER = """\
# What the tests of unbroken.integrations need beside requirements-dev.lock, exact; made by `make lock`.
"""
OLDER_HEADER = """\
# The same with the oldest releases of the frameworks that pyproject.toml allows and that go with the rest, to be tested
# with: `make test-integrations RELEASES=older`.
"""
TORCHTITAN_HEADER = """\
# What the tests of unbroken.integrations.torchtitan need beside requirements-dev.lock, exact; made by `make lock`.
"""
FRAMEWORK_LOCKS: Mapping[Path, tuple[str, str, str]] = {
    INTEGRATIONS_LOCK: (INTEGRATIONS_HEADER, "highest", "integrations"),
    OLDER_LOCK: (OLDER_HEADER, "lowest-direct", "integrations"),
    TORCHTITAN_LOCK: (TORCHTITAN_HEADER, "highest", "torchtitan"),
}
"""Header, uv's resolution and pyproject's extra of each lock of frameworks."""
IMAGES: Mapping[str, tuple[str, ...]] = {
    "operator": ("unbroken[operator]", "setuptools"),
    "sidecar": ("unbroken[sidecar]", "setuptools"),
    # What torch needs is listed, since torch is installed by itself.
    "trainer-example": (
        *("scikit-learn", "numpy", "filelock", "fsspec", "jinja2", "networkx", "sympy", "typing-extensions"),
        "setuptools",
    ),
}
"""What each image is made of; its own packages come from the repository."""


def versions(report: Mapping[str, Any]) -> dict[str, str]:
    """Return version by canonical package name, from the report of `pip install --report`."""
    pinned = {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    return {name: version for name, version in pinned.items() if name not in LEFT_OUT}


def render_lock(header: str, pinned: Mapping[str, str], hashes: Mapping[str, Sequence[str]]) -> str:
    """Return the text of a lock file. Raises KeyError for a package without hashes."""
    parts = (" \\\n".join([f"{name}=={pinned[name]}", *hashes[name]]) + "\n" for name in sorted(pinned))
    return header + "".join(parts)


def parse_lock(text: str) -> dict[str, str]:
    """Return version by canonical package name."""
    lines = (line.split("#")[0].strip(" \\") for line in text.splitlines())
    pins = (line.split("==") for line in lines if line and not line.startswith("--hash="))
    return {canonicalize_name(name): version for name, version in pins}


def parse_hashes(text: str) -> dict[str, list[str]]:
    """Return the lines with hashes by canonical package name; none for one without."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in text.splitlines():
        if "==" in line and not line.startswith("#"):
            name = canonicalize_name(line.split("==")[0])
            found[name] = []
        elif name and re.fullmatch(r"    --hash=sha256:[0-9a-f]{64}( \\)?", line):
            found[name].append(line.removesuffix(" \\"))
    return found


def closure(pinned: Mapping[str, str], wanted: Iterable[str]) -> dict[str, str]:
    """Return what these requirements need, they included, by the installed packages, in the locked versions."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    waiting = [Requirement(text) for text in wanted]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if str(requirement) in seen or not _applies(requirement):
            continue
        seen.add(str(requirement))
        if name in pinned:
            found[name] = pinned[name]
        waiting += _requirements_of(requirement)
    return found


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return one line for each package whose version is new, gone or another, or one that says that all stayed."""
    names = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
    lines = [f"{name}: {before.get(name, 'nothing')} -> {after.get(name, 'nothing')}" for name in names]
    return lines or [f"all {len(after)} packages are as they were"]


def unhashed(text: str) -> list[str]:
    """Return one message for each package of a lock without a hash, and each line that is none of a lock's."""
    lines = re.compile(r"(#.*|[a-z0-9.-]+==[^ ]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?|)")
    found = [
        f"want NAME==VERSION and its hashes, got {line[:80]!r}"
        for line in text.splitlines()
        if not lines.fullmatch(line)
    ]
    return found + [
        f"{name}: want at least one hash, got none" for name, hashes in parse_hashes(text).items() if not hashes
    ]


def violations(pinned: Mapping[str, str], wanted: Iterable[Requirement]) -> list[str]:
    """Return one message for each requirement, direct or through another, that the lock does not meet."""
    found: list[str] = []
    seen: set[str] = set()
    waiting = list(wanted)
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in LEFT_OUT or (requirement.marker and not _applies(requirement)) or str(requirement) in seen:
            continue
        seen.add(str(requirement))
        if name not in pinned:
            found.append(f"{name}: want {requirement} in {LOCK.name}, got nothing")
        elif not requirement.specifier.contains(pinned[name], prereleases=True):
            found.append(f"{name}: want {requirement} in {LOCK.name}, got {pinned[name]}")
        else:
            waiting += _requirements_of(requirement)
    return sorted(found)


def _applies(requirement: Requirement) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def _requirements_of(requirement: Requirement) -> list[Requirement]:
    try:
        needed = distribution(requirement.name).requires or []
    except PackageNotFoundError:
        return []
    found = [Requirement(text) for text in needed]
    extras = requirement.extras | {""}
    needed_here = [item for item in found if not item.marker or any(item.marker.evaluate({"extra": e}) for e in extras)]
    for item in needed_here:
        item.marker = None  # it applies
    return needed_here


def _direct() -> list[Requirement]:
    """Return what pyproject's [dev] asks for, as the installed distribution says it."""
    found = [Requirement(text) for text in distribution("unbroken").requires or []]
    extras = {"dev", "operator", "sidecar", "local", "cli", "tls", "examples"}
    direct = [item for item in found if item.marker and any(item.marker.evaluate({"extra": e}) for e in extras)]
    for item in direct:
        item.marker = None
    return direct


def _resolve() -> Mapping[str, Any]:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*command, f"{ROOT}[dev]", TORCH], check=True, stdout=subprocess.PIPE, text=True)
    report: Mapping[str, Any] = json.loads(done.stdout)
    return report


def _newest() -> dict[str, str]:
    print("lock: asking the package index for the newest versions (minutes, without output)", flush=True)
    return versions(_resolve())


def _write(pinned: Mapping[str, str]) -> None:
    """Write all locks; asks the index for hashes."""
    text = "".join(f"{name}=={version}\n" for name, version in pinned.items())
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--no-deps", "--generate-hashes", "--quiet"]
    command += ["--no-header", "--no-annotate", "--python", sys.executable, "-"]
    done = subprocess.run(command, input=text, check=True, stdout=subprocess.PIPE, text=True)
    hashes = parse_hashes(done.stdout)
    LOCK.write_text(render_lock(HEADER, pinned, hashes), encoding="utf-8")
    for image in IMAGES:
        _lock_of(image).write_text(_image_lock(image, pinned, hashes), encoding="utf-8")


def _write_integrations(path: Path, pinned: Mapping[str, str], keep: bool) -> None:
    """Write a lock of frameworks, beside these packages. Without `keep` it chooses versions, as uv's resolution."""
    header, resolution, extra = FRAMEWORK_LOCKS[path]
    before = parse_lock(path.read_text(encoding="utf-8")) if keep and path.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        constraints, overrides = Path(folder, "constraints"), Path(folder, "overrides")
        lines = [f"{name}=={version}\n" for name, version in {**before, **pinned}.items()]
        constraints.write_text("".join(lines), encoding="utf-8")
        # A condition that never holds: neither torch nor what its build for GPUs needs.
        # Of a library that only reads text for torchtitan, which the tests do not, the bounds do not count.
        own = [f"{name}=={pinned[name]}\n" for name in UNBOUND]
        overrides.write_text("".join(["torch; sys_platform == 'none'\n", *own]), encoding="utf-8")
        command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--generate-hashes", "--quiet"]
        command += ["--no-header", "--no-annotate", "--constraint", str(constraints), "--override", str(overrides)]
        command += ["--resolution", resolution]
        wanted = "\n".join(str(requirement) for requirement in _asked(extra))
        done = subprocess.run(
            [*command, "--python", sys.executable, "-"], input=wanted, check=True, stdout=subprocess.PIPE, text=True
        )
    seen = parse_lock(done.stdout)
    beside = {name: version for name, version in seen.items() if name not in pinned and name not in LEFT_OUT}
    path.write_text(render_lock(header, beside, parse_hashes(done.stdout)), encoding="utf-8")


def _asked(extra: str) -> list[Requirement]:
    """Return what this extra of pyproject asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text) for text in project["optional-dependencies"][extra]]


def of_frameworks(name: str, pinned: Mapping[str, str], text: str, wanted: Iterable[Requirement]) -> list[str]:
    """Return one message for each thing that the frameworks' lock of this name lacks, or says beside the main one."""
    beside = parse_lock(text)
    problems = unhashed(text) + [
        f"{package}: want it in {LOCK.name} alone" for package in sorted(pinned.keys() & beside.keys())
    ]
    both = {**beside, **pinned}
    for one in wanted:
        seen = both.get(canonicalize_name(one.name))
        if canonicalize_name(one.name) not in LEFT_OUT and (seen is None or not one.specifier.contains(seen)):
            problems.append(f"{one.name}: want {one}, got {seen or 'nothing'}")
    return [f"{name}: {problem}" for problem in problems]


def _lock_of(image: str) -> Path:
    return ROOT / "images" / image / "requirements.lock"


def _image_lock(image: str, pinned: Mapping[str, str], hashes: Mapping[str, Sequence[str]]) -> str:
    return render_lock(IMAGE_HEADER, closure(pinned, IMAGES[image]), hashes)


def _of_images(text: str) -> list[str]:
    """Return one message for each image whose lock is not that part of the lock which it needs."""
    pinned, hashes = parse_lock(text), parse_hashes(text)
    files = {_lock_of(image): _image_lock(image, pinned, hashes) for image in IMAGES}
    return [
        f"{path.relative_to(ROOT)}: differs from {LOCK.name}; `.venv/bin/python tools/lock.py --keep` writes it again"
        for path, wanted in files.items()
        if not path.exists() or path.read_text(encoding="utf-8") != wanted
    ]


def _of_build(pinned: Mapping[str, str]) -> list[str]:
    """Return a message unless an isolated build takes the locked setuptools."""
    required = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]
    wanted = [f"setuptools=={pinned.get('setuptools')}"]
    return [] if required == wanted else [f"pyproject.toml: build-system.requires: want {wanted}, got {required}"]


def _not_installed(pinned: Mapping[str, str]) -> list[str]:
    """Return one message for each pinned package of which this environment has another version, or none."""
    found = []
    for name, wanted in pinned.items():
        try:
            seen = version(name)
        except PackageNotFoundError:
            seen = "nothing"
        if seen != wanted:
            found.append(f"{name}: want {wanted} in .venv, as {LOCK.name} says, got {seen}; `make setup` fixes it")
    return found


def main() -> int:
    """Write or check the lock; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail when a lock is not up to date")
    parser.add_argument("--keep", action="store_true", help="keep the versions; write hashes and the images' locks")
    options = parser.parse_args()
    text = LOCK.read_text(encoding="utf-8") if LOCK.exists() else ""
    if not options.check:
        before = parse_lock(text)
        _write(before if options.keep else _newest())
        after = parse_lock(LOCK.read_text(encoding="utf-8"))
        for path in FRAMEWORK_LOCKS:
            _write_integrations(path, after, options.keep)
        for line in changes(before, after):
            print(f"lock: {line}")
        return 0
    pinned = parse_lock(text)
    problems = [f"{LOCK.name}: {message}" for message in unhashed(text)]
    problems += violations(pinned, _direct()) + _not_installed(pinned) + _of_images(text) + _of_build(pinned)
    for path, (_header, _resolution, extra) in FRAMEWORK_LOCKS.items():
        frameworks = path.read_text(encoding="utf-8") if path.exists() else ""
        problems += of_frameworks(path.name, pinned, frameworks, _asked(extra))
    for problem in problems:
        print(f"lock: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
