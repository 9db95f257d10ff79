"""The LM head and its loss as one operation with two gradients, and what is measured on them.

Shapes: N tokens (batch x time), D width, V vocabulary, r rank. The logits are Z = H W^T, the residual (the logit
gradient of the summed loss) is G = softmax(Z) - onehot, so dH = G W and dW = G^T H. Target -100 means: no supervision.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import nn

from backrank.grad import at_least_float32, gram, gram_pinv

IGNORE = -100

# Logits per chunk. On a CPU a chunk should stay in the cache between the product that makes it and the two that use it:
# 8 MiB of float32, 256 rows at V = 8,192. Elsewhere it only has to fill the device.
CHUNK_ELEMENTS = {"cpu": 1 << 21}
CHUNK_ELEMENTS_OTHER = 1 << 27


def _chunks(hidden_ND, vocab, rows):
    tokens = hidden_ND.shape[0]
    if rows is None:
        rows = max(128, CHUNK_ELEMENTS.get(hidden_ND.device.type, CHUNK_ELEMENTS_OTHER) // vocab)
    return [slice(start, min(start + rows, tokens)) for start in range(0, tokens, rows)]


def _residual_(logits, targets):
    """Overwrite a chunk of logits by s * (softmax - onehot); return the summed loss and valid / s as a column.

    s is the row's softmax denominator. Left unnormalised, a chunk needs one pass less: the factor goes into the
    narrow sides of the two products that follow. The target's entry is minus the sum of the others, not a difference
    p - 1, so tokens already learned keep their relative precision; log1p does the same for their loss.
    """
    valid = (targets != IGNORE).unsqueeze(1)
    targets = targets.unsqueeze(1).where(valid, 0)
    shift = logits.amax(1, keepdim=True)
    target_logit = logits.gather(1, targets) - shift
    others = logits.sub_(shift).exp_().scatter_(1, targets, 0.0).sum(1, keepdim=True)
    logits.scatter_(1, targets, -others)
    loss = (torch.log1p(others + target_logit.expm1()) - target_logit).where(valid, 0.0).sum()
    return loss, (others + target_logit.exp()).reciprocal().where(valid, 0.0)


def _loss_and_gradients(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    product_dtype: torch.dtype,
    rows: int | None,
    need_hidden: bool,
    need_weight: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Summed loss, dH and dW (empty where not needed), all in the accumulation dtype."""
    vocab = weight.shape[0]
    dtype = torch.promote_types(product_dtype, torch.float32)
    same = dtype == product_dtype
    H, W = hidden.to(product_dtype), weight.to(product_dtype)
    loss = torch.zeros((), dtype=dtype, device=hidden.device)
    dH = torch.empty(H.shape if need_hidden else (0,), dtype=dtype, device=hidden.device)
    dW = torch.zeros(W.shape if need_weight else (0,), dtype=dtype, device=hidden.device)
    chunks = _chunks(hidden, vocab, rows)
    widest = chunks[0].stop if chunks else 0
    buffer = torch.empty(widest, vocab, dtype=dtype, device=hidden.device)
    products = buffer if same else torch.empty(widest, vocab, dtype=product_dtype, device=hidden.device)
    for chunk in chunks:
        h = H[chunk]
        z, low = buffer[: len(h)], products[: len(h)]
        torch.mm(h, W.T, out=low)
        if not same:
            z.copy_(low)
        chunk_loss, scale = _residual_(z, targets[chunk])
        loss += chunk_loss
        if not same:
            low.copy_(z)
        if need_hidden:
            out = dH[chunk]
            torch.mul(torch.mm(low, W), scale, out=out)
        if need_weight:
            scaled = (h * scale).to(product_dtype)
            if same:
                dW.addmm_(low.T, scaled)
            else:  # a half-precision accumulator would lose the small chunks
                dW += low.T @ scaled
    return loss, dH, dW


# Opaque to torch.compile, which would undo the in-place buffers. Eager code calls the function itself: an operator's
# dispatch costs 0.2 ms, a quarter of the whole loss at N = 1,024, D = 32, V = 256.
_loss_and_gradients_op = torch.library.custom_op("backrank::chunked_loss", _loss_and_gradients, mutates_args=())


