"""Figures of the causal test: FIGURES names each, what it draws from, and its caption."""

import numpy as np
import pandas as pd
from matplotlib import colormaps

from backrank.analysis import stats
from backrank.analysis.figures import BLACK, BLUE, GREEN, GREY, ORANGE, Missing, mean_ci, new, spread
from backrank.analysis.report import Results
from backrank.analysis.tables import order
from backrank.analysis.verdicts import MARGIN

KINDS = {"backward": ("backward only", BLUE), "factorised": ("factorised", ORANGE)}
MODELS = {"byte": ("byte_heads", [16, 8, 4]), "subword": ("subword_heads", [48])}
HOLLOW = {"mfc": "white", "alpha": 0.75}


def _models(r: Results):
    """The models (name, experiment, ranks) whose arms all have runs. Raises Missing without any."""
    found, lacking = [], None
    for name, (experiment, ranks) in MODELS.items():
        try:
            for arm in ["ordinary", *(f"{kind}_r{rank}" for kind in KINDS for rank in ranks)]:
                r.values(experiment, arm)
            found.append((name, experiment, ranks))
        except Missing as error:
            lacking = lacking or error
    if not found:
        raise lacking
    return found


def penalties(r: Results):
    """Penalty over ordinary backpropagation by rank, with the published points beside."""
    models = _models(r)
    widths = [len(ranks) + 1.3 for _, _, ranks in models]
    figure, axes = new(3.2 + 2.2 * len(models), 4.4, len(models), width_ratios=widths, sharey=True)
    at = {}  # where each label of a panel would stand: beside its last pair of points
    for ax, (name, experiment, ranks) in zip(axes, models, strict=True):
        ordinary = r.values(experiment, "ordinary")
        for i, rank in enumerate(ranks):
            for offset, (kind, (label, colour)) in zip((-0.16, 0.16), KINDS.items(), strict=True):
                arm = r.values(experiment, f"{kind}_r{rank}")
                e = mean_ci(ax, i + offset - 0.05, stats.paired(arm, ordinary, complete=False), colour)
                p = r.claims.published[f"{name}.{kind}_r{rank}.delta"]
                bar = None if np.isnan(p.low) else [[p.value - p.low], [p.high - p.value]]
                ax.errorbar(i + offset + 0.06, p.value, bar, fmt="D", ms=5, capsize=3, color=colour, lw=1, **HOLLOW)
                at[ax, label, colour] = (e.mean + p.value) / 2
        ax.axhline(0, color=BLACK, lw=0.8)
        ax.set_xticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
        ax.set_xlim(-0.5, len(ranks) - 1 + 1.25)
        ax.grid(axis="x", visible=False)
        ax.set_title(f"{name} model")
    gap = 0.07 * np.ptp(axes[0].get_ylim())
    for ax, (_, _, ranks) in zip(axes, models, strict=True):
        mine = {key: y for key, y in at.items() if key[0] is ax}
        for (_, label, colour), y in zip(mine, spread(list(mine.values()), gap), strict=True):
            box = {"fc": "white", "ec": "none", "pad": 1}
            ax.text(len(ranks) - 1 + 0.32, y, label, color=colour, va="center", bbox=box)
    axes[0].set_ylabel("penalty in loss (nats)")
    figure.suptitle("filled: ours, 95 % interval over paired seeds    hollow: published (paper's scale)", fontsize=9,
                    x=0.01, ha="left", color=GREY)  # fmt: skip
    return figure


def pairs(r: Results):
    """Each seed from its backward-only to its factorised loss."""
    panels = [(name, experiment, rank) for name, experiment, ranks in _models(r) for rank in ranks]
    figure, axes = new(2.5 * len(panels) + 0.6, 4.2, len(panels))
    for ax, (name, experiment, rank) in zip(axes, panels, strict=True):
        arms = {kind: r.values(experiment, f"{kind}_r{rank}") for kind in KINDS}
        table = stats.align(arms, complete=False)
        paper = r.claims.experiments[experiment]["paper_seeds"]
        for seed, (low, high) in table.iterrows():
            ours = seed in paper
            colour = ORANGE if high < low else BLACK if ours else GREY
            ax.plot([0, 1], [low, high], "-o", color=colour, ms=3.5, lw=1.3 if ours else 0.8, alpha=1 if ours else 0.6)
        e = stats.estimate(table["factorised"] - table["backward"])
        up, _, _ = stats.signs(table["factorised"] - table["backward"])
        p = r.claims.published[f"{name}.r{rank}.forward_minus_backward"]
        ends = "" if e.n < 2 else f" [{e.low:.3f}, {e.high:.3f}]"
        counts = f"{up} of {e.n} up; published {p.value:+.3f}"
        ax.set_title(f"{name}, rank {rank}\n{e.mean:+.3f}{ends}\n{counts}", fontsize=9)
        ax.set_xticks([0, 1], ["backward\nonly", "factorised"])
        ax.set_xlim(-0.25, 1.25)
        ax.grid(axis="x", visible=False)
    axes[0].set_ylabel("validation loss (nats)")
    return figure


