"""Real text that every machine has: the Python standard library's own sources, and a tokenizer.

Contract
    The same Python gives the same text and the same tokenizer. Made at first use, then cached
    under a hash of the text; processes that start together make it once; a reader never sees half
    of it. Neighbouring documents are pieces of different files: a batch is a sample of the whole
    text, not a part of one file.
    A job asks for one stream by `training.dataset_path = "one_stream"`. Each data-parallel rank
    then takes its rows of the batches of one rank alone, so that jobs on other layouts train on the
    same sequences; torchtitan gives each data-parallel rank a text of its own. Every rank reads all
    of the stream: for small jobs, whose losses are compared.
"""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torchtitan.config import JobConfig

DATASET: Final = "python_stdlib"
"""Value of `training.dataset` and `validation.dataset` that asks for this text."""
MAX_CHARACTERS: Final = 6_000_000
"""Text trained on: a minute of training needs far less, and BPE training takes seconds."""
HELD_OUT_CHARACTERS: Final = 300_000
"""Text of the files after these, for validation."""
SKIPPED: Final = frozenset(
    {"test", "tests", "idlelib", "site-packages", "dist-packages", "__pycache__"}
)
"""Folders that are not the library itself, or that not every machine has."""
PIECE: Final = 256
"""Characters of a document, fewer at the end of a file, more where one line has more: about 75
tokens, so that a debug job's sequence of 128 holds two. torchtitan reads documents one after
another, and with whole files a batch was one file: its loss told of the file, not of the model."""
LETTERS: Final = 0.75
"""Least share of letters and white space in a piece; tables of numbers and codes have less (a 25th
of all pieces), and a batch with one of them had a loss of its own."""
BUILD: Final = "_sysconfigdata"
"""Files that begin so say how this Python was built: lists of flags, and other on each machine."""
FORMAT: Final = "3"
"""Changes whenever the tokenizer or the files would be made differently from the same text."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Folders of the text and of the tokenizer."""

    text: Path
    """Folder with one `train.jsonl`, one object `{"text": ...}` per piece of a source file."""
    held_out: Path
    """The same, of other files, and no piece of `text` in it."""
    tokenizer: Path
    """Folder with `tokenizer.json` and `tokenizer_config.json`."""


def prepare_corpus(vocab_size: int, cache: Path | None = None) -> Corpus:
    """Return the corpus with a tokenizer of at most `vocab_size` entries, made if need be."""
    cache = cache or _cache_folder()
    sources = _sources(Path(sysconfig.get_path("stdlib")))
    trained, held_out = _up_to(MAX_CHARACTERS, sources), _up_to(HELD_OUT_CHARACTERS, sources)
    told = [FORMAT, str(vocab_size), *trained, *held_out]
    digest = hashlib.sha256("\n".join(told).encode()).hexdigest()
    folder = cache / f"{DATASET}-{digest[:16]}"
    corpus = Corpus(folder / "text", folder / "held_out", folder / "tokenizer")
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            documents = _documents(trained)
            _write(partial / "text", documents)
            known = set(documents)
            _write(partial / "held_out", [d for d in _documents(held_out) if d not in known])
            _write_tokenizer(partial / "tokenizer", documents, vocab_size)
            partial.rename(folder)
    return corpus


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "megamoe"


def _documents(sources: Iterable[str]) -> list[str]:
    """Return all pieces worth reading, each once, mixed, and in the same order every time."""
    pieces = {piece for text in sources for piece in _pieces(text) if _is_language(piece)}
    return sorted(pieces, key=lambda piece: hashlib.sha256(piece.encode()).digest())


def _write(folder: Path, documents: list[str]) -> None:
    folder.mkdir(parents=True)
    lines = [json.dumps({"text": document}) for document in documents]
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def _write_tokenizer(folder: Path, documents: list[str], vocab_size: int) -> None:
    folder.mkdir()
    _train_tokenizer(documents, vocab_size).save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _up_to(most: int, sources: Iterator[str]) -> tuple[str, ...]:
    """Return sources up to `most` characters in all; the first one beyond is dropped."""
    taken: list[str] = []
    left = most
    for text in sources:
        left -= len(text)
        if left < 0:
            break
        taken.append(text)
    return tuple(taken)


def _sources(root: Path) -> Iterator[str]:
    """Yield source files in a fixed order."""
    for folder, below, names in os.walk(root):
        below[:] = sorted(set(below) - SKIPPED)
        for name in sorted(names):
            if not name.endswith(".py") or name.startswith(BUILD):
                continue
            text = Path(folder, name).read_text(encoding="utf-8", errors="replace")
            if text.strip():
                yield text


def _pieces(text: str) -> Iterator[str]:
    """Yield whole lines of `text`, in order, as pieces of at most PIECE characters."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if piece and len(piece) + len(line) > PIECE:
            yield piece
            piece = ""
        piece += line
    yield piece


def _is_language(piece: str) -> bool:
    return sum(c.isalpha() or c.isspace() for c in piece) >= LETTERS * len(piece) > 0


def _train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer: no text is out of its vocabulary."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


ONE_STREAM: Final = "one_stream"
"""Value of `training.dataset_path`, which our text has no other use for."""


def asks_for_one_stream(job: JobConfig) -> bool:
    """Whether a job's ranks read one stream of our text."""
    return job.training.dataset == DATASET and job.training.dataset_path == ONE_STREAM


class RowsOf:
    """The rows of one data-parallel rank of the batches that one rank alone would read."""

    def __init__(self, loader: Any, rank: int, num_rows: int) -> None:
        """Take `num_rows` rows of each batch of `loader`, those of `rank`."""
        self._loader = loader
        self._rows = slice(rank * num_rows, (rank + 1) * num_rows)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield this rank's inputs and labels."""
        for inputs, labels in self._loader:
            yield {name: x[self._rows] for name, x in inputs.items()}, labels[self._rows]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream."""
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from the position in `state`."""
        self._loader.load_state_dict(state)


def read_one_stream(
    build: Callable[..., Any], job: JobConfig, dp_world_size: int, dp_rank: int, **others: Any
) -> RowsOf:
    """Return the loader of one rank; `build` is torchtitan's, `job` names the text's folder."""
    rows = job.training.local_batch_size
    training = dataclasses.replace(job.training, local_batch_size=rows * dp_world_size)
    whole = dataclasses.replace(job, training=training)
    loader = build(dp_world_size=1, dp_rank=0, job_config=whole, **others)
    return RowsOf(loader, dp_rank, rows)
