"""Typed configuration: schema, and validation across fields. Imports no torch.

The order of events for every run: Hydra composes into the dataclasses below (typos and wrong types end there),
`validate` checks fields against each other, the data is looked at, the run folder is claimed, and only then is torch
imported.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
# data.draws, data.vocab_size, sequences a step -> the steps of one pass, which `validate` checks
OmegaConf.register_new_resolver("one_pass", lambda draws, v, size: round((draws or 0) * v / size), replace=True)
# ranks as shares of the width: ${share:${model.width},8}
OmegaConf.register_new_resolver("share", lambda width, parts: max(1, width // parts), replace=True)
# symbols of SpamLang at a model's width that have the V/D of the published width 576: ${symbols:${model.width},131072}
OmegaConf.register_new_resolver("symbols", lambda width, v: max(2, v * width // 576), replace=True)
SCALES = ("smoke", "laptop", "cpu", "paper")


class ConfigError(Exception):
    """Bad input: names the key, the value and the remedy in one line."""

    def __init__(self, key: str, value: Any, problem: str, remedy: str):
        super().__init__(f"{key}={value}: {problem}. {remedy}")
        self.key, self.value, self.problem, self.remedy = key, value, problem, remedy


@dataclass
class Model:
    """Backbone and head. width D, heads H; `head_std` is the standard deviation of a dense head's elements at init.

    mlp: width of the feed-forward layers (null: the kind's own). patch: side of a patch (vision transformers).
    kv_heads: heads for keys and values, each shared by heads / kv_heads of them (llama; null: as many).
    path: of a pretrained model (checkpoints.py), which decides layers, width, heads and tied where one of them is ???.
    """

    kind: str = "gpt2"
    layers: int = MISSING
    width: int = MISSING
    heads: int = 4
    tied: bool = False
    head_std: float = 0.02
    mlp: int | None = None
    kv_heads: int | None = None
    patch: int | None = None
    path: str | None = None


@dataclass
class Data:
    """What is trained on: text and how it becomes token ids, or what the other sources make of these settings.

    source: `stdlib` (documentation that ships with Python; part `code`: its source), `text` (UTF-8 files under `path`),
    `hub` (a `datasets` data set: a local parquet folder `<root>/<name>` or `<root>` itself first, the hub otherwise).
    tokenizer: `bytes`, `bpe` (byte-level BPE of `vocab_size` trained on the train split, cached by content), the path
    of a tokenizer.json, or `model`, that of a pretrained model's folder. Evaluation reads the first `eval_tokens` ids
    of a split (null: all).

    `shards`: a folder that `python -m backrank.data pack` wrote, `path`, or below `root` as `hub` looks for one; the
    tokenizer is the `packed` one.

    `spamlang` and `shift` are generated (data/symbols.py). target: of SpamLang, `permutation` or `next`. draws: mean
    number of SpamLang sequences a symbol gets, from which `${one_pass:...}` makes train.steps (null: as steps give).
    """

    name: str = MISSING
    source: str = MISSING
    path: str | None = None
    root: str | None = None
    hub_id: str | None = None
    hub_config: str | None = None
    column: str = "text"
    part: str | None = None
    tokenizer: str = "bytes"
    vocab_size: int = 256
    sequence: int = 128
    eval_tokens: int | None = None
    draws: float | None = None
    size: int | None = None
    channels: int | None = None
    target: str | None = None
    augment: str | None = None
    cache: str = MISSING


@dataclass
class Optim:
    """Optimiser and schedule. lr is the peak rate; `warmup` in steps; cosine ends at `final` times the peak, as does
    wsd, which is constant up to its last `cooldown` steps.

    `decay` lists the kinds of parameters that weight decay acts on: matrix, embedding, head, vector.
    """

    name: str = "adamw"
    lr: float = MISSING
    weight_decay: float = 0.01
    decay: list[str] = field(default_factory=lambda: ["matrix", "embedding", "head"])
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    eps: float = 1e-8
    momentum: float = 0.9
    schedule: str = "cosine"
    warmup: int = 50
    final: float = 0.1
    cooldown: int | None = None
    clip: float = 1.0


@dataclass
class Train:
    """steps are optimiser updates; `batch` is sequences in a forward pass, `accumulate` forward passes in a step."""

    steps: int = MISSING
    batch: int = 8
    accumulate: int = 1
    loss: str = "chunked"
    amp: str = "none"
    compile: str = "none"
    checkpointing: bool = False
    channels_last: bool | None = None


@dataclass
class Every:
    """Cadences in steps; none of them changes the training. 0 switches one off; the end is always evaluated.

    fit: evaluate the train split too at the end (as much of it as of the others), for the generalisation gap.
    """

    log: int = 50
    eval: int = 100
    eval_tokens: int = 20480
    checkpoint: int = 200
    fit: bool = False


@dataclass
class Downstream:
    """What study `downstream` evaluates with lm-eval: `tasks` by name, of which `continuation` is made of the held-out
    text of the data. include: a folder with tasks of one's own. limit: items of a task (null: all). shots: examples in
    front of an item (null: as the task says)."""

    tasks: list[str] = field(default_factory=lambda: ["continuation"])
    include: str | None = None
    limit: int | None = None
    shots: int | None = None


@dataclass
class Logger:
    """name: `jsonl` (the local record alone) or `wandb` (mirrors it; never in the way of a run)."""

    name: str = "jsonl"
    project: str = "backrank"
    entity: str | None = None
    mode: str = "auto"
    timeout_s: float = 10.0


@dataclass
class Search:
    """Hyper-parameter search on one seed: several keys of `grids` mean their product.

    `arms` maps a pattern of arm names (`sgd_*`) to {grids: ...} that replace the common ones, or to
    {follows: <arm>, times: {<key>: <factor>}}: no search, the other arm's choice with these settings multiplied.
    """

    seed: int = 1
    split: str = "validation"
    grids: dict[str, list[float]] = field(default_factory=dict)
    arms: dict[str, Any] = field(default_factory=dict)


@dataclass
class Plan:
    """The arms of an experiment (name -> overrides), its seeds, and its search.

    `axes`: lists of {name: overrides} whose every combination is an arm too, called by their names but _,
    joined by _. `only`: patterns of the arms that are run, where a scale has fewer (empty: all). `parents` maps a
    pattern of arm names to the arm whose run of the same seed these start from.
    """

    arms: dict[str, list[str]] = field(default_factory=dict)
    axes: list[Any] = field(default_factory=list)
    only: list[str] = field(default_factory=list)
    parents: dict[str, str] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [1])
    search: Search = field(default_factory=Search)


@dataclass
class Config:
    """A run. study: what is done instead of training, the name of a file in studies/ (null: training).

    parent: the id of the finished run whose weights this one starts from, or that a study measures.
    parallel: how the processes that torchrun started share this run: `ddp`, `fsdp`, or `none` for one process.
    """

    scale: str = "laptop"
    experiment: str | None = None
    arm: str | None = None
    label: str | None = None
    seed: int = 1
    device: str = "auto"
    parallel: str = "none"
    runs: str = MISSING
    study: str | None = None
    parent: str | None = None
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    optim: Optim = field(default_factory=Optim)
    train: Train = field(default_factory=Train)
    every: Every = field(default_factory=Every)
    intervention: dict[str, Any] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    downstream: Downstream = field(default_factory=Downstream)
    logger: Logger = field(default_factory=Logger)
    plan: Plan = field(default_factory=Plan)


def parent_arm(plan: DictConfig, arm: str | None) -> str | None:
    """The arm whose runs those of `arm` start from, if any: of the first pattern that fits."""
    return next((leader for pattern, leader in plan.parents.items() if arm and fnmatch(arm, pattern)), None)


# ----------------------------------------------------------------------------------------------------- validation

# source of data -> module of backrank.data that reads it
SOURCES = {
    "stdlib": "tokens",
    "text": "tokens",
    "hub": "tokens",
    "shards": "shards",
    "digits": "images",
    "images": "images",
    "spamlang": "symbols",
    "shift": "symbols",
}

CHOICES = {
    "scale": SCALES,
    "device": ("auto", "cpu", "cuda"),
    "parallel": ("none", "ddp", "fsdp"),
    "model.kind": tuple(sorted(p.stem for p in (Path(__file__).parent / "models").glob("[a-z]*.py"))),
    "study": (None, *sorted(p.stem for p in (Path(__file__).parent / "studies").glob("[a-z]*.py"))),
    "data.source": tuple(SOURCES),
    "optim.name": ("adamw", "sgd", "muon"),
    "optim.schedule": ("cosine", "constant", "wsd"),
    "train.loss": ("chunked", "plain", "torch", "liger"),
    "data.augment": (None, "flip", "crop", "crop_flip"),
    "train.amp": ("none", "bf16"),
    "train.compile": ("none", "aot_eager", "inductor"),
    "logger.name": ("jsonl", "wandb"),
    "logger.mode": ("auto", "online", "offline"),
    "plan.search.split": ("validation", "test"),
}
POSITIVE = (
    "model.layers",
    "model.width",
    "model.heads",
    "data.vocab_size",
    "data.sequence",
    "train.steps",
    "train.batch",
    "train.accumulate",
    "optim.lr",
    "model.head_std",
)
NOT_NEGATIVE = (
    "seed",
    "optim.weight_decay",
    "optim.warmup",
    "optim.final",
    "optim.momentum",
    "optim.clip",
    "optim.eps",
    "every.log",
    "every.eval",
    "every.checkpoint",
    "logger.timeout_s",
)
PARAMETER_KINDS = ("matrix", "embedding", "head", "vector")


def nearest(name: str, known: Any) -> str:
    """The remedy for an unknown name: the nearest known one, and the list."""
    known = sorted(str(k) for k in known)
    if not known:
        return "There are none"
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return (f"Did you mean {close[0]}? " if close else "") + "Known: " + ", ".join(known)


def keys(cfg: DictConfig, prefix: str = "") -> list[str]:
    """Every dotted key of a config."""
    found = []
    for key in cfg:
        full = f"{prefix}{key}"
        found.append(full)
        node = OmegaConf.to_container(cfg, resolve=False).get(key)
        if isinstance(node, dict):
            found += keys(cfg._get_node(key), full + ".")
    return found


def untyped(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Keys that got past the schema, as `+key=` does."""
    fields = getattr(OmegaConf.get_type(cfg), "__dataclass_fields__", None)
    for key in cfg:
        if fields is not None and key not in fields:
            yield f"{prefix}{key}"
        elif isinstance(node := cfg._get_node(key), DictConfig) and not node._is_none():
            yield from untyped(node, f"{prefix}{key}.")


def raw(cfg: DictConfig, key: str) -> Any:
    """A key's value with its references as they are written."""
    value: Any = OmegaConf.to_container(cfg, resolve=False)
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else value
    return value


def validate(cfg: DictConfig) -> None:
    """Checks fields against each other before anything is allocated. Raises ConfigError for the first that fails."""
    for key in untyped(cfg):
        raise ConfigError(
            key,
            raw(cfg, key),
            "is no key of the configuration",
            nearest(key, keys(OmegaConf.structured(Config))).split(" Known")[0],
        )
    try:
        OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException as error:
        key = error.full_key or ""
        raise ConfigError(
            key,
            raw(cfg, key),
            f"cannot be resolved ({str(error).splitlines()[0]})",
            "Give a value, or name a key that is there",
        ) from error
    if cfg.model.kind == "pretrained":
        from .checkpoints import settle

        settle(cfg)
    elif cfg.model.path is not None:
        raise ConfigError("model.path", cfg.model.path, "goes with model.kind=pretrained alone", "Leave it out")
    for missing in sorted(OmegaConf.missing_keys(cfg)):
        raise ConfigError(
            missing, "???", "has no value", f"Set it: {missing}=<value>, or pick experiment=<paper>/<name>"
        )
    for key, known in CHOICES.items():
        value = OmegaConf.select(cfg, key)
        if value not in known:
            raise ConfigError(key, value, "is not known", nearest(str(value), known))
    for key in POSITIVE + NOT_NEGATIVE:
        value = OmegaConf.select(cfg, key)
        if not math.isfinite(value) or value < 0 or (value == 0 and key in POSITIVE):
            bound = "greater than 0" if key in POSITIVE else "0 or greater"
            raise ConfigError(key, value, f"must be finite and {bound}", f"Set {key} to a number {bound}")
    for kind in cfg.optim.decay:
        if kind not in PARAMETER_KINDS:
            raise ConfigError("optim.decay", kind, "is no kind of parameter", nearest(kind, PARAMETER_KINDS))
    if cfg.every.eval_tokens < 2:
        raise ConfigError(
            "every.eval_tokens", cfg.every.eval_tokens, "is below 2", "every.eval=0 switches the curve off"
        )
    if cfg.optim.momentum >= 1:
        raise ConfigError("optim.momentum", cfg.optim.momentum, "is not below 1", "For example 0.9")
    if (cfg.optim.cooldown is not None) != (cfg.optim.schedule == "wsd") or not (
        cfg.optim.cooldown is None or 1 <= cfg.optim.cooldown <= cfg.train.steps - cfg.optim.warmup
    ):
        raise ConfigError(
            "optim.cooldown",
            cfg.optim.cooldown,
            f"does not go with optim.schedule={cfg.optim.schedule}, train.steps={cfg.train.steps} and "
            f"optim.warmup={cfg.optim.warmup}",
            "wsd needs 1 to train.steps - optim.warmup, the others null",
        )
    if not cfg.downstream.tasks:
        raise ConfigError("downstream.tasks", [], "leaves nothing to evaluate", "Name one or more: [continuation]")
    for key, least in (("limit", 1), ("shots", 0)):
        if (many := cfg.downstream[key]) is not None and many < least:
            raise ConfigError(f"downstream.{key}", many, f"is below {least}", "Raise it, or null")
    if cfg.downstream.include is not None and not Path(cfg.downstream.include).expanduser().is_dir():
        problem = "is no folder"
        raise ConfigError(
            "downstream.include", cfg.downstream.include, problem, "Name one that holds task files (.yaml)"
        )
    if cfg.train.loss == "liger" and cfg.device == "cpu":
        raise ConfigError("train.loss", "liger", "needs a GPU", "Use train.loss=chunked")
    if len(cfg.optim.betas) != 2 or not all(0 <= b < 1 for b in cfg.optim.betas):
        raise ConfigError("optim.betas", list(cfg.optim.betas), "needs two numbers in [0, 1)", "For example [0.9,0.95]")
    if cfg.model.width % cfg.model.heads:
        raise ConfigError(
            "model.width",
            cfg.model.width,
            f"is not divisible by model.heads={cfg.model.heads}",
            "Change one of the two",
        )
    if cfg.model.kv_heads is not None and (
        cfg.model.kind != "llama" or cfg.model.kv_heads < 1 or cfg.model.heads % cfg.model.kv_heads
    ):
        raise ConfigError(
            "model.kv_heads",
            cfg.model.kv_heads,
            f"does not go with model.kind={cfg.model.kind} and model.heads={cfg.model.heads}",
            "Use a divisor of model.heads with model.kind=llama, or null",
        )
    if cfg.data.eval_tokens is not None and cfg.data.eval_tokens < cfg.data.sequence:
        raise ConfigError(
            "data.eval_tokens",
            cfg.data.eval_tokens,
            f"is less than one sequence (data.sequence={cfg.data.sequence})",
            "Raise it, or null for all",
        )
    if cfg.data.draws is not None:
        draws, symbols, size = cfg.data.draws, cfg.data.vocab_size, cfg.train.batch * cfg.train.accumulate
        steps = draws * symbols / size
        if cfg.train.steps != steps:
            raise ConfigError(
                "train.steps",
                cfg.train.steps,
                f"is not the one pass of data.draws={draws:g} for each of {symbols} symbols, {size} sequences a step",
                f"Set train.steps={steps:.0f}"
                if steps >= 1 and steps % 1 == 0
                else f"Make data.draws a multiple of {size / symbols:g}",
            )
    from .interventions import INTERVENTIONS
    from .probes import PROBES

    for group, known in (("intervention", INTERVENTIONS), ("probe", PROBES)):
        for name in cfg[group]:
            if name not in known:
                raise ConfigError(group, name, "is not known", nearest(name, known))
            make(known[name], cfg[group][name]).check(cfg)


def make(cls: type, node: Any) -> Any:
    """An intervention or probe from its settings, which the schema has typed already."""
    settings = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node)
    fields = set(cls.__dataclass_fields__)
    for key in settings:
        if key not in fields:
            raise ConfigError(f"{cls.name()}.{key}", settings[key], "is no setting of it", nearest(key, fields))
    return cls(**settings)
