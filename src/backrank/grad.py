"""Gradient maps: identity in the forward pass, a pure function on the gradient in the backward pass.

Shapes: N tokens (batch x time), D width, V vocabulary, r rank. A basis is a D x r matrix with orthonormal columns.
"""

import torch
from torch.autograd.function import once_differentiable

# Eigenvalues of W^T W below this share of the largest count as zero, that is singular values below 1e-5 of sigma_1: far
# above the rounding of a product A B of rank r < D in float32 (about 1e-14), far below a usable direction of a head.
RANK_CUTOFF = 1e-10


class _GradMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, fn):
        ctx.fn = fn
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, g):
        return ctx.fn(g).to(g.dtype), None


def grad_map(x, fn):
    """Return `x` unchanged; its gradient g becomes `fn(g)`, cast to g's dtype.

    `fn` takes and returns a tensor of x's shape and must not branch on tensor values in Python. It may close over
    tensors that are updated in place between steps: compiled graphs see the updates. Part of the graph, so unlike a
    module hook it holds under compilation, activation checkpointing and `torch.autograd.grad`. A second derivative
    through `fn` raises RuntimeError.
    """
    return _GradMap.apply(x, fn)


def at_least_float32(x):
    """x in float32 if it is a half type, else as it is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def reduce_rank(g_ND, basis_Dr, rms="tensor", all_reduce=None):
    """Project each token's gradient on span(V_r) and restore its size: c g V_r V_r^T (causal_test, backward-only rank).

    rms: "tensor" makes the root mean square over the whole tensor equal to g's, "token" that of every row, "none"
    leaves c = 1. `all_reduce` maps the two summed squares (a float64 vector of 2) to their sums over all processes,
    for rms="tensor" with the batch split. Rows whose projection is no more than rounding error become zero, so zero
    gradients stay zero; a non-finite gradient stays non-finite. Raises ValueError for another `rms`.
    """
    if rms not in ("tensor", "token", "none"):
        raise ValueError(f"rms must be 'tensor', 'token' or 'none', got {rms!r}")
    with torch.autocast(g_ND.device.type, enabled=False):
        g = at_least_float32(g_ND)
        basis = basis_Dr.to(g.dtype)
        out = (g @ basis) @ basis.T
        if rms != "none":
            dim = None if rms == "tensor" else -1
            # float64: squares of a gradient below 1e-19 would underflow.
            squares = torch.stack([x.double().square().sum(dim, keepdim=rms == "token") for x in (g, out)])
            if all_reduce is not None and rms == "tensor":
                squares = all_reduce(squares)
            before, after = squares.sqrt()
            scale = torch.where(after > torch.finfo(g.dtype).eps * before, before / after, 0.0)
            out = out * scale.to(g.dtype)
        return out.to(g_ND.dtype)


@torch.no_grad()
def gram(x_ND):
    """x^T x, the D x D Gram matrix in float64 (a float32 one loses singular values below 3e-4 of the largest)."""
    with torch.autocast(x_ND.device.type, enabled=False):
        x = x_ND.detach().double()
        return x.T @ x


def _eigh(gram_DD):
    # Non-finite entries count as zero so that the solver does not raise in the middle of a step: the gradient or weight
    # that is multiplied with the result is non-finite itself, stays so, and is reported as such.
    return torch.linalg.eigh(torch.nan_to_num(gram_DD.double(), nan=0.0, posinf=0.0, neginf=0.0))


@torch.no_grad()
def top_basis(gram_DD, rank):
    """Eigenvectors of the `rank` largest eigenvalues of a symmetric D x D matrix, largest first: D x rank.

    Solved in float64, returned in the dtype of `gram_DD`, at least float32. Raises ValueError unless 1 <= rank <= D.
    """
    width = gram_DD.shape[-1]
    if not 1 <= rank <= width:
        raise ValueError(f"rank must lie in 1..{width} (the width), got {rank}")
    vectors = _eigh(gram_DD).eigenvectors
    return at_least_float32(vectors[:, width - rank :].flip(-1).to(gram_DD.dtype))


def head_basis(W_VD, rank):
    """Top `rank` right singular vectors of the head, D x rank: W V_r V_r^T is its best rank-r approximation."""
    return top_basis(gram(W_VD), rank).to(at_least_float32(W_VD).dtype)


def gradient_basis(g_ND, rank, all_reduce=None):
    """Top `rank` right singular vectors of the hidden gradient, D x rank; with N < rank the rest is arbitrary.

    `all_reduce` maps the D x D Gram matrix to its sum over all processes, with the batch split.
    """
    gram_DD = gram(g_ND) if all_reduce is None else all_reduce(gram(g_ND))
    return top_basis(gram_DD, rank).to(at_least_float32(g_ND).dtype)


def random_basis(width, rank, generator):
    """Uniformly random orthonormal columns, width x rank, float32, on the generator's device."""
    if not 1 <= rank <= width:
        raise ValueError(f"rank must lie in 1..{width} (the width), got {rank}")
    draw = torch.randn(width, rank, dtype=torch.float64, generator=generator, device=generator.device)
    return torch.linalg.qr(draw).Q.float()


@torch.no_grad()
def gram_pinv(gram_DD):
    """Pseudo-inverse of a float64 Gram matrix, its rank (a tensor) and its eigenvalues, ascending."""
    values, vectors = _eigh(gram_DD)
    keep = values > RANK_CUTOFF * values[-1]
    inverse = torch.where(keep, 1.0 / values, 0.0)
    return (vectors * inverse) @ vectors.T, keep.sum(), values


@torch.no_grad()
def column_project(W_VD, X_VD):
    """The part of X inside the column space of W: W (W^T W)^+ W^T X, V x D, in X's dtype.

    In float64 throughout: in float32 the error would grow with the condition number of W. Heads of rank below D,
    such as W = A B, are projected on the space they span.
    """
    with torch.autocast(W_VD.device.type, enabled=False):
        W, X = W_VD.detach().double(), X_VD.detach().double()
        inverse, _, _ = gram_pinv(W.T @ W)
        return (W @ (inverse @ (W.T @ X))).to(X_VD.dtype)
