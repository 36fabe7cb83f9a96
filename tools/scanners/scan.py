"""Scan the rendered chart with checkov: `python tools/scanners/scan.py`, by `make scan`.

Fails on a finding that exceptions.yaml beside it does not explain, on an exception that no longer occurs, and when
checkov looked at nothing. Environment: UNBROKEN_TEST_HELM, the program helm.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXCEPTIONS = Path(__file__).with_name("exceptions.yaml")
DIGEST = f"sha256:{'0' * 64}"
SOUND = (
    f"registry=registry.example.com/team,image.tag={DIGEST},sidecarImage.tag={DIGEST},networkPolicy.enabled=true,"
    "webhook.enabled=true,crd.install=false"
)
SCOPES = {
    "namespaces": f"{SOUND},namespaces={{ml,vision}}",
    "cluster": f"{SOUND},scope=Cluster,quarantine.mode=On,dashboards.enabled=true",
}
"""As the documents recommend it: images by digest, the operator's pods closed. The CRD has neither rights nor pods."""
MIN_PASSED = 100
"""Each scope passes some 200 checks: far fewer means that checkov did not see the objects."""

Finding = tuple[str, str]
"""Check and resource, as Kind.name."""


def findings(report: Mapping[str, Any]) -> set[Finding]:
    """Return what checkov found, from its JSON. Raises ValueError when it looked at too little."""
    summary = report.get("summary") or {}
    if summary.get("parsing_errors") != 0 or int(summary.get("passed", 0)) < MIN_PASSED:
        raise ValueError(f"want at least {MIN_PASSED} passed checks and no parsing error, got {summary}")
    return {(item["check_id"], _short(item["resource"])) for item in report["results"]["failed_checks"]}


def _short(resource: str) -> str:
    kind, *_, name = resource.split(".")
    return f"{kind}.{name}"


def explained(entries: Iterable[Mapping[str, Any]]) -> set[Finding]:
    """Return the findings that exceptions.yaml explains. Raises ValueError for one without a reason."""
    found: set[Finding] = set()
    for entry in entries:
        if len(str(entry.get("why") or "").split()) < 5:
            raise ValueError(
                f"{EXCEPTIONS.name}: {entry.get('check')}: want a reason in a sentence, got {entry.get('why')!r}"
            )
        found |= {(entry["check"], resource) for resource in entry["resources"]}
    return found


def complaints(seen: Mapping[str, set[Finding]], known: set[Finding]) -> list[str]:
    """Return one line for each finding without an exception, and each exception without a finding."""
    lines = [
        f"{scope}: {check} {resource}: correct it, or explain it in tools/scanners/{EXCEPTIONS.name}"
        for scope, found in seen.items()
        for check, resource in sorted(found - known)
    ]
    stale = known - set().union(*seen.values())
    return lines + [f"{EXCEPTIONS.name}: {check} {resource}: no longer occurs" for check, resource in sorted(stale)]


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode not in (0, 1) or not done.stdout:
        raise ValueError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def _scan(checkov: str, values: str) -> set[Finding]:
    helm = os.environ["UNBROKEN_TEST_HELM"]
    chart = str(ROOT / "charts" / "unbroken")
    text = _run(helm, "template", "unbroken", chart, "--namespace", "unbroken-system", "--set", values)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "chart.yaml")
        path.write_text(text, encoding="utf-8")
        words = ("--framework", "kubernetes", "--quiet", "--compact", "--skip-download", "--output", "json")
        report: Mapping[str, Any] = json.loads(_run(checkov, "--file", str(path), *words))
    return findings(report)


def main() -> int:
    """Scan both scopes; return the exit code."""
    try:
        known = explained(yaml.safe_load(EXCEPTIONS.read_text(encoding="utf-8")))
        checkov = _run(str(ROOT / "tools/scanners/install.sh"), "checkov").strip()
        seen = {scope: _scan(checkov, values) for scope, values in SCOPES.items()}
    except ValueError as error:
        print(f"scan: {error}", file=sys.stderr)
        return 2
    lines = complaints(seen, known)
    for line in lines:
        print(f"scan: {line}", file=sys.stderr)
    if not lines:
        print(f"scan: {', '.join(seen)}: nothing but the {len(known)} findings that {EXCEPTIONS.name} explains")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
