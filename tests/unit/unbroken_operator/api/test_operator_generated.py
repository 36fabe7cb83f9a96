"""The generated files are those of the models."""

from pathlib import Path

import yaml

from unbroken_operator.generate import CHART_OLD_CRD_PATH, CRD_PATH, main, stale_files

ROOT = Path(__file__).parents[4]


def test_the_generated_files_are_up_to_date() -> None:
    assert stale_files(ROOT) == []


def test_check_names_a_file_that_is_not_up_to_date_and_writes_nothing(tmp_path: Path) -> None:
    assert main(["--root", str(tmp_path), "--check"]) == 1
    assert list(tmp_path.iterdir()) == []
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--root", str(tmp_path), "--check"]) == 0


def test_the_crd_for_old_clusters_has_no_cel_rules() -> None:
    text = (ROOT / CHART_OLD_CRD_PATH).read_text()
    assert "x-kubernetes-validations" not in text
    assert yaml.safe_load(text)["spec"]["names"]["shortNames"] == ["rtj"]


def test_only_the_wide_table_of_jobs_shows_the_iteration() -> None:
    """Beside ranks and restarts it reads like training steps."""
    crd = yaml.safe_load((ROOT / CRD_PATH).read_text())
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    assert [column["name"] for column in columns if column.get("priority", 0) > 0] == ["Iteration"]
