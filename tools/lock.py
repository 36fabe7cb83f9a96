"""Write requirements-dev.lock: the exact version of everything that development needs, but torch.

    python tools/lock.py [--check]

pip resolves pyproject's [dev] and what torch needs; torch itself stays out, because a machine may bring its own build
(tools/setup.sh chooses). --check changes nothing and fails when the lock does not hold all that pyproject asks for.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements-dev.lock"
TORCH = "torch==2.13.0+cpu"
LEFT_OUT = {"torch", "unbroken", "pip"}
HEADER = """\
# Every package of the development environment but torch, exact; made by `make lock`. tools/setup.sh installs it.
"""


def render_lock(report: Mapping[str, Any]) -> str:
    """Return the text of the lock file from the report of `pip install --report`."""
    pinned = {canonicalize_name(item["metadata"]["name"]): item["metadata"]["version"] for item in report["install"]}
    lines = (f"{name}=={pinned[name]}\n" for name in sorted(pinned) if name not in LEFT_OUT)
    return HEADER + "".join(lines)


def parse_lock(text: str) -> dict[str, str]:
    """Return version by canonical package name."""
    lines = (line.split("#")[0].strip() for line in text.splitlines())
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines if line}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Return one line for each package whose version is new, gone or another, or one that says that all stayed."""
    names = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
    lines = [f"{name}: {before.get(name, 'nothing')} -> {after.get(name, 'nothing')}" for name in names]
    return lines or [f"all {len(after)} packages are as they were"]


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
    extras = requirement.extras or {""}
    return [item for item in found if item.marker is None or any(item.marker.evaluate({"extra": e}) for e in extras)]


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
    parser.add_argument("--check", action="store_true", help="change nothing; fail when the lock is not up to date")
    if not parser.parse_args().check:
        before = parse_lock(LOCK.read_text(encoding="utf-8")) if LOCK.exists() else {}
        print("lock: asking the package index for the newest versions (minutes, without output)", flush=True)
        LOCK.write_text(render_lock(_resolve()), encoding="utf-8")
        for line in changes(before, parse_lock(LOCK.read_text(encoding="utf-8"))):
            print(f"lock: {line}")
        return 0
    pinned = parse_lock(LOCK.read_text(encoding="utf-8"))
    bad = [line for line in LOCK.read_text().splitlines() if not re.fullmatch(r"(#.*|[a-z0-9.-]+==[^ ]+|)", line)]
    problems = [f"{LOCK.name}: want NAME==VERSION, got {line!r}" for line in bad]
    problems += violations(pinned, _direct()) + _not_installed(pinned)
    for problem in problems:
        print(f"lock: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
