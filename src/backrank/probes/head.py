"""What passes from the logit gradient to the hidden gradient, and how the head's column space turns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .base import Measured, Probe, Snapshot

if TYPE_CHECKING:
    from torch import Tensor


JACOBIANS = 64  # tokens of a head that is no product W h: each has a V x D Jacobian of its own


@dataclass
class HeadGradient(Probe):
    """Lost fraction of the logit gradient, its cosine, both nulls, kept energy over D/V, cond(W) (lost_in_backprop)."""

    def measure(self, snapshot: Snapshot) -> Measured:
        from ..head import IGNORE, head_gradient_stats

        head = snapshot.task.head
        if head.linear:
            stats = head_gradient_stats(snapshot.hidden_ND, snapshot.weight_VD, snapshot.targets_N)
        else:
            seen = (snapshot.targets_N != IGNORE).nonzero().flatten()
            seen = seen[:: max(1, len(seen) // JACOBIANS)][:JACOBIANS]  # all over the sequences
            stats = jacobian_stats(head, snapshot.hidden_ND[seen], snapshot.targets_N[seen])
        return {f"head/{key}": math.nan if value is None else float(value) for key, value in stats.items()}, []


def jacobian_stats(head: Any, hidden_ND: Tensor, targets_N: Tensor) -> dict[str, float]:
    """The same of any head f: R^D -> R^V, whose outputs' gradient G reaches the state through its Jacobian J, V x D.

    lost: norm of G outside each token's col(J) over that of G; rank: the largest of a J.
    """
    import warnings

    import torch

    from ..grad import gram_pinv

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's own, of what its forward mode is made of
        G_NV = head(hidden_ND).softmax(-1).double()
        G_NV[torch.arange(len(G_NV)), targets_N] -= 1
        kept, ranks = [], []
        for hidden_D, g_V in zip(hidden_ND, G_NV, strict=True):
            J_VD = torch.func.jacfwd(head)(hidden_D).double()
            inverse_DD, rank, _ = gram_pinv(J_VD.T @ J_VD)
            at_state_D = J_VD.T @ g_V
            kept.append(float(at_state_D @ inverse_DD @ at_state_D))
            ranks.append(int(rank))
    share, null = sum(kept) / float(G_NV.square().sum()), max(ranks) / G_NV.shape[1]
    return {
        "lost": (1 - share) ** 0.5,
        "cosine": share**0.5,
        "null_lost": (1 - null) ** 0.5,
        "null_cosine": null**0.5,
        "kept_over_null": share / null,
        "rank": max(ranks),
        "tokens": len(targets_N),
    }


def principal_cosines(first_VD: Tensor, second_VD: Tensor) -> Tensor:
    """Cosines of the principal angles between two column spaces, in falling order, float64.

    They are the singular values of Q_1^T Q_2 with Q = W (W^T W)^(-1/2); directions below 1e-10 of the largest
    eigenvalue of W^T W do not count, so that a head of rank r < D has r angles.
    """
    import torch

    def whiten(w_VD: Tensor) -> Tensor:  # W (W^T W)^(-1/2) = w @ this
        values, vectors = torch.linalg.eigh(w_VD.T @ w_VD)
        keep = values > 1e-10 * values[-1]
        return vectors[:, keep] / values[keep].sqrt()

    a, b = first_VD.double(), second_VD.double()
    return torch.linalg.svdvals(whiten(a).T @ (a.T @ b) @ whiten(b)).clamp(max=1)


@dataclass
class FeedbackRotation(Probe):
    """Principal angles of col(W_t) to col(W_0): the mechanism causal_test names and does not measure there."""

    def measure(self, snapshot: Snapshot) -> Measured:
        weight = snapshot.weight_VD
        if snapshot.step == 0:
            self.state["initial"] = weight.clone()
        if not (weight.isfinite().all() and weight.any()):  # no column space; the loss is about to say why
            return {"rotation/mean_cos": math.nan, "rotation/min_cos": math.nan}, []
        cosines = principal_cosines(weight, self.state["initial"])
        return {"rotation/mean_cos": float(cosines.mean()), "rotation/min_cos": float(cosines[-1])}, []
