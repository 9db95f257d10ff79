"""Backbones: one builder a kind, each in a file of its own.

forward(x, taps=None): token ids (B, T) -> hidden states (B, T, D), or images (B, C, H, W) -> features (B, D). `taps`, a
dict by depth, gets the states after the blocks it names: 1 is the first block's output, the last block's is the result.
"""

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
