"""What `make images` builds is what operator, chart, example and documentation ask for."""

import re
from pathlib import Path

import pytest
import yaml

from unbroken_core import __version__
from unbroken_core.conventions.images import PARTS, REPOSITORY, image_of
from unbroken_local.kubelet.images import default_rules, find_image
from unbroken_operator.config import parse

ROOT = Path(__file__).parents[3]
IMAGE = re.compile(rf"(?<![\w./-]){REPOSITORY}/([a-z$-]+):([\w.*]+)")


def test_make_images_builds_and_tags_every_part() -> None:
    script = (ROOT / "tools" / "images.sh").read_text()
    loop = re.search(r"^for image in (.*); do$", script, re.MULTILINE)
    assert loop is not None
    assert tuple(loop[1].split()) == PARTS
    assert f'--tag "{REPOSITORY}/$image:$TAG"' in script
    assert f"$(or $(TAG),{__version__})" in (ROOT / "Makefile").read_text()
    assert sorted(path.parent.name for path in ROOT.glob("images/*/Dockerfile")) == sorted(PARTS)


def test_operator_asks_for_the_sidecar_that_is_built_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "kubeconfig").touch()
    arguments = ["--all-namespaces", "--kubeconfig", str(tmp_path / "kubeconfig")]
    assert parse(arguments).sidecar_image == image_of("sidecar")


def test_chart_asks_for_the_images_that_are_built() -> None:
    chart = yaml.safe_load((ROOT / "charts/unbroken/Chart.yaml").read_text())
    values = yaml.safe_load((ROOT / "charts/unbroken/values.yaml").read_text())
    for key, part in (("image", "operator"), ("sidecarImage", "sidecar")):
        assert f"{values[key]['repository']}:{values[key]['tag'] or chart['appVersion']}" == image_of(part)


def test_all_versions_are_one() -> None:
    assert f'\nversion = "{__version__}"\n' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("part", PARTS)
def test_local_cluster_has_every_image_that_is_built(part: str) -> None:
    assert find_image(image_of(part), default_rules()) is not None


def test_example_and_documents_name_images_that_are_built() -> None:
    for path in (*ROOT.glob("examples/*.yaml"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"):
        for part, tag in IMAGE.findall(path.read_text()):
            assert part in {*PARTS, "$image"}, path
            assert tag == __version__, path
