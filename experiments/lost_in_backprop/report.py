"""Figures of lost_in_backprop, and what is derived from its runs: tokens to a loss, scaling laws, converging rates."""

import itertools
import re

import numpy as np
import pandas as pd
from matplotlib import colormaps
from scipy.optimize import least_squares, nnls

from backrank.analysis import stats
from backrank.analysis.figures import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, Missing, mean_ci, new, spread
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
    """Lost fraction against D/V: the null's curve with drawn heads and measured models; published ranges and nulls."""
    measured = r.runs[r.runs["experiment"] == "pretrained"]
    drawn = (r.runs["experiment"] == "propositions").any()
    if not drawn and measured.empty:
        raise Missing("no run of propositions or pretrained")
    figure, (ax, near) = new(9.4, 4.4, 2)
    x = np.logspace(-3, 0, 400)[:-1]
    for axis in (ax, near):
        axis.plot(x, np.sqrt(1 - x), color=BLACK, lw=1.4)
        axis.set_xscale("log")
        axis.set_xlabel("D/V")
    for width in WIDTHS if drawn else ():
        isotropic, untrained = (r.values("propositions", "drawn", f"null/{k}_{width}_lost") for k in GRADIENTS)
        mean_ci(ax, width / VOCAB, isotropic, BLUE)
        ax.plot(width / VOCAB, untrained.mean(), "o", mfc="none", ms=11, color=ORANGE)
    for arm, rows in measured.groupby("arm") if len(measured) else ():
        at, lost = (rows["head/rank"] / rows["rank/vocabulary"]).mean(), rows["head/lost"].mean()
        ax.plot(at, lost, "D", color=PURPLE, ms=5, zorder=4)
        name = arm.removesuffix("_start").removesuffix("_end")
        ax.annotate(name, (at, lost), (-4, -12), textcoords="offset points", ha="right", color=PURPLE, fontsize=8)
    ax.set_xlim(2e-3, 1)
    ax.set_ylim(0, 1.05)
    ax.set_ylabel("lost fraction (of the norm)")
    ax.set_title("drawn heads and measured models on sqrt(1 - D/V)", fontsize=9.5)
    if drawn:
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
        if len(found := measured[measured["arm"] == arm]):
            near.plot(at, found["head/lost"].mean(), "o", color=BLUE, ms=5, zorder=4)
    at = MODELS["olmo2_1b"][1] / MODELS["olmo2_1b"][2]
    middle, half = (olmo.low + olmo.high) / 2, (olmo.high - olmo.low) / 2
    near.errorbar(at, middle, half, fmt="none", ecolor=ORANGE, elinewidth=2, capsize=6, capthick=2, zorder=2)
    near.set_xlim(4e-3, 0.1)
    near.set_ylim(0.971, 1.0005)
    near.set_title("pretrained models: their nulls and what is published")
    return figure


# --- the head sweep ---------------------------------------------------------------------------------------------------

FAMILIES = {"narrow": ("head W = A B of rank D", ORANGE), "backward": ("rank D on the way back alone", BLUE)}
WHOLE = {"narrow": "full", "backward": "dense"}  # the arm of each family whose rank is the width


def shares(r: Results, experiment: str, family: str) -> list[int]:
    """The k of a family's arms <family>_<k>, D = width / k, from the widest head to the narrowest."""
    arms = set(r.runs.loc[r.runs["experiment"] == experiment, "arm"])
    return sorted(int(arm.split("_")[1]) for arm in arms if re.fullmatch(rf"{family}_\d+", str(arm)))


def sweep_width(r: Results) -> int:
    """Width of the backbone: the number of columns of the full head."""
    return int(r.values("head_sweep", "full", "head/rank").max())


def curve(r: Results, arm: str, seed: int) -> pd.DataFrame:
    """tokens and loss of one run of the sweep, in order."""
    c = r.curves
    rows = c[(c["experiment"] == "head_sweep") & (c["arm"] == arm) & (c["seed"] == seed)].sort_values("step")
    runs = r.runs[(r.runs["experiment"] == "head_sweep") & (r.runs["arm"] == arm) & (r.runs["seed"] == seed)]
    if rows.empty or runs.empty:
        raise Missing(f"head_sweep/{arm} has no curve of seed {seed}")
    return rows.assign(tokens=rows["step"] * float(runs["step_tokens"].iloc[0]))


