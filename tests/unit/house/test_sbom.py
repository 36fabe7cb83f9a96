"""The bill of materials that each image brings."""

import json
from importlib.metadata import distributions
from pathlib import Path

import pytest
from tools import sbom

ROOT = Path(__file__).parents[3]


def install(folder: Path, name: str, *lines: str) -> None:
    """Make a package of which nothing but its metadata is there."""
    place = folder / f"{name}-1.2.dist-info"
    place.mkdir()
    (place / "METADATA").write_text(
        "\n".join(["Metadata-Version: 2.1", f"Name: {name}", "Version: 1.2", *lines]) + "\n"
    )


def test_every_package_is_named_with_version_and_licence_in_order(tmp_path: Path) -> None:
    install(tmp_path, "Z_Last", "License: BSD")
    install(tmp_path, "b.two", "License-Expression: MIT OR Apache-2.0", "License: ignored")
    install(tmp_path, "c", "License: UNKNOWN", "Classifier: License :: OSI Approved :: Apache Software License")
    install(tmp_path, "a")
    made = sbom.document("unbroken-x", "9", distributions(path=[str(tmp_path)]))
    assert made["metadata"]["component"] == {
        "type": "container",
        "bom-ref": "unbroken-x",
        "name": "unbroken-x",
        "version": "9",
    }
    assert [(item["purl"], item.get("licenses")) for item in made["components"]] == [
        ("pkg:pypi/a@1.2", None),
        ("pkg:pypi/b-two@1.2", [{"expression": "MIT OR Apache-2.0"}]),
        ("pkg:pypi/c@1.2", [{"license": {"name": "Apache Software License"}}]),
        ("pkg:pypi/z-last@1.2", [{"license": {"name": "BSD"}}]),
    ]
    json.dumps(made)


def test_installed_packages_of_the_base_are_named_and_none_twice(tmp_path: Path) -> None:
    (tmp_path / "os-release").write_text('PRETTY_NAME="Debian"\nVERSION_ID="12"\nID=debian\n')
    (tmp_path / "status").write_text(
        "Package: libssl3\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:3.0.17-1~deb12u2\n\n"
        "Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n\n"
    )
    (found,) = sbom.debian_packages(tmp_path / "status", tmp_path / "os-release")
    assert found["purl"] == "pkg:deb/debian/libssl3@1%3A3.0.17-1~deb12u2?arch=amd64&distro=debian-12"
    assert list(sbom.debian_packages(tmp_path / "none", tmp_path / "os-release")) == []
    made = sbom.document("unbroken-x", "9", (), (found, found, sbom.interpreter()))
    assert [item["name"] for item in made["components"]] == ["libssl3", "cpython"]


@pytest.mark.parametrize("part", ["operator", "sidecar", "trainer-example"])
def test_every_image_brings_its_bill(part: str) -> None:
    text = (ROOT / "images" / part / "Dockerfile").read_text()
    assert f'sbom.py "unbroken-{part}" "${{VERSION}}" /venv/lib/python3.*/site-packages > /venv/sbom.cdx.json' in text
    assert "!tools/sbom.py" in (ROOT / ".dockerignore").read_text().splitlines()