def residual(r: Results):
    """Losses of the four head updates under both optimisers."""
    arms = {"full": "full", "projected": "gradient\nprojected", "update_projected": "update\nprojected",
            "frozen": "frozen\nW = Q A"}  # fmt: skip
    optimisers = [o for o in ("adamw", "sgd") if _has(r, "residual_usage", [f"{o}_{arm}" for arm in arms])]
    if not optimisers:
        r.values("residual_usage", "adamw_full")
        raise Missing("residual_usage lacks arms of adamw and of sgd")
    figure, axes = new(4.3 * len(optimisers) + 0.4, 4.2, len(optimisers), sharey=True)
    for ax, optimiser in zip(axes, optimisers, strict=True):
        for x, arm in enumerate(arms):
            values = r.values("residual_usage", f"{optimiser}_{arm}")
            ax.plot(np.full(len(values), x) + np.linspace(-0.12, 0.12, len(values)), values, ".", color=GREY, ms=5)
            e = mean_ci(ax, x + 0.25, values, BLUE)
            ax.text(x + 0.33, e.mean, f"{e.mean:.3f}", color=BLUE, va="center", fontsize=9, zorder=4,
                    bbox={"fc": "white", "ec": "none", "alpha": 0.8, "pad": 0.6})  # fmt: skip
        where = "published" if r.scale == "paper" else "published at the paper's scale"
        for key, label in (("residual.full", f"{where}: full"), ("residual.projected", f"{where}: residual removed")):
            p = r.claims.published[key]
            ax.axhspan(p.low, p.high, color=ORANGE, alpha=0.15, lw=0)
            ax.axhline(p.value, color=ORANGE, lw=1)
            ax.text(3.75, p.high, label, color=ORANGE, ha="right", va="bottom", fontsize=8.5)
        ax.set_xticks(range(len(arms)), arms.values())
        ax.set_xlim(-0.4, 3.8)
        ax.grid(axis="x", visible=False)
        ax.set_title({"adamw": "AdamW", "sgd": "SGD with momentum"}[optimiser])
    axes[0].set_ylabel("validation loss (nats)")
    return figure


def rotation(r: Results):
    """How far the head's column space has turned at the end, by arm."""
    rows = []
    for experiment in ("byte_heads", "subword_heads", "residual_usage"):
        baselines = r.claims.experiments[experiment]["baselines"]
        for arm in order(r.runs[r.runs["experiment"] == experiment]["arm"], baselines):
            if _has(r, experiment, [arm], "rotation/mean_cos"):
                rows.append((experiment, arm))
    if not rows:
        raise Missing("no run records rotation/mean_cos")
    figure, (ax,) = new(7.2, 1.5 + 0.3 * len(rows))
    for y, (experiment, arm) in enumerate(rows):
        mean_ci(ax, y, r.values(experiment, arm, "rotation/mean_cos"), BLUE, horizontal=True)
        if _has(r, experiment, [arm], "rotation/min_cos"):
            mean_ci(ax, y + 0.22, r.values(experiment, arm, "rotation/min_cos"), GREY, horizontal=True, mfc="white")
    ax.set_yticks(range(len(rows)), [arm.replace("_", " ") for _, arm in rows])
    for experiment in dict.fromkeys(e for e, _ in rows):
        at = [y for y, (e, _) in enumerate(rows) if e == experiment]
        ax.axhline(at[0] - 0.5, color=BLACK, lw=0.6)
        ax.text(1.02, np.mean(at), experiment.replace("_", " "), transform=ax.get_yaxis_transform(), rotation=-90,
                va="center", color=GREY)  # fmt: skip
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.set_xlim(-0.03, 1.03)
    ax.set_xlabel("cosine of the principal angles between col(W) at the end and at the start")
    ax.set_title("filled: mean angle   hollow: largest angle", fontsize=9, color=GREY)
    return figure


