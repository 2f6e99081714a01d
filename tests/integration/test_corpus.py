"""The text and its tokenizer are the same every time, and made once."""

import json

import pytest

pytest.importorskip("tokenizers")

from torchtitan_integration.corpus import prepare_corpus


def test_the_corpus_is_real_text_and_deterministic(tmp_path):
    first = prepare_corpus(600, tmp_path / "a")
    second = prepare_corpus(600, tmp_path / "b")
    text = (first.text / "train.jsonl").read_text()
    assert text == (second.text / "train.jsonl").read_text()
    tokenizer = (first.tokenizer / "tokenizer.json").read_text()
    assert tokenizer == (second.tokenizer / "tokenizer.json").read_text()
    documents = [json.loads(line)["text"] for line in text.splitlines()]
    assert len(documents) > 100
    assert any("import" in document for document in documents)


def test_a_cached_corpus_is_not_made_again(tmp_path):
    first = prepare_corpus(600, tmp_path)
    before = (first.text / "train.jsonl").stat().st_mtime_ns
    assert prepare_corpus(600, tmp_path) == first
    assert (first.text / "train.jsonl").stat().st_mtime_ns == before
