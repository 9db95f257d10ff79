"""lost_in_backprop's propositions on drawn matrices, and its arithmetic: pure functions, float64, nothing is trained.

Shapes: N tokens, D width of the hidden states, V classes. H N x D and W V x D give the logits Z = H W^T; G, N x V, is
the gradient of the summed loss in Z, softmax(Z) - onehot.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from backrank.grad import column_project

# Width and classes of the pretrained models that the paper measures, from their published configurations.
MODELS = {
    "gpt2": (768, 50_257),
    "pythia_1b": (2048, 50_304),
    "llama32_1b": (2048, 128_256),
    "olmo2_1b": (2048, 100_352),
    "qwen3_06b": (1024, 151_936),
    "smollm2_135m": (576, 49_152),
}


def _normal(generator, *shape):
    return torch.randn(*shape, generator=generator, device=generator.device, dtype=torch.float64)


def rank(matrix):
    """Numerical rank: singular values above max(n, m) eps sigma_1."""
    return int(torch.linalg.matrix_rank(matrix))


def draw_states(tokens, vocab, width, generator, spread=1.0):
    """(H, W), Gaussian, such that the logits H W^T have standard deviation `spread`. ValueError for sizes below 1."""
    if min(tokens, vocab, width) < 1:
        raise ValueError(f"tokens, vocab and width must be at least 1, got {tokens}, {vocab}, {width}")
    return _normal(generator, tokens, width), spread * width**-0.5 * _normal(generator, vocab, width)


def logit_gradient(logits_NV, targets_N):
    """G = softmax(Z) - onehot, N x V: every row sums to zero, so its rank is at most V - 1."""
    return logits_NV.softmax(1) - F.one_hot(targets_N, logits_NV.shape[1])


# Top-1 with two dimensions


def circle(vocab):
    """(W, H), both V x 2: class k and the state that asks for it are the same point of the unit circle.

    The margin 1 - cos(2 pi / V) falls as V^-2: 1.2e-6 at V = 4,096.
    """
    _at_least_three(vocab)
    angle = 2 * math.pi / vocab * torch.arange(vocab, dtype=torch.float64)
    points = torch.stack([angle.cos(), angle.sin()], 1)
    return points, points


def parabola(vocab):
    """(W, H), both V x 2: w_k = (k, -k^2 / 2) and h_k = (k, 1), so that z_jk = (j^2 - (j - k)^2) / 2.

    The margin is 1/2 at every V, exactly; the weights grow as V^2 instead.
    """
    _at_least_three(vocab)
    k = torch.arange(vocab, dtype=torch.float64)
    return torch.stack([k, -k.square() / 2], 1), torch.stack([k, torch.ones_like(k)], 1)


def _at_least_three(vocab):
    if vocab < 3:
        raise ValueError(f"vocab must be at least 3 for two dimensions to say something, got {vocab}")


class Top1(NamedTuple):
    share: float  # of the classes, those that their own state makes the largest
    margin: float  # least z_cc - max_{j != c} z_cj over the classes


def top1(W_VD, H_VD, rows=1024):
    """Does state c make class c the largest, for each of V classes? A Top1; `rows` states at a time."""
    if W_VD.shape != H_VD.shape:
        raise ValueError(f"one state per class is needed, got {tuple(H_VD.shape)} for {tuple(W_VD.shape)}")
    margins = []
    for start in range(0, len(H_VD), rows):
        logits = H_VD[start : start + rows] @ W_VD.T
        own = torch.arange(start, start + len(logits), device=logits.device)[:, None]
        asked = logits.gather(1, own)
        margins.append(asked[:, 0] - logits.scatter(1, own, -math.inf).amax(1))
    margins = torch.cat(margins)
    return Top1(float((margins > 0).double().mean()), float(margins.min()))


def reachable_share(W_V2):
    """The share of classes that some hidden state makes the largest, for a V x 2 head: the vertices of its hull."""
    from scipy.spatial import ConvexHull

    if W_V2.ndim != 2 or W_V2.shape[1] != 2 or len(W_V2) < 3:
        raise ValueError(f"a head of V >= 3 classes and two dimensions is needed, got {tuple(W_V2.shape)}")
    return len(ConvexHull(W_V2.cpu().numpy()).vertices) / len(W_V2)


# The update of the logits and what no update reaches


def first_order_update(H_ND, W_VD, dH_ND, dW_VD):
    """dZ = dH W^T + H dW^T, N x V: two products over D dimensions, so its rank is at most 2 D."""
    return dH_ND @ W_VD.T + H_ND @ dW_VD.T


def whole_update(H_ND, W_VD, dH_ND, dW_VD):
    """(H + dH)(W + dW)^T - H W^T, N x V: with the second order, and of rank at most 2 D nevertheless."""
    return first_order_update(H_ND, W_VD, dH_ND, dW_VD) + dH_ND @ dW_VD.T


class Residuals(NamedTuple):
    """Squared Frobenius norms of what an update leaves of G, and sums of its squared singular values."""

    energy: float  # of G: no update
    step: float  # after the gradient's own update, at its best length
    given: float  # after the best dH, dW at these H and W
    best: float  # after the best matrix of rank 2 D
    tail_d: float  # sum of sigma_i^2 over i > D, the summary's bound
    tail_2d: float  # the same over i > 2 D, the paper's (Eckart and Young)


def residuals(G_NV, H_ND, W_VD):
    """How near updates of rank 2 D come to G: energy >= step >= given >= best = tail_2d. ValueError for other shapes.

    The best dH W^T + H dW^T leaves (I - P_H) G (I - P_W), with the projectors on the column spaces of H and W. Were
    these the first D left and the next D right singular directions of G, that would be `best`.
    """
    width = H_ND.shape[1]
    if G_NV.shape != (len(H_ND), len(W_VD)) or W_VD.shape[1] != width:
        raise ValueError(f"shapes do not fit: G {tuple(G_NV.shape)}, H {tuple(H_ND.shape)}, W {tuple(W_VD.shape)}")
    U, s, Vh = torch.linalg.svd(G_NV, full_matrices=False)
    top = slice(0, 2 * width)
    own = first_order_update(H_ND, W_VD, G_NV @ W_VD, G_NV.T @ H_ND)
    length = (own * G_NV).sum() / own.square().sum()
    left = G_NV - column_project(H_ND, G_NV)
    given = left - column_project(W_VD, left.T).T
    kept = (U[:, top] * s[top]) @ Vh[top]
    energies = [float(x.square().sum()) for x in (G_NV, G_NV - length * own, given, G_NV - kept)]
    return Residuals(*energies, float(s[width:].square().sum()), float(s[2 * width :].square().sum()))


# Other heads


def draw_head(kind, vocab, width, generator, components=4):
    """A map f from hidden states (... x D) to logits (... x V), with drawn weights; ValueError for another kind.

    linear: W h. sigsoftmax: z + log sigmoid(z), z = W h (Kanai et al. 2018). mixture: the log of a mixture of
    `components` softmaxes of W tanh(A_k h), with weights softmax(B h) (Yang et al. 2018). mlp: V tanh(A h), four times
    the width in between.
    """
    W = 4 * width**-0.5 * _normal(generator, vocab, width)
    if kind == "linear":
        return lambda h: h @ W.T
    if kind == "sigsoftmax":
        return lambda h: h @ W.T + F.logsigmoid(h @ W.T)
    if kind == "mixture":
        A = width**-0.5 * _normal(generator, components, width, width)
        B = width**-0.5 * _normal(generator, components, width)

        def mixture(h):
            parts = (torch.einsum("...d,ked->...ke", h, A).tanh() @ W.T).log_softmax(-1)
            return torch.logsumexp(parts + (h @ B.T).log_softmax(-1)[..., None], -2)

        return mixture
    if kind == "mlp":
        A, W = width**-0.5 * _normal(generator, 4 * width, width), width**-0.5 * _normal(generator, vocab, 4 * width)
        return lambda h: (h @ A.T).tanh() @ W.T
    raise ValueError(f"head {kind!r} is not known; choose linear, sigsoftmax, mixture or mlp")


class HeadRanks(NamedTuple):
    jacobian: int  # the largest over the tokens
    hidden: int  # of the N x D hidden gradient
    logits: int  # of the N x V outputs: what other heads do raise
    lost: float  # share of the logit gradient's norm outside the columns of the Jacobian, over all tokens


def head_ranks(head, H_ND, targets_N):
    """Ranks of a head f: R^D -> R^V by its autograd Jacobian at each state, a HeadRanks."""
    H_ND = H_ND.detach().requires_grad_()
    outputs = head(H_ND)
    rows = [torch.autograd.grad(column.sum(), H_ND, retain_graph=True)[0] for column in outputs.unbind(1)]
    J_NVD, outputs = torch.stack(rows, 1), outputs.detach()  # a token's outputs know its own state alone
    G = logit_gradient(outputs, targets_N)
    hidden = torch.einsum("nv,nvd->nd", G, J_NVD)
    inside = torch.einsum("nvd,ndw,nw->nv", J_NVD, torch.linalg.pinv(J_NVD), G)
    lost = float(torch.linalg.vector_norm(G - inside) / torch.linalg.vector_norm(G))
    return HeadRanks(int(torch.linalg.matrix_rank(J_NVD).max()), rank(hidden), rank(outputs), lost)


# The rank of a batch


class BatchRank(NamedTuple):
    rank: int  # of G
    unique: int  # contexts whose next token is that of no other context
    tokens: int  # different next tokens
    components: int  # of G, largest first, that hold `share` of its norm


def batch_rank(H_ND, W_VD, targets_N, share=0.999):
    """Rank of the logit gradient of N contexts against their next tokens, a BatchRank.

    rank >= min(unique, V - 1): take the rows with a next token of their own and the columns of these tokens. What is
    left of G is P - I with rows of P that sum to less than 1 (to 1 where these are all V classes): diagonally dominant.
    `share` is one of the Frobenius norm, not of its square.
    """
    G = logit_gradient(H_ND @ W_VD.T, targets_N)
    s = torch.linalg.svdvals(G)
    counts = torch.bincount(targets_N, minlength=len(W_VD))
    held = (s.square().cumsum(0) / s.square().sum()).sqrt()
    components = int((held < share).sum()) + 1
    return BatchRank(rank(G), int((counts == 1).sum()), int((counts > 0).sum()), components)


def draw_next(kind, tokens, vocab, generator):
    """Next tokens of N contexts: `distinct`, `repeated` (uniform over V/8 of them) or `zipf` (frequency 1 / rank)."""
    if kind == "distinct":
        if tokens > vocab:
            raise ValueError(f"{tokens} contexts have no distinct next tokens among {vocab}")
        return torch.randperm(vocab, generator=generator)[:tokens]
    if kind == "repeated":
        return torch.randint(max(1, vocab // 8), (tokens,), generator=generator)
    if kind == "zipf":
        frequency = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
        return torch.multinomial(frequency, tokens, replacement=True, generator=generator)
    raise ValueError(f"next tokens {kind!r} are not known; choose distinct, repeated or zipf")


# What the head passes, and its null model


def null_lost(width, vocab):
    """sqrt(1 - D/V): the lost fraction of a gradient that is isotropic with respect to col(W)."""
    return math.sqrt(1 - _share(width, vocab))


def null_cosine(width, vocab):
    """sqrt(D/V), the cosine of that gradient with its projection."""
    return math.sqrt(_share(width, vocab))


def _share(width, vocab):
    if not 1 <= width <= vocab:
        raise ValueError(f"width must lie in 1..{vocab} (the classes), got {width}")
    return width / vocab


def cosine_of(lost):
    """sqrt(1 - lost^2): the projection is orthogonal, so the two published statistics are one number."""
    if not 0 <= lost <= 1:
        raise ValueError(f"a lost fraction lies in [0, 1], got {lost}")
    return math.sqrt(1 - lost**2)


def kept_over_null(lost, width, vocab):
    """(1 - lost^2) / (D/V): the kept energy as a multiple of the null model's."""
    return cosine_of(lost) ** 2 / _share(width, vocab)


