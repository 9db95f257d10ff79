"""Figures of the backward bottleneck, and what is derived from its layer rows."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable

from backrank.analysis.figures import BLACK, BLUE, GREY, ORANGE, Missing, mean_ci, new
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
        return layer.startswith("head"), [int(part) if part.isdigit() else part for part in layer.split(".")]

    try:
        return sorted(layers, key=key)
    except TypeError:  # a number where another name has a word
        return sorted(layers, key=lambda layer: (layer.startswith("head"), layer))


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


def ranks(r: Results):
    """Effective rank of every counted matrix over training, seed mean, coloured by depth."""
    names = _present(r, "weight")
    figure, axes = new(3.3 * len(names) + 0.9, 3.9, len(names))
    for ax, name in zip(axes, names, strict=True):
        title, arm, _ = TRAINED[name]
        rows = _rows(r, name, "weight", arm)
        wide = rows.pivot_table("erank", "step", "layer")
        wide /= wide.iloc[0]
        depth = rows.drop_duplicates("layer").set_index("layer")["depth"]
        for layer in sorted(wide, key=depth.get):
            ax.plot(wide.index, wide[layer], color=colormaps["viridis"](0.88 * depth[layer]), lw=1.1, alpha=0.9)
        ax.plot(wide.index, wide.mean(axis=1), color=BLACK, lw=2.2, ls=(0, (4, 2)))
        ax.set_title(f"{title}, {arm.replace('wd_', 'decay ')}")
        ax.set_xlabel("step")
    axes[0].set_ylabel("effective rank / its initial value")
    bar = figure.colorbar(ScalarMappable(cmap=colormaps["viridis"]), ax=axes[-1], ticks=[0, 1], fraction=0.05)
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
               "output/r_out": "r_out", "output/r_out_null": "r_out of a uniform softmax"}  # fmt: skip
    colours = [BLUE, "#56B4E9", ORANGE, GREY]
    figure, axes = new(3.1 * len(names) + 0.6, 3.9, len(names))
    for ax, name in zip(axes, names, strict=True):
        title, arm, _ = TRAINED[name]
        rows = page[name]
        for i, column in enumerate(columns):
            mean_ci(ax, i, rows[column].dropna(), colours[i])
            ax.annotate(f"{rows[column].mean():.1f}", (i, rows[column].mean()), (7, 0), textcoords="offset points",
                        fontsize=8.5, va="center", color=colours[i])  # fmt: skip
        ax.set_yscale("log")
        ax.set_xlim(-0.4, len(columns) - 0.2)
        ax.set_xticks(range(len(columns)), [label.replace(" ", "\n") for label in columns.values()], fontsize=8)
        ax.grid(axis="x", visible=False)
        ax.set_title(f"{title}, {arm.replace('wd_', 'decay ')}")
    axes[0].set_ylabel("effective rank at the end")
    return figure


def tails(r: Results):
    """Largest tail norm over training, index from the final r_out, against what decay alone allows."""
    names = _present(r, "tail_frozen")
    figure, axes = new(3.3 * len(names) + 0.5, 3.9, len(names))
    for ax, name in zip(axes, names, strict=True):
        title, _, _ = TRAINED[name]
        rows = _rows(r, name, "tail_frozen")
        arms = sorted(set(rows["arm"]), key=lambda a: r.runs[r.runs["arm"] == a]["weight_decay"].iloc[0])
        for i, arm in enumerate(arms):
            mine = rows[rows["arm"] == arm]
            top = mine.groupby(["id", "step"])["tau"].max().groupby("step").mean()
            if not top.iloc[0]:  # no matrix has as many singular values as the output error has dimensions
                continue
            ax.plot(top.index, top / top.iloc[0], color=colormaps["viridis"](0.85 * i / max(len(arms) - 1, 1)), lw=1.6)
            ax.annotate(arm.replace("wd_", ""), (top.index[-1], top.iloc[-1] / top.iloc[0]), (4, 0),
                        textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        ax.set_yscale("log")
        ax.set_title(title)
        ax.set_xlabel("step")
        ax.margins(x=0.15)
    axes[0].set_ylabel("largest tail norm / its initial value")
    return figure


FIGURES = {
    "ranks": (ranks, list(TRAINED), "Effective rank of each counted matrix over training (dashed: their mean)"),
    "decay": (decay, list(TRAINED), "Mean effective rank at the end against weight decay"),
    "rout": (rout, list(TRAINED), "Rank of the output error beside that of the weights"),
    "tails": (tails, list(TRAINED), "Tail norms over training by weight decay (index from the final r_out)"),
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
    """Compression, the generalisation gap and the time to 90 % of the fall against depth."""
    arms = depth_scaling(r).dropna(subset=["depth"])
    runs = r.runs[r.runs["experiment"] == "depth"].set_index("id")
    panels = {
        "compression of the mean rank (%)": 100 - 100 / arms["factor"],
        "accuracy, trained less held-out (points)": 100
        * arms["id"].map(runs["fit/accuracy"] - runs["val_accuracy"]).astype(float),
        "steps to 90 % of the fall": arms["time_90"],
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
                      "time_90": falls_at(mean, 0.9), "factor": mean.iloc[0] / mean.iloc[-1],
                      "product": np.log(wide.iloc[0] / wide.iloc[-1]).sum()})  # fmt: skip
    table = pd.DataFrame(found)
    exponents = {"time_exponent": table["time_90"], "factor_exponent": table["factor"],
                 "product_exponent": table["product"]}  # fmt: skip
    logs = pd.DataFrame({name: np.log(values.where(values > 0)) for name, values in exponents.items()})
    for seed, mine in table.groupby("seed"):
        row = {name: slope(np.log(mine["depth"]), logs.loc[mine.index, name]) for name in logs}
        found.append({"arm": "slopes", "seed": seed, "id": " ".join(mine["id"]), **row})
    return pd.DataFrame(found)


DERIVED = {"layers": layers, "coupling_over_training": coupling_over_training, "depth_scaling": depth_scaling}
