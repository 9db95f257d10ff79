"""The loss of a language model where its logits move along their gradient, and along what its head can realise
(lost_in_backprop).

Which model, and which text: studies/gradient_loss.py. Of the text the first TOKENS tokens, a batch of which the logits
move together.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from . import Measured
from .gradient_loss import prepare, row, text_of

TOKENS = 1024
PER_DECADE, FIRST, LAST = 4, -5, 1  # steps: ||dZ||_F over the logits' norm, 1e-5 to 10
STATED = 0.01  # the step of direction/log10_ratio


def run(cfg: DictConfig, source: Any, root: Path) -> Measured:
    """direction/<name> of theory.update_directions' curves:

    log10_ratio: log10 of the largest fall of the loss with a step of up to STATED along -G over that along the
    realizable -G W W^T; log10_ratio_limit: of their slopes, where steps are small; log10_ratio_most: the largest over
    all steps. log10_<direction>: the same as log10_ratio, of -G over another direction. <direction>_fall: the largest
    fall over all steps, in nats. loss, norm: of the batch that stays.

    Rows: `direction/<name>`, the change of the loss by step.
    """
    import torch

    from ..seeding import generator
    from ..theory import logit_gradient, update_directions

    task, device, parents = prepare(cfg, root)
    stream = source.stream(cfg, device)
    batch, left = [], TOKENS
    with torch.no_grad(), task.evaluating():
        for x, y in text_of(cfg, source, stream):
            seen = (y.flatten() != logit_gradient.IGNORE).nonzero()[:left, 0]
            batch.append((task.hidden(x)[seen], y.flatten()[seen]))
            left -= len(seen)
            if not left:
                break
    H, targets = (torch.cat(part) for part in zip(*batch, strict=True))
    steps = [10 ** (FIRST + i / PER_DECADE) for i in range((LAST - FIRST) * PER_DECADE + 1)]
    found = update_directions.curves(H, task.head.weight.detach(), targets, steps, generator(cfg.seed, "head"))
    falls = {name: update_directions.best_fall(found.loss, losses) for name, losses in found.losses.items()}
    stated = min(range(len(steps)), key=lambda i: abs(math.log(steps[i] / STATED)))

    def log10_over(other: str, at: slice) -> float:
        return float((falls["gradient"][at] / falls[other][at]).log10().max())

    metrics = {
        "loss": found.loss,
        "norm": found.norm,
        "log10_ratio": log10_over("realizable", slice(stated, stated + 1)),
        "log10_ratio_limit": math.log10(found.slope["gradient"] / found.slope["realizable"]),
        "log10_ratio_most": log10_over("realizable", slice(None)),
        **{f"log10_{other}": log10_over(other, slice(stated, stated + 1))
           for other in ("projected", "both", "random_subspace")},
        **{f"{name}_fall": float(fall[-1]) for name, fall in falls.items()},
    }  # fmt: skip
    rows = [row(f"direction/{name}", step, value) for name, losses in found.losses.items()
            for step, value in zip(steps, (losses - found.loss).tolist(), strict=True)]  # fmt: skip
    return Measured({f"direction/{name}": value for name, value in metrics.items()}, rows, parents, str(device))
