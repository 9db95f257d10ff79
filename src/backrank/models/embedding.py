"""An embedding and nothing else: with the head, the embedding + linear model of SpamLang (`causal_test`).

Its elements are N(0, 1), as `nn.Embedding` draws them.
"""

from __future__ import annotations

from omegaconf import DictConfig
from torch import Tensor, nn

from ..config import ConfigError


class Embedding(nn.Module):
    def __init__(self, vocab_size: int, width: int):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)

    def checkpoint_activations(self) -> None:
        """There are none between input and result."""

    def forward(self, x_BT: Tensor, taps: dict[int, Tensor] | None = None) -> Tensor:
        states_BTD = self.embedding(x_BT)
        if taps:
            taps[1] = states_BTD
        return states_BTD


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    """Raises ConfigError for a number of layers or heads that it does not have."""
    for key in ("layers", "heads"):
        if model[key] != 1:
            raise ConfigError(f"model.{key}", model[key], "but model.kind=embedding has 1", f"Set model.{key}=1")
    return Embedding(data.vocab_size, model.width)
