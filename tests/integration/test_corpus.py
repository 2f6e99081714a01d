"""The text and its tokenizer are the same every time, and made once."""

import itertools
import json
import sysconfig
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")

from torchtitan_integration.corpus import PIECE, SKIPPED, prepare_corpus


@pytest.fixture(scope="module")
def library():
    """The standard library's sources, by path."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [f for f in root.rglob("*.py") if not SKIPPED & set(f.relative_to(root).parts)]
    return {f: f.read_text(encoding="utf-8", errors="replace") for f in files}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    return folder, prepare_corpus(600, folder)


def test_the_corpus_is_real_text_and_deterministic(corpus, tmp_path):
    _, first = corpus
    second = prepare_corpus(600, tmp_path)
    text = (first.text / "train.jsonl").read_text()
    assert text == (second.text / "train.jsonl").read_text()
    tokenizer = (first.tokenizer / "tokenizer.json").read_text()
    assert tokenizer == (second.tokenizer / "tokenizer.json").read_text()
    documents = [json.loads(line)["text"] for line in text.splitlines()]
    assert len(documents) > 100
    assert any("import" in document for document in documents)


def test_a_cached_corpus_is_not_made_again(corpus):
    folder, first = corpus
    before = (first.text / "train.jsonl").stat().st_mtime_ns
    assert prepare_corpus(600, folder) == first
    assert (first.text / "train.jsonl").stat().st_mtime_ns == before


def test_documents_that_follow_one_another_are_of_different_files(corpus, library):
    """A document was a whole file, and a batch a part of one: its loss was that file's."""
    lines = (corpus[1].text / "train.jsonl").read_text().splitlines()
    documents = [json.loads(line)["text"] for line in lines]
    assert all(len(text) <= PIECE or text.count("\n") <= 1 for text in documents)
    homes = [{f for f, source in library.items() if text in source} for text in documents[:40]]
    assert all(homes)
    shared = [here & following for here, following in itertools.pairwise(homes)]
    assert sum(map(bool, shared)) <= 1
