"""The site has every page of docs/ in its navigation, and its pages read alike on GitHub."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SITE = (ROOT / "mkdocs.yml").read_text()
LOADED = re.compile(r"""(?:src|href)=["']?(?:https?:)?//|!\[[^]]*\]\((?:https?:)?//""")
"""A picture, script or style that a page would load from elsewhere."""


def navigation():
    return re.findall(r"(\S+\.md)$", SITE.partition("\nnav:\n")[2], re.MULTILINE)


def test_every_page_is_in_the_navigation_once_and_no_entry_is_dead():
    assert Counter(navigation()) == Counter(page.name for page in PAGES)


def test_every_page_is_named_on_the_first_one():
    first = (DOCS / "index.md").read_text()
    named = set(re.findall(r"\]\(([\w-]+\.md)", first))
    assert named == {page.name for page in PAGES} - {"index.md"}


def without_code(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_reads_alike_on_the_site_and_on_github(page):
    """Python-Markdown wants an empty line before a list, and four columns within an item."""
    lines = without_code(page).splitlines()
    item = re.compile(r"( *)(?:[-*+]|\d+\.) ")
    for before, line in zip(["", *lines], lines, strict=False):
        found = item.match(line)
        if found and not item.match(before) and before.strip():
            assert before.startswith(" "), line
        assert not found or len(found[1]) % 4 == 0, line
        within = len(line) - len(line.lstrip(" "))
        assert before.strip() or not line.strip() or within % 4 == 0, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_loads_nothing_from_elsewhere(page):
    assert LOADED.search(without_code(page)) is None


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_one_title_and_links_no_file_outside_of_docs(page):
    text = without_code(page)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert text.startswith("# ")
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)", text)
    assert [
        link for link in links if (DOCS / link).resolve().parent not in (DOCS, DOCS / "pictures")
    ] == []


def test_the_theme_asks_for_no_web_font():
    assert re.search(r"^  font: false\b", SITE, re.MULTILINE)
    assert "https:" not in SITE


def functions_of(path):
    return {node.name for node in ast.parse(path.read_text()).body if hasattr(node, "name")}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_test_that_a_page_names_is_there(page):
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text()):
        assert name in functions_of(ROOT / path), f"{path}::{name}"


def test_each_row_of_what_works_of_torch_compile_names_a_test():
    text = (DOCS / "torch-compile.md").read_text()
    rows = re.findall(r"^\| (?!form\b)(?!-)(.*) \|$", text, re.MULTILINE)
    assert len(rows) > 30
    assert [row for row in rows if not re.search(r"\| `tests/[\w/]+\.py::\w+`$", row)] == []