@_loss_and_gradients_op.register_fake
def _(hidden, weight, targets, product_dtype, rows, need_hidden, need_weight):
    dtype = torch.promote_types(product_dtype, torch.float32)
    return (
        hidden.new_empty((), dtype=dtype),
        hidden.new_empty(hidden.shape if need_hidden else (0,), dtype=dtype),
        weight.new_empty(weight.shape if need_weight else (0,), dtype=dtype),
    )


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, product_dtype, rows):
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        compute = _loss_and_gradients_op if torch.compiler.is_compiling() else _loss_and_gradients
        loss, dH, dW = compute(hidden, weight, targets, product_dtype, rows, need_hidden, need_weight)
        ctx.save_for_backward(dH, dW)
        ctx.dtypes = hidden.dtype, weight.dtype
        return loss

    @staticmethod
    def backward(ctx, g):
        # once_differentiable is no guard here: g is a constant, so the second derivative would come out as zero.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("chunked_loss is differentiable once; with create_graph=True use plain_loss")
        needed = ctx.needs_input_grad
        dH, dW = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        return (
            (dH * g).to(hidden_dtype) if needed[0] else None,
            (dW * g).to(weight_dtype) if needed[1] else None,
            None,
            None,
            None,
        )


def chunked_loss(hidden_ND, weight_VD, targets_N, denominator, rows=None):
    """Sum of the cross-entropy over targets other than -100, divided by `denominator`: a scalar in nats.

    hidden N x D, weight V x D, targets N (int64); `denominator` is the number of supervised tokens of the whole
    optimiser step (number or tensor), so that accumulated parts add up exactly. Both gradients are computed in the
    forward pass, chunk by chunk, while the logits are in the cache; frozen inputs cost nothing. `rows` is the chunk's
    height (default: by cache size).

    Products run in autocast's dtype if it is on, else in the inputs'; softmax, loss and accumulation at least in
    float32; each gradient comes in its input's dtype. A single opaque operator for torch.compile (fullgraph works).
    Raises RuntimeError under create_graph=True: use `plain_loss` there.
    """
    device = hidden_ND.device.type
    product_dtype = torch.promote_types(hidden_ND.dtype, weight_VD.dtype)
    if torch.is_autocast_enabled(device) and product_dtype != torch.float64:  # autocast leaves float64 alone
        product_dtype = torch.get_autocast_dtype(device)
    if not torch.is_grad_enabled():  # needs_input_grad stays true under no_grad and would pay for both gradients
        hidden_ND, weight_VD = hidden_ND.detach(), weight_VD.detach()
    return _ChunkedLoss.apply(hidden_ND, weight_VD, targets_N, product_dtype, rows) / denominator


def plain_loss(hidden_ND, weight_VD, targets_N, denominator):
    """The same value through torch's own cross-entropy on whole logits: the oracle, any order of derivative."""
    logits = at_least_float32(F.linear(hidden_ND, weight_VD))
    return F.cross_entropy(logits, targets_N, reduction="sum", ignore_index=IGNORE) / denominator


def torch_loss(hidden_ND, weight_VD, targets_N, denominator):
    """The same value through torch.nn.functional.linear_cross_entropy."""
    total = F.linear_cross_entropy(hidden_ND, weight_VD, targets_N, reduction="sum", ignore_index=IGNORE)
    return total / denominator


