"""Heads that are no plain softmax of W h, which cannot help (lost_in_backprop): a Jacobian has rank D at most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from omegaconf import DictConfig

from ..config import ConfigError
from .base import Intervention

if TYPE_CHECKING:
    from torch import Generator, nn

READ_ANY_HEAD = ("head_gradient", "weight_spectrum", "gradient_spectrum", "feedback_rotation", "forgetting")


@dataclass
class Sigsoftmax(Intervention):
    """The ordinary head's weight under a sigsoftmax, p ~ exp(z) sigmoid(z) (Kanai et al. 2018)."""

    keeps_forward: ClassVar = False
    parallel: ClassVar = ("ddp", "fsdp")
    accepts_tied: ClassVar = False

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        if others := [name for name in cfg.intervention if name != self.name()]:
            problem = f"cannot go with {self.name()}, whose gradient does not pass their sites"
            raise ConfigError("intervention", ",".join(others), problem, "Leave one out")
        if blind := [name for name in cfg.probe if name not in READ_ANY_HEAD]:
            raise ConfigError("probe", ",".join(blind), f"takes the head for W h, which {self.name()} is not",
                              f"Use {', '.join(READ_ANY_HEAD)}")  # fmt: skip

    def transform_head(self, head: nn.Module, generator: Generator, std: float) -> nn.Module:
        from ..head import SigsoftmaxHead

        return SigsoftmaxHead(head.weight.detach(), head.active)


@dataclass
class MixtureOfSoftmaxes(Sigsoftmax):
    """`components` softmaxes of W tanh(P_k h), mixed with weights softmax(Q h) (Yang et al. 2018)."""

    example: ClassVar = {"components": 2}

    components: int = 4

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        if self.components < 1:
            self.refuse("components", self.components, "is below 1", "Use 2 or more")

    def transform_head(self, head: nn.Module, generator: Generator, std: float) -> nn.Module:
        from ..head import MixtureHead

        return MixtureHead.from_weight(head.weight, self.components, generator, head.active)
