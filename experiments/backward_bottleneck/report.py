"""Figures of the backward bottleneck, and what is derived from its layer rows."""

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable

from backrank.analysis import stats
from backrank.analysis.figures import BLACK, BLUE, GREY, ORANGE, Missing, mean_ci, new, spread
from backrank.analysis.report import Results

# experiment -> title, the arm read as the page's run, key of its published numbers
TRAINED = {
    "resnet18_weight_decay": ("ResNet", "wd_5e-4", "resnet18"),
    "vit_weight_decay": ("vision transformer", "wd_published", "vit_s"),
    "gpt2_weight_decay": ("GPT-2", "wd_published", "gpt2_small"),
    "toy_shift": ("toy transformer", "wd_1e-1", "toy"),
}


def _rows(r: Results, experiment: str, kind: str, arm: str | None = None) -> pd.DataFrame:
    """Layer rows of the counted matrices, with `depth`, 0 at the input and 1 at the output. Raises Missing."""
    rows = r.layers
    if len(rows):
        rows = rows[(rows["experiment"] == experiment) & (rows["kind"] == kind) & (rows["part"] == "block")]
        rows = rows if arm is None else rows[rows["arm"] == arm]
    if not len(rows):
        raise Missing(f"{experiment} has no rows {kind} in layers.parquet")
    order = list(dict.fromkeys(rows[rows["id"] == rows["id"].iloc[0]]["layer"]))
    depth = {layer: i / max(len(order) - 1, 1) for i, layer in enumerate(_by_depth(order))}
    return rows.assign(depth=rows["layer"].map(depth))


def _by_depth(layers: list[str]) -> list[str]:
    """Layers from input to output: by the numbers in their names, the head last."""

    def key(layer: str):
        named = layer.replace("self_attention", "attention")  # in front of the feed-forward pair, mlp
        return layer.startswith("head"), re.sub(r"\d+", lambda number: number[0].zfill(9), named)

    return sorted(layers, key=key)


def _present(r: Results, kind: str, extra: Iterable[str] = ()) -> list[str]:
    """The trained models that have such rows at the page's arm, and of the `extra` experiments those with any."""
    found = []
    for name, arm in {**{name: arm for name, (_, arm, _) in TRAINED.items()}, **dict.fromkeys(extra)}.items():
        try:
            _rows(r, name, kind, arm)
        except Missing as error:
            lacking = error
        else:
            found.append(name)
    if not found:
        raise lacking
    return found


def _forgetting(r: Results, name: str) -> str | None:
    """The arm of the least decay that has forgotten 3 nats of its start."""
    rows = r.runs[r.runs["experiment"] == name]
    if not len(rows) or "forgetting/budget" not in rows:
        return None
    forgets = rows[rows["forgetting/budget"] >= 3].sort_values("forgetting/budget")
    return forgets["arm"].iloc[0] if len(forgets) else None


def _decay(r: Results, name: str, arm: str) -> str:
    rows = r.runs[(r.runs["experiment"] == name) & (r.runs["arm"] == arm)]
    return f"decay {rows['weight_decay'].iloc[0]:g}, {rows['forgetting/budget'].mean():.1f} nats"


def ranks(r: Results):
    """Effective rank of every counted matrix over training: at the page's decay, and one that forgets (or none)."""
    names = _present(r, "weight")
    figure, axes = new(3.1 * len(names) + 0.9, 6.6, len(names), 2, sharey=True)
    for column, name in zip(axes.T, names, strict=True):
        title, page, _ = TRAINED[name]
        other = _forgetting(r, name)
        for ax, arm in zip(column, (page, other if other not in (None, page) else "wd_0"), strict=True):
            rows = _rows(r, name, "weight", arm)
            wide = rows.pivot_table("erank", "step", "layer")
            wide /= wide.iloc[0]
            depth = rows.drop_duplicates("layer").set_index("layer")["depth"]
            for layer in sorted(wide, key=depth.get):
                ax.plot(wide.index, wide[layer], color=colormaps["viridis"](0.88 * depth[layer]), lw=1.1, alpha=0.9)
            ax.plot(wide.index, wide.mean(axis=1), color=BLACK, lw=2.2, ls=(0, (4, 2)))
            ax.set_title(f"{title}\n{_decay(r, name, arm)}", fontsize=10)
            ax.set_ylim(0, 1.08)
        column[1].set_xlabel("step")
    figure.supylabel("effective rank / its initial value", fontsize=10)
    bar = figure.colorbar(ScalarMappable(cmap=colormaps["viridis"]), ax=axes, ticks=[0, 1], fraction=0.03)
    bar.ax.set_yticklabels(["input", "output"])
    return figure