def tokens_to(rows: pd.DataFrame, loss: float) -> float:
    """Tokens at which a curve first reaches a loss, in a line between its points; infinite where it never does."""
    tokens, losses = rows["tokens"].to_numpy(float), rows["loss"].to_numpy(float)
    below = np.flatnonzero(losses <= loss)
    if not len(below):
        return np.inf
    i = below[0]
    if i == 0:
        return tokens[0]
    share = (losses[i - 1] - loss) / (losses[i - 1] - losses[i])
    return tokens[i - 1] + share * (tokens[i] - tokens[i - 1])


def sweep_tokens(r: Results) -> pd.DataFrame:
    """tokens, speedup: at which an arm reaches the final loss of the narrowest head, and how many times fewer that is
    than the whole training; whole_speedup: the same of the full (dense) head and the arm's own final loss."""
    if r.curves.empty or not (narrow := shares(r, "head_sweep", "narrow")):
        raise Missing("no curve of head_sweep")
    narrowest, rows = f"narrow_{narrow[-1]}", []
    for seed in r.values("head_sweep", narrowest).index:
        reference = curve(r, narrowest, seed)
        for family, whole in WHOLE.items():
            for arm in [whole, *(f"{family}_{k}" for k in shares(r, "head_sweep", family))]:
                try:
                    own, best = curve(r, arm, seed), curve(r, whole, seed)
                except Missing:
                    continue
                total, reached = own["tokens"].iloc[-1], tokens_to(own, reference["loss"].iloc[-1])
                of_whole = tokens_to(best, own["loss"].iloc[-1])
                ids = " ".join(dict.fromkeys([own["id"].iloc[0], best["id"].iloc[0], reference["id"].iloc[0]]))
                rows.append({"arm": arm, "seed": seed, "id": ids, "tokens": reached, "speedup": total / reached,
                             "whole_speedup": total / of_whole})  # fmt: skip
    if not rows:
        raise Missing("no seed of head_sweep has the curves of two arms")
    return pd.DataFrame(rows).replace({"tokens": {np.inf: np.nan}})


def sweep(r: Results):
    """Final loss over D: factorised heads and backward-only ranks, each against its head of full width."""
    width = sweep_width(r)
    figure, axes = new(10.6, 4.4, 2)
    for family, (label, colour) in FAMILIES.items():
        ks = [1, *shares(r, "head_sweep", family)]
        arms = [WHOLE[family] if k == 1 else f"{family}_{k}" for k in ks]
        losses = [r.values("head_sweep", arm) for arm in arms]
        axes[0].plot([width / k for k in ks], [x.mean() for x in losses], color=colour, lw=1)
        dodge = 1.03 if family == "backward" else 0.97
        for k, loss in zip(ks, losses, strict=True):
            mean_ci(axes[0], dodge * width / k, loss, colour)
            if k > 1:
                mean_ci(axes[1], dodge * width / k, stats.paired(loss, losses[0], complete=False), colour)
        axes[1].plot([width / k for k in ks[1:]], [(x - losses[0]).mean() for x in losses[1:]], color=colour, lw=1)
        axes[0].text(0.97, 0.95 - 0.07 * (family == "backward"), label, color=colour, ha="right",
                     transform=axes[0].transAxes, va="top")  # fmt: skip
    axes[0].set_ylabel("validation loss (nats)")
    axes[1].axhline(0, color=BLACK, lw=0.8)
    axes[1].set_ylabel("penalty over its own head of full width (nats)")
    axes[0].set_title("final loss")
    axes[1].set_title("what rank D costs, paired over seeds")
    for ax in axes:
        ax.set_xscale("log", base=2)
        ticks = sorted({width / k for k in [1, *shares(r, "head_sweep", "narrow")]})
        ax.set_xticks(ticks, [f"{t:g}" for t in ticks])
        ax.set_xlabel(f"D, of width {width}")
    return figure


def curves(r: Results):
    """Validation loss over tokens, by D, mean over seeds; both families."""
    if r.curves.empty:
        raise Missing("no curve of head_sweep")
    width = sweep_width(r)
    figure, axes = new(10.6, 4.4, 2, sharey=True)
    for ax, (family, (label, _)) in zip(axes, FAMILIES.items(), strict=True):
        ks, ends = [1, *shares(r, "head_sweep", family)], []
        for i, k in enumerate(ks):
            arm = WHOLE[family] if k == 1 else f"{family}_{k}"
            seeds = r.values("head_sweep", arm).index
            rows = pd.concat([curve(r, arm, seed) for seed in seeds]).groupby("tokens")["loss"].mean()
            rows = rows[rows.index > 0]
            ends.append((rows.index[-1], rows.iloc[-1], colormaps["viridis"](i / max(1, len(ks) - 1) * 0.9)))
            ax.plot(rows.index / 1000, rows, color=ends[-1][2], lw=1.5)
        gap = 0.035 * np.ptp(ax.get_ylim())
        for k, (x, _, colour), y in zip(ks, ends, spread([end[1] for end in ends], gap), strict=True):
            ax.text(x / 1000 * 1.01, y, f"{width // k}", color=colour, va="center", fontsize=8)
        ax.set_title(label)
        ax.set_xlabel("thousand tokens (labels: D)")
        ax.margins(x=0.08)
    axes[0].set_ylabel("validation loss (nats)")
    return figure


