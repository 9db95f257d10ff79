"""The network of the paper's proof (backward_bottleneck): f(x) = W_2 relu(W_1 x) + v^T x."""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from torch import Tensor, nn


class TwoLayer(nn.Module):
    """relu(W_1 x) beside x itself, B x (h + d): the head's first h columns are W_2, the others are v^T."""

    counts_head = True

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.first = nn.Linear(inputs, hidden, bias=False)

    def forward(self, x: Tensor, taps: dict[int, Tensor] | None = None) -> Tensor:
        x = x.flatten(1)
        out = torch.cat([self.first(x).relu(), x], dim=1)
        if taps:
            taps[1] = out
        return out


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    inputs = data.channels * data.size**2
    return TwoLayer(inputs, model.width - inputs)
