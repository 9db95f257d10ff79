"""The loss where the logits move by an update of a given norm, along their gradient and along what a head can realise.

Shapes: N tokens, D width, V vocabulary, r rank of W. Z = H W^T are the logits, G = softmax(Z) - onehot their gradient
of the summed loss; dZ is the change of all N x V logits together, one step length for the whole batch.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from backrank.head import IGNORE, residual_chunks
from backrank.theory.logit_gradient import column_space

DIRECTIONS = ("gradient", "projected", "realizable", "both", "random_subspace", "random_inside")


class Curves(NamedTuple):
    """`loss`: the mean loss in nats where they stay; `norm`: ||Z||_F, each token's logits around their mean."""

    loss: float
    norm: float
    slope: dict[str, float]  # fall of the summed loss by unit ||dZ||_F, in the limit of small steps
    losses: dict[str, torch.Tensor]  # at every step


@torch.no_grad()
def curves(H_ND, W_VD, targets_N, steps: Sequence[float], generator):
    """Losses along each of DIRECTIONS at ||dZ||_F of `steps` times `norm`, a Curves.

    gradient         -G: every logit on its own
    projected        -G P, P the projector on col(W): the nearest to -G among dZ = dH W^T
    realizable       -G W W^T: dZ = dH W^T with dH = -G W, the step along the hidden gradient (the paper's)
    both             -(G W W^T + H H^T G): to first order that of the head's weight beside it
    random_subspace  -G R, R the projector on a drawn subspace of the rank of W
    random_inside    A W^T, A Gaussian: inside col(W), and of no use

    ValueError where no token is supervised.
    """
    seen = targets_N != IGNORE
    H, y, W = H_ND[seen], targets_N[seen], W_VD
    if not len(y):
        raise ValueError("there is no supervised token")
    space = column_space(W)
    drawn = torch.randn(len(W), space.rank, generator=generator, device=generator.device).to(W)
    random = column_space(drawn)
    A = torch.randn(H.shape, generator=generator, device=generator.device).to(H)
    dW_VD = torch.zeros_like(W, dtype=torch.float64)
    for chunk, G in residual_chunks(H, W, y):
        dW_VD += (G.T @ H[chunk]).double()
    dW_VD = dW_VD.to(W)

    def project(G, onto):
        return (((G @ onto.W_VD).double() @ onto.white_Dr @ onto.white_Dr.T).to(G) @ onto.W_VD.T).neg_()

    def directions():
        """Chunk by chunk: which tokens, G, and what each direction makes of it."""
        for chunk, G in residual_chunks(H, W, y):
            realizable = (G @ W) @ W.T
            yield (
                chunk,
                G,
                {
                    "gradient": lambda G=G: -G,
                    "projected": lambda G=G: project(G, space),
                    "realizable": lambda r=realizable: -r,
                    "both": lambda r=realizable, c=chunk: -(r + H[c] @ dW_VD.T),
                    "random_subspace": lambda G=G: project(G, random),
                    "random_inside": lambda c=chunk: A[c] @ W.T,
                },
            )

    sums = {name: torch.zeros(2, dtype=torch.float64, device=W.device) for name in DIRECTIONS}
    energy, loss = torch.zeros(2, dtype=torch.float64, device=W.device)
    for chunk, G, made in directions():
        Z = H[chunk] @ W.T
        loss += F.cross_entropy(Z, y[chunk], reduction="none").double().sum()
        energy += Z.sub_(Z.mean(1, keepdim=True)).square().sum(dtype=torch.float64)
        for name, make in made.items():
            dZ = make()
            sums[name] += torch.stack([dZ.square().sum(dtype=torch.float64), -(dZ * G).sum(dtype=torch.float64)])
    norm = float(energy.sqrt())
    lengths = {name: float(square.sqrt()) for name, (square, _) in sums.items()}
    losses = {name: torch.zeros(len(steps), dtype=torch.float64, device=W.device) for name in DIRECTIONS}
    for chunk, _, made in directions():
        Z = H[chunk] @ W.T
        for name, make in made.items():
            dZ = make()
            for i, step in enumerate(steps):
                moved = torch.add(Z, dZ, alpha=step * norm / lengths[name])
                losses[name][i] += F.cross_entropy(moved, y[chunk], reduction="none").double().sum()
    return Curves(
        float(loss) / len(y),
        norm,
        {name: float(inner) / lengths[name] for name, (_, inner) in sums.items()},
        {name: (values / len(y)).cpu() for name, values in losses.items()},
    )


def best_fall(loss, losses):
    """The largest fall of the loss with a step up to each length: rises from step to step, 0 where there is none."""
    return (loss - losses).clamp(min=0).cummax(0).values
