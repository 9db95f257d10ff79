"""Token ids of the three splits as memory maps, and the order in which training reads them. Imports no torch.

Shapes: B batch, T sequence.
"""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backrank.config import ConfigError
from backrank.data.text import SPLITS, text_hash, texts, write_atomic

FORMAT = 1  # raise it when the same text and tokenizer give other ids
BATCH_LINES = 20_000  # bounds the memory that encoding needs


@dataclass
class Tokens:
    """Ids of the splits, 1-D of the smallest unsigned dtype; `words`: how many whitespace separates."""

    name: str
    train: np.memmap
    validation: np.memmap
    test: np.memmap
    vocab_size: int
    text_hash: str
    tokenizer_hash: str
    bytes_per_token: dict[str, float]
    words: dict[str, int]

    def stream(self, cfg: Any, device: Any) -> TokenStream:
        return TokenStream(self, cfg, device)


def check(data: Any) -> None:
    """Raises ConfigError unless the text of the `Data` node can be read and its tokenizer fits. Encodes nothing."""
    if data.tokenizer not in ("bytes", "bpe"):
        _tokenizer(data.tokenizer)
    least = {"bytes": 256, "bpe": 257}.get(data.tokenizer, 1)
    if data.vocab_size < least:
        problem = f"the tokenizer {data.tokenizer} has at least {least} ids"
        raise ConfigError("data.vocab_size", data.vocab_size, problem, f"Set data.vocab_size={least} or more")
    _long_enough(data, {s: len(t) for s, t in texts(data).items()}, "bytes")  # a token holds one byte or more


def content_hash(data: Any) -> dict[str, str]:
    """Identity of what is trained on: sha256 of the splits' text, whatever files held it, and the tokenizer's name.

    tokenizer: `bytes`, `bpe-<vocab_size>` (its training is a function of the text) or the sha256 of the given file.
    """
    return {"text": text_hash(data), "tokenizer": _tokenizer_name(data)}


def load(data: Any) -> Tokens:
    """Tokens of a `Data` node, encoded once per text and tokenizer and kept under `data.cache`.

    Raises ConfigError as `check` does, and for ids outside `vocab_size` or splits shorter than a sequence and a token.
    """
    check(data)
    identity = content_hash(data)
    folder = Path(data.cache).expanduser() / f"{identity['text'][:16]}-{identity['tokenizer'][:16]}-{FORMAT}"
    meta = _cached(folder) or _encode(data, folder)
    if meta["largest"] >= data.vocab_size:
        problem, least = f"the largest id in the text is {meta['largest']}", meta["largest"] + 1
        raise ConfigError("data.vocab_size", data.vocab_size, problem, f"Set data.vocab_size={least} or more")
    ids = {s: np.load(folder / f"{s}.npy", mmap_mode="r") for s in SPLITS}
    _long_enough(data, {s: len(i) for s, i in ids.items()}, "tokens")
    return Tokens(
        name=data.name,
        **ids,
        vocab_size=data.vocab_size,
        text_hash=identity["text"],
        tokenizer_hash=identity["tokenizer"],
        bytes_per_token={s: meta["bytes"][s] / len(ids[s]) for s in SPLITS},
        words=meta["words"],
    )