def head_over_training(r: Results):
    """Lost fraction against its null and kept energy of the trained heads, by D."""
    width = sweep_width(r)
    figure, axes = new(10.6, 4.2, 2)
    for family, (label, colour) in FAMILIES.items():
        for k in [1, *shares(r, "head_sweep", family)]:
            arm = WHOLE[family] if k == 1 else f"{family}_{k}"
            try:
                lost, null = (r.values("head_sweep", arm, f"head/{name}") for name in ("lost", "null_lost"))
                kept = r.values("head_sweep", arm, "head/kept_over_null")
            except Missing:
                continue
            at = width / k * (1.03 if family == "backward" else 1)
            mean_ci(axes[0], at, lost, colour)
            axes[0].plot(at, null.mean(), "_", color=BLACK, ms=14, zorder=4)
            mean_ci(axes[1], at, kept, colour)
        axes[1].text(1.03, 0.9 - 0.09 * (family == "backward"), label, color=colour, transform=axes[1].transAxes)
    axes[1].axhline(1, color=BLACK, lw=0.8)
    axes[0].set_title("lost fraction at the end (bars: the null)")
    axes[1].set_title("kept energy over that of the null")
    for ax in axes:
        ax.set_xscale("log", base=2)
        ax.set_xlabel("D, or the rank that is passed back")
    return figure


# --- scaling laws -----------------------------------------------------------------------------------------------------

# name -> the variables whose powers a law sums, beside the constant
LAWS = {"without_d": ("params", "tokens"), "with_d": ("params", "tokens", "d"),
        "width": ("width", "tokens"), "width_and_d": ("width", "tokens", "d")}  # fmt: skip


def cells(r: Results) -> pd.DataFrame:
    """Runs of `scaling` with width, d and tokens; a cell is a width and a d."""
    rows = r.runs[(r.runs["experiment"] == "scaling")].copy()
    if rows.empty:
        raise Missing("no run of scaling")
    named = rows["arm"].str.extract(r"^w(\d+)_d(\d+)_").astype(float)
    return rows.assign(width=named[0], d=named[1], tokens=rows["steps"] * rows["step_tokens"])


def law(rows: pd.DataFrame, names: tuple[str, ...]):
    """E + sum_v a_v v^-b_v fitted to the losses by least squares, none of them negative; returns the prediction.

    At given exponents the rest is linear, so that these alone are searched.
    """
    scale, loss = {v: rows[v].median() for v in names}, rows["val_loss"].to_numpy(float)

    def terms(exponents, at: pd.DataFrame) -> np.ndarray:
        powers = [(at[v].to_numpy(float) / scale[v]) ** -b for v, b in zip(names, exponents, strict=True)]
        return np.stack([np.ones(len(at)), *powers], 1)

    def left(exponents) -> np.ndarray:
        basis = terms(exponents, rows)
        return basis @ nnls(basis, loss)[0] - loss

    starts = itertools.product((0.15, 0.8), repeat=len(names))
    fits = [least_squares(left, start, bounds=(0.02, 3)) for start in starts]
    exponents = min(fits, key=lambda fit: fit.cost).x
    factors = nnls(terms(exponents, rows), loss)[0]
    return lambda at: terms(exponents, at) @ factors


def scaling(r: Results) -> pd.DataFrame:
    """error_<law>: root mean squared error in nats on a cell that the fit has not seen, over all cells, by seed."""
    rows, found = cells(r), []
    for seed, mine in rows.groupby("seed"):
        keys = list(mine.groupby(["width", "d"]).groups)
        if len(keys) < 6:
            continue
        errors = {name: [] for name in LAWS}
        for width, d in keys:
            out = (mine["width"] == width) & (mine["d"] == d)
            for name, variables in LAWS.items():
                left = law(mine[~out], variables)(mine[out]) - mine.loc[out, "val_loss"]
                errors[name] += list(left)
        rms = {f"error_{name}": float(np.sqrt(np.mean(np.square(e)))) for name, e in errors.items()}
        found.append({"arm": "laws", "seed": seed, "id": " ".join(mine["id"]), **rms})
    if not found:
        raise Missing("scaling has no seed with six cells")
    return pd.DataFrame(found)


