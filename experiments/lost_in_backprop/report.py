"""Figures of lost_in_backprop: so far what a head would lose of a gradient that knows nothing of it."""

import numpy as np

from backrank.analysis.figures import BLACK, BLUE, GREY, ORANGE, Missing, mean_ci, new
from backrank.analysis.report import Results

# arm of `pretrained` -> name, D, V
MODELS = {
    "gpt2": ("GPT-2", 768, 50_257),
    "pythia_1b": ("Pythia-1B", 2048, 50_304),
    "llama32_1b": ("Llama-3.2-1B", 2048, 128_256),
    "olmo2_1b": ("OLMo2-1B", 2048, 100_352),
    "qwen3_06b": ("Qwen3-0.6B", 1024, 151_936),
    "smollm2_135m": ("SmolLM2-135M", 576, 49_152),
}
WIDTHS, VOCAB, GRADIENTS = (8, 32, 128, 512), 1024, ("isotropic", "untrained")  # of the drawn heads


def null_model(r: Results):
    """Lost fraction against D/V: the null's curve, drawn heads on it, published ranges beside the models' nulls."""
    if not (r.runs["experiment"] == "propositions").any():
        raise Missing("no run of propositions")
    figure, (ax, near) = new(9.4, 4.4, 2)
    x = np.logspace(-3, 0, 400)[:-1]
    for axis in (ax, near):
        axis.plot(x, np.sqrt(1 - x), color=BLACK, lw=1.4)
        axis.set_xscale("log")
        axis.set_xlabel("D/V")
    for width in WIDTHS:
        isotropic, untrained = (r.values("propositions", "drawn", f"null/{k}_{width}_lost") for k in GRADIENTS)
        mean_ci(ax, width / VOCAB, isotropic, BLUE)
        ax.plot(width / VOCAB, untrained.mean(), "o", mfc="none", ms=11, color=ORANGE)
    ax.set_xlim(4e-3, 1)
    ax.set_ylim(0, 1.05)
    ax.set_ylabel("lost fraction (of the norm)")
    ax.set_title("drawn heads on sqrt(1 - D/V)")
    ax.text(0.05, 0.16, "filled: isotropic gradient", color=BLUE, fontsize=9, transform=ax.transAxes)
    ax.text(0.05, 0.09, "hollow: gradient of an untrained head", color=ORANGE, fontsize=9, transform=ax.transAxes)

    p = r.claims.published
    families, olmo = p["lost.range"], p["lost.olmo2_1b"]
    near.axhspan(families.low, families.high, color=ORANGE, alpha=0.13, lw=0)
    near.text(0.0043, 0.9722, "published range of all families, down to 0.95", color=ORANGE, fontsize=8)
    for arm, (name, width, vocab) in MODELS.items():
        at, null = width / vocab, np.sqrt(1 - width / vocab)
        near.plot(at, null, "o", color=BLACK, ms=4, zorder=3)
        shift, side = ((-6, -9), "right") if arm in ("gpt2", "smollm2_135m") else ((6, 3), "left")
        near.annotate(name, (at, null), shift, textcoords="offset points", ha=side, color=GREY, fontsize=8)
        if len(found := r.runs[(r.runs["experiment"] == "pretrained") & (r.runs["arm"] == arm)]):
            near.plot(at, found["head/lost"].mean(), "o", color=BLUE, ms=5, zorder=4)
    at = MODELS["olmo2_1b"][1] / MODELS["olmo2_1b"][2]
    middle, half = (olmo.low + olmo.high) / 2, (olmo.high - olmo.low) / 2
    near.errorbar(at, middle, half, fmt="none", ecolor=ORANGE, elinewidth=2, capsize=6, capthick=2, zorder=2)
    near.set_xlim(4e-3, 0.1)
    near.set_ylim(0.971, 1.0005)
    near.set_title("pretrained models: their nulls and what is published")
    return figure


FIGURES = {
    "null_model": (
        null_model,
        ["propositions"],
        "The share of the logit gradient's norm outside col(W) where gradient and head have no relation; black points: "
        "the null of each model, bar: OLMo2-1B over its training as published",
    ),
}
