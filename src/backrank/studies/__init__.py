"""What a run does instead of training: one file each, named by `study`, with a function `run(cfg, source, root)`.

It returns a Measured; where it starts from other runs, it names them as `parents`.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig


@dataclass
class Measured:
    """metrics: name -> number. rows: for layers.jsonl. parents: ids of the runs it was made from. device: where."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    device: str = "cpu"


def measure(cfg: DictConfig, source: Any, root: Path) -> Measured:
    """Runs the study of a config; `source` is its data, loaded, `root` the folder of all runs."""
    return importlib.import_module(f"{__name__}.{cfg.study}").run(cfg, source, root)
