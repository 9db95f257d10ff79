"""Optimisers, their parameter groups, and the learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

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


def build_optimiser(task: nn.Module, cfg: DictConfig) -> tuple[Any, list[str]]:
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
    if cfg.name == "sgd":
        pieces = any(hasattr(p, "full_tensor") for p in named.values())  # torch has no fused SGD for FSDP's
        return torch.optim.SGD(groups, lr=cfg.lr, momentum=cfg.momentum, fused=not pieces), decays
    return Muon(named, kinds, decays, cfg), decays


class Muon:
    """torch's Muon on the matrices, AdamW on embeddings, head, vectors and convolutions, as one optimiser.

    `match_rms_adamw` gives Muon's update the size of AdamW's, so that both parts share the learning rate.
    """

    def __init__(self, named: dict[str, nn.Parameter], kinds: dict[str, str], decays: list[str], cfg: DictConfig):
        def groups(names: list[str]) -> list[dict[str, Any]]:
            split = [[n for n in names if (n in decays) == decay] for decay in (True, False)]
            return [
                {"params": [named[n] for n in part], "weight_decay": cfg.weight_decay if decay else 0.0}
                for part, decay in zip(split, (True, False), strict=True)
                if part
            ]

        matrices = [n for n, kind in kinds.items() if kind == "matrix" and named[n].ndim == 2]
        rest = [n for n in named if n not in set(matrices)]
        self.parts = []
        if matrices:
            self.parts.append(
                torch.optim.Muon(groups(matrices), lr=cfg.lr, momentum=cfg.momentum, adjust_lr_fn="match_rms_adamw")
            )
        if rest:
            self.parts.append(
                torch.optim.AdamW(groups(rest), lr=cfg.lr, betas=tuple(cfg.betas), eps=cfg.eps, fused=True)
            )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for part, saved in zip(self.parts, state["parts"], strict=True):
            part.load_state_dict(saved)


def lr_at(step: int, steps: int, cfg: DictConfig) -> float:
    """Learning rate of the update number `step` (from 0) of `steps`: linear warm-up, then cosine to final * lr.

    wsd stays at lr until the last `cooldown` updates, which fall linearly to final * lr (warm-up, stable, decay).
    """
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    if cfg.schedule == "wsd":
        return cfg.lr * (1 - (1 - cfg.final) * max(0.0, 1 - (steps - step - 1) / cfg.cooldown))
    progress = (step - cfg.warmup) / max(1, steps - cfg.warmup)
    return cfg.lr * (cfg.final + (1 - cfg.final) * 0.5 * (1 + math.cos(math.pi * progress)))
