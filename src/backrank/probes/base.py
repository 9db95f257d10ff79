"""What a probe is: it reads the model at a step and returns numbers; training is bit-equal with it on or off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig

from ..config import ConfigError
from ..plugins import snake

if TYPE_CHECKING:
    from torch import Tensor

    from ..task import Task

Measured = tuple[dict[str, float], list[dict[str, Any]]]  # metrics of the step, rows of layers.jsonl


@dataclass
class Probe:
    """every: steps between measurements; the initial and the final state are always measured. sequences: batch size."""

    example: ClassVar[dict[str, Any]] = {}
    # kinds of models it can read; empty: all
    kinds: ClassVar[tuple[str, ...]] = ()

    every: int = 100
    sequences: int = 8

    def __post_init__(self) -> None:
        self.state: dict[str, Tensor] = {}  # kept in the checkpoint

    @classmethod
    def name(cls) -> str:
        return snake(cls.__name__)

    def check(self, cfg: DictConfig) -> None:
        if self.kinds and cfg.model.kind not in self.kinds:
            problem = f"cannot be read by probe {self.name()}"
            remedy = f"Leave the probe out, or use one of {', '.join(self.kinds)}"
            raise ConfigError("model.kind", cfg.model.kind, problem, remedy)
        for key, least in (("every", 0), ("sequences", 1)):
            if getattr(self, key) < least:
                raise ConfigError(
                    f"probe.{self.name()}.{key}",
                    getattr(self, key),
                    f"is below {least}",
                    f"Use {least} or more" + (" (0: start and end only)" if key == "every" else ""),
                )

    def prepare(self, cfg: DictConfig, task: Task) -> None:
        """Before the first step: what a probe has to know of the config and of the initial weights."""

    def due(self, step: int, steps: int) -> bool:
        return step in (0, steps) or (self.every > 0 and step % self.every == 0)

    def measure(self, snapshot: Snapshot) -> Measured:
        raise NotImplementedError


class Snapshot:
    """The model at one step on one fixed batch; what several probes read is computed once.

    x_BT, y_BT come from the validation split. All gradients are of the plain mean loss and taken past all sites, unless
    `through_sites` is asked for.
    """

    def __init__(self, task: Task, batch: Callable[[], tuple[Tensor, Tensor]], step: int):
        self.task, self.step = task, step
        self.x_BT, self.y_BT = batch()
        self._cache: dict[str, Any] = {}

    def once(self, key: str, compute: Callable[[], Any]) -> Any:
        if key not in self._cache:
            self._cache[key] = compute()
        return self._cache[key]

    @property
    def hidden_ND(self) -> Tensor:
        import torch

        def compute() -> Tensor:
            with torch.no_grad():
                return self.task.hidden(self.x_BT)

        return self.once("hidden", compute)

    @property
    def targets_N(self) -> Tensor:
        return self.y_BT.flatten()

    @property
    def weight_VD(self) -> Tensor:
        return self.once("weight", lambda: self.task.head.weight.detach())

    def gradients(self, through_sites: bool = False) -> dict[str, Tensor]:
        """Gradient of the mean loss by parameter name; never touches `.grad`."""
        import torch

        def compute() -> dict[str, Tensor]:
            if through_sites and self.step == 0:  # before the first step the maps have nothing to read yet
                for intervention in self.task.interventions:
                    intervention.begin_step(0, self.task.head)
            named = {n: p for n, p in self.task.named_parameters() if p.requires_grad}
            with torch.enable_grad():
                supervised = int((self.y_BT >= 0).sum())  # a held-out split shorter than the batch is padded
                loss = self.task.loss(self.x_BT, self.y_BT, supervised, sites=through_sites, loss="plain")
                grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
            return {n: g for n, g in zip(named, grads, strict=True) if g is not None}

        return self.once(f"gradients/{through_sites}", compute)
