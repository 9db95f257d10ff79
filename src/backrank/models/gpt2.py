"""GPT-2 by `transformers`: pre-norm blocks, 4x GELU feed-forward, learned positions, dropout 0."""

from __future__ import annotations

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model


class Gpt2(nn.Module):
    def __init__(self, config: GPT2Config):
        super().__init__()
        self.model = GPT2Model(config)

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.wte

    def checkpoint_activations(self) -> None:
        # the name changed within transformers 5
        enable = (
            getattr(self.model, "activation_checkpointing_enable", None) or self.model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})

    def forward(self, x_BT: Tensor, taps: dict[int, Tensor] | None = None) -> Tensor:
        # the library's own forward reads the positions back to see whether sequences are packed: a wait every step
        state = self.model.wte(x_BT) + self.model.wpe(torch.arange(x_BT.shape[1], device=x_BT.device)[None])
        for depth, block in enumerate(self.model.h, start=1):
            state = block(state)
            state = state[0] if isinstance(state, tuple) else state  # some versions of transformers 5 wrap it
            if taps and depth in taps:
                taps[depth] = state
        out = self.model.ln_f(state)
        if taps and len(self.model.h) in taps:
            taps[len(self.model.h)] = out
        return out


def settings(model: DictConfig, data: DictConfig) -> GPT2Config:
    """gelu_pytorch_tanh is GPT-2's own gelu_new as one kernel; there are as many positions as a sequence has."""
    return GPT2Config(
        vocab_size=data.vocab_size,
        n_positions=data.sequence,
        n_embd=model.width,
        n_layer=model.layers,
        n_head=model.heads,
        n_inner=model.mlp,
        activation_function="gelu_pytorch_tanh",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",  # causal without a mask
        bos_token_id=None,
        eos_token_id=None,
    )


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    return Gpt2(settings(model, data))
