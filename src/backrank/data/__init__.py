"""What is trained on, in which order, and its identity. Neither torch nor the network is needed to look at it.

A source is a module with `check(data)`, `content_hash(data)` and `load(data)`, which returns what a run reads: an
object whose `stream(cfg, device)` has
  batch_at(i)               the i-th micro-batch since the start, a function of i alone
  fresh(i)                  batches in an order of their own, for what must not see the training order
  evaluation(split, whole)  the held-out batches, in order; not whole: the part that draws the curve
  held_out(sequences)       one fixed validation batch, for probes
  order_hash(n)             equal means the same data order
  facts                     what was counted in the data, for the record
Batches are (x, y) on the device, y integer classes, -100 without supervision.
"""

from __future__ import annotations

import importlib
from typing import Any

from backrank.config import SOURCES, ConfigError
from backrank.data.tokens import Tokens, Windows, eval_windows

__all__ = ["Tokens", "Windows", "check", "content", "content_hash", "eval_windows", "load"]


def _source(data: Any) -> Any:
    if data.source not in SOURCES:
        raise ConfigError("data.source", data.source, "is not known", f"Use {', '.join(SOURCES)}")
    return importlib.import_module(f"{__name__}.{SOURCES[data.source]}")


def check(data: Any) -> None:
    """Raises ConfigError unless the data of a `Data` node can be read. Encodes nothing."""
    _source(data).check(data)


def content_hash(data: Any) -> dict[str, str]:
    """Identity of what is trained on: the content's hash first, then the tokenizer's where there is one."""
    return _source(data).content_hash(data)


def content(hashes: dict[str, str]) -> str:
    """The content's hash of `content_hash`."""
    return next(iter(hashes.values()))


def load(data: Any) -> Any:
    """What a run reads; raises ConfigError as `check` does."""
    return _source(data).load(data)
