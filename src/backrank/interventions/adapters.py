"""Low-rank adapters: a fine-tune that moves every counted matrix by B A alone, with ranks by layer at one budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import MISSING, DictConfig

from .base import Intervention

if TYPE_CHECKING:
    from ..task import Task

ALLOCATIONS = ("uniform", "erank", "early", "late")


@dataclass
class Adapters(Intervention):
    """Freezes the model and trains W + B A in its counted matrices (LoRA; backward_bottleneck's ranks from r_eff).

    B starts at zero, A at N(0, 1/m), W being n x m. All allocations have the parameters of rank `rank` in every
    matrix, to within one rank: `uniform` is that, `erank` makes ranks proportional to r_eff of the weights at the
    start, `early` and `late` give all to the first or to the last half of the matrices.
    """

    example: ClassVar = {"rank": 2}
    parallel: ClassVar = ("ddp", "fsdp")

    rank: int = MISSING
    allocate: str = "uniform"

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        self.check_rank(self.rank, cfg.model.width)
        if "forgetting" in cfg.probe:
            self.refuse("rank", self.rank, "freezes what probe forgetting follows", "Leave the probe out")
        if self.allocate not in ALLOCATIONS:
            self.refuse("allocate", self.allocate, "is not known", f"Use one of {', '.join(ALLOCATIONS)}")

    def attach(self, task: Task, fresh: Callable[[int], Any], seed: int) -> None:
        import torch
        from torch import nn
        from torch.nn.utils.parametrize import register_parametrization

        from ..probes.spectra import parts
        from ..spectra import effective_rank, gram_spectrum

        class Plus(nn.Module):
            def __init__(self, A: torch.Tensor, B: torch.Tensor):
                super().__init__()
                self.A, self.B = nn.Parameter(A), nn.Parameter(B)

            def forward(self, weight: torch.Tensor) -> torch.Tensor:
                return weight + (self.B @ self.A).view_as(weight)

        named = dict(task.named_parameters())
        weights = {name: named[name] for name in parts(task)["block"] if not name.startswith("head.")}
        shapes = [(W.shape[0], W[0].numel()) for W in weights.values()]
        half = len(weights) // 2
        shares = {
            "uniform": lambda: [1.0] * len(weights),
            "erank": lambda: [effective_rank(s) for s in gram_spectrum(list(weights.values()), list(weights))],
            "early": lambda: [float(i < half) for i in range(len(weights))],
            "late": lambda: [float(i >= len(weights) - half) for i in range(len(weights))],
        }[self.allocate]()
        self.ranks = dict(zip(weights, allocated(shapes, shares, self.rank), strict=True))
        draws = torch.Generator().manual_seed(seed)
        for parameter in task.parameters():
            parameter.requires_grad_(False)
        for (name, W), (n, m) in zip(weights.items(), shapes, strict=True):
            A = torch.randn(self.ranks[name], m, generator=draws) * m**-0.5
            path, _, leaf = name.rpartition(".")
            if self.ranks[name]:
                plus = Plus(A.to(W), torch.zeros(n, self.ranks[name]).to(W))
                register_parametrization(task.get_submodule(path), leaf, plus)


def allocated(shapes: Sequence[tuple[int, int]], shares: Sequence[float], rank: int) -> list[int]:
    """Ranks proportional to `shares` whose parameters, k (n + m) of a matrix, are at most those of `rank` everywhere.

    No rank above its matrix's; of what rounding leaves, each matrix gets one more in order of the largest remainder.
    """
    costs = [n + m for n, m in shapes]
    most = [min(shape) if share > 0 else 0 for shape, share in zip(shapes, shares, strict=True)]
    budget = rank * sum(costs)
    low, high = 0.0, max(min(s) / w for s, w in zip(shapes, shares, strict=True) if w > 0)
    for _ in range(100):  # the scale at which the ranks, not yet rounded, cost the budget
        scale = (low + high) / 2
        cost = sum(c * min(scale * w, k) for c, w, k in zip(costs, shares, most, strict=True))
        low, high = (scale, high) if cost < budget else (low, scale)
    exact = [min(low * w, k) + 1e-9 for w, k in zip(shares, most, strict=True)]
    ranks = [int(x) for x in exact]
    for i in sorted(range(len(ranks)), key=lambda i: ranks[i] - exact[i]):
        if ranks[i] < most[i] and sum(map(int.__mul__, ranks, costs)) + costs[i] <= budget:
            ranks[i] += 1
    return ranks
