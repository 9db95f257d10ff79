"""GPT-2 by `transformers`: pre-norm blocks, 4x GELU feed-forward, learned positions, dropout 0."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from . import _decoder


class Gpt2(_decoder.Decoder):
    @property
    def embedding(self) -> nn.Embedding:
        return self.model.wte

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.h

    @property
    def norm(self) -> nn.Module:
        return self.model.ln_f

    def stem(self, x_BT: Tensor) -> tuple[Tensor, dict[str, Any]]:
        return self.model.wte(x_BT) + self.model.wpe(torch.arange(x_BT.shape[1], device=x_BT.device)[None]), {}


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
    return Gpt2(GPT2Model(settings(model, data)))
