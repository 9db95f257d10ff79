"""The paper's own theory, computed: recursion, explorer, products, the proof's masks, Adam, initial ranks.

Exact where it is arithmetic; where something is drawn, the run's seed draws it. Definitions: theory/.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from . import Measured

DEPTHS = (1, 2, 4, 8, 12, 24, 48)
DEEP = (12, 24, 48, 96)  # the powers settle there
DECAY = 0.01  # mu * lambda of the simulated recursions
PAGE_DECAY, PAGE_RATIO = 0.1 * 5e-4, 4000  # mu 0.1, lambda 5e-4; 2 mu C c over mu lambda with C c = 1


def run(cfg: DictConfig, source: Any, root: Path) -> Measured:
    import torch

    generator = torch.Generator().manual_seed(cfg.seed)
    return Measured(recursion() | products(generator) | proof(generator) | adam(generator) | initial_ranks(cfg.seed))


def recursion() -> dict[str, float]:
    """Steps until every tail is below 1e-3, as multiples of T_forget and as a power of the depth."""
    from ..theory import tails

    found: dict[str, float] = {}
    for name, ratio in (("equal", 1.0), ("weak", 0.001)):
        steps = {L: tails.tail_steps(DECAY, ratio * DECAY, L).steps for L in sorted({*DEPTHS, *DEEP})}
        found |= {f"{name}/steps_{L}": steps[L] for L in DEPTHS}
        growth = tails.growth(DEEP, [steps[L] for L in DEEP])
        found |= {f"{name}/exponent": growth.exponent, f"{name}/r2_linear": growth.r2_linear,
                  f"{name}/r2_log": growth.r2_log}  # fmt: skip
    times = np.array([1e7, 1e8])  # where t^(L-1) is all that is left of the transient, four layers
    M = tails.recursion_matrix(DECAY, DECAY, 4)
    late = tails.log_tails(M, times)[:, 0] - times * math.log(1 - DECAY)
    found["transient/exponent_4"] = float(np.diff(late)[0] / np.diff(np.log(times))[0])
    page = tails.tail_steps(PAGE_DECAY, PAGE_RATIO * PAGE_DECAY, 21)
    forget = tails.forget_steps(DECAY)
    return found | {
        "page/over_t_forget": page.steps / tails.forget_steps(PAGE_DECAY),
        "page/log10_peak": page.log10_peak,
        "page/rho": tails.spectral_radius(tails.recursion_matrix(DECAY, 4e4, 12)),
        "explorer/t_forget": forget,
        "explorer/t_converge": tails.converge_steps(DECAY),
        "explorer/simulated_12": found["equal/steps_12"] / forget,
    }


def products(generator: Any) -> dict[str, float]:
    """rank and r_eff of prod(I + J) over 12 blocks of rank 10 and norm 0.5, d = 128."""
    from ..theory import spaces

    rank, erank = spaces.ranks(spaces.backward_product(spaces.random_jacobians(12, 128, 10, 0.5, generator)))
    return {"product/rank": float(rank), "product/erank": float(erank)}


def proof(generator: Any) -> dict[str, float]:
    """Step 2 of the two-layer proof with and without the ReLU mask, K = 5."""
    from ..theory import spaces

    drawn = spaces.draw_two_layer(2048, 32, 1000, 5, generator)
    masked, plain = (spaces.two_layer(*drawn, mask=mask) for mask in (True, False))
    return {
        **{f"proof/{key}": float(value) for key, value in masked._asdict().items()},
        "proof/outside_unmasked": float(plain.outside),
        "proof/delta_rank_unmasked": float(plain.delta_rank),
        "proof/product": float(masked.r_star * masked.r_a),
    }


def adam(generator: Any) -> dict[str, float]:
    """What a thousand Adam steps make of rank-5 gradients with one column space, 128 x 128."""
    from ..theory import spaces

    found = spaces.adam_containment(128, 128, 5, 1000, generator)
    return {f"adam/{key}": float(value) for key, value in found._asdict().items()}


def initial_ranks(seed: int) -> dict[str, float]:
    """Mean over the counted matrices of each architecture at initialisation, by four definitions of rank."""
    from ..build import build_task
    from ..compose import compose
    from ..probes.spectra import parts
    from ..spectra import effective_rank, entropy_rank_sigma, gram_spectrum, participation_ratio, stable_rank

    definitions = {"erank": effective_rank, "sigma": entropy_rank_sigma, "participation": participation_ratio,
                   "stable": stable_rank}  # fmt: skip
    models = {"resnet18": "cifar10", "vit_s": "cifar100", "gpt2_small": "stdlib", "toy": "stdlib"}
    found = {}
    for model, data in models.items():
        cfg = compose([f"model={model}", f"data={data}", f"seed={seed}", "train.steps=1", "optim.lr=1"])
        matrices = parts(build_task(cfg)[0])["block"]
        spectra = gram_spectrum(list(matrices.values()), list(matrices))
        for name, rank in definitions.items():
            found[f"init/{model}_{name}"] = sum(float(rank(s)) for s in spectra) / len(spectra)
    return found
