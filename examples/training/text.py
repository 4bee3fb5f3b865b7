"""Text to batches of token sequences, in an order that depends on the seed and the step alone."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

IGNORED_LABEL = -100


class Tokenizer(Protocol):
    """What the trainer needs of a tokenizer."""

    vocab_size: int
    end_id: int

    def encode(self, text: str) -> Sequence[int] | np.ndarray: ...

    def decode(self, ids: Iterable[int]) -> str: ...


class ByteTokenizer:
    """The 256 byte values are the tokens; byte 0, which text does not contain, ends a document."""

    vocab_size = 256
    end_id = 0

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in ids if i != self.end_id).decode("utf-8", errors="replace")


class FileTokenizer:
    """A `tokenizer.json` of the `tokenizers` library."""

    END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[SEP]")

    def __init__(self, path: str | Path):
        import tokenizers

        if not Path(path).is_file():
            raise ValueError(f"tokenizer file {path} does not exist; give a tokenizer.json")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:
            raise ValueError(f"tokenizer file {path} is not a tokenizer.json: {error}") from None
        # The ids of added tokens may lie beyond the vocabulary's count.
        self.vocab_size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        ends = [self._tokenizer.token_to_id(token) for token in self.END_TOKENS]
        self.end_id = next((i for i in ends if i is not None), None)
        if self.end_id is None:
            raise ValueError(
                f"tokenizer file {path} has no end token; it must have one of "
                f"{', '.join(self.END_TOKENS)}"
            )

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def standard_library() -> Iterator[str]:
    """The source files of the running Python's standard library, without its tests."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    for path in sorted(root.rglob("*.py")):
        if skipped.isdisjoint(path.relative_to(root).parts):
            yield path.read_text(encoding="utf-8", errors="replace")


def documents(paths: Iterable[str | Path]) -> Iterator[str]:
    """Documents of .txt files (one each), .jsonl files (one a line) and folders of such files.

    A line of a .jsonl file is a string or an object with the string "text".

    Raises:
      ValueError: if a path does not exist, has another suffix, holds no text, or is not valid.
    """
    for path in map(Path, paths):
        if not path.exists():
            raise ValueError(
                f"--data is {path}, which does not exist; it must name .txt or .jsonl files, or "
                "folders of them"
            )
        files = [path]
        if path.is_dir():
            found = (f for f in path.rglob("*") if f.suffix in (".txt", ".jsonl"))
            files = sorted(f for f in found if not f.is_dir())
            if not files:
                raise ValueError(
                    f"--data is {path}, a folder that has no .txt or .jsonl file; it must hold one"
                )
        for file in files:
            if file.suffix not in (".txt", ".jsonl"):
                raise ValueError(f"--data is {file}; a file must be a .txt or .jsonl file")
            if not file.read_bytes().strip():
                raise ValueError(f"data file {file} is empty; it must hold text")
            yield from _jsonl(file) if file.suffix == ".jsonl" else [_text(file)]


def _text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")


def _jsonl(file: Path) -> Iterator[str]:
    for number, line in enumerate(_text(file).split("\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"data file {file}, line {number}, is not JSON: {error}") from None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ValueError(
                f'data file {file}, line {number}, must be a string or an object with "text"'
            )
        yield text


def encode(texts: Iterable[str], tokenizer: Tokenizer) -> np.ndarray:
    """All tokens, int32 [N], with the end token after each document."""
    parts = [np.append(tokenizer.encode(text), tokenizer.end_id).astype(np.int32) for text in texts]
    tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if tokens.size - len(parts) < 2:
        raise ValueError("the data holds fewer than two tokens; there is nothing to predict")
    return tokens


def unigram_entropy(tokens: np.ndarray) -> float:
    """Loss (nats per token) of the best model that knows only how frequent each token is."""
    counts = np.bincount(tokens)
    p = counts[counts > 0] / tokens.size
    return float(-(p * np.log(p)).sum())


class Batch(NamedTuple):
    """int32 [batch, seq_len] each. Labels are those of Hugging Face: not shifted, -100 ignored."""

    input_ids: np.ndarray
    labels: np.ndarray
    attention_mask: np.ndarray


class Batches:
    """The text cut into sequences, shuffled anew each epoch; batch `step` needs no history.

    So the position in the data is the step number, and a resumed run sees what an unbroken one
    would have seen. The end of the text is padded, masked and not part of the loss.
    """

    def __init__(self, tokens: np.ndarray, *, batch: int, seq_len: int, seed: int):
        self._tokens, self._batch, self._seq_len, self._seed = tokens, batch, seq_len, seed
        self.count = -(-tokens.size // seq_len)
        self._epoch, self._order = -1, None

    def __getitem__(self, step: int) -> Batch:
        first = step * self._batch
        rows = [self._row(i) for i in range(first, first + self._batch)]
        ids = np.zeros((self._batch, self._seq_len), np.int32)
        mask = np.zeros_like(ids)
        for row, tokens in enumerate(rows):
            ids[row, : tokens.size] = tokens
            mask[row, : tokens.size] = 1
        return Batch(ids, np.where(mask == 1, ids, IGNORED_LABEL), mask)

    def _row(self, index: int) -> np.ndarray:
        epoch, position = divmod(index, self.count)
        if epoch != self._epoch:
            self._order = np.random.default_rng((self._seed, epoch)).permutation(self.count)
            self._epoch = epoch
        start = self._order[position] * self._seq_len
        return self._tokens[start : start + self._seq_len]
