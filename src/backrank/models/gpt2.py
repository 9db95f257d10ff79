"""GPT-2 by `transformers`: pre-norm blocks, 4x GELU feed-forward, learned positions, dropout 0."""

from __future__ import annotations

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
        out = self.model(input_ids=x_BT, use_cache=False, output_hidden_states=bool(taps))
        for depth in taps or ():
            taps[depth] = out.hidden_states[depth] if depth < len(self.model.h) else out.last_hidden_state
        return out.last_hidden_state


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
        attn_implementation=model.attention or "sdpa",
        bos_token_id=None,
        eos_token_id=None,
    )


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    return Gpt2(settings(model, data))
