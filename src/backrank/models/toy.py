"""The toy decoder of backward_bottleneck: GPT-2's blocks, of which only the feed-forward pairs are counted."""

from __future__ import annotations

from omegaconf import DictConfig
from torch import nn
from transformers import GPT2Model

from . import gpt2


class Toy(gpt2.Gpt2):
    counted = r"\.mlp\.c_(fc|proj)\.weight$"


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    return Toy(GPT2Model(gpt2.settings(model, data)))