def scaling_figure(r: Results):
    """Loss over D by width and tokens; and the error on cells left out of the fit, by law."""
    rows = cells(r)
    errors = r.runs[r.runs["experiment"] == "scaling_laws"]
    if errors.empty:
        raise Missing("no scaling law fitted")
    figure, (ax, right) = new(10.6, 4.4, 2)
    widths, lengths = sorted(rows["width"].unique()), sorted(rows["tokens"].unique())
    for i, width in enumerate(widths):
        colour = colormaps["viridis"](i / max(1, len(widths) - 1) * 0.85)
        for tokens, style in zip(lengths, (":", "--", "-"), strict=False):
            mine = rows[(rows["width"] == width) & (rows["tokens"] == tokens)].groupby("d")["val_loss"].mean()
            ax.plot(mine.index, mine, style, marker="o", ms=3.5, color=colour, lw=1.2)
        ax.text(0.97, 0.95 - 0.07 * i, f"width {width:g}", color=colour, ha="right", transform=ax.transAxes)
    ax.set_xscale("log", base=2)
    low, high = ax.get_ylim()
    ax.set_ylim(low, high + 0.3 * (high - low))  # room for the labels
    ax.set_xlabel("D (dotted, dashed, solid: more tokens)")
    ax.set_ylabel("validation loss (nats)")
    labels = {"without_d": "parameters, tokens", "with_d": "parameters, tokens, D", "width": "width, tokens",
              "width_and_d": "width, tokens, D"}  # fmt: skip
    for y, name in enumerate(LAWS):
        mean_ci(right, y, errors[f"error_{name}"], ORANGE if name.endswith("d") and name != "without_d" else GREY,
                horizontal=True)  # fmt: skip
    right.set_yticks(range(len(LAWS)), [labels[name] for name in LAWS])
    right.set_ylim(len(LAWS) - 0.5, -0.5)
    right.set_xlim(left=0)
    right.set_xlabel("error on a cell left out (nats)")
    return figure


# --- SpamLang ---------------------------------------------------------------------------------------------------------

SYMBOLS = (1024, 4096, 16384, 32768, 65536, 131072)
CONVERGED = 0.99  # of the symbols that were drawn


def rates(r: Results) -> pd.DataFrame:
    """converged: learning rates of an arm's search whose accuracy is 99 % of the coverage; tried: how many there are;
    best_accuracy: the best of them."""
    runs = r.table[(r.table["experiment"] == "spamlang") & r.table["searched"].astype(bool)]
    found = []
    for arm, rows in runs.groupby("arm"):
        accuracy = rows["val_accuracy"].astype(float).fillna(0.0)  # diverged: nothing
        coverage = rows["data/coverage"].astype(float).max()
        found.append({"arm": arm, "seed": int(rows["seed"].iloc[0]), "id": " ".join(rows["id"]), "tried": len(rows),
                      "converged": int((accuracy >= CONVERGED * coverage).sum()),
                      "best_accuracy": accuracy.max()})  # fmt: skip
    if not found:
        raise Missing("no run of spamlang")
    return pd.DataFrame(found)


def spamlang(r: Results):
    """Accuracy over V and learning rate on the searched seed, by optimiser, untied above and tied below."""
    runs = r.table[(r.table["experiment"] == "spamlang") & r.table["searched"].astype(bool)]
    if runs.empty:
        raise Missing("no run of spamlang")
    optimisers = {"": "AdamW", "_sgd": "SGD with momentum", "_muon": "Muon"}
    figure, axes = new(12.4, 7.2, 3, 2)
    for row, (kind, name) in zip(axes, {"v": "untied", "tied": "tied"}.items(), strict=True):
        for ax, (suffix, optimiser) in zip(row, optimisers.items(), strict=True):
            for i, v in enumerate(SYMBOLS):
                mine = runs[runs["arm"] == f"{kind}_{v}{suffix}"].sort_values("lr")
                colour = colormaps["viridis"](i / len(SYMBOLS))
                accuracy = mine["val_accuracy"].astype(float).fillna(0.0)
                ax.plot(mine["lr"], 100 * accuracy, "-o", ms=3.5, lw=1.2, color=colour)
                if ax is row[-1] and kind == "v" and len(mine):
                    symbols = round(float((mine["data/unique"] / mine["data/coverage"]).iloc[0]))
                    ax.text(1.03, 0.9 - 0.1 * i, f"{symbols:,} symbols", color=colour, transform=ax.transAxes)
            ax.set_xscale("log")
            ax.set_ylim(-3, 103)
            ax.set_title(f"{optimiser}, {name}")
        row[0].set_ylabel("accuracy over all symbols (%)")
    for ax in axes[-1]:
        ax.set_xlabel("learning rate")
    return figure


