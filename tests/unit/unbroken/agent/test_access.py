"""Files that the agent shares with the trainer."""

from pathlib import Path

import pytest

from unbroken.agent.adapters.access import shared_mode
from unbroken.agent.adapters.stamp_page import StampPage


@pytest.mark.parametrize(
    ("folder_mode", "wanted"),
    [
        pytest.param(0o777, 0o666, id="emptyDir of a pod: every user of the pod"),
        pytest.param(0o2770, 0o660, id="emptyDir with fsGroup alone: the group"),
        pytest.param(0o755, 0o600, id="others may look only: the owner"),
        pytest.param(0o700, 0o600, id="a folder of one's own: the owner"),
    ],
)
def test_who_may_write_into_the_folder_may_use_the_page(tmp_path: Path, folder_mode: int, wanted: int) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(folder_mode)
    page = StampPage(folder / "stamps", 2)
    page.close()
    assert (folder / "stamps").stat().st_mode & 0o777 == wanted == shared_mode(folder)
