"""Singular values, effective ranks and the walk over a model's matrices.

Spectra come from the float64 Gram matrix of the smaller side, several times faster than an SVD. The relative error
grows as sigma falls: below 1e-7 at 1e-5 sigma_1, 1e-5 at 1e-6, 1e-3 at 1e-7; under that the values are noise. Effective
ranks do not notice.

Shapes: a matrix is n x m; its spectrum s holds min(n, m) values, descending, float64.
"""

import logging
import math
import re

import torch
from torch import nn

from backrank.head import Head

log = logging.getLogger(__name__)

# Gram matrices solved in one call hold at most this many float64 entries (128 MiB).
BATCH_ELEMENTS = 1 << 24


def as_matrix(weight):
    """The weight as n x m: convolutions as (out, in * kh * kw), 2-D weights as they are; ValueError below 2-D."""
    if weight.ndim < 2:
        raise ValueError(f"a spectrum needs a matrix, got a tensor of shape {tuple(weight.shape)}")
    return weight.detach().flatten(1)


def _normalised(matrix):
    """float64 copy over its largest magnitude, and that magnitude: squares then neither overflow nor underflow."""
    wide = matrix.detach().double()
    scale = wide.abs().max() if wide.numel() else wide.new_zeros(())
    return wide / torch.where(scale > 0, scale, 1.0), scale


def _scipy_svd(matrix):
    from scipy.linalg import svd

    values = svd(matrix.cpu().numpy(), compute_uv=False, lapack_driver="gesvd")  # slower and surer than gesdd
    return torch.from_numpy(values).to(matrix.device)


def _eigen_solve(gram):
    return torch.linalg.eigvalsh(gram).clamp(min=0).flip(-1).sqrt()


def _gram(matrix):
    return matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix


def _solve_one_by_one(matrices, names, error):
    solvers = [
        ("eigvalsh alone", lambda x: _eigen_solve(_gram(x))),
        ("svdvals", torch.linalg.svdvals),
        ("scipy gesvd on the CPU", _scipy_svd),
    ]
    if len(matrices) == 1:
        del solvers[0]  # this very call has just failed
    spectra, paths = [], []
    for matrix, name in zip(matrices, names, strict=True):
        normal = _normalised(matrix)[0]
        for path, solver in solvers:
            try:
                spectra.append(solver(normal))
            except torch.linalg.LinAlgError:
                continue
            paths.append(f"{name}: {path}")
            break
        else:
            raise error
    log.warning("eigvalsh did not converge (%s); solved instead by %s", error, ", ".join(paths))
    return spectra


