"""Backward-only rank reduction (causal_test): the gradient that leaves the head for the backbone loses rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING, DictConfig

from .base import Intervention

if TYPE_CHECKING:
    from torch import Generator, Tensor, nn


@dataclass
class BackwardRank(Intervention):
    """g -> g V_r V_r^T on the hidden gradient, then rescaled to its former RMS; logits and head update are untouched.

    basis: `head`, top eigenvectors of the current W^T W, so that the gradient is that of the best rank-r head (the
    paper's); `gradient`, top right singular vectors of the gradient itself, every step; `random`, one orthonormal D x r
    drawn by the head's generator. refresh_every: steps between bases (head: 1; random: never unless set).
    rms: `tensor`, one scalar over the whole gradient; `token`, each row its own; `none`.
    """

    example: ClassVar = {"rank": 3}
    neutral: ClassVar = {"rank": 8}
    parallel: ClassVar = ("ddp", "fsdp")

    rank: int = MISSING
    basis: str = "head"
    refresh_every: int | None = None
    rms: str = "tensor"

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        self.check_rank(self.rank, cfg.model.width)
        for key, known in (("basis", ("head", "gradient", "random")), ("rms", ("tensor", "token", "none"))):
            if getattr(self, key) not in known:
                self.refuse(key, getattr(self, key), "is not known", "Use one of " + ", ".join(known))
        if self.refresh_every is not None and (self.refresh_every < 1 or self.basis == "gradient"):
            self.refuse(
                "refresh_every",
                self.refresh_every,
                "needs 1 or more steps, and a basis other than gradient",
                "Leave it null for the default",
            )
        if cfg.train.accumulate > 1 and (self.rms == "tensor" or self.basis == "gradient"):
            key = "rms" if self.rms == "tensor" else "basis"
            self.refuse(
                key,
                getattr(self, key),
                f"is taken over the whole batch, which train.accumulate={cfg.train.accumulate} splits",
                "Set train.accumulate=1, or rms=token with a head or random basis",
            )

    def transform_head(self, head: nn.Module, generator: Generator, std: float) -> nn.Module:
        from ..grad import random_basis

        width = head.weight.shape[1]
        if self.basis == "random":
            self.generator = generator
            self.state["basis"] = random_basis(width, self.rank, generator)
        elif self.basis == "head":
            self.state["basis"] = head.weight.detach().new_zeros(width, self.rank)
        return head

    def begin_step(self, step: int, head: nn.Module) -> None:
        from ..grad import head_basis, random_basis

        every = self.refresh_every or (1 if self.basis == "head" else 0)
        if self.basis == "gradient" or not every or step % every:
            return
        if self.basis == "head":
            basis = head_basis(head.weight.detach(), self.rank)
        elif step > 0:  # step 0 has the basis of the set-up
            # a generator of the step's own: the basis of a step does not depend on where a run was resumed
            import torch

            basis = random_basis(
                head.weight.shape[1], self.rank, torch.Generator().manual_seed(self.generator.initial_seed() + step)
            )
        else:
            return
        self.state["basis"].copy_(basis)

    def hidden(self, hidden_ND: Tensor) -> Tensor:
        from ..grad import grad_map, gradient_basis, reduce_rank

        if self.basis == "gradient":
            return grad_map(
                hidden_ND,
                lambda g: reduce_rank(g, gradient_basis(g, self.rank, self.all_reduce), self.rms, self.all_reduce),
            )
        basis = self.state["basis"]
        return grad_map(hidden_ND, lambda g: reduce_rank(g, basis, self.rms, self.all_reduce))
