"""What the head passes on of the logit gradient, over any number of tokens: nothing of N x V is kept.

G = softmax(H W^T) - onehot, N x V, is a token's gradient of its own loss in its logits; what reaches the model is its
part inside col(W). Shapes: N tokens, D width, V vocabulary, r rank of W. Products run in the inputs' dtype, energies
and what follows from them in float64. With dH = G W the energy inside is dH (W^T W)^+ dH^T, so V x D is never
factorised. In float32 a relative error of cond(W) 1e-7 in the norm inside remains.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from backrank.grad import RANK_CUTOFF, gram
from backrank.head import IGNORE, residual_chunks

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
TOP = 10  # coefficients of a token that count as its largest; the others are its tail
RESOLVED = 1e-6  # of sigma_1: what a float64 Gram matrix resolves to 1e-5
BLOCK = 1 << 25  # float64 entries held at once


class ColumnSpace(NamedTuple):
    W_VD: torch.Tensor
    white_Dr: torch.Tensor  # float64: W white has orthonormal columns, so dH white are coordinates in col(W)
    cond: float  # largest over smallest singular value that is not zero

    @property
    def rank(self):
        return self.white_Dr.shape[1]


def column_space(W_VD):
    """col(W) by the float64 Gram matrix. Raises ValueError for a zero or non-finite W."""
    if not (W_VD.isfinite().all() and W_VD.any()):
        raise ValueError("a zero or non-finite head has no column space")
    values, vectors = torch.linalg.eigh(gram(W_VD))
    keep = values > RANK_CUTOFF * values[-1]
    values, vectors = values[keep], vectors[:, keep]
    return ColumnSpace(W_VD.detach(), vectors * values.rsqrt(), float((values[-1] / values[0]).sqrt()))


class Passed(NamedTuple):
    """Of each supervised token, float64: ||G||^2, its part inside col(W), and the loss in nats."""

    total_N: torch.Tensor
    kept_N: torch.Tensor
    loss_N: torch.Tensor


def _supervised(H_ND, targets_N):
    seen = targets_N != IGNORE
    return (H_ND, targets_N) if bool(seen.all()) else (H_ND[seen], targets_N[seen])


def _inside(G_NV, space):
    """Coordinates of the rows of G P, P the projector on col(W), in an orthonormal basis: N x r, float64."""
    return (G_NV @ space.W_VD).double() @ space.white_Dr


@torch.no_grad()
def passed(H_ND, targets_N, space):
    """A Passed of one batch; `torch.cat` its parts over batches. Tokens without supervision are left out."""
    H_ND, targets_N = _supervised(H_ND, targets_N)
    parts = []
    for chunk, G in residual_chunks(H_ND, space.W_VD, targets_N):
        total = torch.linalg.vector_norm(G, dim=1).double().square()
        # p_y would be 1 + G_y, which has no digits left where p_y is small; -ln p_y = z_k - z_y - ln p_k for any k
        p_k, k = G.max(1)
        gap = (H_ND[chunk] * (space.W_VD[k] - space.W_VD[targets_N[chunk]])).sum(1)
        loss = torch.where(p_k > 0, gap - p_k.log(), 0)  # the others' shares may underflow
        parts.append((total, _inside(G, space).square().sum(1), loss.double()))
    empty = H_ND.new_zeros(0, dtype=torch.float64)
    return Passed(*(torch.cat(part) for part in zip(*parts, strict=True))) if parts else Passed(empty, empty, empty)


def lost(total, kept):
    """sqrt(1 - kept / total), norm not squared: a share outside col(W)."""
    return (1 - (kept / total).clamp(0, 1)).sqrt()


def quantiles(values_N, weights_N=None, at=QUANTILES):
    """The least values with at least these shares of the weight (null: equal) at or below them, and the mean."""
    weights_N = torch.ones_like(values_N) if weights_N is None else weights_N
    order = values_N.argsort()
    shares = weights_N[order].cumsum(0) / weights_N.sum()
    places = torch.searchsorted(shares, shares.new_tensor(at) * (1 - 1e-12)).clamp(max=len(values_N) - 1)
    return values_N[order[places]].tolist(), float((values_N * weights_N).sum() / weights_N.sum())


def summary(tokens, space):
    """The lost fraction of all tokens and its like, and its distribution over tokens: names -> numbers.

    lost: ||G - G P||_F / ||G||_F; cosine: of G with G P, sqrt(1 - lost^2); null_lost, null_cosine: of a gradient that
    knows nothing of the head, sqrt(1 - r/V), sqrt(r/V); kept_over_null: kept energy over r/V. lost_token_mean,
    lost_token_q05 to _q95: over tokens; lost_weighted_...: with the tokens' losses as weights. Raises ValueError where
    no token is supervised or all gradients are zero.
    """
    total, kept, loss = tokens
    if not total.sum() > 0:
        raise ValueError("there is no supervised token with a gradient")
    null = space.rank / len(space.W_VD)
    share = float((kept.sum() / total.sum()).clamp(0, 1))
    found = {
        "lost": math.sqrt(1 - share), "cosine": math.sqrt(share), "kept_over_null": share / null,
        "null_lost": math.sqrt(1 - null), "null_cosine": math.sqrt(null), "rank": space.rank, "cond": space.cond,
        "tokens": len(total), "loss": float(loss.mean()),
    }  # fmt: skip
    each = lost(total.clamp(min=torch.finfo(total.dtype).tiny), kept)
    for name, weights in (("token", None), ("weighted", loss)):
        values, found[f"lost_{name}_mean"] = quantiles(each, weights)
        found |= {f"lost_{name}_q{100 * q:02.0f}": value for q, value in zip(QUANTILES, values, strict=True)}
    return found


@torch.no_grad()
def controls(H_ND, targets_N, space, generator):
    """Lost fractions without a relation of gradient and head, each with the null sqrt(1 - r/V).

    lost_random_head: outside the column space of a Gaussian matrix of rank r; lost_shuffled: of gradients whose
    entries are permuted over the vocabulary, each row by a permutation of its own.
    """
    H_ND, targets_N = _supervised(H_ND, targets_N)
    vocab = len(space.W_VD)
    drawn = torch.randn(vocab, space.rank, generator=generator, device=generator.device).to(space.W_VD)
    other = column_space(drawn)
    sums = torch.zeros(3, dtype=torch.float64, device=H_ND.device)
    for _, G in residual_chunks(H_ND, space.W_VD, targets_N):
        sums[0] += torch.linalg.vector_norm(G).double().square()
        sums[1] += _inside(G, other).square().sum()
        for row in G:
            row.copy_(row[torch.randperm(vocab, generator=generator, device=generator.device).to(row.device)])
        sums[2] += _inside(G, space).square().sum()
    total, random_head, shuffled = sums
    return {"lost_random_head": float(lost(total, random_head)), "lost_shuffled": float(lost(total, shuffled))}


def places(vocab, per_decade=8):
    """Positions 1 to V, spaced evenly in their logarithm."""
    count = 1 + math.ceil(per_decade * math.log10(vocab))
    return torch.logspace(0, math.log10(vocab), count, dtype=torch.float64).round().long().unique()


class Moved(NamedTuple):
    """What the projection does to a token's coefficients, sorted by falling |G|; see `moved`."""

    metrics: dict[str, float]
    places: torch.Tensor
    curves: dict[str, torch.Tensor]  # <before|after|own>_<magnitude|energy|variance> at these places


