"""The files of the live page: all there, small, and nothing in them loads or runs what comes from elsewhere."""

import re
from importlib.resources import files
from pathlib import Path

from unbroken_cli.page_proxy.files import page_files
from unbroken_core.vocabulary.reasons import Cause, Phase, Rung

MAX_BYTES = 64 << 10
SINKS = re.compile(
    r"innerHTML|outerHTML|insertAdjacent|document\.write|DOMParser|srcdoc|\beval\(|new Function|javascript:"
    r"|setTimeout\(['\"`]"
)


def texts() -> dict[str, str]:
    """Return the files as they are served."""
    return {name: body.decode() for name, (body, _type) in page_files().items()}


def test_all_files_are_served_and_together_they_are_small() -> None:
    folder = files("unbroken_cli.page_proxy").joinpath("assets")
    assert {item.name for item in folder.iterdir()} == set(texts())
    assert sum(len(body) for body, _type in page_files().values()) < MAX_BYTES


def test_whatever_a_file_names_is_there_and_nothing_is_fetched_from_elsewhere() -> None:
    found = texts()
    for name, text in found.items():
        wanted = re.findall(r"""(?:from '\./|(?:src|href)=")([\w.-]+)['"]""", text)
        assert set(wanted) <= set(found), name
        addresses = set(re.findall(r"https?://[^\s\"']+|url\([^)]*\)|@import", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


def test_text_of_a_job_has_no_way_to_become_markup_or_code() -> None:
    for name, text in texts().items():
        assert not SINKS.search(text), name
        if name.endswith(".html"):
            assert not re.search(r"<script(?! type=\"module\" src=)|<style|\sstyle=|\son\w+=", text)


def test_every_word_of_the_closed_vocabulary_has_its_words() -> None:
    words = texts()["words.js"]
    for word in (*Cause, *Rung, *Phase):
        assert re.search(rf"^  '?{word.value}'?:", words, re.MULTILINE), word


def test_package_data_takes_the_files_along() -> None:
    project = Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    assert '"unbroken_cli.page_proxy" = ["assets/*"]' in project
