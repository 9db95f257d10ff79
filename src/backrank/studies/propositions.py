"""lost_in_backprop's propositions, computed on drawn matrices, and its arithmetic.

What is drawn, the run's seed draws; the rest is the same number in every run. Definitions: theory/propositions.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from . import Measured

CLASSES = (16, 256, 4096)
# N, V, D of drawn logits
SIZES = {"tall": (200, 100, 8), "square": (128, 128, 4), "wide": (64, 256, 16)}
HEADS = ("linear", "sigsoftmax", "mixture", "mlp")
NEXT = ("distinct", "repeated", "zipf")
VOCAB, WIDTHS = 1024, (8, 32, 128, 512)  # of the null model


def run(cfg: DictConfig, source: Any, root: Path) -> Measured:
    import torch

    generator = torch.Generator().manual_seed(cfg.seed)
    found = arithmetic()
    for draw in (top1, updates, heads, batches, null_model):
        found |= draw(generator)
    return Measured({name: float(value) for name, value in found.items()})


def top1(generator: Any) -> dict[str, float]:
    """Classes that two dimensions make the largest: constructed heads, and a drawn one."""
    from ..theory import propositions as p

    found = {}
    for name, construct in (("circle", p.circle), ("parabola", p.parabola)):
        for vocab in CLASSES:
            share, margin = p.top1(*construct(vocab))
            found |= {f"top1/{name}_{vocab}": share, f"top1/{name}_{vocab}_margin": margin}
    _, W = p.draw_states(1, CLASSES[-1], 2, generator)
    return found | {"top1/drawn_reachable": p.reachable_share(W)}


def updates(generator: Any) -> dict[str, float]:
    """Rank of the update of the logits and what it leaves of their gradient: of a drawn softmax, and Gaussian."""
    import torch

    from ..theory import propositions as p

    found = {}
    for name, (tokens, vocab, width) in SIZES.items():
        H, W = p.draw_states(tokens, vocab, width, generator)
        G = p.logit_gradient(H @ W.T, torch.randint(vocab, (tokens,), generator=generator))
        dH, dW = -G @ W, -G.T @ H
        of = {"rank": p.first_order_update(H, W, dH, dW), "whole": p.whole_update(H, W, dH, dW)}
        found |= {f"update/{name}_{key}_over_2d": p.rank(dZ) / (2 * width) for key, dZ in of.items()}
        gaussian = torch.randn(tokens, vocab, generator=generator, dtype=torch.float64)
        for kind, gradient in (("softmax", G), ("gaussian", gaussian)):
            left = p.residuals(gradient, H, W)._asdict()
            found |= {f"residual/{name}_{kind}_{key}": value for key, value in left.items()}
    return found


def heads(generator: Any) -> dict[str, float]:
    """Ranks of Jacobians, hidden gradients and outputs of several heads, over D, and what they lose."""
    import torch

    from ..theory import propositions as p

    tokens, vocab, width = 64, 48, 6
    H, _ = p.draw_states(tokens, vocab, width, generator)
    targets = torch.randint(vocab, (tokens,), generator=generator)
    found = {"head/null_lost": p.null_lost(width, vocab)}
    for kind in HEADS:
        ranks = p.head_ranks(p.draw_head(kind, vocab, width, generator), H, targets)
        found |= {f"head/{kind}_{key}_over_d": getattr(ranks, key) / width for key in ("jacobian", "hidden", "logits")}
        found |= {f"head/{kind}_lost": ranks.lost}
    return found


def batches(generator: Any) -> dict[str, float]:
    """Rank of the logit gradient of 256 contexts, 512 classes, D = 8, by how their next tokens repeat."""
    from ..theory import propositions as p

    found = {}
    for kind in NEXT:
        H, W = p.draw_states(256, 512, 8, generator)
        values = p.batch_rank(H, W, p.draw_next(kind, 256, 512, generator))._asdict()
        found |= {f"batch/{kind}_{key}": value for key, value in values.items()}
    return found


def null_model(generator: Any) -> dict[str, float]:
    """Lost fraction and cosine against sqrt(1 - D/V): of an isotropic gradient, and of that of an untrained head."""
    import torch

    from ..head import head_gradient_stats
    from ..theory import propositions as p

    found = {}
    for width in WIDTHS:
        H, W = p.draw_states(256, VOCAB, width, generator, spread=0.02 * width**0.5)
        isotropic = torch.randn(256, VOCAB, generator=generator, dtype=torch.float64)
        targets = torch.randint(VOCAB, (256,), generator=generator)
        untrained = p.logit_gradient(H @ W.T, targets)
        for kind, G in (("isotropic", isotropic), ("untrained", untrained)):
            lost, cosine = p.passed(G, W)
            found |= {f"null/{kind}_{width}_lost": lost, f"null/{kind}_{width}_cosine": cosine,
                      f"null/{kind}_{width}_identity": abs(cosine - p.cosine_of(lost)),
                      f"null/{kind}_{width}_over_null": p.kept_over_null(lost, width, VOCAB)}  # fmt: skip
        found |= {f"null/lost_{width}": p.null_lost(width, VOCAB)}
        cheap = head_gradient_stats(H, W, targets)["lost"]
        found |= {f"null/untrained_{width}_cheap": abs(cheap - found[f"null/untrained_{width}_lost"])}
    return found


def arithmetic() -> dict[str, float]:
    """Nulls of the pretrained models, parameters of the sweep, draws of SpamLang."""
    from ..theory import propositions as p

    found = {}
    for name, (width, vocab) in p.MODELS.items():
        found |= {f"model/{name}_lost": p.null_lost(width, vocab), f"model/{name}_cosine": p.null_cosine(width, vocab)}
    found |= {f"params/sweep_{width}": p.sweep_parameters(width) for width in (32, 4096)}
    found |= {"params/spamlang": p.llama_parameters(30, 576, 1536, kv_width=192)}
    draws = p.draws_per_symbol(128 * 5000, 131_072)
    return found | {"spamlang/draws": draws, "spamlang/coverage": p.coverage(draws)}