@torch.no_grad()
def moved(H_ND, targets_N, space):
    """Coefficients of G and of G P by position, a Moved.

    `before` are those of G, `after` those of G P at the same places, both in the order of falling |G| of the token;
    `own` those of G P in its own order of falling size. At each place: mean magnitude, mean square, and variance over
    the tokens. top10_before, top10_after: share of a token's energy in its ten largest coefficients, each in its own
    order; top10_same: of G P in the ten places where G is largest. tail_variance_before, _after: variance, within a
    token, of its coefficients at all places but these ten, the mean over tokens.
    """
    H_ND, targets_N = _supervised(H_ND, targets_N)
    at = places(len(space.W_VD)).to(H_ND.device) - 1
    sums, shares = {}, torch.zeros(5, dtype=torch.float64, device=H_ND.device)
    for _, G in residual_chunks(H_ND, space.W_VD, targets_N):
        P = (_inside(G, space) @ space.white_Dr.T).to(G.dtype) @ space.W_VD.T
        order = G.abs().argsort(1, descending=True)
        before, after = G.gather(1, order), P.gather(1, order)
        own = P.gather(1, P.abs().argsort(1, descending=True))
        for name, rows in (("before", before), ("after", after), ("own", own)):
            seen = rows[:, at].double()
            new = torch.stack([seen.abs().sum(0), seen.square().sum(0), seen.sum(0)])
            sums[name] = sums[name] + new if name in sums else new
            heads = rows[:, :TOP].double().square().sum(1) / rows.square().sum(1, dtype=torch.float64)
            shares[{"before": 0, "own": 1, "after": 2}[name]] += heads.nan_to_num(0).sum()
        for i, rows in ((3, before), (4, after)):
            shares[i] += rows[:, TOP:].double().var(1, correction=0).nan_to_num(0).sum()
    count, curves = max(len(H_ND), 1), {}
    for name, (magnitude, square, plain) in sums.items():
        curves |= {f"{name}_magnitude": magnitude / count, f"{name}_energy": square / count,
                   f"{name}_variance": square / count - (plain / count).square()}  # fmt: skip
    names = ("top10_before", "top10_after", "top10_same", "tail_variance_before", "tail_variance_after")
    return Moved(dict(zip(names, (shares / count).tolist(), strict=True)), at + 1, curves)


