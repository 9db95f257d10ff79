"""What decoders of `transformers` have in common here: their blocks run one by one, so that depths can be read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class Decoder(nn.Module):
    """`model` is the library's, without a head; a subclass names its parts.

    The library's own forward reads the positions back to see whether sequences are packed: a wait every step. Without
    a mask its attention is causal.
    """

    embedding: nn.Embedding
    blocks: nn.ModuleList
    norm: nn.Module

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def stem(self, x_BT: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """States in front of the first block, and what every block is called with beside them."""
        raise NotImplementedError

    def checkpoint_activations(self) -> None:
        # the name changed within transformers 5
        enable = (
            getattr(self.model, "activation_checkpointing_enable", None) or self.model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})

    def forward(self, x_BT: Tensor, taps: dict[int, Tensor] | None = None) -> Tensor:
        state, also = self.stem(x_BT)
        for depth, block in enumerate(self.blocks, start=1):
            state = block(state, **also)
            state = state[0] if isinstance(state, tuple) else state  # some versions of transformers 5 wrap it
            if taps and depth in taps:
                taps[depth] = state
        out = self.norm(state)
        if taps and len(self.blocks) in taps:
            taps[len(self.blocks)] = out
        return out