def ranks(r: Results):
    """Effective rank of every block matrix over the steps, ordinary arm, mean over seeds."""
    rows = r.layers
    if len(rows):
        rows = rows[(rows["experiment"] == "byte_heads") & (rows["arm"] == "ordinary") & (rows["kind"] == "weight")]
        rows = rows[rows["layer"].str.contains(r"\.\d+\.") & rows["erank"].notna()]
    if not len(rows):
        raise Missing("byte_heads/ordinary has no spectra in layers.parquet")
    parts = rows["layer"].str.extract(r"\.(?P<depth>\d+)\.(?P<matrix>.+?)(?:\.weight)?$")
    wide = pd.concat([rows, parts], axis=1).pivot_table("erank", ["matrix", "depth"], "step", sort=False)
    wide = wide[sorted(wide)].div(wide[min(wide)], axis=0)
    start = pd.concat([rows, parts], axis=1).query("step == step.min()").groupby("matrix", sort=False)["erank"].mean()
    height = float(np.nanmax(wide) - np.nanmin(wide)) or 1.0
    depths = sorted({int(d) for d in wide.index.get_level_values("depth")})
    figure, axes = new(2.6 * len(start) + 0.8, 3.8, len(start), sharey=True)
    # Viridis without its yellow end, which vanishes on white; it stays ordered in grey and for the colour-blind.
    colour = {d: colormaps["viridis"](0.85 * i / max(len(depths) - 1, 1)) for i, d in enumerate(depths)}
    lowest = float(np.nanmin(wide)) - 0.04 * height
    for ax, (matrix, first) in zip(axes, start.items(), strict=True):
        curves = {d: wide.loc[(matrix, str(d))].dropna() for d in depths if (matrix, str(d)) in wide.index}
        last = max(curve.index[-1] for curve in curves.values())
        labels = spread([curve.iloc[-1] for curve in curves.values()], 0.06 * height)
        for (d, curve), y in zip(curves.items(), labels, strict=True):
            ax.plot(curve.index, curve, color=colour[d], lw=1.6)
            lowest = min(lowest, y - 0.04 * height)
            ax.text(last * 1.03, y, f"layer {d}", color=colour[d], va="center", fontsize=8.5)
        ax.set_xlim(0, last * 1.32)
        ax.set_xticks(np.linspace(0, last, 3).round().astype(int))
        ax.set_title(f"{matrix}\n{first:.1f} at the start", fontsize=9.5)
        ax.set_xlabel("step")
    axes[0].set_ylim(bottom=lowest)
    axes[0].set_ylabel("effective rank / its initial value")
    return figure


def spamlang(r: Results):
    """Accuracy of SpamLang against the learning rate by draws per symbol, AdamW and SGD, with the coverage ceilings."""
    lines = {"positions_len1": BLUE, "draws4_len64": GREEN, "positions_len64": ORANGE}
    panels = {"best": "AdamW", "sgd": "SGD with momentum"}
    ceilings = {}
    for arm in lines:
        draws = r.values("spamlang", arm, "data/draws").iloc[0]
        ceilings[arm] = draws, 100 * r.values("spamlang", arm, "data/ceiling").iloc[0]
    figure, axes = new(9.6, 4.4, 2, sharey=True)
    for ax, (suffix, title) in zip(axes, panels.items(), strict=True):
        for arm, colour in lines.items():
            ax.axhline(ceilings[arm][1], color=colour, lw=1, ls="--", alpha=0.7)
            shown = [f"{arm}_{suffix}", *([arm] if suffix == "best" else [])]
            rows = r.table[(r.table["experiment"] == "spamlang") & r.table["arm"].isin(shown)]
            rows = rows[(rows["status"] == "done") & rows["searched"].astype(bool)].sort_values("lr")
            ax.plot(rows["lr"], 100 * rows["val_accuracy"], "-o", color=colour, ms=3.5, lw=1.3)
            chosen = r.runs[(r.runs["experiment"] == "spamlang") & (r.runs["arm"] == f"{arm}_{suffix}")]
            mean_ci(ax, chosen["lr"].iloc[0], 100 * r.values("spamlang", f"{arm}_{suffix}", "val_accuracy"), colour)
            key = f"spamlang.{arm}.accuracy"
            if suffix == "best" and key in r.claims.published:
                fitted = r.runs[(r.runs["experiment"] == "spamlang") & (r.runs["arm"] == arm)]["lr"].iloc[0]
                ax.plot(fitted, r.claims.published[key].value, "D", color=colour, ms=7, mew=1.4, **HOLLOW)
        ax.set_xscale("log")
        ax.set_xlabel("learning rate")
        ax.set_title(title)
    axes[0].set_ylim(-4, 105)
    axes[0].set_ylabel("accuracy over all symbols (%)")
    for (draws, top), colour, y in zip(ceilings.values(), lines.values(),
                                       spread([top for _, top in ceilings.values()], 11), strict=True):  # fmt: skip
        axes[1].text(1.02, y, f"{draws:g} draws a symbol\n(ceiling {top:.1f} %)", color=colour, va="center", fontsize=9,
                     transform=axes[1].get_yaxis_transform())  # fmt: skip
    key = ("lines: seed 1    large: chosen rate, all seeds, 95 %    dashed: 1 - exp(-draws)    "
           "hollow: published (paper's scale), at the fitted rate")  # fmt: skip
    figure.suptitle(key, fontsize=9, x=0.01, ha="left", color=GREY)
    return figure


