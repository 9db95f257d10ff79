"""Any causal language model of `transformers`: a local folder, a .gguf file or a hub id (checkpoints.py), in float32.

Refused unless the backbone's states times the head's weight are the model's own logits on one batch: a bias, a scale or
a soft cap between the two would make every statement on W and G one about another model. Dropout is off.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ..checkpoints import facts, locate, model_config, refused
from ..config import ConfigError

TOLERANCE = 1e-4  # of the largest logit; the library may add up a product in another order


class Pretrained(nn.Module):
    """The model without its head. `head_weight`: V x D, the embedding's own parameter where the two are tied."""

    def __init__(self, model: nn.Module, layers: int):
        super().__init__()
        self.model = model.base_model
        self.layers = layers
        # in a tuple, which is not registered: the parameter is the head's, or the embedding's
        self._head_weight = (model.get_output_embeddings().weight,)

    @property
    def head_weight(self) -> nn.Parameter:
        return self._head_weight[0]

    @property
    def embedding(self) -> nn.Embedding:
        return self.model.get_input_embeddings()

    @property
    def blocks(self) -> nn.ModuleList:
        return next(m for m in self.model.modules() if isinstance(m, nn.ModuleList) and len(m) == self.layers)

    def checkpoint_activations(self) -> None:
        # the name changed within transformers 5
        enable = (
            getattr(self.model, "activation_checkpointing_enable", None) or self.model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})

    def forward(self, x_BT: Tensor, taps: dict[int, Tensor] | None = None) -> Tensor:
        out = self.model(input_ids=x_BT, use_cache=False, output_hidden_states=bool(taps))
        for depth in taps or ():
            taps[depth] = out.last_hidden_state if depth == self.layers else out.hidden_states[depth]
        return out.last_hidden_state


def build(model: DictConfig, data: DictConfig) -> nn.Module:
    """Raises ConfigError for a model that cannot be loaded, has no linear head, or is not what the config says.

    data.vocab_size bounds the ids of the text. The head has the model's own number of rows, which may be larger, since
    vocabularies are padded; the softmax runs over all of them, as in the model.
    """
    config = model_config(model.path)
    for key, value in facts(config).items():
        if model[key] != value:
            raise ConfigError(f"model.{key}", model[key], f"but {model.path} has {value}", f"Set model.{key}={value}")
    if data.vocab_size > config.vocab_size:
        problem = f"but {model.path} has {config.vocab_size} rows, and ids lie below that"
        raise ConfigError(
            "data.vocab_size", data.vocab_size, problem, f"Set data.vocab_size={config.vocab_size} or less"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions and data.sequence > positions:
        problem = f"but {model.path} has {positions} positions"
        raise ConfigError("data.sequence", data.sequence, problem, f"Set data.sequence={positions} or less")
    loaded = load(model.path, config)
    check_head(loaded, model.path)
    return Pretrained(loaded, model.layers)


def load(path: str, config: Any) -> nn.Module:
    """The whole model by `transformers`, in float32. Raises ConfigError, also where weights are missing."""
    for key, value in config.to_dict().items():
        if key.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, key, 0.0)
    options = locate(path).options
    try:
        with redirect_stderr(io.StringIO()):  # progress bars; what goes wrong is raised
            model, report = AutoModelForCausalLM.from_pretrained(
                **options, config=config, dtype=torch.float32, output_loading_info=True
            )
    except Exception as error:
        raise refused(path, error, "Give a causal language model that the installed transformers can load") from error
    if missing := sorted(report["missing_keys"]):  # the library would draw them
        problem = f"the files lack {', '.join(missing[:3])}{' and more' * (len(missing) > 3)}"
        raise refused(path, problem, "Give a checkpoint of the whole model, its LM head included")
    return model.eval()


@torch.no_grad()
def check_head(model: nn.Module, path: str) -> None:
    """Raises ConfigError unless the model's logits are those of a plain linear head on the backbone's states."""
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), nn.Parameter):
        raise refused(path, "has no LM head with a weight", "Give a causal language model")
    x_BT = torch.randint(len(model.get_input_embeddings().weight), (2, 8), generator=torch.Generator().manual_seed(0))
    state = model.base_model(input_ids=x_BT, use_cache=False).last_hidden_state
    own = model(input_ids=x_BT, use_cache=False).logits
    same = own.shape[-1] == len(head.weight) and state.shape[-1] == head.weight.shape[1]
    if not same or not (own - state @ head.weight.T).abs().max() <= TOLERANCE * own.abs().max():
        kinds = ("logit", "softcap", "head_bias", "lm_head")
        named = [f"{k}={v}" for k, v in model.config.to_dict().items() if any(kind in k for kind in kinds) and v]
        named += ["a bias in the head"] if getattr(head, "bias", None) is not None else []
        why = f" ({', '.join(named)})" if named else ""
        raise refused(path, f"its logits are not H W^T of its head{why}", "Give a model with a plain linear head")
