"""Run identity: the hash of what decides a run's numbers. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

# Where a run is kept, what watches it and what it is called do not change its numbers.
NOT_IDENTITY = ("scale", "experiment", "arm", "label", "runs", "device", "parallel", "every", "probe", "logger", "plan")
NOT_IDENTITY_DATA = ("name", "path", "root", "hub_id", "hub_config", "source", "part", "column", "cache", "tokenizer")


def canonical(cfg: DictConfig, data_hash: dict[str, str]) -> dict[str, Any]:
    """The part of the resolved config that decides a run's numbers, with the content of its data in place of paths."""
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)  # type: ignore[assignment]
    for key in NOT_IDENTITY:
        plain.pop(key)
    for key in NOT_IDENTITY_DATA:
        plain["data"].pop(key)
    # a setting that is null is one that the run does not have: a schema may grow without renaming every run
    for key in ("study", "parent"):
        if plain[key] is None:
            plain.pop(key)
    settings = plain.pop("downstream")
    if cfg.study == "downstream":
        plain["downstream"] = {key: value for key, value in settings.items() if value is not None}
        if settings["include"]:
            plain["downstream"]["include"] = _files_hash(Path(settings["include"]).expanduser())
    if path := plain["model"].pop("path"):
        from .checkpoints import content_hash

        plain["model"]["content"] = content_hash(path)
    for group in ("model", "data", "optim", "train"):
        plain[group] = {key: value for key, value in plain[group].items() if value is not None}
    plain["data"]["content"] = dict(data_hash)
    # a list, since the order in which the gradient meets them matters
    plain["intervention"] = [[name, settings] for name, settings in plain["intervention"].items()]
    return plain


def trunk_of(plain: dict[str, Any]) -> str:
    """Of a canonical config under wsd: equal for runs that differ in how long they are and how they cool down alone."""
    optim = {k: v for k, v in plain["optim"].items() if k not in ("cooldown", "final")}
    return hash_of(plain | {"optim": optim, "train": {k: v for k, v in plain["train"].items() if k != "steps"}})


def run_id(cfg: DictConfig, data_hash: dict[str, str]) -> str:
    """Run identity: 12 hex digits of the hash of `canonical`; asking twice for the same run continues the same run."""
    return hash_of(canonical(cfg, data_hash))


def hash_of(plain: dict[str, Any]) -> str:
    text = json.dumps(plain, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _files_hash(folder: Path) -> str:
    """What the files of a folder hold, wherever it lies."""
    digest = hashlib.sha256()
    for path in sorted(p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()
