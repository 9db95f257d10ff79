"""Interventions that replace the head before training; all keep a `weight` property, so the sites still work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from omegaconf import MISSING, DictConfig

from ..config import ConfigError
from .base import Intervention

if TYPE_CHECKING:
    from torch import Generator, nn


@dataclass
class LowRankHead(Intervention):
    """A rank-r forward head W = A B with its own exact gradient (causal_test: factorised; lost_in_backprop: D)."""

    example: ClassVar = {"rank": 3}
    keeps_forward: ClassVar = False
    parallel: ClassVar = ("ddp", "fsdp")
    accepts_tied: ClassVar = False

    rank: int = MISSING

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        self.check_rank(self.rank, cfg.model.width)
        if "frozen_column_space" in cfg.intervention:
            self.refuse("rank", self.rank, "and frozen_column_space both replace the head", "Leave one out")

    def transform_head(self, head: nn.Module, generator: Generator, std: float) -> nn.Module:
        from ..head import FactorisedHead

        vocab, width = head.weight.shape
        factorised = FactorisedHead.create(vocab, width, self.rank, generator, std)
        factorised.active = head.active
        return factorised


@dataclass
class FrozenColumnSpace(Intervention):
    """W = Q A with W_0 = Q R and A starting at R: the head that can only move inside its initial column space.

    A control for residual removal: under plain SGD without clipping it equals `head_residual(at: gradient)`.
    """

    parallel: ClassVar = ("ddp", "fsdp")
    keeps_forward: ClassVar = False  # Q R equals W_0 to rounding only
    accepts_tied: ClassVar = False

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        if cfg.data.vocab_size < cfg.model.width:
            raise ConfigError(
                "data.vocab_size",
                cfg.data.vocab_size,
                f"is below model.width={cfg.model.width}, so frozen_column_space would freeze nothing",
                "Use a narrower model",
            )

    def transform_head(self, head: nn.Module, generator: Generator, std: float) -> nn.Module:
        from ..head import FrozenColumnHead

        return FrozenColumnHead.from_weight(head.weight, head.active)


@dataclass
class VocabExpansion(Intervention):
    """Classes that are never a target, in the head only: `size` classes in all, the common rows drawn first."""

    example: ClassVar = {"size": 48}
    neutral: ClassVar = {"size": 32}
    keeps_forward: ClassVar = False
    parallel: ClassVar = ("ddp", "fsdp")
    accepts_tied: ClassVar = False

    size: int = MISSING

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        if self.size < cfg.data.vocab_size:
            self.refuse(
                "size",
                self.size,
                f"is below data.vocab_size={cfg.data.vocab_size}",
                f"Use {cfg.data.vocab_size} or more",
            )
        first = next(iter(cfg.intervention))
        if first != self.name() and {"low_rank_head", "frozen_column_space"} & set(cfg.intervention):
            self.refuse(
                "size", self.size, f"must expand the head before {first} replaces it", "List vocab_expansion first"
            )

    def transform_head(self, head: nn.Module, generator: Generator, std: float) -> nn.Module:
        return head.expand(self.size - head.weight.shape[0], generator, std)
