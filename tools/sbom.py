"""Print what a Python environment holds, as CycloneDX 1.5 JSON: `python3 sbom.py NAME VERSION SITE_PACKAGES`.

Standard library only: it runs while an image is built. Without times and random numbers, so that one commit gives one
file. What the base image holds is not in it.
"""

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Any

Component = dict[str, Any]


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


def document(name: str, version: str, found: Iterable[Distribution]) -> Component:
    """Return the whole document, packages by name."""
    components = sorted(map(component_of, found), key=lambda component: component["bom-ref"])
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "bom-ref": name, "name": name, "version": version}},
        "components": components,
    }


def main() -> int:
    """Print the document; return the exit code."""
    if len(sys.argv) < 4:
        print("sbom: want NAME VERSION SITE_PACKAGES...", file=sys.stderr)
        return 2
    name, version, *folders = sys.argv[1:]
    print(json.dumps(document(name, version, distributions(path=folders)), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