def liger_loss(hidden_ND, weight_VD, targets_N, denominator):
    """The same value through Liger's fused kernel (GPU only)."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    total = liger_fused_linear_cross_entropy(hidden_ND, weight_VD, targets_N, ignore_index=IGNORE, reduction="sum")
    return total / denominator


LOSSES = {"chunked": chunked_loss, "plain": plain_loss, "torch": torch_loss, "liger": liger_loss}


def resolve_loss(name):
    """The loss function of that name; ValueError naming the key, the value and the remedy if it cannot be had."""
    if name not in LOSSES:
        raise ValueError(f"train.loss={name!r} is not known; choose one of {', '.join(LOSSES)}")
    if name == "torch" and not hasattr(F, "linear_cross_entropy"):
        raise ValueError(
            "train.loss='torch' needs torch.nn.functional.linear_cross_entropy, which "
            f"torch {torch.__version__} lacks; use a newer torch or train.loss=chunked"
        )
    if name == "liger" and find_spec("liger_kernel") is None:
        raise ValueError("train.loss='liger' needs liger-kernel: pip install liger-kernel, or use train.loss=chunked")
    return LOSSES[name]


@torch.no_grad()
def residual_chunks(hidden_ND, weight_VD, targets_N, rows=None):
    """Yield (slice of tokens, softmax - onehot) chunk by chunk: rows x V, at least float32; ignored rows are zero.

    Each chunk is a tensor of its own, without graph.
    """
    with torch.autocast(hidden_ND.device.type, enabled=False):
        dtype = torch.promote_types(torch.promote_types(hidden_ND.dtype, weight_VD.dtype), torch.float32)
        H, W = hidden_ND.detach().to(dtype), weight_VD.detach().to(dtype)
        for chunk in _chunks(H, W.shape[0], rows):
            residual = H[chunk] @ W.T
            _, scale = _residual_(residual, targets_N[chunk])
            yield chunk, residual.mul_(scale)


@torch.no_grad()
def head_gradient_stats(hidden_ND, weight_VD, targets_N, rows=None):
    """How much of the logit gradient G the head loses on the way back (lost_in_backprop), as a dict of floats.

    lost = ||G P_ker||_F / ||G||_F, with P_ker the projector on the kernel of W^T (norm, not squared), and
    lost_token_mean its mean over supervised tokens; cosine = sqrt(1 - lost^2); null_lost and null_cosine, the values of
    an isotropic gradient: sqrt(1 - rank/V), sqrt(rank/V); kept_over_null = (1 - lost^2) / (rank/V); rank and cond
    (largest over smallest non-zero singular value) of W; tokens, the number of supervised ones. Values without meaning
    (no supervised token, zero gradient or head, non-finite input) are None.

    Computed in float64 by the Gram identity: with dH = G W the kept energy of a token is dH (W^T W)^+ dH^T, so that no
    V x D factorisation is needed and heads of rank below D are exact.
    """
    H, W = hidden_ND.detach().double(), weight_VD.detach().double()
    inverse, rank, values = gram_pinv(gram(W))
    rank, vocab = int(rank), W.shape[0]
    valid = targets_N != IGNORE
    total, kept = [], []
    for _, residual in residual_chunks(H, W, targets_N, rows):
        dH = residual @ W
        total.append(residual.square().sum(1))
        kept.append(((dH @ inverse) * dH).sum(1))
    total = torch.cat(total)[valid] if total else H.new_zeros(0)
    kept = torch.cat(kept)[valid] if kept else total
    stats = {
        "lost": None,
        "lost_token_mean": None,
        "cosine": None,
        "null_lost": (1 - rank / vocab) ** 0.5,
        "null_cosine": (rank / vocab) ** 0.5,
        "kept_over_null": None,
        "rank": rank,
        "cond": float((values[-1] / values[-rank]).sqrt()) if rank else None,
        "tokens": int(valid.sum()),
    }
    energy = float(total.sum())
    if rank and 0 < energy < float("inf"):
        share = min(max(float(kept.sum()) / energy, 0.0), 1.0)
        per_token = (1 - (kept / total.clamp(min=torch.finfo(torch.float64).tiny)).clamp(0, 1)).sqrt()
        stats.update(
            lost=(1 - share) ** 0.5,
            lost_token_mean=float(per_token.mean()),
            cosine=share**0.5,
            kept_over_null=share / (rank / vocab),
        )
    return stats


class Head(nn.Module):
    """A map from hidden states to logits by a V x D `weight`; `vocab` rows, of which the first `active` are targets."""

    weight: torch.Tensor
    linear = True  # else the loss is that of `forward`, and the sites at hidden state and weight are not met

    def __init__(self, vocab, active=None):
        super().__init__()
        self.vocab = vocab
        self.active = vocab if active is None else active

    def forward(self, hidden):
        """hidden ... x D -> logits ... x V."""
        return F.linear(hidden, self.weight)


class DenseHead(Head):
    """The ordinary head. `weight` may be another module's parameter (a tied embedding): pass the object itself."""

    def __init__(self, weight_VD, active=None):
        super().__init__(weight_VD.shape[0], active)
        self.weight = weight_VD if isinstance(weight_VD, nn.Parameter) else nn.Parameter(weight_VD)

    @classmethod
    def create(cls, vocab, width, generator, std=0.02):
        """Entries N(0, std^2), float32, drawn row by row."""
        return cls(std * torch.randn(vocab, width, generator=generator, device=generator.device))

    def expand(self, extra_rows, generator, std=0.02):
        """A new, untied head with never-target rows N(0, std^2) appended; the common rows are bit-equal copies."""
        W = self.weight.detach()
        extra = std * torch.randn(extra_rows, W.shape[1], generator=generator, device=generator.device)
        return DenseHead(torch.cat([W, extra.to(W)]), self.active)


