"""Auxiliary routes (causal_test): gradients that reach the backbone past the head, on top of ordinary backpropagation.

Each is a term of value 0 in the loss, t - t.detach(), so that the forward pass, the loss and the head's own update stay
the ordinary ones: t = <h, R> sends R (N x D, a constant) to the state h, and nothing else.

Shapes: N tokens, D width, V vocabulary, L receiving states, k rank. G = softmax - onehot is the logit gradient of the
summed loss (N x V), met in chunks of rows; the ordinary hidden gradient is G W.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import MISSING, DictConfig

from .base import Forward, Intervention

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..task import Task

AllReduce = Callable[[Any], Any] | None


@dataclass
class FeedbackRoute(Intervention):
    """Sends c G M to the states after the blocks `depths` (none: the hidden states in front of the head alone).

    c makes each state's RMS `scale` times that of the ordinary hidden gradient G W, one scalar over the whole batch.
    Each state has a B of its own, V x D with entries N(0, 1), drawn once by the seed's generator. matrix, what M is:
    `random`: B. `residual`: B - P_W B, so that only the part of G outside the current col(W) is carried. `oja` and
    `frequent_directions`: U U^T B, with U (V x k) the top right singular directions of G over the last `memory` steps
    or so, those before the current one (U U^T and not U alone, so that M does not turn with the basis of its span).
    """

    example: ClassVar = {"scale": 0.5}
    parallel: ClassVar = ("ddp", "fsdp")
    neutral: ClassVar = {"scale": 0.0}

    matrix: str = "random"
    scale: float = MISSING
    depths: list[int] = field(default_factory=list)
    rank: int = 8
    memory: float = 20.0

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        known = ("random", "residual", "oja", "frequent_directions")
        if self.matrix not in known:
            self.refuse("matrix", self.matrix, "is not known", "Use one of " + ", ".join(known))
        check_scale(self, cfg, whole_batch=True)
        check_depths(self, cfg)
        if self.matrix in known[2:]:
            self.check_rank(self.rank, cfg.model.width)
            if not 1 <= self.memory < math.inf:
                self.refuse("memory", self.memory, "is no number of steps", "Use 1 (this step alone) or more")
        if self.matrix == "residual" and cfg.data.vocab_size <= cfg.model.width:
            problem = f"has nothing to carry: col(W) is everything at data.vocab_size={cfg.data.vocab_size}"
            self.refuse("matrix", self.matrix, problem, "Use a narrower model")

    def check_parallel(self, mode: str) -> None:
        super().check_parallel(mode)
        if self.matrix == "frequent_directions":
            problem = f"takes the rows of a batch one after the other, which parallel={mode} splits"
            self.refuse("matrix", self.matrix, problem, "Set parallel=none, or matrix=oja")

    def attach(self, task: Task, fresh: Callable[[int], Any], seed: int) -> None:
        import torch

        from ..grad import random_basis

        vocab, width = task.head.weight.shape
        draws = torch.Generator().manual_seed(seed)
        self.state["returns"] = torch.randn(max(1, len(self.depths)), vocab, width, generator=draws)
        if self.matrix == "oja":
            self.state["tracked"] = random_basis(vocab, self.rank, draws).T.contiguous()
        elif self.matrix == "frequent_directions":
            self.state["tracked"] = torch.zeros(min(2 * self.rank, vocab - 1), vocab)

    def matrices(self, weight_VD: Tensor) -> Iterable[Tensor]:
        """M of every receiving state, V x D each."""
        from torch.nn.functional import normalize

        from ..grad import column_project

        returns = self.state["returns"]
        if self.matrix == "residual":
            return [B - column_project(weight_VD, B) for B in returns]
        if self.matrix != "random":  # the rows of a sketch are orthogonal, the longest first
            U_kV = normalize(self.state["tracked"][: self.rank], dim=1)
            return U_kV.T @ (U_kV @ returns)
        return returns

    def loss(self, at: Forward) -> Tensor:
        import torch

        from ..head import residual_chunks

        returned, tracked, pull = [], self.state.get("tracked"), 0.0
        with torch.autocast(at.hidden_ND.device.type, enabled=False):
            weight = at.weight_VD.detach()
            M = torch.cat([weight, *self.matrices(weight)], dim=1)
            if self.matrix == "frequent_directions":
                tracked = tracked * (1 - 1 / self.memory) ** 0.5
            for _, G in residual_chunks(at.hidden_ND, weight, at.targets_N):
                returned.append(G @ M.to(G.dtype))
                if self.matrix == "oja":
                    pull = pull + (tracked.to(G.dtype) @ G.T) @ G
                elif self.matrix == "frequent_directions":
                    tracked = frequent_directions(tracked, G)
            if self.matrix == "oja":
                pull = pull if self.all_reduce is None else self.all_reduce(pull)
                tracked = oja(tracked, pull, 1 / self.memory)
        self.seen = tracked  # of this forward pass; it counts only if an update follows
        ordinary, *routes = torch.cat(returned).split(weight.shape[1], dim=1)
        states = [at.taps[depth] for depth in self.depths] or [at.hidden_ND]
        return send(states, routes, ordinary, self.scale, at.denominator, self.all_reduce)

    def before_update(self, head: nn.Module) -> None:
        if "tracked" in self.state:
            self.state["tracked"].copy_(self.seen)


@dataclass
class IntermediateLoss(Intervention):
    """Sends the gradient of `scale` times a further prediction loss at each state after the blocks `depths`.

    The state, normalised without parameters, meets the shared head's weight as a constant: the head learns from the
    last state alone, and what differs from ordinary training is the gradient that the blocks below receive.
    """

    example: ClassVar = {"depths": [1], "scale": 0.5}
    parallel: ClassVar = ("ddp", "fsdp")
    neutral: ClassVar = {"depths": [1], "scale": 0.0}

    depths: list[int] = MISSING
    scale: float = MISSING

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        check_scale(self, cfg)
        check_depths(self, cfg)
        if not self.depths:
            self.refuse("depths", self.depths, "leaves nothing to predict from", "Name one block or more")

    def loss(self, at: Forward) -> Tensor:
        from torch.nn.functional import layer_norm

        from ..head import chunked_loss

        weight = at.weight_VD.detach()
        states = [layer_norm(at.taps[depth], at.taps[depth].shape[-1:]) for depth in self.depths]
        term = self.scale * sum(chunked_loss(h, weight, at.targets_N, at.denominator) for h in states)
        return term - term.detach()


@dataclass
class MetaRoute(Intervention):
    """Sends c G U Q to the hidden states in front of the head; Q (k x D) is learned on fresh batches, U is random.

    c as in `FeedbackRoute`; U has k orthonormal columns. Every `every` steps, except before the first, Q moves so that
    one plain gradient step of size `inner_lr` on a fresh batch, route included, lowers the loss on another one: by
    `meta_lr` of its norm, against the gradient of that loss (one-step meta-learning).
    """

    example: ClassVar = {"scale": 0.5, "rank": 3, "every": 4}
    parallel: ClassVar = ("ddp",)  # its inner step differentiates through whole weights
    neutral: ClassVar = {"scale": 0.0}

    scale: float = MISSING
    rank: int = 8
    every: int = 5
    inner_lr: float = 0.1
    meta_lr: float = 0.1

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        check_scale(self, cfg, whole_batch=True)
        self.check_rank(self.rank, cfg.model.width)
        for key in ("every", "inner_lr", "meta_lr"):
            if not 0 < getattr(self, key) < math.inf:
                self.refuse(key, getattr(self, key), "must be finite and above 0", "Leave it at its default")

    def attach(self, task: Task, fresh: Callable[[int], tuple[Tensor, Tensor]], seed: int) -> None:
        import torch

        from ..grad import random_basis

        self.task, self.fresh = task, fresh
        vocab, width = task.head.weight.shape
        draws = torch.Generator().manual_seed(seed)
        self.state["directions"] = random_basis(vocab, self.rank, draws)
        self.state["mixing"] = torch.randn(self.rank, width, generator=draws)

    def loss(self, at: Forward) -> Tensor:
        return self.term(at, self.state["mixing"], self.all_reduce)

    def term(self, at: Forward, mixing_kD: Tensor, all_reduce: AllReduce = None) -> Tensor:
        import torch

        from ..head import residual_chunks

        with torch.autocast(at.hidden_ND.device.type, enabled=False):
            weight = at.weight_VD.detach()
            M = torch.cat([weight, self.state["directions"]], dim=1)
            chunks = residual_chunks(at.hidden_ND, weight, at.targets_N)
            returned = torch.cat([G @ M.to(G.dtype) for _, G in chunks])
            ordinary, seen = returned.split([weight.shape[1], self.rank], dim=1)
            return send(
                [at.hidden_ND], [seen @ mixing_kD.to(seen.dtype)], ordinary, self.scale, at.denominator, all_reduce
            )

    def begin_step(self, step: int, head: nn.Module) -> None:
        if step == 0 or step % self.every:  # a probe of the initial state begins step 0 too
            return
        mixing, gradient = self.state["mixing"], self.meta_gradient(step // self.every)
        mixing -= self.meta_lr * mixing.norm() * gradient / positive(gradient.norm())

    def meta_gradient(self, index: int) -> Tensor:
        """Gradient by Q (k x D) of the loss on fresh batch 2 i + 1 after the step on fresh batch 2 i."""
        import torch
        from torch.func import functional_call
        from torch.nn.attention import SDPBackend, sdpa_kernel

        from ..head import plain_loss

        mixing = self.state["mixing"].clone().requires_grad_()
        named = {name: p for name, p in self.task.named_parameters() if p.requires_grad}
        # the one attention kernel that can be differentiated twice
        with sdpa_kernel(SDPBackend.MATH), self.task.evaluating():
            x, y = self.fresh(2 * index)
            at = Forward(self.task.hidden(x), self.task.head.weight, y.flatten(), (y >= 0).sum(), {})
            inner = plain_loss(*at[:4]) + self.term(at, mixing)
            gradients = torch.autograd.grad(inner, list(named.values()), create_graph=True)
            moved = {name: p - self.inner_lr * g for (name, p), g in zip(named.items(), gradients, strict=True)}
            x, y = self.fresh(2 * index + 1)
            outer = functional_call(self.task, moved, (x, y, (y >= 0).sum()), {"sites": False, "loss": "plain"})
            return torch.autograd.grad(outer, mixing)[0]


def send(
    states: list[Tensor],
    routes: list[Tensor],
    ordinary_ND: Tensor,
    scale: float,
    denominator: Any,
    all_reduce: AllReduce = None,
) -> Tensor:
    """The term of value 0 whose gradient at each state is its route's, at `scale` times the RMS of the ordinary one.

    states, routes: N x D each; routes of the summed loss. Zero routes stay zero. `all_reduce` sums over the processes
    that share the batch.
    """

    def norm(x_ND: Tensor) -> Tensor:
        own = x_ND.double().norm()
        return own if all_reduce is None else all_reduce(own.square()).sqrt()

    size = scale * norm(ordinary_ND)
    factors = [(size / positive(norm(route))).to(route.dtype) for route in routes]
    parts = zip(states, routes, factors, strict=True)
    term = sum((state * (factor * route / denominator)).sum() for state, route, factor in parts)
    return term - term.detach()


def positive(norm: Tensor) -> Tensor:
    """The norm, or 1 in place of 0: what is divided by it stays zero, its derivative too."""
    import torch

    return torch.where(norm > 0, norm, 1.0)


def oja(directions_kV: Tensor, pull_kV: Tensor, rate: float) -> Tensor:
    """One step of Oja's subspace rule: orthonormal rows again, turned towards pull = U^T (G^T G) (k x V).

    The step is `rate` times the pull over its longest row, so that the strongest direction grows by 1 + rate.
    """
    import torch

    step = rate * pull_kV / positive(pull_kV.norm(dim=1).amax())
    return torch.linalg.qr((directions_kV + step.to(directions_kV.dtype)).T).Q.T


def frequent_directions(sketch_lV: Tensor, rows_MV: Tensor) -> Tensor:
    """The sketch after further rows (Liberty, 2013; Ghashami et al., 2016): orthogonal rows, the longest first.

    All squared singular values fall by the first that is left out, so that S^T S never exceeds the sum of G^T G. Needs
    V > l.
    """
    import torch
    from torch.nn.functional import normalize

    from ..grad import top_basis

    stacked = torch.cat([sketch_lV, rows_MV])
    tall = stacked.shape[0] > stacked.shape[1]
    gram = stacked.T @ stacked if tall else stacked @ stacked.T
    top = top_basis(gram, len(sketch_lV) + 1)
    energy = ((gram @ top) * top).sum(0)
    rows = top.T if tall else normalize(top.T @ stacked, dim=1)
    return ((energy - energy[-1]).clamp(min=0).sqrt()[:, None] * rows)[:-1]


def check_scale(route: Any, cfg: DictConfig, whole_batch: bool = False) -> None:
    if not 0 <= route.scale < math.inf:
        route.refuse("scale", route.scale, "must be finite and 0 or greater", "For example 0.3")
    if whole_batch and cfg.train.accumulate > 1:
        problem = f"is taken over the whole batch, which train.accumulate={cfg.train.accumulate} splits"
        route.refuse("scale", route.scale, problem, "Set train.accumulate=1")


def check_depths(route: Any, cfg: DictConfig) -> None:
    if len(set(route.depths)) < len(route.depths) or not all(1 <= d <= cfg.model.layers for d in route.depths):
        problem = f"does not name different blocks of 1 to model.layers={cfg.model.layers}"
        route.refuse("depths", route.depths, problem, "Count blocks from 1")
    if route.depths and cfg.train.compile != "none":  # the backbone collects its states behind a lock
        problem = f"cannot be read within a graph of train.compile={cfg.train.compile}"
        route.refuse("depths", route.depths, problem, "Set train.compile=none")