class Shuffled:
    """Order without state: the rows of any micro-batch are a function of its index.

    Rows are shuffled anew each epoch, and what is left of an epoch after its last whole batch is dropped.
    """

    def __init__(self, rows: int, batch: int, seed_key: int, unit: str = "images"):
        """seed_key: a non-negative int. Raises ConfigError for fewer rows than one batch."""
        self.windows, self.batch, self.seed_key = rows, batch, seed_key
        self.batches_per_epoch = rows // batch
        if not self.batches_per_epoch:
            problem = f"the split has {rows} {unit}, fewer than one batch"
            raise ConfigError("train.batch", batch, problem, "Lower train.batch or data.sequence, or give more data")
        self._epoch, self._order = -1, np.empty(0, np.int64)

    def rows_at(self, index: int) -> np.ndarray:
        """(B,) int64: the numbers of the rows in the index-th micro-batch since the start."""
        epoch, at = divmod(index, self.batches_per_epoch)
        if epoch != self._epoch:  # a memo, not a state
            rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence(self.seed_key, spawn_key=(epoch,))))
            self._epoch, self._order = epoch, rng.permutation(self.windows)
        return self._order[at * self.batch : (at + 1) * self.batch]

    def order_hash(self, n_batches: int) -> str:
        """sha256 over the row numbers of the first `n_batches` micro-batches: equal means the same data order."""
        digest = hashlib.sha256()
        for index in range(n_batches):
            digest.update(self.rows_at(index).astype("<i8").tobytes())
        return digest.hexdigest()


