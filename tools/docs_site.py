"""mkdocs' hooks: pages from outside docs/, files that pages link to, GitHub's anchors, and folders in the navigation.

The documents are written to be read in the repository, too: their links name paths of the repository. Here each becomes
a link within the site, and what it names becomes a part of the site.
"""

import os.path
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
DOCS = "docs/"
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "charts/unbroken/README.md": "reference/chart.md",
}
"""Place in the site of each page that lies outside docs/, by its path in the repository."""

_LINK = re.compile(r"(?<=\]\()([^)\s#:]+)(?=(#[^)\s]*)?\))")
_FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)


def path_in_repository(uri: str) -> str:
    """Return the repository's path of a page of the site."""
    return next((path for path, page in PAGES.items() if page == uri), DOCS + uri)


def path_in_site(path: str) -> str | None:
    """Return where a path of the repository is in the site; None: nowhere, since it is no file."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    if path in PAGES:
        return PAGES[path]
    return f"source/{path}" if (ROOT / path).is_file() else None


def _target(page: str, link: str) -> str:
    return os.path.normpath(PurePosixPath(page).parent / link)


def linked_paths(path: str, markdown: str) -> Iterator[str]:
    """Yield the paths of the repository that the page at a path links to."""
    for part in _FENCE.split(markdown)[::2]:
        for match in _LINK.finditer(part):
            yield _target(path, match[1])


def rewrite_links(uri: str, markdown: str) -> str:
    """Return the text of a page of the site with its links led to the site's own files."""
    path = path_in_repository(uri)

    def rewrite(match: re.Match[str]) -> str:
        target = path_in_site(_target(path, match[1]))
        return match[1] if target is None else os.path.relpath(target, PurePosixPath(uri).parent)

    parts = _FENCE.split(markdown)
    parts[::2] = [_LINK.sub(rewrite, part) for part in parts[::2]]
    return "".join(parts)


def anchor(heading: str, separator: str) -> str:
    """Return the anchor that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def expand(navigation: Any) -> Any:
    """Return the navigation with each `FOLDER/*.md` replaced by that folder's pages, but for its README."""
    if isinstance(navigation, dict):
        return {title: expand(part) for title, part in navigation.items()}
    if not isinstance(navigation, list):
        return navigation
    found: list[Any] = []
    for part in navigation:
        if isinstance(part, str) and part.endswith("/*.md"):
            paths = sorted((ROOT / DOCS).glob(part))
            found += [str(path.relative_to(ROOT / DOCS)) for path in paths if path.name != "README.md"]
        else:
            found.append(expand(part))
    return found


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation, and make anchors as GitHub does, so that a link works in both places."""
    config.nav = expand(config.nav)
    toc: dict[str, Any] = config.mdx_configs.setdefault("toc", {})
    toc["slugify"] = anchor
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/ and every file that a page links to."""
    for path, uri in PAGES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    pages = [file for file in files if file.is_documentation_page()]
    texts = {path_in_repository(page.src_uri): page.content_string for page in pages}
    for target in sorted({target for path, text in texts.items() for target in linked_paths(path, text)}):
        file_uri = path_in_site(target)
        if file_uri is not None and file_uri.startswith("source/"):
            files.append(File.generated(config, file_uri, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page to the site's own files."""
    return rewrite_links(page.file.src_uri, markdown)
