"""Llama by `transformers`: RMS norms in front, SwiGLU, rotary positions, grouped keys and values, no biases."""

from __future__ import annotations

from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from . import _decoder


class Llama(_decoder.Decoder):
    @property
    def embedding(self) -> nn.Embedding:
        return self.model.embed_tokens

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.layers

    @property
    def norm(self) -> nn.Module:
        return self.model.norm

    def stem(self, x_BT: Tensor) -> tuple[Tensor, dict[str, Any]]:
        state = self.model.embed_tokens(x_BT)
        positions = torch.arange(x_BT.shape[1], device=x_BT.device)[None]
        return state, {"position_embeddings": self.model.rotary_emb(state, positions)}


def settings(model: DictConfig, data: DictConfig) -> LlamaConfig:
    """Llama 3's constants; a feed-forward width of 4 D where none is given, which reproduces the published sizes."""
    return LlamaConfig(
        vocab_size=data.vocab_size,
        hidden_size=model.width,
        intermediate_size=model.mlp or 4 * model.width,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads or model.heads,
        max_position_embeddings=data.sequence,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        use_cache=False,
        attn_implementation="sdpa",
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    return Llama(LlamaModel(settings(model, data)))