class FactorisedHead(Head):
    """W = A B of rank at most r, with A V x r and B r x D, each with its own exact gradient (causal_test)."""

    def __init__(self, A_Vr, B_rD, active=None):
        super().__init__(A_Vr.shape[0], active)
        self.A, self.B = nn.Parameter(A_Vr), nn.Parameter(B_rD)

    @classmethod
    def create(cls, vocab, width, rank, generator, std=0.02):
        """B ~ N(0, 1/width), A ~ N(0, std^2 width/rank): the elements of W have the dense head's variance std^2."""
        A = std * (width / rank) ** 0.5 * torch.randn(vocab, rank, generator=generator, device=generator.device)
        B = width**-0.5 * torch.randn(rank, width, generator=generator, device=generator.device)
        return cls(A, B)

    @property
    def weight(self):
        return self.A @ self.B


class FrozenColumnHead(Head):
    """W = Q A with Q V x D fixed and orthonormal: a head that moves only inside its initial column space."""

    def __init__(self, Q_VD, A_DD, active=None):
        super().__init__(Q_VD.shape[0], active)
        self.register_buffer("Q", Q_VD)
        self.A = nn.Parameter(A_DD)

    @classmethod
    def create(cls, vocab, width, generator, std=0.02):
        """From a dense head drawn in the same way, so that both start at the same weight."""
        return cls.from_weight(DenseHead.create(vocab, width, generator, std).weight)

    @classmethod
    def from_weight(cls, weight_VD, active=None):
        """W_0 = Q R by a float64 QR factorisation, A = R: equal to W_0 up to rounding. Needs V >= D."""
        if weight_VD.shape[0] < weight_VD.shape[1]:
            raise ValueError(f"a frozen column space needs vocab >= width, got weight {tuple(weight_VD.shape)}")
        Q, R = torch.linalg.qr(weight_VD.detach().double())
        return cls(Q.to(weight_VD.dtype), R.to(weight_VD.dtype), active)

    @property
    def weight(self):
        return self.Q @ self.A


class SigsoftmaxHead(DenseHead):
    """Outputs z + log sigmoid(z), z = W h, whose softmax is the sigsoftmax of z (Kanai et al. 2018)."""

    linear = False

    def forward(self, hidden):
        z = super().forward(hidden)
        return z + F.logsigmoid(z)


class MixtureHead(DenseHead):
    """Outputs ln sum_k pi_k softmax(W tanh(P_k h)), pi = softmax(Q h): a mixture of K softmaxes (Yang et al. 2018)."""

    linear = False

    def __init__(self, weight_VD, P_KDxD, Q_KD, active=None):
        super().__init__(weight_VD, active)
        self.P, self.Q = nn.Parameter(P_KDxD), nn.Parameter(Q_KD)

    @classmethod
    def from_weight(cls, weight_VD, components, generator, active=None):
        """P, the K matrices P_k below each other, and Q are N(0, 1/D), drawn in this order."""
        width = weight_VD.shape[1]
        shapes = (components * width, width), (components, width)
        P, Q = (torch.randn(*s, generator=generator, device=generator.device) * width**-0.5 for s in shapes)
        return cls(weight_VD.detach(), P.to(weight_VD), Q.to(weight_VD), active)

    def forward(self, hidden):
        parts = F.linear(hidden, self.P).tanh().unflatten(-1, (len(self.Q), -1)) @ self.weight.T
        shares = (hidden @ self.Q.T).log_softmax(-1)
        return torch.logsumexp(parts.log_softmax(-1) + shares[..., None], -2)