@torch.no_grad()
def spectra(H_ND, W_VD, targets_N, sizes: Sequence[int]):
    """Singular values of G of the first n tokens for each n of `sizes`: {n: descending, float64}.

    From G G^T, the vocabulary in pieces, or from G^T G where the tokens are not fewer than the classes; in float64
    throughout, so that values down to 1e-6 of the first are good to 1e-5. Raises ValueError for more tokens than there
    are.
    """
    H_ND, targets_N = _supervised(H_ND, targets_N)
    sizes, vocab = sorted(set(sizes)), len(W_VD)
    if not sizes or not 1 <= sizes[0] <= sizes[-1] <= len(H_ND):
        raise ValueError(f"sizes must lie in 1..{len(H_ND)} (the tokens), got {sizes}")
    H, W = H_ND[: sizes[-1]].double(), W_VD.double()
    few = [n for n in sizes if n < vocab]
    found = {}
    if few:
        H_few, y, n = H[: few[-1]], targets_N[: few[-1]], few[-1]
        log_sum = torch.cat([(part @ W.T).logsumexp(1) for part in H_few.split(max(1, BLOCK // vocab))])
        outer = H.new_zeros(n, n)
        for start in range(0, vocab, width := max(1, BLOCK // n)):
            block = torch.addmm(-log_sum[:, None], H_few, W[start : start + width].T).exp_()
            mine = ((y >= start) & (y < start + width)).nonzero()[:, 0]
            block[mine, y[mine] - start] -= 1
            outer.addmm_(block, block.T)
        found = {n: _values(outer[:n, :n]) for n in few}
    if len(few) < len(sizes):
        inner, done = H.new_zeros(vocab, vocab), 0
        for n in sizes[len(few) :]:
            for chunk in torch.arange(done, n, device=H.device).split(max(1, BLOCK // vocab)):
                G = (H[chunk] @ W.T).softmax(1)
                G[torch.arange(len(chunk), device=H.device), targets_N[chunk]] -= 1
                inner.addmm_(G.T, G)
            found[n], done = _values(inner), n
    return found


def _values(gram_matrix):
    return torch.linalg.eigvalsh(gram_matrix).clamp(min=0).sqrt().flip(0)


def components(s, share, squared=False):
    """How many singular values, largest first, hold `share` of the Frobenius norm (or of its square, the energy)."""
    held = s.square().cumsum(0) / s.square().sum()
    return int((held < (share if squared else share**2) * (1 - 1e-12)).sum()) + 1