def decay(r: Results):
    """Mean rank at the end over weight decay, with the published points at the paper's scale beside."""
    names = [n for n in TRAINED if len(r.runs[r.runs["experiment"] == n])]
    if not names:
        raise Missing("no experiment on weight decay has runs")
    figure, axes = new(3.1 * len(names) + 0.5, 3.9, len(names), sharey=True)
    for ax, name in zip(axes, names, strict=True):
        title, arm, key = TRAINED[name]
        rows = r.runs[r.runs["experiment"] == name]
        share = rows["rank/weight_mean"] / rows["rank/weight_mean@0"]
        values = sorted(set(rows["weight_decay"]))
        for i, value in enumerate(values):
            mean_ci(ax, i, share[rows["weight_decay"] == value], BLUE)
            budget = rows[rows["weight_decay"] == value]["forgetting/budget"].mean()
            ax.text(i, 0.02, f"{budget:.1f}", ha="center", color=GREY, fontsize=8)
        ax.text(-0.45, 0.07, "nats forgotten", color=GREY, fontsize=8)
        p = r.claims.published
        left = p[f"{key}.final_erank"].value / p[f"{key}.init_erank"].value
        at = values.index(rows[rows["arm"] == arm]["weight_decay"].iloc[0]) if (rows["arm"] == arm).any() else 0
        ax.plot(at + 0.15, left, "D", mfc="white", color=ORANGE, ms=6)
        if key == "resnet18":
            ax.plot(values.index(0.0) + 0.15, 1 - p["ablation.wd0"].value / 100, "D", mfc="white", color=ORANGE, ms=6)
        ax.set_xticks(range(len(values)), [f"{v:g}" for v in values])
        ax.set_xlim(-0.5, len(values) - 0.5)
        ax.set_ylim(0, 1.05)
        ax.set_title(title)
        ax.set_xlabel("weight decay")
    axes[0].set_ylabel("mean effective rank, end / start")
    figure.suptitle("filled: ours    hollow: published (full size)", fontsize=9, x=0.01, ha="left", color=GREY)
    return figure


def rout(r: Results):
    """r_out beside the mean rank of the weights and of what the data wrote, over training, with the null of r_out."""
    page = {n: r.runs[(r.runs["experiment"] == n) & (r.runs["arm"] == arm)] for n, (_, arm, _) in TRAINED.items()}
    names = [n for n, rows in page.items() if len(rows) and "output/r_out" in rows]
    if not names:
        raise Missing("no run records output/r_out")
    columns = {"rank/weight_mean": "weights", "forgetting/remainder_mean": "written by the data",
               "output/r_out": "r_out", "output/r_out_null": "its null"}  # fmt: skip
    colours = [BLUE, "#56B4E9", ORANGE, GREY]
    figure, axes = new(3.1 * len(names) + 0.6, 3.9, len(names))
    for ax, name in zip(axes, names, strict=True):
        title, arm, _ = TRAINED[name]
        rows = page[name]
        for i, column in enumerate(columns):
            mean_ci(ax, i, rows[column].dropna(), colours[i])
            ax.annotate(f"{rows[column].mean():.1f}", (i, rows[column].mean()), (7, 0), textcoords="offset points",
                        fontsize=8.5, va="center", color=colours[i])  # fmt: skip
        ax.set_ylim(0, None)
        ax.set_xlim(-0.4, len(columns) - 0.2)
        ax.set_xticks(range(len(columns)), [label.replace(" by ", "\nby ") for label in columns.values()], fontsize=8)
        ax.grid(axis="x", visible=False)
        ax.set_title(f"{title}\n{_decay(r, name, arm)}", fontsize=10)
    axes[0].set_ylabel("effective rank at the end")
    figure.suptitle(
        "null: the same of a uniform softmax on the same targets", fontsize=9, x=0.01, ha="left", color=GREY
    )
    return figure


