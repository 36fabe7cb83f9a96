"""Print what an image holds, as CycloneDX 1.5 JSON: `python3 sbom.py [--lock FILE] NAME VERSION SITE_PACKAGES...`.

That is the packages in those folders and, of the base image that it runs in, the interpreter, its own packages and
those of dpkg. Standard library only: it runs while an image is built. Without times and random numbers, so that one
commit and one base give one file. With --lock it fails unless these folders hold what the lock says, and nothing else.
"""

import json
import platform
import re
import site
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote

Component = dict[str, Any]
MAY_MISS = {"setuptools"}
"""Builds our own package, and is taken away."""
MAY_COME = {"pip", "unbroken"}


def component_of(found: Distribution) -> Component:
    """Return one package by its name, version and licence."""
    name = re.sub(r"[-_.]+", "-", found.metadata["Name"]).lower()
    licence = licence_of(found)
    return {
        "type": "library",
        "bom-ref": f"pkg:pypi/{name}@{found.version}",
        "name": name,
        "version": found.version,
        "purl": f"pkg:pypi/{name}@{found.version}",
        **({"licenses": [licence]} if licence else {}),
    }


def licence_of(found: Distribution) -> Component | None:
    """Return the licence as the package states it: an SPDX expression, a line of text, classifiers, or nothing."""
    if expressions := found.metadata.get_all("License-Expression"):
        return {"expression": expressions[0]}
    text = (found.metadata.get_all("License") or [""])[0].strip()
    if text and "\n" not in text and text.upper() != "UNKNOWN":
        return {"license": {"name": text}}
    words = [
        line.split(" :: ")[-1] for line in found.metadata.get_all("Classifier") or () if line.startswith("License ::")
    ]
    return {"license": {"name": " or ".join(words)}} if words else None


def interpreter() -> Component:
    """Return the Python that runs this, which is the image's."""
    name, version = platform.python_implementation().lower(), platform.python_version()
    purl = f"pkg:generic/{name}@{version}"
    return {"type": "platform", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def debian_packages(status: Path, release: Path) -> Iterator[Component]:
    """Yield what dpkg has installed; nothing where the base has no dpkg."""
    if not status.exists():
        return
    system = dict(re.findall(r'^(ID|VERSION_ID)="?([^"\n]*)"?$', release.read_text(encoding="utf-8"), re.MULTILINE))
    distro = "-".join(filter(None, (system.get("ID", "debian"), system.get("VERSION_ID"))))
    for paragraph in status.read_text(encoding="utf-8").split("\n\n"):
        words = dict(re.findall(r"^(Package|Version|Architecture|Status): (.*)$", paragraph, re.MULTILINE))
        if words.get("Status", "").endswith(" installed"):
            name, version = words["Package"], words["Version"]
            place = f"{system.get('ID', 'debian')}/{name}@{quote(version)}"
            purl = f"pkg:deb/{place}?arch={words['Architecture']}&distro={distro}"
            yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def document(name: str, version: str, found: Iterable[Distribution], others: Iterable[Component] = ()) -> Component:
    """Return the whole document, each component once, by its reference."""
    by_reference = {component["bom-ref"]: component for component in (*map(component_of, found), *others)}
    components = [by_reference[reference] for reference in sorted(by_reference)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name, "version": version}},
        "components": components,
    }


def differences(lock: str, found: Iterable[Component]) -> list[str]:
    """Return one message for each package that is not as the text of a lock file says."""
    locked = dict(re.findall(r"^([a-z0-9.-]+)==([^ \n]+)", lock, re.MULTILINE))
    seen = {item["name"]: item["version"] for item in found}
    wrong = [name for name in locked if seen.get(name) != locked[name] and not (name in MAY_MISS and name not in seen)]
    wrong += [name for name in seen if name not in locked and name not in MAY_COME]
    return [f"{name}: want {locked.get(name, 'nothing')}, got {seen.get(name, 'nothing')}" for name in sorted(wrong)]


def main() -> int:
    """Print the document; return the exit code."""
    arguments = sys.argv[1:]
    lock = Path(arguments[1]) if arguments[:1] == ["--lock"] and len(arguments) > 1 else None
    name, version, *folders = arguments[2 if lock else 0 :] or ("", "")
    if not folders:
        print("sbom: want [--lock FILE] NAME VERSION SITE_PACKAGES...", file=sys.stderr)
        return 2
    if lock:
        wrong = differences(lock.read_text(encoding="utf-8"), map(component_of, distributions(path=folders)))
        for message in wrong:
            print(f"sbom: {lock}: {message}", file=sys.stderr)
        if wrong:
            return 1
    found = distributions(path=[*folders, *site.getsitepackages()])
    others = [interpreter(), *debian_packages(Path("/var/lib/dpkg/status"), Path("/etc/os-release"))]
    print(json.dumps(document(name, version, found, others), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
