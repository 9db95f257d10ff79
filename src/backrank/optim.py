"""Optimisers, their parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math

import torch
from omegaconf import DictConfig
from torch import nn


def parameter_kinds(task: nn.Module) -> dict[str, str]:
    """Parameter name -> kind: embedding (tied weights too), head, matrix (two or more dimensions) or vector."""
    embeddings = {id(m.weight) for m in task.modules() if isinstance(m, nn.Embedding)}
    kinds = {}
    for name, p in task.named_parameters():
        if id(p) in embeddings:
            kinds[name] = "embedding"
        elif name.startswith("head."):
            kinds[name] = "head"
        else:
            kinds[name] = "matrix" if p.ndim >= 2 else "vector"
    return kinds


def build_optimiser(task: nn.Module, cfg: DictConfig) -> tuple[torch.optim.Optimizer, list[str]]:
    """The optimiser and the names of the parameters that decay. A weight decay of 0 is really 0: no name is listed."""
    kinds = parameter_kinds(task)
    named = dict(task.named_parameters())
    decays = [n for n, kind in kinds.items() if kind in cfg.decay and cfg.weight_decay > 0]
    groups = [
        {"params": [named[n] for n in decays], "weight_decay": cfg.weight_decay},
        {"params": [p for n, p in named.items() if n not in set(decays)], "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    if cfg.name == "adamw":
        # one fused kernel a group, on the CPU too
        return torch.optim.AdamW(groups, lr=cfg.lr, betas=tuple(cfg.betas), eps=cfg.eps, fused=True), decays
    return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=True), decays


def lr_at(step: int, steps: int, cfg: DictConfig) -> float:
    """Learning rate of the update number `step` (from 0) of `steps`: linear warm-up, then cosine to final * lr."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    progress = (step - cfg.warmup) / max(1, steps - cfg.warmup)
    return cfg.lr * (cfg.final + (1 - cfg.final) * 0.5 * (1 + math.cos(math.pi * progress)))
