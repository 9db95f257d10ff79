"""Backbones: token ids (B, T) in, hidden states (B, T, D) out. One builder a kind, each in a file of its own."""

from __future__ import annotations

import importlib

import torch
from omegaconf import DictConfig
from torch import nn

from ..seeding import role_seed


def build_backbone(cfg: DictConfig) -> nn.Module:
    """The backbone of `model.kind`, initialised by the run's backbone generator alone."""
    module = importlib.import_module(f"{__name__}.{cfg.model.kind}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(role_seed(cfg.seed, "backbone"))
        return module.build(cfg.model, cfg.data)
