"""The steps of backward_bottleneck's two-layer proof, on the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .base import Measured, Probe, Snapshot


@dataclass
class ProofSteps(Probe):
    """f(x) = W_2 relu(W_1 x) + v^T x with errors e = softmax - onehot on the probe's batch: what the proof bounds.

    delta_rank, delta_erank   rank and r_eff of the deltas D_b W_2^T e_b; g1_, g2_: of the gradients of W_1 and W_2
    outside                   share of G_1's energy (squared Frobenius norm) outside col(W_2^T)
    r_star, r_a               ranks of the errors and of the inputs
    product, min              r* r_A, the paper's bound on r_eff(G_1), and min(r*, r_A), the one its argument would give
    """

    kinds: ClassVar[tuple[str, ...]] = ("two_layer",)

    every: int = 0

    def measure(self, snapshot: Snapshot) -> Measured:
        import torch

        from ..head import residual_chunks
        from ..theory.bounds import rank_limits
        from ..theory.spaces import two_layer

        W_1, W = snapshot.task.backbone.first.weight.detach().double(), snapshot.weight_VD.double()
        errors_BK = torch.cat([e for _, e in residual_chunks(snapshot.hidden_ND.double(), W, snapshot.targets_N)])
        steps = two_layer(snapshot.x_BT.flatten(1).double(), W_1, W[:, : len(W_1)], errors_BK)
        product, least = rank_limits(steps.r_star, steps.r_a)
        return {f"proof/{name}": v for name, v in {**steps._asdict(), "product": product, "min": least}.items()}, []