def tails(r: Results):
    """Largest tail norm over training, index from the final r_out, and what the decay alone would leave of it."""
    top = {}
    for name in _present(r, "tail_frozen"):
        rows = _rows(r, name, "tail_frozen")
        found = rows.groupby(["arm", "id", "step"])["tau"].max().groupby(["arm", "step"]).mean()
        found = found[found.groupby("arm").transform("first") > 0]
        if len(found):  # else no matrix has as many singular values as the output error has dimensions
            top[name] = found
    if not top:
        raise Missing("no matrix has a tail: the output error has more dimensions than any")
    figure, axes = new(3.5 * len(top) + 0.5, 3.9, len(top))
    for ax, (name, found) in zip(axes, top.items(), strict=True):
        decays = r.runs[r.runs["experiment"] == name].groupby("arm")["weight_decay"].first().sort_values()
        colours = [colormaps["viridis"](0.85 * i / max(len(decays) - 1, 1)) for i in range(len(decays))]
        ends = []
        for arm, colour in zip(decays.index, colours, strict=True):
            tau = found[arm] / found[arm].iloc[0]
            ax.plot(tau.index, tau, color=colour, lw=1.6)
            left = _left(r, name, arm)
            ax.plot(left.index, left, color=colour, lw=1.0, ls=":")
            ends.append(tau.iloc[-1])
        low, high = ax.get_ylim()
        for value, at, colour in zip(decays, spread(ends, 0.05 * (high - low)), colours, strict=True):
            ax.annotate(f"{value:g}", (tau.index[-1], at), (4, 0), textcoords="offset points", va="center",
                        fontsize=8, color=colour)  # fmt: skip
        ax.set_title(TRAINED[name][0])
        ax.set_xlabel("step")
        ax.margins(x=0.12)
    axes[0].set_ylabel("largest tail norm / its initial value")
    figure.suptitle(
        "dotted: (1 - mu lambda)^t, the bound without its coupling", fontsize=9, x=0.01, ha="left", color=GREY
    )
    return figure


def _left(r: Results, name: str, arm: str) -> pd.Series:
    """What the decay alone leaves of a weight, by step: ||E|| = f ||W_0|| of any counted matrix."""
    energy = _rows(r, name, "remainder", arm).groupby(["layer", "step"])["initial_share"].mean()
    norms = _rows(r, name, "weight", arm).groupby(["layer", "step"])["frobenius"].mean()
    found = (energy**0.5 * norms / norms.groupby("layer").transform("first")).dropna()
    return found[found.index[0][0]]


def pruning(r: Results):
    """Test accuracy against the parameters kept, by way of cutting and by decay."""
    rows = r.runs[(r.runs["experiment"] == "pruning") & r.runs["arm"].str.startswith("prune_")]
    if not len(rows):
        raise Missing("pruning has no runs")
    arms = rows.groupby("arm")["weight_decay"].first().sort_values()
    figure, axes = new(2.5 * len(arms) + 0.6, 3.9, len(arms), sharey=True)
    for ax, (arm, value) in zip(axes, arms.items(), strict=True):
        mine = rows[rows["arm"] == arm]
        for method, colour in CUTS.items():
            columns = [c for c in mine if c.startswith(f"prune/{method}_") and c.rpartition("_")[2].isdigit()]
            kept = sorted((int(c.rpartition("_")[2]), c) for c in columns)
            estimates = [stats.estimate(100 * mine[c]) for _, c in kept]
            x, mean = [k for k, _ in kept], [e.mean for e in estimates]
            ax.plot(x, mean, "-o", color=colour, ms=4, lw=1.5)
            if len(mine) > 1:
                ax.fill_between(
                    x, [e.low for e in estimates], [e.high for e in estimates], color=colour, alpha=0.15, lw=0
                )
        ax.axhline(100 * mine["prune/accuracy"].mean(), color=BLACK, lw=0.8, ls=":")
        ax.set_title(f"decay {value:g}", fontsize=10)
        ax.set_xlabel("parameters kept (%)")
        ax.set_xticks([5, 20, 40, 60, 80])
        ax.set_ylim(0, 102)
    axes[0].set_ylabel("test accuracy (%)")
    legend = "blue: singular directions    orange: range(P^T)    grey: largest entries    dotted: whole"
    figure.suptitle(legend, fontsize=9, x=0.01, ha="left", color=GREY)
    return figure


CUTS = {"rank": BLUE, "range": ORANGE, "magnitude": GREY}
FIGURES = {
    "ranks": (ranks, list(TRAINED), "Effective rank of each counted matrix over training (dashed: their mean)"),
    "decay": (decay, list(TRAINED), "Mean effective rank at the end against weight decay"),
    "rout": (rout, list(TRAINED), "Rank of the output error beside that of the weights"),
    "tails": (tails, list(TRAINED), "Tail norms over training by weight decay (index from the final r_out)"),
    "pruning": (pruning, ["pruning"], "Accuracy of trained networks cut to a share of their parameters"),
}


