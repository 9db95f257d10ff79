"""What passes from the logit gradient to the hidden gradient, and how the head's column space turns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Measured, Probe, Snapshot

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class HeadGradient(Probe):
    """Lost fraction of the logit gradient, its cosine, both nulls, kept energy over D/V, cond(W) (lost_in_backprop)."""

    def measure(self, snapshot: Snapshot) -> Measured:
        from ..head import head_gradient_stats

        stats = head_gradient_stats(snapshot.hidden_ND, snapshot.weight_VD, snapshot.targets_N)
        return {f"head/{key}": math.nan if value is None else float(value) for key, value in stats.items()}, []


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