def predictive(r: Results):
    """Change of the error for a left-out condition by candidate feature, both targets, the published points beside."""
    arms = [a for a in r.runs[r.runs["experiment"] == "predictive_study"]["arm"].unique() if a != "base"]
    if not arms:
        raise Missing("predictive has no features")
    figure, axes = new(9.4, 1.6 + 0.36 * len(arms), 2, sharey=True)
    for ax, (target, title) in zip(
        axes, {"final": "final loss", "next": "loss at the next checkpoint"}.items(), strict=True
    ):
        for y, arm in enumerate(arms):
            mean_ci(ax, y - 0.12, r.values("predictive_study", arm, f"error_change_{target}"), BLUE, horizontal=True)
            if _has(r, "predictive_study", [arm], f"forest_error_change_{target}"):
                forest = r.values("predictive_study", arm, f"forest_error_change_{target}")
                mean_ci(ax, y + 0.12, forest, GREEN, horizontal=True)
        p = r.claims.published[f"predictive.{target}"]
        bar = [[p.value - p.low], [p.high - p.value]]
        ax.errorbar(p.value, arms.index("retained_norm") + 0.36, xerr=bar, fmt="D", ms=5, capsize=3, color=ORANGE, lw=1,
                    **HOLLOW)  # fmt: skip
        ax.axvline(0, color=BLACK, lw=0.8)
        ax.set_title(title)
        ax.set_xlabel("change of the error (%)")
        ax.grid(axis="y", visible=False)
    axes[0].set_yticks(range(len(arms)), [arm.replace("_", " ") for arm in arms])
    axes[0].set_ylim(len(arms) - 0.4, -0.6)
    for x, label, colour in ((0.01, "ridge regression", BLUE), (0.19, "random forest", GREEN),
                             (0.34, "hollow: published (paper's scale)", ORANGE)):  # fmt: skip
        figure.text(x, 0.985, label, color=colour, fontsize=9, va="top")
    figure.get_layout_engine().set(rect=(0, 0.055, 1, 0.9))
    return figure


def study(r: Results) -> pd.DataFrame:
    """Rows of the predictive study, one a candidate and left-out condition."""
    from backrank.analysis.predictive import leave_one_out

    return leave_one_out(r.features[r.features["experiment"] == "predictive"] if len(r.features) else r.features)


def routes(r: Results):
    """Loss of every route, and of a rate 10 % higher, minus backpropagation's."""
    arms = [a for a in order(r.runs[r.runs["experiment"] == "auxiliary_routes"]["arm"], {}) if a != "backprop"]
    backprop = r.values("auxiliary_routes", "backprop")
    figure, (ax,) = new(7.2, 1.4 + 0.36 * len(arms))
    ax.axvspan(-MARGIN, MARGIN, color=GREY, alpha=0.15, lw=0)
    ax.axvline(0, color=BLACK, lw=0.8)
    for y, arm in enumerate(arms):
        difference = stats.paired(r.values("auxiliary_routes", arm), backprop, complete=False)
        e = mean_ci(ax, y, difference, GREY if arm == "rate_plus_10" else BLUE, horizontal=True)
        if arm == "rate_plus_10":
            ax.axvline(e.mean, color=GREY, lw=1, ls=":")
    ax.set_yticks(range(len(arms)), [arm.replace("_", " ") for arm in arms])
    ax.set_ylim(len(arms) - 0.4, -0.6)
    ax.grid(axis="y", visible=False)
    ax.set_xlabel("validation loss minus backpropagation's (nats), 95 % interval over paired seeds")
    title = f"left of the band: a gain of more than {MARGIN:g}   dotted: the rate 10 % higher"
    ax.set_title(title, fontsize=9, color=GREY)
    return figure


WIDTHS, VOCABULARIES = (32, 64, 128), (256, 1024, 8192)


