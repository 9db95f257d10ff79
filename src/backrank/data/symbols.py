"""Generated sequences: SpamLang (one uniform symbol, repeated) and uniform symbols to be shifted by one.

`spamlang` (`lost_in_backprop`, `causal_test`): each sequence is one of V symbols, T times; the target at every position
is the next symbol, which is the same one (`target: next`), or what a fixed random permutation makes of it
(`target: permutation`). One pass over fresh draws: `draws` is how many independent sequences a symbol gets in the mean.
`shift` (`backward_bottleneck`'s toy task): uniform symbols; the target is the symbol before, which a causal model can
attend to, and the first position has none.

Imports no torch. Shapes: B batch, T sequence, V symbols.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from backrank.config import ConfigError

FORMAT = 1  # raise it when the same seed gives other sequences
HELD_OUT = 65_536  # positions of a held-out split of `shift` where no limit is set
TARGETS = ("permutation", "next")


@dataclass
class Symbols:
    source: str

    def stream(self, cfg: Any, device: Any) -> Stream:
        return {"spamlang": SpamLang, "shift": Shift}[self.source](cfg, device)


def check(data: Any) -> None:
    """Raises ConfigError for settings that make no sequences of this source."""
    if data.vocab_size < 2:
        raise ConfigError("data.vocab_size", data.vocab_size, "is no choice of symbols", "Use 2 or more")
    if data.source == "spamlang" and data.target not in TARGETS:
        raise ConfigError("data.target", data.target, "is not known", f"Use {' or '.join(TARGETS)}")
    if data.source == "shift":
        for key in ("target", "draws"):
            if getattr(data, key) is not None:
                raise ConfigError(
                    f"data.{key}", getattr(data, key), "is no setting of shift sequences", "Leave it null"
                )
        if data.sequence < 2:
            raise ConfigError("data.sequence", data.sequence, "leaves no symbol with one before it", "Use 2 or more")


def content_hash(data: Any) -> dict[str, str]:
    """Identity of the generator; what it is asked for is in the settings, and the draws follow from the run's seed."""
    return {"generator": hashlib.sha256(f"{data.source} {FORMAT}".encode()).hexdigest()}


def load(data: Any) -> Symbols:
    check(data)
    return Symbols(data.source)


class Stream:
    """Sequences as tensors on the device, made from `rows`; those of a batch are a function of its index alone."""

    def __init__(self, cfg: Any, device: Any):
        from backrank.seeding import role_seed

        self.cfg, self.device = cfg, device
        self.symbols, self.sequence = cfg.data.vocab_size, cfg.data.sequence
        self.order, self.other = (role_seed(cfg.seed, role) for role in ("order", "fresh"))
        self.batches = cfg.train.steps * cfg.train.accumulate

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        """n rows, int64."""
        raise NotImplementedError

    def held_out_rows(self, split: str, n: int | None) -> np.ndarray:
        """The first n rows of a split (None: all)."""
        raise NotImplementedError

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(x, y) of rows, each (B, T) int64."""
        raise NotImplementedError

    def rows_at(self, index: int, key: int) -> np.ndarray:
        return self.draw(_rng(key, index), self.cfg.train.batch)

    def to_device(self, rows: np.ndarray) -> Any:
        import torch

        x, y = (torch.from_numpy(a) for a in self.batch(rows))
        if self.device.type == "cuda":
            return x.pin_memory().to(self.device, non_blocking=True), y.pin_memory().to(self.device, non_blocking=True)
        return x, y

    def batch_at(self, index: int) -> Any:
        return self.to_device(self.rows_at(index, self.order))

    def fresh(self, index: int) -> Any:
        return self.to_device(self.rows_at(index, self.other))

    def evaluation(self, split: str, whole: bool) -> Iterator[Any]:
        limit = self.cfg.data.eval_tokens if whole else self.cfg.every.eval_tokens
        rows = self.held_out_rows(split, limit and max(1, limit // self.sequence))
        size = max(1, 1024 // self.sequence)
        return (self.to_device(rows[at : at + size]) for at in range(0, len(rows), size))

    def held_out(self, sequences: int) -> Any:
        return self.to_device(self.held_out_rows("validation", sequences))

    def order_hash(self, n_batches: int) -> str:
        """sha256 over the rows of the first `n_batches` micro-batches: equal means the same data order."""
        digest = hashlib.sha256()
        for index in range(n_batches):
            digest.update(self.rows_at(index, self.order).astype("<i8").tobytes())
        return digest.hexdigest()


class SpamLang(Stream):
    """A row is a symbol. The draws do not depend on T: runs that differ in it alone meet the same symbols.

    Evaluation reads every symbol once, on `validation` and `test` alike, and on `train` those that were drawn. facts,
    counted over all batches of the run: positions; draws, sequences over V; unique, symbols ever drawn; coverage,
    their share of V; ceiling, 1 - exp(-draws), the coverage to expect.
    """

    def __init__(self, cfg: Any, device: Any):
        super().__init__(cfg, device)
        self.targets = np.arange(self.symbols)
        if cfg.data.target == "permutation":
            self.targets = _rng(self.order).permutation(self.symbols)
        drawn = np.concatenate([self.rows_at(index, self.order) for index in range(self.batches)])
        self.drawn = np.unique(drawn)
        draws = len(drawn) / self.symbols
        self.facts = {
            "positions": len(drawn) * self.sequence,
            "draws": draws,
            "unique": len(self.drawn),
            "coverage": len(self.drawn) / self.symbols,
            "ceiling": 1 - math.exp(-draws),
        }

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.integers(self.symbols, size=n)

    def held_out_rows(self, split: str, n: int | None) -> np.ndarray:
        return (self.drawn if split == "train" else np.arange(self.symbols))[:n]

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return tuple(np.repeat(a[:, None], self.sequence, axis=1) for a in (rows, self.targets[rows]))


class Shift(Stream):
    """A row is a sequence. Held-out ones are the same for every seed; `train` reads the first that were trained on."""

    def __init__(self, cfg: Any, device: Any):
        super().__init__(cfg, device)
        self.facts = {"positions": self.batches * cfg.train.batch * (self.sequence - 1)}

    def draw(self, rng: np.random.Generator, n: int) -> np.ndarray:
        return rng.integers(self.symbols, size=(n, self.sequence))

    def held_out_rows(self, split: str, n: int | None) -> np.ndarray:
        n = n or -(-HELD_OUT // self.sequence)
        if split != "train":
            return self.draw(_rng(("validation", "test").index(split)), n)
        batches = min(self.batches, -(-n // self.cfg.train.batch))
        return np.concatenate([self.rows_at(index, self.order) for index in range(batches)])[:n]

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        y = np.full_like(rows, -100)
        y[:, 1:] = rows[:, :-1]
        return rows, y


def _rng(seed_key: int, *index: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed_key, spawn_key=index)))