# --- the tail recursion, depth, optimisers ----------------------------------------------------------------------------


def tail_steps(r: Results):
    """Bound over measured of each layer's next tail, by layer: median and the middle nine tenths of steps and seeds."""
    rows = _rows(r, "tail_dynamics", "tail_bound")
    rows = rows[rows["tau"] > 0]
    arms = [
        arm for arm in dict.fromkeys(r.runs[r.runs["experiment"] == "tail_dynamics"]["arm"]) if arm in set(rows["arm"])
    ]
    figure, axes = new(2.7 * len(arms) + 0.6, 3.9, len(arms), sharey=True)
    for ax, arm in zip(axes, arms, strict=True):
        mine = rows[rows["arm"] == arm]
        order = _by_depth(list(set(mine["layer"])))
        for kind, colour, shift in (("uniform", GREY, -0.12), ("directional", BLUE, 0.12)):
            ratio = (mine[kind] / mine["tau"]).groupby(mine["layer"]).quantile([0.05, 0.5, 0.95]).unstack().loc[order]
            at = np.arange(len(order)) + shift
            ax.vlines(at, ratio[0.05], ratio[0.95], color=colour, lw=1.6)
            ax.plot(at, ratio[0.5], "o", color=colour, ms=5)
        ax.axhline(1, color=ORANGE, lw=1.2)
        ax.set_yscale("log")
        ax.set_xticks([0, len(order) - 1], ["input", "output"])
        ax.set_title(arm.replace("_", ", ") + " nats")
    axes[0].set_ylabel("bound / measured tail, one step on")
    legend = "blue: directional c_j    grey: uniform c_j    below the line the bound is broken"
    figure.suptitle(legend, fontsize=9, x=0.01, ha="left", color=GREY)
    return figure


def depth(r: Results):
    """Compression, the generalisation gap and the time to a loss of a fifth of the rank, against depth."""
    arms = depth_scaling(r).dropna(subset=["depth"])
    runs = r.runs[r.runs["experiment"] == "depth"].set_index("id")
    panels = {
        "compression of the mean rank (%)": 100 - 100 / arms["factor"],
        "accuracy, trained less held-out (points)": 100
        * arms["id"].map(runs["fit/accuracy"] - runs["val_accuracy"]).astype(float),
        "steps until a fifth of the rank is gone": arms["time_20"],
    }
    figure, axes = new(3.3 * len(panels) + 0.4, 3.9, len(panels))
    depths = sorted(set(arms["depth"]))
    for ax, (label, values) in zip(axes, panels.items(), strict=True):
        for i, times in enumerate(depths):
            if len(chosen := values[arms["depth"] == times].dropna()):
                mean_ci(ax, i, chosen, BLUE)
        ax.set_xticks(range(len(depths)), [f"{times:g}x" for times in depths])
        ax.set_xlabel("layers over those of the shallowest")
        ax.set_title(label, fontsize=10)
    return figure


def optimizers(r: Results):
    """Compression at the matched budget and without decay, by optimiser."""
    names = [n for n in OPTIMISED if len(r.runs[r.runs["experiment"] == n])]
    if not names:
        raise Missing("no experiment on optimisers has runs")
    figure, axes = new(3.4 * len(names) + 0.5, 3.9, len(names), sharey=True)
    for ax, name in zip(axes, names, strict=True):
        rows = r.runs[r.runs["experiment"] == name]
        compression = 100 - 100 * rows["rank/weight_mean"] / rows["rank/weight_mean@0"]
        for i, optimiser in enumerate(OPTIMISERS):
            for arm, colour, shift in ((optimiser, BLUE, -0.1), (f"{optimiser}_0", GREY, 0.1)):
                if len(values := compression[rows["arm"] == arm].dropna()):
                    mean_ci(ax, i + shift, values, colour)
        ax.axhline(0, color=BLACK, lw=0.8)
        ax.set_xticks(range(len(OPTIMISERS)), list(OPTIMISERS.values()))
        ax.set_title(OPTIMISED[name])
    axes[0].set_ylabel("compression of the mean rank (%)")
    figure.suptitle("blue: 4 nats forgotten    grey: no decay", fontsize=9, x=0.01, ha="left", color=GREY)
    return figure


