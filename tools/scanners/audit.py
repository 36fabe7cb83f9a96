"""Ask for known vulnerabilities of everything that is locked: `python tools/scanners/audit.py`, by `make audit`.

pip-audit asks the package index. Its exit code is 0 even if the index answers nothing, so each package counts: the exit
code here is 0 when all were looked up and none is known to be vulnerable, 1 for a vulnerability, and 3 with the line
`audit: not done: ...` when some could not be looked up.
"""

import json
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOCKS = (
    *sorted(path for path in ROOT.glob("requirements-*.lock") if not path.stem.endswith("-older")),
    *sorted((ROOT / "tools" / "scanners").glob("*.lock")),
)
"""Those of the images are parts of requirements-dev.lock. What is old on purpose has known flaws, and is for tests."""
LIMIT_S = 300
MAX_SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """What the index knows of one lock."""

    num_asked: int
    vulnerable: tuple[str, ...]
    """One line each: package, version, advisory, and where it is fixed."""
    unknown: tuple[str, ...]
    """Packages that could not be looked up."""


def finding(report: Mapping[str, Any]) -> Finding:
    """Return what the JSON report of pip-audit says."""
    packages = report["dependencies"]
    lines = [_described(package, item) for package in packages for item in package.get("vulns", ())]
    return Finding(len(packages), tuple(lines), tuple(item["name"] for item in packages if "skip_reason" in item))


def _described(package: Mapping[str, Any], item: Mapping[str, Any]) -> str:
    fixed = ", ".join(item["fix_versions"]) or "no version"
    return f"{package['name']} {package['version']}: {item['id']}, fixed in {fixed}"


def verdict(found: Mapping[str, Finding | str]) -> tuple[int, list[str]]:
    """Return the exit code and what is said; `found` by lock: a text says why there is no report."""
    lines: list[str] = []
    code = 0
    for name, seen in found.items():
        unknown = seen if isinstance(seen, str) else _unknown(seen)
        if isinstance(seen, Finding):
            lines += [f"audit: {name}: {line}" for line in seen.vulnerable]
            code = 1 if seen.vulnerable else code
        if unknown:
            lines.append(f"audit: not done: {name}: {unknown}")
            code = code or 3
        elif isinstance(seen, Finding) and not seen.vulnerable:
            lines.append(f"audit: {name}: {seen.num_asked} packages, no known vulnerability")
    return code, lines


def _unknown(seen: Finding) -> str:
    if not seen.num_asked:
        return "no packages were asked for"
    shown = ", ".join(seen.unknown[:MAX_SHOWN])
    more = ", ..." if len(seen.unknown) > MAX_SHOWN else ""
    return f"{len(seen.unknown)} of {seen.num_asked} packages could not be looked up: {shown}{more}" if shown else ""


def ask(program: str, lock: Path) -> Finding | str:
    """Ask for one lock; return why not as a text."""
    command = [program, "--disable-pip", "--require-hashes", "--progress-spinner", "off", "--format", "json"]
    try:
        done = subprocess.run([*command, "-r", str(lock)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
        return finding(json.loads(done.stdout))
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S} s"
    except (ValueError, KeyError, TypeError):
        return f"pip-audit ended with {done.returncode}: {_last_line(done.stderr)}"


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["it said nothing"])[-1][:300]


def main(locks: Iterable[Path] = LOCKS) -> int:
    """Print what is known; return the exit code."""
    installed = subprocess.run(
        [str(ROOT / "tools/scanners/install.sh"), "pip-audit"], capture_output=True, text=True, check=False
    )
    program = installed.stdout.strip()
    if installed.returncode:
        print(f"audit: not done: pip-audit cannot be installed: {_last_line(installed.stderr)}")
        return 3
    code, lines = verdict({str(lock.relative_to(ROOT)): ask(program, lock) for lock in locks})
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())