def draws(r: Results):
    """Accuracy at the best rate over V: positions fixed, and draws of a symbol held."""
    if not (r.runs["experiment"] == "spamlang").any():
        raise Missing("no run of spamlang")
    figure, (ax, right) = new(10.6, 4.3, 2)
    for suffix, colour, label in (("", BLUE, "AdamW"), ("_sgd", ORANGE, "SGD with momentum"), ("_muon", GREEN, "Muon")):
        for kind, style in (("v", "-"), ("tied", ":")):
            at, means = [], []
            for v in SYMBOLS:
                try:
                    values = 100 * r.values("spamlang", f"{kind}_{v}{suffix}", "val_accuracy")
                except Missing:
                    continue
                mean_ci(ax, v * (1 if kind == "v" else 1.06), values, colour)
                at.append(v)
                means.append(values.mean())
            ax.plot(at, means, style, color=colour, lw=1.2)
        ax.text(0.03, 0.28 - 0.07 * len(label[:1]) * (BLUE, ORANGE, GREEN).index(colour), label, color=colour,
                transform=ax.transAxes)  # fmt: skip
    for held, colour, first in (("5", ORANGE, "v_131072"), ("39", BLUE, "v_16384")):
        arms = {int(first[2:]): first} | {v: f"v_{v}_draws_{held}" for v in SYMBOLS if v != int(first[2:])}
        at = []
        for v, arm in sorted(arms.items()):
            try:
                values = 100 * r.values("spamlang", arm, "val_accuracy")
            except Missing:
                continue
            mean_ci(right, v, values, colour)
            at.append((v, values.mean()))
        if at:
            right.plot(*zip(*at, strict=True), color=colour, lw=1.2)
            right.text(at[-1][0] * 1.15, at[-1][1], f"{held} draws", color=colour, va="center")
    ax.set_title("positions fixed (solid: untied, dotted: tied)")
    right.set_title("draws of a symbol held, AdamW, untied")
    ax.set_ylabel("accuracy at the rate of the lowest loss (%)")
    for axis in (ax, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(SYMBOLS, [f"{v // 1024}k" for v in SYMBOLS])
        axis.set_xlabel("V at the published width; here the same V/D")
        axis.set_ylim(-3, 106)
    right.set_xlim(12_000, 300_000)
    return figure


# --- measured models --------------------------------------------------------------------------------------------------


def points(r: Results, experiment: str, kind: str) -> pd.DataFrame:
    """Rows of layers.parquet of one kind; raises Missing without any."""
    rows = r.layers[(r.layers["experiment"] == experiment) & (r.layers["kind"] == kind)] if len(r.layers) else r.layers
    if rows.empty:
        raise Missing(f"{experiment} has no {kind}")
    return rows


COLOURS = (BLUE, ORANGE, GREEN, PURPLE, BLACK, GREY)


def spectrum(r: Results):
    """Components of G by batch size, and its singular values."""
    held, sigma = points(r, "pretrained", "logit/components_999"), points(r, "pretrained", "logit/sigma")
    least, tokens = points(r, "pretrained", "logit/components_70"), points(r, "pretrained", "logit/next_tokens")
    figure, (ax, right) = new(10.6, 4.4, 2)
    for i, (arm, rows) in enumerate(held.groupby("arm")):
        colour = COLOURS[i % len(COLOURS)]
        mine = rows.groupby("index")["value"].mean()
        ax.plot(mine.index, mine, "-o", ms=3.5, color=colour)
        seventy = least[least["arm"] == arm].groupby("index")["value"].mean()
        ax.plot(seventy.index, seventy, "--", color=colour, lw=1.2)
        different = tokens[tokens["arm"] == arm].groupby("index")["value"].mean()
        ax.plot(different.index, different, ":", color=colour, lw=1.2)
        s = sigma[sigma["arm"] == arm].groupby("index")["value"].mean()
        right.plot(s.index, (s / s.iloc[0]).where(s > 1e-6 * s.iloc[0]), color=colour)  # below is rounding
        ax.text(0.03, 0.95 - 0.07 * i, arm, color=colour, transform=ax.transAxes, va="top")
    for axis in (ax, right):
        axis.set_xscale("log")
        axis.set_yscale("log")
    ax.set_xlabel("tokens of the batch")
    ax.set_ylabel("components")
    ax.set_title("solid 99.9 %, dashed 70 % of the norm; dotted: next tokens", fontsize=9.5)
    right.set_xlabel("index")
    right.set_title("singular values of G over the first", fontsize=9.5)
    return figure


def moved(r: Results):
    """What the projection does to a token's coefficients, by position: energy and variance over the tokens."""
    arms = sorted(set(points(r, "pretrained", "sorted/before_energy")["arm"]))
    styles = {"before": "-", "after": "--", "own": ":"}
    figure, axes = new(10.6, 4.4, 2)
    for ax, quantity in zip(axes, ("energy", "variance"), strict=True):
        for i, arm in enumerate(arms):
            for when, style in styles.items():
                rows = points(r, "pretrained", f"sorted/{when}_{quantity}")
                mine = rows[rows["arm"] == arm].groupby("index")["value"].mean()
                ax.plot(mine.index, mine, style, color=COLOURS[i % len(COLOURS)], lw=1.4)
            ax.text(0.03, 0.05 + 0.07 * i, arm, color=COLOURS[i % len(COLOURS)], transform=ax.transAxes)
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_xlabel("position, largest |G| first (dotted: in its own order)")
        ax.set_title(f"{quantity}: solid before, dashed after the projection", fontsize=9.5)
    axes[0].set_ylabel("mean square of a coefficient")
    axes[1].set_ylabel("variance of it over the tokens")
    return figure


def directions(r: Results):
    """Change of the loss against the size of the step of the logits, by direction."""
    shown = {"gradient": ("-G", BLACK), "realizable": ("-G W W^T", ORANGE), "projected": ("-G P", BLUE),
             "random_subspace": ("-G on a random subspace", GREY)}  # fmt: skip
    arms = sorted(set(points(r, "update_direction", "direction/gradient")["arm"]))
    figure, axes = new(4.2 * len(arms) + 1, 4.4, len(arms), sharey=True)
    for ax, arm in zip(axes, arms, strict=True):
        for i, (name, (label, colour)) in enumerate(shown.items()):
            rows = points(r, "update_direction", f"direction/{name}")
            mine = -rows[rows["arm"] == arm].groupby("index")["value"].mean()
            mine = mine[mine > 0]
            ax.plot(mine.index, mine, color=colour, lw=1.5)
            ax.text(0.97, 0.27 - 0.07 * i, label, color=colour, transform=ax.transAxes, ha="right")
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.set_title(arm)
        ax.set_xlabel("||dZ|| over ||Z||")
    axes[0].set_ylabel("fall of the loss (nats)")
    return figure


DERIVED = {"head_sweep_tokens": sweep_tokens, "scaling_laws": scaling, "spamlang_rates": rates}
FIGURES = {
    "sweep": (
        sweep,
        ["head_sweep"],
        "Heads of rank D, and rank D on the way back alone",
    ),
    "curves": (curves, ["head_sweep"], "Validation loss over training by D, seed mean"),
    "head_over_d": (
        head_over_training,
        ["head_sweep"],
        "What trained heads pass on, against an isotropic gradient",
    ),
    "null_model": (
        null_model,
        ["propositions", "pretrained"],
        "The share of the logit gradient's norm outside col(W), against a gradient without relation to the head "
        "(line); black points: the null of each model, blue and diamonds: measured, bar: OLMo2-1B as published",
    ),
    "spectrum": (spectrum, ["pretrained"], "Rank of the logit gradient against the batch, and its spectrum"),
    "moved": (moved, ["pretrained"], "Coefficients of the logit gradient before and after the projection"),
    "directions": (
        directions,
        ["update_direction"],
        "Fall of the loss as the logits move, at equal size",
    ),
    "scaling": (scaling_figure, ["scaling"], "Loss over D, width and tokens, and laws with and without D"),
    "spamlang": (spamlang, ["spamlang_rates"], "SpamLang: accuracy over V and learning rate, one seed"),
    "draws": (
        draws,
        ["spamlang"],
        "SpamLang at the rate of the lowest loss: over V, and with the draws of a symbol held",
    ),
}