class Windows(Shuffled):
    """Windows of T inputs that do not overlap (the last target of one is the first input of the next), shuffled."""

    def __init__(self, ids: np.ndarray, sequence: int, batch: int, seed_key: int):
        """ids (length,)."""
        super().__init__(max(len(ids) - 1, 0) // sequence, batch, seed_key, f"windows of {sequence} tokens")
        self.ids, self.sequence = ids, sequence

    def batch_at(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets of the index-th micro-batch since the start, each (B, T) int64."""
        T = self.sequence
        span = np.asarray(self.ids[self.rows_at(index)[:, None] * T + np.arange(T + 1)], np.int64)
        return np.ascontiguousarray(span[:, :-1]), np.ascontiguousarray(span[:, 1:])


class TokenStream:
    """Training windows and held-out text as tensors on the device."""

    def __init__(self, tokens: Tokens, cfg: Any, device: Any):
        from backrank.seeding import role_seed

        self.tokens, self.cfg, self.device, self.facts = tokens, cfg, device, {}
        self.windows, self._fresh = (
            Windows(tokens.train, cfg.data.sequence, cfg.train.batch, role_seed(cfg.seed, role))
            for role in ("order", "fresh")
        )
        self.order_hash = self.windows.order_hash

    def to_device(self, batch: Any) -> Any:
        import torch

        x, y = (torch.from_numpy(a) for a in batch)
        if self.device.type == "cuda":  # pinned and asynchronous: the step never waits for the copy
            return x.pin_memory().to(self.device, non_blocking=True), y.pin_memory().to(self.device, non_blocking=True)
        return x, y

    def batch_at(self, index: int) -> Any:
        return self.to_device(self.windows.batch_at(index))

    def fresh(self, index: int) -> Any:
        return self.to_device(self._fresh.batch_at(index))

    def evaluation(self, split: str, whole: bool) -> Iterator[Any]:
        limit = self.cfg.data.eval_tokens if whole else self.cfg.every.eval_tokens
        sequence = self.cfg.data.sequence
        return map(self.to_device, eval_windows(getattr(self.tokens, split), sequence, limit, max(1, 1024 // sequence)))

    def held_out(self, sequences: int) -> Any:
        sequence = self.cfg.data.sequence
        return self.to_device(next(eval_windows(self.tokens.validation, sequence, sequences * sequence + 1, sequences)))


def eval_windows(
    ids: np.ndarray, sequence: int, limit: int | None = None, batch: int = 8
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(x, y) of up to (B, T) int64 over the first `limit` ids in order, without overlap; the last B may be smaller.

    The last window is padded, its targets with -100: exactly min(limit, len(ids)) - 1 targets are supervised.
    """
    ids = np.asarray(ids[:limit], np.int64)
    targets = max(len(ids) - 1, 0)
    n = -(-targets // sequence)
    x, y = np.zeros(n * sequence, np.int64), np.full(n * sequence, -100, np.int64)
    x[:targets], y[:targets] = ids[:-1], ids[1:]
    for at in range(0, n, batch):
        rows = slice(at * sequence, (at + batch) * sequence)
        yield x[rows].reshape(-1, sequence), y[rows].reshape(-1, sequence)


def _tokenizer_name(data: Any) -> str:
    if data.tokenizer == "bytes":
        return "bytes"
    return f"bpe-{data.vocab_size}" if data.tokenizer == "bpe" else _tokenizer(data.tokenizer)[1]


@functools.lru_cache(maxsize=4)
def _tokenizer(path: str) -> tuple[Any, str]:
    """A given tokenizer.json and its sha256."""
    from tokenizers import Tokenizer

    try:
        content = Path(path).expanduser().read_bytes()
    except OSError as error:
        remedy = "Use bytes, bpe or the path of a tokenizer.json"
        raise ConfigError("data.tokenizer", path, f"no readable file ({error.strerror})", remedy) from error
    try:
        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_truncation()  # which a file may ask for, as for padding
        tokenizer.no_padding()
        return tokenizer, hashlib.sha256(content).hexdigest()
    except Exception as error:  # the library raises bare Exception
        remedy = "Give a file that the package tokenizers wrote"
        raise ConfigError("data.tokenizer", path, f"not a tokenizer.json ({error})", remedy) from error


def _lines(text: bytes) -> list[str]:
    """Lines with their ends: the pieces that are tokenised on their own, in training and in encoding alike."""
    return [line.decode() for line in text.splitlines(keepends=True)]


def train_bpe(text: bytes, vocab_size: int) -> Any:
    """Byte-level BPE of `vocab_size` ids, the 256 bytes among them (fewer if the text runs out of pairs)."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, min_frequency=2, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_lines(text), trainer)
    return tokenizer


def _encode(data: Any, folder: Path) -> dict[str, Any]:
    """Encode every split into `folder`; meta.json comes last and holds the files' checksums."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # many workers share a machine; forks stay quiet
    source, files, tokenizer = texts(data), {}, None
    if data.tokenizer == "bpe":
        tokenizer = train_bpe(source["train"], data.vocab_size)
        files["tokenizer.json"] = tokenizer.to_str().encode()
    elif data.tokenizer != "bytes":
        tokenizer = _tokenizer(data.tokenizer)[0]
    largest = 0
    for split, text in source.items():
        if tokenizer is None:
            ids = np.frombuffer(text, np.uint8)
        else:
            lines = _lines(text)
            parts = [np.empty(0, np.uint32)]
            for at in range(0, len(lines), BATCH_LINES):
                for line in tokenizer.encode_batch_fast(lines[at : at + BATCH_LINES], add_special_tokens=False):
                    parts.append(np.array(line.ids, np.uint32))
            ids = np.concatenate(parts)
            ids = ids.astype(np.min_scalar_type(ids.max(initial=0)))
        largest = max(largest, int(ids.max(initial=0)))
        buffer = io.BytesIO()
        np.save(buffer, ids)
        files[f"{split}.npy"] = buffer.getvalue()
    meta = {
        "largest": largest,
        "bytes": {s: len(t) for s, t in source.items()},
        "words": {s: len(t.decode().split()) for s, t in source.items()},
        "sha256": {name: hashlib.sha256(content).hexdigest() for name, content in files.items()},
    }
    for name, content in files.items():
        write_atomic(folder / name, content)
    write_atomic(folder / "meta.json", json.dumps(meta).encode())
    return meta


def _cached(folder: Path) -> dict[str, Any] | None:
    """The folder's meta.json if every file is there and whole."""
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
        for name, expected in meta["sha256"].items():
            with open(folder / name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    return None
    except (OSError, ValueError, KeyError):
        return None
    return meta


def _long_enough(data: Any, lengths: dict[str, int], unit: str) -> None:
    for split, length in lengths.items():
        if length < data.sequence + 1:
            problem = f"split {split} of {data.name} has {length} {unit}, fewer than a sequence and the next token"
            raise ConfigError("data.sequence", data.sequence, problem, "Lower data.sequence or give more text")