class Passed(NamedTuple):
    lost: float  # ||G - G P||_F / ||G||_F, with P the projector on col(W)
    cosine: float  # <G, G P> / (||G||_F ||G P||_F)


def passed(G_NV, W_VD):
    """Lost fraction and cosine of a gradient, each from its own definition (`head_gradient_stats` takes one from the
    other). ValueError where G is zero.
    """
    inside = column_project(W_VD, G_NV.T).T
    norm, norm_inside = torch.linalg.vector_norm(G_NV), torch.linalg.vector_norm(inside)
    if not norm > 0:
        raise ValueError("a zero gradient has no lost fraction")
    lost = torch.linalg.vector_norm(G_NV - inside) / norm
    return Passed(float(lost), float((G_NV * inside).sum() / (norm * norm_inside).clamp(min=1e-300)))


# Arithmetic


def llama_parameters(layers, width, ffn, kv_width=None, vocab=0, head_rank=None):
    """Parameters of a Llama-style model without biases: RMS norms, attention, SwiGLU.

    Keys and values are `kv_width` wide (default: all heads). With `vocab` > 0 there are an embedding and an untied
    head, W = A B where it has a `head_rank`.
    """
    attention = 2 * width**2 + 2 * width * (width if kv_width is None else kv_width)
    blocks = layers * (attention + 3 * width * ffn + 2 * width) + width
    head = vocab * width if head_rank is None else head_rank * (vocab + width)
    return blocks + vocab * width + (head if vocab else 0)


def sweep_parameters(head_rank):
    """Of the controlled sweep: 6 layers, width 4,096, SwiGLU 16,384, V = 49,152, head A B of that rank."""
    return llama_parameters(6, 4096, 16_384, vocab=49_152, head_rank=head_rank)


def draws_per_symbol(sequences, vocab):
    """Independent draws of a symbol in the mean; a SpamLang sequence is one draw, however long."""
    return sequences / vocab


def coverage(draws):
    """The share of symbols drawn at least once, 1 - exp(-draws) of many symbols: what a model without guessing learns
    at most where embedding and head are not tied.
    """
    return -math.expm1(-draws)