OPTIMISERS = {"sgd": "SGD", "adamw": "AdamW", "muon": "Muon"}
OPTIMISED = {"optimizers": "vision transformer", "optimizers_toy": "toy transformer"}
FIGURES |= {
    "tail_steps": (
        tail_steps,
        ["tail_dynamics"],
        "One step of the tail recursion: its bound over what is measured, by layer",
    ),
    "depth": (depth, ["depth"], "Compression, generalisation gap and convergence time against depth at fixed width"),
    "optimizers": (
        optimizers,
        list(OPTIMISED),
        "Compression by optimiser at equal forgetting budgets and without decay",
    ),
}


# --- derived from the layer rows --------------------------------------------------------------------------------------


def falls_at(values: pd.Series, share: float) -> float:
    """The step (the index) at which a value has made that share of its whole fall; nan where it loses under 1 %."""
    first, last = values.iloc[0], values.iloc[-1]
    if not 0 < last < 0.99 * first:
        return np.nan
    done, steps = ((first - values) / (first - last)).to_numpy(), values.index.to_numpy()
    i = int((done >= share).argmax())
    return float(np.interp(share, done[i - 1 : i + 1], steps[i - 1 : i + 1]))


def reaches(values: pd.Series, share: float) -> float:
    """The step (the index) at which a value is first down to that share of its start; nan where it never is."""
    below = (values <= share * values.iloc[0]).to_numpy()
    i = int(below.argmax())
    if not below.any():
        return np.nan
    return float(np.interp(-share * values.iloc[0], -values.iloc[i - 1 : i + 1], values.index[i - 1 : i + 1]))