def _cells(r: Results, metric: str, arm: str = "ordinary") -> pd.DataFrame:
    """The metric of an arm by seed (rows) and cell (columns: width, vocabulary). Raises Missing without all nine."""
    cells = {(w, v): r.values("width_and_vocab", f"w{w}_v{v}_{arm}", metric) for w in WIDTHS for v in VOCABULARIES}
    return pd.DataFrame(cells).dropna()


def fit_width_and_vocab(r: Results) -> pd.DataFrame:
    """By seed: Spearman's rank correlation of both penalties with the lost fraction and with D/V over nine cells."""
    lost, ordinary = _cells(r, "head/lost"), _cells(r, "val_loss")
    ratio = pd.Series({(w, v): w / v for w, v in lost.columns})
    runs, found = r.runs[r.runs["experiment"] == "width_and_vocab"], []
    for arm in KINDS:
        penalty = (_cells(r, "val_loss", arm) - ordinary).dropna()
        for seed in penalty.index:
            mine = runs[(runs["seed"] == seed) & runs["arm"].str.contains(f"ordinary|{arm}")]
            found.append({"arm": arm, "seed": seed, "id": " ".join(mine["id"]),
                          "lost_correlation": penalty.loc[seed].corr(lost.loc[seed], method="spearman"),
                          "ratio_correlation": penalty.loc[seed].corr(ratio, method="spearman")})  # fmt: skip
    return pd.DataFrame(found)


def width_and_vocab(r: Results):
    """Both penalties at half rank and the kept energy over D/V, against D/V, nine cells."""
    ordinary, kept = _cells(r, "val_loss"), _cells(r, "head/kept_over_null")
    figure, axes = new(11.4, 4.2, 3)
    for ax, (arm, (label, _)) in zip(axes, KINDS.items(), strict=False):
        penalty = _cells(r, "val_loss", arm) - ordinary
        for w, colour in zip(WIDTHS, (BLUE, ORANGE, GREEN), strict=True):
            for v in VOCABULARIES:
                mean_ci(ax, w / v, penalty[w, v].dropna(), colour)
            ax.plot([w / v for v in VOCABULARIES], [penalty[w, v].mean() for v in VOCABULARIES], color=colour, lw=1)
        ax.axhline(0, color=BLACK, lw=0.8)
        ax.set_title(f"{label}, half the rank")
        ax.set_ylabel("penalty in loss (nats)")
    for w, colour in zip(WIDTHS, (BLUE, ORANGE, GREEN), strict=True):
        for v in VOCABULARIES:
            mean_ci(axes[2], w / v, kept[w, v].dropna(), colour)
        axes[2].plot([w / v for v in VOCABULARIES], [kept[w, v].mean() for v in VOCABULARIES], color=colour, lw=1)
        axes[2].text(0.06, 0.95 - 0.07 * WIDTHS.index(w), f"width {w}", color=colour, transform=axes[2].transAxes)
    axes[2].axhline(1, color=BLACK, lw=0.8)
    axes[2].set_title("ordinary head: kept energy over D/V")
    for ax in axes:
        ax.set_xscale("log")
        ax.set_xlabel("D/V")
        ax.margins(x=0.2)
    return figure


def _has(r: Results, experiment: str, arms: list[str], metric: str = "val_loss") -> bool:
    try:
        return all(len(r.values(experiment, arm, metric)) for arm in arms)
    except Missing:
        return False


HEADS = ["byte_heads", "subword_heads"]
DERIVED = {"predictive_study": study, "width_and_vocab_fit": fit_width_and_vocab}
FIGURES = {
    "penalties": (penalties, HEADS, "Cost of a head narrow backwards only, and of one narrow both ways"),
    "pairs": (pairs, HEADS, "Each seed, backward only and factorised (black: the paper's seeds, orange: falls)"),
    "residual": (residual, ["residual_usage"], "Head updates without the residual, and a head held in its first span"),
    "rotation": (rotation, [*HEADS, "residual_usage"], "Rotation of the feedback subspace, not measured in the paper"),
    "predictive": (predictive, ["predictive_study"], "What a feature of the head's gradient adds to simple ones"),
    "spamlang": (spamlang, ["spamlang"], "SpamLang: accuracy against the learning rate, by draws per symbol"),
    "routes": (routes, ["auxiliary_routes"], "Routes for the gradient past the head against tuned backpropagation"),
    "width_and_vocab": (width_and_vocab, ["width_and_vocab"], "Half the rank over width and vocabulary, against D/V"),
    "ranks": (ranks, ["byte_heads"], "Effective rank of each block matrix over training, ordinary arm, seed mean"),
}
