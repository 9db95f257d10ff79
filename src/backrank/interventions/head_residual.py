"""Residual removal (causal_test): the head's own update without the part outside the column space of W."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from omegaconf import DictConfig

from .base import Intervention

if TYPE_CHECKING:
    from torch import Tensor, nn


@dataclass
class HeadResidual(Intervention):
    """Removes from the head's update what lies outside col(W), by W (W^T W)^+ W^T; the hidden gradient is exact.

    at: `gradient` acts on dW where the head uses W; `update` on the step that the optimiser is about to apply. Under
    AdamW these are different experiments: a rescaled gradient changes nothing, and the elementwise step leaves col(W)
    again. keep: keep only the residual instead. match: rescale to the norm before (null: at the update only).
    """

    example: ClassVar = {}
    parallel: ClassVar = ("ddp", "fsdp")

    at: str = "gradient"
    keep: bool = False
    match: bool | None = None

    @property
    def matched(self) -> bool:
        return self.at == "update" if self.match is None else self.match

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        if self.at not in ("gradient", "update"):
            self.refuse("at", self.at, "is not known", "Use gradient or update")
        if self.at == "update" and cfg.model.tied:
            self.refuse(
                "at",
                self.at,
                "would project the embedding's update too when model.tied=true",
                "Set model.tied=false, or at=gradient",
            )
        if self.at == "gradient" and self.matched and cfg.train.accumulate > 1:
            self.refuse(
                "match",
                True,
                f"needs the whole batch, which train.accumulate={cfg.train.accumulate} splits",
                "Set train.accumulate=1, or match=false",
            )
        for other in ("low_rank_head", "frozen_column_space"):
            if other in cfg.intervention:
                self.refuse("at", self.at, f"needs a dense head, which {other} replaces", f"Leave out {other}")

    def project(self, weight_VD: Tensor, delta_VD: Tensor) -> Tensor:
        import torch

        from ..grad import column_project

        inside = column_project(weight_VD, delta_VD)
        out = delta_VD - inside if self.keep else inside
        if self.matched:
            before, after = delta_VD, out
            if self.all_reduce is not None and self.at == "gradient":  # a part of it: the norm is that of the sum
                before, after = self.all_reduce(before), self.all_reduce(after)
            norm = after.norm()
            out = out * torch.where(norm > 0, before.norm() / norm, torch.zeros_like(norm))
        return out

    def weight(self, weight_VD: Tensor) -> Tensor:
        from ..grad import grad_map

        if self.at != "gradient":
            return weight_VD
        now = weight_VD.detach()
        return grad_map(weight_VD, lambda g: self.project(now, g))

    def before_update(self, head: nn.Module) -> None:
        from ..distributed import whole

        if self.at == "update":
            self.before = whole(head.weight.detach()).clone()

    def after_update(self, head: nn.Module) -> None:
        from ..distributed import like, whole

        if self.at == "update":
            weight = head.weight.detach()
            weight.copy_(like(weight, self.before + self.project(self.before, whole(weight) - self.before)))
            del self.before