def slope(x, y) -> float:
    """Least squares over the finite points; nan of fewer than three."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    finite = np.isfinite(x) & np.isfinite(y)
    return float(np.polyfit(x[finite], y[finite], 1)[0]) if finite.sum() >= 3 else np.nan


def layers(r: Results) -> pd.DataFrame:
    """By run: when a layer has made half of its fall, and how much rank it keeps, as slopes over depth (0 to 1)."""
    found = []
    for name in _present(r, "weight", extra=["tail_dynamics"]):
        rows = _rows(r, name, "weight")
        for (arm, seed, run), mine in rows.groupby(["arm", "seed", "id"]):
            wide = mine.pivot_table("erank", "step", "layer")
            depth = mine.drop_duplicates("layer").set_index("layer")["depth"][wide.columns]
            half = wide.apply(falls_at, share=0.5) / wide.index[-1]
            kept = wide.iloc[-1] / wide.iloc[0]
            found.append({"arm": f"{name}.{arm}", "seed": seed, "id": run,
                          "half_time_slope": slope(depth, half), "kept_slope": slope(depth, kept)})  # fmt: skip
    return pd.DataFrame(found)


def forgetting(r: Results) -> pd.DataFrame:
    """By run of the trained models: compression in percent, without decay and (`forgets`) at the least that forgets."""
    found = []
    for name in TRAINED:
        rows = r.runs[r.runs["experiment"] == name]
        for arm, of in (("wd_0", "wd_0"), ("forgets", _forgetting(r, name))):
            for _, run in rows[rows["arm"] == of].iterrows():
                compression = 100 - 100 * run["rank/weight_mean"] / run["rank/weight_mean@0"]
                found.append({"arm": f"{name}.{arm}", "seed": run["seed"], "id": run["id"], "compression": compression})
    if not found:
        raise Missing("no model trained at several decays has runs")
    return pd.DataFrame(found)


def coupling_over_training(r: Results) -> pd.DataFrame:
    """By run: C_data (mean over the layers) times the largest c_j, the most and the least of it over the steps."""
    found = []
    for name in _present(r, "coupling", extra=["tail_dynamics"]):
        rows = _rows(r, name, "coupling")
        for (arm, seed, run), mine in rows.groupby(["arm", "seed", "id"]):
            steps = mine.groupby("step")
            products = steps[["uniform", "directional"]].max().mul(steps["c_data"].mean(), axis=0)
            found.append({"arm": f"{name}.{arm}", "seed": seed, "id": run,
                          "uniform_most": products["uniform"].max(), "directional_most": products["directional"].max(),
                          "directional_least": products["directional"].min()})  # fmt: skip
    return pd.DataFrame(found)


def depth_scaling(r: Results) -> pd.DataFrame:
    """By run of `depth`: how far and how fast the mean rank falls; by seed (arm `slopes`) the exponents in depth."""
    found = []
    for (arm, seed, run), mine in _rows(r, "depth", "weight").groupby(["arm", "seed", "id"]):
        wide = mine.pivot_table("erank", "step", "layer")
        mean = wide.mean(axis=1)
        found.append({"arm": arm, "seed": seed, "id": run, "depth": float(arm.removeprefix("depth_").removesuffix("x")),
                      "time_20": reaches(mean, 0.8), "factor": mean.iloc[0] / mean.iloc[-1],
                      "product": np.log(wide.iloc[0] / wide.iloc[-1]).sum()})  # fmt: skip
    table = pd.DataFrame(found)
    exponents = {"time_exponent": table["time_20"], "factor_exponent": table["factor"],
                 "product_exponent": table["product"]}  # fmt: skip
    logs = pd.DataFrame({name: np.log(values.where(values > 0)) for name, values in exponents.items()})
    for seed, mine in table.groupby("seed"):
        if len(mine) < table["arm"].nunique():  # a slope over other depths is another number
            continue
        row = {name: slope(np.log(mine["depth"]), logs.loc[mine.index, name]) for name in logs}
        found.append({"arm": "slopes", "seed": seed, "id": " ".join(mine["id"]), **row})
    return pd.DataFrame(found)


def shapes(r: Results) -> pd.DataFrame:
    """By run: how the spectra changed, each matrix against itself: exponent, KS distance, logarithm of the gap at r.

    gap_change: of the gap at the end, less that of the initial weights; gap_stands_out: less the mean from r/2 to 2r.
    """
    found = []
    for name in _present(r, "shape", extra=["tail_dynamics"]):
        rows = _rows(r, name, "shape")
        forgets = _forgetting(r, name) if name in TRAINED else None
        for (arm, seed, run), mine in rows.groupby(["arm", "seed", "id"]):
            first, last = (mine[mine["step"] == step].set_index("layer") for step in (0, mine["step"].max()))
            logs = {key: np.log(last[key].astype(float)) for key in ("gap", "gap_initial", "gap_neighbours")}
            row = {"seed": seed, "id": run,
                   "exponent_change": (last["exponent"] - first["exponent"]).astype(float).mean(),
                   "ks_change": (last["ks"] - first["ks"]).astype(float).mean(),
                   "gap_change": (logs["gap"] - logs["gap_initial"]).mean(),
                   "gap_stands_out": (logs["gap"] - logs["gap_neighbours"]).mean()}  # fmt: skip
            found += [{"arm": f"{name}.{a}", **row} for a in (arm, *(["forgets"] if arm == forgets else []))]
    return pd.DataFrame(found)


def bound_kept(r: Results) -> pd.DataFrame:
    """By run: share of layers and steps that break the bound, of the last layer (which it allows no growth) and of the
    others, and the median of bound over measured there."""
    rows = _rows(r, "tail_dynamics", "tail_bound")
    rows = rows[rows["tau"] > 0]
    last = _by_depth(list(set(rows["layer"])))[-1]
    found = []
    for (arm, seed, run), mine in rows.groupby(["arm", "seed", "id"]):
        row = {"arm": arm, "seed": seed, "id": run}
        for kind in ("uniform", "directional"):
            broken, inner = mine[kind] < mine["tau"], mine["layer"] != last
            row |= {f"broken_{kind}": broken[inner].mean(), f"broken_last_{kind}": broken[~inner].mean(),
                    f"ratio_{kind}": (mine[kind] / mine["tau"])[inner].median()}  # fmt: skip
        found.append(row)
    return pd.DataFrame(found)


def perplexity(r: Results) -> pd.DataFrame:
    """By run of GPT-2: perplexity on the held-out and on the train split, a token and a whitespace-separated word."""
    rows = r.runs[r.runs["experiment"] == "gpt2_weight_decay"]
    if not len(rows) or "data/train_words" not in rows:
        raise Missing("GPT-2 has no runs")
    found = rows[["arm", "seed", "id"]].copy()
    for split, loss in (("validation", "val_loss"), ("train", "fit/loss")):
        found[f"{split}_token"] = np.exp(rows[loss])
        found[f"{split}_word"] = np.exp(rows[loss] * rows[f"data/{split}_tokens"] / rows[f"data/{split}_words"])
    return found


DERIVED = {
    "perplexity": perplexity,
    "shapes": shapes,
    "bound_kept": bound_kept,
    "layers": layers,
    "forgetting": forgetting,
    "coupling_over_training": coupling_over_training,
    "depth_scaling": depth_scaling,
}
