"""What an intervention is, and the only places where it can act.

set-up   `transform_head`  replace the head before training (the head and its generator in, a head out)
hidden   `hidden`          a grad_map on the hidden state in front of the head (N x D)
weight   `weight`          a grad_map on the head's weight where the head uses it (V x D), not on a tied embedding's
loss     `loss`            a term of value 0 with a gradient of its own, from the states after the blocks `depths`
update   `before_update`, `after_update`   around the optimiser's step
`attach` gives it the task and fresh batches once both are there; `begin_step` comes before the forward passes of a
step and may refresh what the maps read.

A subclass is a dataclass whose fields are its settings. It imports torch inside its methods only, since settings are
read before torch is loaded. What it declares below is what the tests, the validation and the report read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from omegaconf import DictConfig

from ..config import ConfigError
from ..plugins import snake

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn

    from ..task import Task


class Forward(NamedTuple):
    """A training forward pass, past all sites. taps: depth -> state after that block (N x D), of every `depths`."""

    hidden_ND: Tensor
    weight_VD: Tensor
    targets_N: Tensor
    denominator: Any  # supervised tokens of the step: number or tensor
    taps: dict[int, Tensor]


@dataclass
class Intervention:
    # settings with which the tests run it on a model of width 8 and vocabulary 32
    example: ClassVar[dict[str, Any]] = {}
    # settings under which it must equal ordinary backpropagation there, if there are any
    neutral: ClassVar[dict[str, Any] | None] = None
    # the loss of the first step is the ordinary one, bit for bit
    keeps_forward: ClassVar[bool] = True
    accepts_tied: ClassVar[bool] = True
    # values of the key `parallel` under which it is exact
    parallel: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        self.state: dict[str, Tensor] = {}  # what a resumed run needs: kept in the checkpoint
        # sums a tensor over the processes that share a run; None where there is one. A site meets its share of the
        # batch alone: what is linear in the batch is exact by itself, what is not needs this
        self.all_reduce: Callable[[Tensor], Tensor] | None = None

    @classmethod
    def name(cls) -> str:
        return snake(cls.__name__)

    def refuse(self, key: str, value: Any, problem: str, remedy: str) -> None:
        raise ConfigError(f"intervention.{self.name()}.{key}", value, problem, remedy)

    def check(self, cfg: DictConfig) -> None:
        """Raises ConfigError for settings, or a combination with the rest of the config, that is not exact."""
        if cfg.model.tied and not self.accepts_tied:
            raise ConfigError("model.tied", True, f"cannot go with intervention {self.name()}", "Set model.tied=false")

    def check_parallel(self, mode: str) -> None:
        if mode not in self.parallel:
            problem = f"is not exact with intervention {self.name()}"
            raise ConfigError("parallel", mode, problem, f"Set parallel={'ddp' if 'ddp' in self.parallel else 'none'}")

    def check_rank(self, rank: int, width: int) -> None:
        if not 1 <= rank <= width:
            self.refuse("rank", rank, f"is not between 1 and model.width={width}", f"Use 1 to {width}")

    def transform_head(self, head: nn.Module, generator: Generator, std: float) -> nn.Module:
        return head

    # blocks whose outputs `loss` reads, counted from 1; the last one's are the hidden states in front of the head
    depths: ClassVar[tuple[int, ...]] = ()

    def attach(self, task: Task, fresh: Callable[[int], tuple[Tensor, Tensor]], seed: int) -> None:
        """Before the first step, on the device. fresh(i): the i-th training batch of an order of its own."""

    def begin_step(self, step: int, head: nn.Module) -> None:
        pass

    def hidden(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND

    def weight(self, weight_VD: Tensor) -> Tensor:
        return weight_VD

    def loss(self, at: Forward) -> Tensor | None:
        return None

    def before_update(self, head: nn.Module) -> None:
        pass

    def after_update(self, head: nn.Module) -> None:
        pass
