"""What a run does instead of training: one file each, named by `study`, with a function `run(cfg, source, root)`.

It returns a Measured and may train or continue the runs it starts from: `parent` gives their folders.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf


@dataclass
class Measured:
    """metrics: name -> number. rows: for layers.jsonl. parents: ids of the runs it was made from."""

    metrics: dict[str, float]
    rows: list[dict[str, Any]] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)


def measure(cfg: DictConfig, source: Any, root: Path) -> Measured:
    """Runs the study of a config; `source` is its data, loaded, `root` the folder of all runs."""
    return importlib.import_module(f"{__name__}.{cfg.study}").run(cfg, source, root)


def parent(cfg: DictConfig, root: Path, **changes: Any) -> tuple[str, Path]:
    """Id and folder of the finished training run of this very config, with dotted `changes`; run first if need be."""
    from ..run import run_one

    own = OmegaConf.merge(cfg, {"study": None})
    for key, value in changes.items():
        OmegaConf.update(own, key, value)
    own.study = None
    outcome = run_one(own)
    return outcome.id, root / outcome.id
