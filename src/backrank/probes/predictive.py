"""What might tell where the loss goes: the features of the head's gradient that causal_test tries as predictors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .base import Measured, Probe, Snapshot

if TYPE_CHECKING:
    from torch import Tensor

MAIN = 0.7  # share of the energy of G that the main directions hold, as lost_in_backprop counts them


@dataclass
class HeadFeatures(Probe):
    """Candidate features of the predictive study (causal_test, which names them; the definitions are ours).

    G: logit gradient of the supervised tokens, N x V; P: projector on col(W); y: target; c: top competitor, the largest
    coordinate of a token's gradient besides y's.
    retained_norm            ||G P||_F / ||G||_F = sqrt(1 - lost^2)
    angle                    between G and G P, the arc cosine of it in degrees
    target_preservation      sum over tokens of (g P)_y / sum of g_y; sums, since a single coordinate may be close to 0
    competitor_preservation  the same at c
    directions               how many principal directions of G hold 70 % of its energy
    strength                 share of the energy in the first of them
    cond                     largest over smallest non-zero singular value of W
    """

    def measure(self, snapshot: Snapshot) -> Measured:
        features = head_features(snapshot.hidden_ND, snapshot.weight_VD, snapshot.targets_N)
        return {f"features/{name}": value for name, value in features.items()}, []


def head_features(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor) -> dict[str, float]:
    """The features of `HeadFeatures` by name, nan where one has no meaning.

    In float64 by Gram identities, (g P)_v = g W (W^T W)^+ w_v: no V x D factorisation, and exact for ranks below D.
    """
    import torch

    from ..grad import gram, gram_pinv
    from ..head import IGNORE, head_gradient_stats, residual_chunks
    from ..spectra import gram_spectrum

    H, W = hidden_ND.double(), weight_VD.double()
    stats = head_gradient_stats(H, W, targets_N)
    retained, cond = (math.nan if stats[key] is None else float(stats[key]) for key in ("cosine", "cond"))
    supervised = targets_N != IGNORE  # a held-out split shorter than the batch is padded
    G = torch.cat([g for _, g in residual_chunks(H, W, targets_N)])[supervised]
    kept_ND = G @ W @ gram_pinv(gram(W))[0]
    target = targets_N[supervised].unsqueeze(1)
    competitor = G.scatter(1, target, -math.inf).argmax(1, keepdim=True)

    def preserved(at: Tensor) -> float:
        return float((kept_ND * W[at.squeeze(1)]).sum() / G.gather(1, at).sum())

    energy = gram_spectrum(G).square()
    shares = energy / energy.sum()
    directions = int((shares.cumsum(0) < MAIN).sum()) + 1 if shares.isfinite().all() else math.nan
    return {
        "retained_norm": retained,
        "angle": math.degrees(math.acos(retained)),
        "target_preservation": preserved(target),
        "competitor_preservation": preserved(competitor),
        "directions": directions,
        "strength": float(shares[0]),
        "cond": cond,
    }
