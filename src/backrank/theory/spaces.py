"""Does the gradient stay in the column space the argument of backward_bottleneck needs? Constructed cases, float64.

Shapes: B samples, D inputs or width, H hidden units, K classes; W_1 H x D, W_2 K x H, errors e B x K as rows.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from backrank.grad import column_project
from backrank.spectra import effective_rank, gram_spectrum

# Singular values below this share of the largest count as zero: a Gram spectrum's noise lies at 1e-8.
RANK_CUTOFF = 1e-6


def ranks(matrix):
    """(rank, r_eff) of a matrix; the rank counts singular values above RANK_CUTOFF of the largest."""
    s = gram_spectrum(matrix)
    return int((s > RANK_CUTOFF * s.max()).sum()), effective_rank(s)


def outside_share(X_nm, basis_nr):
    """The share of X's energy (squared Frobenius norm) outside the column space of `basis_nr`; 0 for X = 0."""
    energy = X_nm.square().sum()
    return float((X_nm - column_project(basis_nr, X_nm)).square().sum() / energy) if energy > 0 else 0.0


def _normal(generator, *shape):
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float64)


def _linear(generator, *shape):
    """torch's own initial weight of a linear layer: uniform on +-1/sqrt(fan in)."""
    draw = torch.rand(*shape, generator=generator, device=generator.device, dtype=torch.float64)
    return (2 * draw - 1) / shape[1] ** 0.5


def random_jacobians(blocks, width, rank, norm, generator):
    """`blocks` Gaussian D x D products of that rank, each of spectral norm `norm`."""
    raw = [_normal(generator, width, rank) @ _normal(generator, rank, width) for _ in range(blocks)]
    return [norm * J / torch.linalg.matrix_norm(J, 2) for J in raw]


def backward_product(jacobians):
    """P_{>k} = (I + J_n) ... (I + J_1), D x D, of the residual blocks above layer k in forward order.

    Low rank in every J says nothing of P: a block of rank r moves at most r singular values away from 1.
    """
    P = torch.eye(jacobians[0].shape[-1], dtype=jacobians[0].dtype, device=jacobians[0].device)
    for J in jacobians:
        P = P + J @ P
    return P


class TwoLayer(NamedTuple):
    delta_rank: int
    delta_erank: float
    g1_rank: int
    g1_erank: float
    g2_rank: int
    g2_erank: float
    outside: float  # share of G_1's energy outside col(W_2^T)
    r_star: int  # rank of the errors
    r_a: int  # rank of the inputs


def two_layer(X_BD, W1_HD, W2_KH, e_BK, mask=True):
    """Ranks in the case f(x) = W_2 relu(W_1 x) + v^T x: deltas D_b W_2^T e_b, G_1 = delta^T X, G_2 = e^T relu(W_1 x).

    mask=False puts the identity in place of the ReLU mask D_b. v acts through the errors alone.
    """
    hidden = X_BD @ W1_HD.T
    on = (hidden > 0).to(hidden) if mask else torch.ones_like(hidden)
    delta = on * (e_BK @ W2_KH)
    G1, G2 = delta.T @ X_BD, e_BK.T @ (on * hidden)
    outside = outside_share(G1, W2_KH.T)
    return TwoLayer(*ranks(delta), *ranks(G1), *ranks(G2), outside, ranks(e_BK)[0], ranks(X_BD)[0])


def draw_two_layer(batch, width, hidden, classes, generator, softmax=False):
    """(X, W_1, W_2, e) for `two_layer`: Gaussian X, weights as torch draws them, errors Gaussian or of f itself.

    softmax=True: e = softmax(f(x)) - onehot of random labels; else Gaussian errors that know nothing of x, for which
    half of G_1's energy is expected outside col(W_2^T): of a mask that is on with probability p the mean, p W_2^T e,
    stays inside, the variance leaves: 1 - p of the whole. Sizes 2048, 32, 1000, 5 over 32 draws: deltas of rank 1000
    and r_eff 83.1 +- 0.2, a share of 0.495 +- 0.028 outside (mean, standard deviation); softmax=True: 71.5, 0.19.
    """
    X = _normal(generator, batch, width)
    W1, W2 = _linear(generator, hidden, width), _linear(generator, classes, hidden)
    if not softmax:
        return X, W1, W2, _normal(generator, batch, classes)
    v = _linear(generator, classes, width)
    labels = torch.randint(classes, (batch,), generator=generator, device=generator.device)
    logits = (X @ W1.T).relu() @ W2.T + X @ v.T
    return X, W1, W2, logits.softmax(1) - F.one_hot(labels, classes)


class Containment(NamedTuple):
    rank: int
    erank: float
    outside: float  # share of the energy outside the gradients' column space


def adam_sum(gradients, betas=(0.9, 0.999), eps=1e-8):
    """The sum of Adam's updates over the n x m `gradients` of successive steps, at learning rate 1, no decay."""
    parameter, optimiser = None, None
    for G in gradients:
        if parameter is None:
            parameter = torch.nn.Parameter(torch.zeros_like(G))
            optimiser = torch.optim.Adam([parameter], lr=1.0, betas=betas, eps=eps)
        parameter.grad = G
        optimiser.step()
    return -parameter.detach()


def adam_containment(rows, columns, rank, steps, generator):
    """Adam's total move over gradients U A_t, U n x r fixed and A_t r x m fresh at each step, all Gaussian.

    Adam divides element by element, which no projector on U commutes with; SGD's move has rank r, nothing outside. At
    128, 128, 5, 1000 over 16 draws: rank 127 or 128, r_eff 4.94 +- 0.04, 0.088 +- 0.011 outside.
    """
    U = _normal(generator, rows, rank)
    total = adam_sum(U @ _normal(generator, rank, columns) for _ in range(steps))
    return Containment(*ranks(total), outside_share(total, U))
