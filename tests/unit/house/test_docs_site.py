"""tools/docs_site.py: links of the repository become links of the site."""

import pytest
from tools import docs_site as tool


@pytest.mark.parametrize(
    ("page", "link", "expected"),
    [
        pytest.param("index.md", "docs/torchrun.md#logs", "torchrun.md#logs", id="front page to a page"),
        pytest.param("reference/chart.md", "../../docs/dashboards.md", "../dashboards.md", id="chart to a page"),
        pytest.param("security.md", "../charts/unbroken/README.md", "reference/chart.md", id="page to the chart"),
        pytest.param("operations/on-call.md", "../runbooks/README.md", "../runbooks/README.md", id="page to page"),
        pytest.param("quickstart.md", "../examples/digits.yaml", "source/examples/digits.yaml", id="page to a file"),
        pytest.param("quickstart.md", "../nowhere.md", "../nowhere.md", id="what does not exist, as it is"),
        pytest.param("quickstart.md", "https://example.com/a.md", "https://example.com/a.md", id="address"),
        pytest.param("quickstart.md", "#run", "#run", id="the same page"),
    ],
)
def test_link_leads_to_the_same_thing_in_the_site(page: str, link: str, expected: str) -> None:
    assert tool.rewrite_links(page, f"See [it]({link}).") == f"See [it]({expected})."


def test_code_is_left_alone() -> None:
    text = "```\n[a](docs/torchrun.md)\n```\n"
    assert tool.rewrite_links("index.md", text) == text


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        pytest.param("Changes made by hand", "changes-made-by-hand", id="words"),
        pytest.param("--rdzv-conf", "--rdzv-conf", id="an option"),
        pytest.param("Coming from NVIDIA's inprocess", "coming-from-nvidias-inprocess", id="an apostrophe"),
        pytest.param("Run it, then break it", "run-it-then-break-it", id="a comma"),
    ],
)
def test_anchor_is_the_one_of_github(heading: str, expected: str) -> None:
    assert tool.anchor(heading, "-") == expected


def test_folder_in_the_navigation_is_all_of_its_pages_but_the_first() -> None:
    expanded = tool.expand([{"Runbooks": ["runbooks/README.md", "runbooks/*.md"]}])
    pages = expanded[0]["Runbooks"]
    assert pages[:2] == ["runbooks/README.md", "runbooks/broken-device.md"]
    assert pages.count("runbooks/README.md") == 1
