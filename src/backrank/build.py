"""Config -> objects, in one visible order. This is the first module of a run that imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from .config import ConfigError, make
from .data import Tokens, Windows, eval_windows
from .head import DenseHead, resolve_loss
from .interventions import INTERVENTIONS
from .models import build_backbone
from .optim import build_optimiser, lr_at, parameter_kinds
from .probes import PROBES
from .probes.base import Snapshot
from .recorder import Recorder
from .rundir import RunDir
from .seeding import generator, role_seed, tensor_hash
from .task import LanguageModel
from .trainer import Trainer


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "is not there", "Use device=cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def build_task(cfg: DictConfig) -> tuple[LanguageModel, dict[str, str]]:
    """The model with its interventions, and the hashes of its initial backbone and dense head.

    The dense head is drawn first, so that every arm shares it; what an intervention draws comes after it.
    """
    backbone = build_backbone(cfg)
    draws = generator(cfg.seed, "head")
    if cfg.model.tied:
        head = DenseHead(backbone.embedding.weight)
    else:
        head = DenseHead.create(cfg.data.vocab_size, cfg.model.width, draws, cfg.model.head_std)
    hashes = {"backbone": tensor_hash(dict(backbone.named_parameters())), "head": tensor_hash({"": head.weight})}
    interventions = [make(INTERVENTIONS[name], node) for name, node in cfg.intervention.items()]
    for intervention in interventions:
        head = intervention.transform_head(head, draws, cfg.model.head_std)
    try:
        resolve_loss(cfg.train.loss)
    except ValueError as error:
        raise ConfigError("train.loss", cfg.train.loss, str(error), "Use train.loss=chunked") from None
    return LanguageModel(backbone, head, interventions, cfg.train.loss), hashes


def build(cfg: DictConfig, tokens: Tokens, rundir: RunDir, recorder: Recorder) -> tuple[Trainer, dict[str, Any]]:
    """The trainer of a run, and what its record says of the model, its parameters and its data order."""
    device = pick_device(cfg.device)
    torch.manual_seed(role_seed(cfg.seed, "training"))
    task, hashes = build_task(cfg)
    task.to(device)
    for intervention in task.interventions:
        intervention.state = {name: t.to(device) for name, t in intervention.state.items()}
    optimiser, decays = build_optimiser(task, cfg.optim)

    def to_device(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = (torch.from_numpy(a) for a in batch)
        if device.type == "cuda":  # pinned and asynchronous: the step never waits for the copy
            return x.pin_memory().to(device, non_blocking=True), y.pin_memory().to(device, non_blocking=True)
        return x, y

    windows = Windows(tokens.train, cfg.data.sequence, cfg.train.batch, role_seed(cfg.seed, "order"))

    def held_out(split: str, limit: int | None, batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for pair in eval_windows(getattr(tokens, split), cfg.data.sequence, limit, batch):
            yield to_device(pair)

    def evaluate(split: str, whole: bool = True) -> dict[str, float]:
        limit = cfg.data.eval_tokens if whole else cfg.every.eval_tokens
        return task.evaluate(held_out(split, limit, max(1, 1024 // cfg.data.sequence)))

    def snapshot(step: int, sequences: int) -> Snapshot:
        return Snapshot(task, lambda: next(held_out("validation", sequences * cfg.data.sequence + 1, sequences)), step)

    autocast = partial(torch.autocast, device.type, torch.bfloat16) if cfg.train.amp == "bf16" else nullcontext
    if cfg.train.checkpointing:
        task.backbone.checkpoint_activations()
    forward = task
    if cfg.train.compile != "none":
        forward = torch.compile(task, backend=cfg.train.compile, fullgraph=True)
    trainer = Trainer(
        task=task,
        optimiser=optimiser,
        lr_at=lambda step: lr_at(step, cfg.train.steps, cfg.optim),
        batch_at=lambda i: to_device(windows.batch_at(i)),
        evaluate=evaluate,
        snapshot=snapshot,
        probes=[make(PROBES[name], node) for name, node in cfg.probe.items()],
        recorder=recorder,
        save=rundir.save,
        steps=cfg.train.steps,
        accumulate=cfg.train.accumulate,
        clip=cfg.optim.clip,
        autocast=autocast,
        every=cfg.every,
        forward=forward,
    )
    counted = {id(p): p.numel() for p in task.parameters()}
    record = {
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "params": sum(counted.values()),
        "init_hash": hashes,
        "order_hash": windows.order_hash(min(cfg.train.steps * cfg.train.accumulate, 10_000)),
        "parameter_kinds": parameter_kinds(task),
        "decaying": decays,
    }
    return trainer, record
