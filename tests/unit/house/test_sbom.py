"""The bill of materials that each image brings."""

import json
import subprocess
import sys
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


LOCKED = """\
# A lock.
a==1.2 \\
    --hash=sha256:00
setuptools==84 \\
    --hash=sha256:00
torch==2+cpu --hash=sha256:00
"""


@pytest.mark.parametrize(
    ("installed", "wanted"),
    [
        pytest.param({"a": "1.2", "torch": "2+cpu", "unbroken": "1", "pip": "9"}, [], id="as locked"),
        pytest.param({"a": "1.2", "torch": "2+cpu", "setuptools": "84"}, [], id="the builder is still there"),
        pytest.param(
            {"a": "1.3", "torch": "2+cpu", "setuptools": "85"},
            ["a: want 1.2, got 1.3", "setuptools: want 84, got 85"],
            id="other versions",
        ),
        pytest.param({"torch": "2+cpu"}, ["a: want 1.2, got nothing"], id="missing"),
        pytest.param({"a": "1.2", "torch": "2+cpu", "evil": "6"}, ["evil: want nothing, got 6"], id="more than that"),
    ],
)
def test_an_image_that_holds_something_else_than_its_lock_is_not_built(
    installed: dict[str, str], wanted: list[str]
) -> None:
    assert sbom.differences(LOCKED, ({"name": name, "version": seen} for name, seen in installed.items())) == wanted


def test_the_bill_fails_on_what_is_not_locked(tmp_path: Path) -> None:
    """As a Dockerfile calls it."""
    site = tmp_path / "site"
    site.mkdir()
    install(site, "a")
    lock = tmp_path / "requirements.lock"
    command = [sys.executable, str(ROOT / "tools" / "sbom.py"), "--lock", str(lock), "unbroken-x", "9", str(site)]
    for text, code, message in (
        ("a==1.2 \\\n    --hash=sha256:00\n", 0, ""),
        ("b==1\n", 1, f"sbom: {lock}: a: want nothing, got 1.2\nsbom: {lock}: b: want 1, got nothing\n"),
    ):
        lock.write_text(text)
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (code, message)
        assert bool(done.stdout) is (code == 0)


@pytest.mark.parametrize("part", ["operator", "sidecar", "trainer-example"])
def test_every_image_brings_its_bill(part: str) -> None:
    text = (ROOT / "images" / part / "Dockerfile").read_text()
    assert f' "unbroken-{part}" "${{VERSION}}" /venv/lib/python3.*/site-packages > /venv/sbom.cdx.json' in text
    assert "sbom.py --lock " in text
    assert "!tools/sbom.py" in (ROOT / ".dockerignore").read_text().splitlines()