def gram_spectrum(matrices, names=None):
    """Singular values, descending, float64, of one matrix (a tensor) or of each of a list (a list of tensors).

    Any floating dtype. Matrices of equal smaller side are solved in batches. A zero matrix has zero singular values, a
    non-finite one NaN throughout. Where eigvalsh raises, float64 svdvals and then LAPACK's gesvd on the CPU take over,
    with one log line that names the layers (`names`, else their positions) and the path taken; no noise is added.
    """
    if isinstance(matrices, torch.Tensor):
        return gram_spectrum([matrices], None if names is None else [names])[0]
    matrices = [as_matrix(matrix) for matrix in matrices]
    names = [f"matrix {i}" for i in range(len(matrices))] if names is None else list(names)
    spectra, groups = [None] * len(matrices), {}
    for i, matrix in enumerate(matrices):
        side = min(matrix.shape)
        if not bool(matrix.isfinite().all()):
            spectra[i] = torch.full((side,), math.nan, dtype=torch.float64, device=matrix.device)
        elif side == 0:
            spectra[i] = torch.zeros(0, dtype=torch.float64, device=matrix.device)
        else:
            groups.setdefault((side, matrix.device), []).append(i)
    for (side, _), members in groups.items():
        size = max(1, BATCH_ELEMENTS // side**2)
        for start in range(0, len(members), size):
            batch = members[start : start + size]
            grams, scales = [], []
            for i in batch:
                normal, scale = _normalised(matrices[i])
                grams.append(_gram(normal))
                scales.append(scale)
            try:
                solved = _eigen_solve(torch.stack(grams))
            except torch.linalg.LinAlgError as error:
                solved = _solve_one_by_one([matrices[i] for i in batch], [names[i] for i in batch], error)
            for i, values, scale in zip(batch, solved, scales, strict=True):
                spectra[i] = values * scale
    return spectra


def _shares(s, power):
    """s^power over its sum, from a spectrum scaled to 1; None for the zero matrix."""
    s = torch.as_tensor(s, dtype=torch.float64)
    top = s.max() if s.numel() else s.new_zeros(())
    if top == 0:
        return None
    p = (s / top) ** power
    return p / p.sum()


def effective_rank(s):
    """exp(-sum p ln p), p = s^2 / sum s^2, natural log (backward_bottleneck's r_eff); 0 for the zero matrix."""
    p = _shares(s, 2)
    return 0.0 if p is None else float(torch.special.entr(p).sum().exp())


def entropy_rank_sigma(s):
    """The same entropy on p = s / sum s (Roy and Vetterli's effective rank); not what the paper prints."""
    p = _shares(s, 1)
    return 0.0 if p is None else float(torch.special.entr(p).sum().exp())


def participation_ratio(s):
    """(sum s^2)^2 / sum s^4; 0 for the zero matrix."""
    p = _shares(s, 2)
    return 0.0 if p is None else float(1 / p.square().sum())


def stable_rank(s):
    """sum s^2 / s_1^2, the squared Frobenius over the squared spectral norm; 0 for the zero matrix."""
    p = _shares(s, 2)
    return 0.0 if p is None else float(1 / p.max())


def tail_norm(s, k):
    """sigma_{k+1}, the spectral norm of what the best rank-k approximation leaves; 0 from k = len(s) on."""
    return float(s[k]) if k < len(s) else 0.0


# A tail of fewer values has no exponent worth the name: its relative error is 1 / sqrt(count).
LEAST_TAIL = 10


def tail_exponent(s, least=LEAST_TAIL):
    """(alpha, values in the tail, KS distance) of a power law x^-alpha fitted to the largest eigenvalues x = sigma^2.

    Clauset, Shalizi and Newman (2009): alpha = 1 + k / sum_{i <= k} ln(x_i / x_k), Hill's maximum-likelihood estimate
    over the k largest values, with k (that is x_min) where the Kolmogorov-Smirnov distance to the fitted law is least.
    k is at least `least`; singular values under 1e-6 sigma_1 are noise and left out. Scale-invariant. None where fewer
    than `least` values are left or where they are all equal. An exponent alone does not make a law: a random matrix,
    whose spectrum ends, has one too, of 2.5 to 40, with a distance over 0.1 (300 drawn values of a true law: 0.03).
    """
    s = torch.as_tensor(s, dtype=torch.float64)
    logs = 2 * s[s > 1e-6 * s.max()].log().sort(descending=True).values if len(s) else s
    sizes = torch.arange(1, len(logs) + 1, dtype=torch.float64, device=logs.device)
    spread = logs.cumsum(0) - sizes * logs  # of a tail of k values, sum ln(x_i / x_k)
    chosen = (sizes >= least) & (spread > 1e-12)
    if not chosen.any():
        return None
    sizes, lowest, spread = sizes[chosen], logs[chosen], spread[chosen]
    alpha = 1 + sizes / spread
    # by tail (rows) and value: the fitted share above it, against the shares above it without and with itself
    above = torch.exp((1 - alpha)[:, None] * (logs - lowest[:, None]))
    position = torch.arange(len(logs), dtype=torch.float64, device=logs.device)
    gaps = torch.maximum((above - position / sizes[:, None]).abs(), (above - (position + 1) / sizes[:, None]).abs())
    distance = torch.where(position < sizes[:, None], gaps, 0.0).amax(1)
    best = int(distance.argmin())
    return float(alpha[best]), int(sizes[best]), float(distance[best])


def gap_ratio(s, r):
    """sigma_r / sigma_{r+1}, and the geometric mean of such ratios from r/2 to 2r, what a smooth fall would give there.

    Singular values under 1e-6 sigma_1, which are noise, count as that. (None, None) where the spectrum ends before
    sigma_{r+1}, or is zero.
    """
    if not 1 <= r < len(s) or not s[0] > 0:
        return None, None
    s = s.clamp(min=1e-6 * float(s[0]))
    low, high = (r + 1) // 2, min(2 * r, len(s) - 1)
    return float(s[r - 1] / s[r]), float((s[low - 1] / s[high]) ** (1 / (high - low + 1)))


def marchenko_pastur_erank(n, m):
    """Effective rank of an n x m matrix of independent equal-variance entries, for large sides.

    Closed form min * exp(-beta / 2), beta = min / max, from the Marchenko-Pastur law.
    """
    small, large = sorted((n, m))
    return small * math.exp(-small / large / 2)


def spectrum_rows(matrices, spectra=None):
    """One dict per entry of {name: weight}: layer, shape, zero, nonfinite_entries and the spectral values.

    `spectra`: their singular values by name, where these are known already.

    erank, erank_sigma, participation, stable_rank are counts of dimensions; sigma_1 and frobenius in the weight's
    units. `nonfinite_entries` counts NaN and infinite entries; if there are any, every spectral value is None.
    """
    matrices = {name: as_matrix(weight) for name, weight in matrices.items()}
    if spectra is None:
        spectra = dict(zip(matrices, gram_spectrum(list(matrices.values()), matrices), strict=True))
    rows = []
    for name, W in matrices.items():
        nonfinite = int((~W.isfinite()).sum())
        s = spectra[name].cpu()
        values = {
            "erank": effective_rank,
            "erank_sigma": entropy_rank_sigma,
            "participation": participation_ratio,
            "stable_rank": stable_rank,
            "sigma_1": lambda s: tail_norm(s, 0),
            "frobenius": lambda s: float(torch.linalg.vector_norm(s)),
        }
        rows.append(
            {"layer": name, "shape": list(W.shape), "nonfinite_entries": nonfinite, "zero": not bool(W.any())}
            | {key: None if nonfinite else value(s) for key, value in values.items()}
        )
    return rows


def spectrum_row(name, weight):
    """`spectrum_rows` of a single weight."""
    return spectrum_rows({name: weight})[0]


# Names that torch.compile, DataParallel, DDP, FSDP and checkpoint wrappers put into a parameter's path.
WRAPPERS = {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# Input embeddings that are no nn.Embedding: patch projections, positions and class tokens of vision transformers.
INPUT_NAMES = re.compile(r"(^|\.)(conv_proj|patch_embed\w*|pos(ition)?_embed\w*|class_token|cls_token)(\.|$)")


def matrix_parameters(model):
    """Every parameter of two or more dimensions, once: {name: (parameter, kind)} in the model's order.

    kind is "embedding" (nn.Embedding, and the input embeddings of vision transformers), "head" (our heads, and modules
    named lm_head) or "block" (all the rest); a parameter that is tied is an embedding if any of its uses is one. Names
    are those of the state dict without wrappers' prefixes.
    """
    found = {}
    for path, module in model.named_modules():
        clean = [part for part in path.split(".") if part not in WRAPPERS and part]
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            name = ".".join([*clean, leaf])
            if isinstance(module, nn.Embedding) or INPUT_NAMES.search(name):
                kind = "embedding"
            elif isinstance(module, Head) or clean[-1:] == ["lm_head"]:
                kind = "head"
            else:
                kind = "block"
            known = found.get(id(parameter))
            if known is None or (kind == "embedding" and known[2] != "embedding"):
                found[id(parameter)] = (name, parameter, kind)
    named = {name: (parameter, kind) for name, parameter, kind in found.values()}
    if len(named) < len(found):
        raise ValueError(f"two matrices of {type(model).__name__} share a name once wrappers' prefixes are removed")
    return named


def block_matrices(model):
    """{name: n x m weight} of the matrices between embedding and head, convolutions flattened, without graph."""
    return {name: as_matrix(p) for name, (p, kind) in matrix_parameters(model).items() if kind == "block"}


def other_matrices(model):
    """{name: n x m weight} of embeddings and head, tied ones once."""
    return {name: as_matrix(p) for name, (p, kind) in matrix_parameters(model).items() if kind != "block"}
