"""Tables of a report: numbers for programs (.csv) and the same rows for readers (.md). Losses are in nats."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pandas as pd

from ..recorder import atomic_write
from . import stats
from .claims import ClaimSet


def markdown(table: pd.DataFrame) -> str:
    """A table of texts as Markdown; a bar inside a cell would end it, so it is escaped."""
    rows = [table.columns, ["---"] * table.shape[1], *table.astype(str).values]
    return "\n".join("| " + " | ".join(str(x).replace("|", "\\|") for x in row) + " |" for row in rows) + "\n"


def write(folder: Path, name: str, numbers: pd.DataFrame, shown: pd.DataFrame, caption: str) -> str:
    """Write <name>.csv and <name>.md under `folder`; returns the Markdown for the report."""
    atomic_write(folder / f"{name}.csv", numbers.to_csv(index=False))
    text = f"{markdown(shown)}\n*{caption}*\n"
    atomic_write(folder / f"{name}.md", text)
    return text


def order(names, baselines: dict[str, str]) -> list[str]:
    """Arms as a reader expects them: by baseline group, the baseline first, ranks falling, other numbers rising."""

    def key(arm):
        group = next((i for i, prefix in enumerate(baselines) if arm.startswith(prefix)), len(baselines))
        parts = re.split(r"(\d+)", arm)
        values = [int(x) * (-1 if parts[i - 1].endswith("_r") else 1) if i % 2 else x for i, x in enumerate(parts)]
        return group, arm not in baselines.values(), values

    return sorted(set(names), key=key)


def arms(runs: pd.DataFrame, experiment: str, claims: ClaimSet, metric: str = "val_loss") -> pd.DataFrame:
    """One row an arm: mean, paired difference to its baseline over all seeds and over the paper's, head statistics.

    `runs` are finished final runs of one experiment. Differences use the seeds that arm and baseline share.
    """
    block = claims.experiments[experiment]
    mine = [c for c in claims.claims if c.experiment == experiment and c.metric == metric and c.stat == "mean"]
    means = {c.arm: c.published.value for c in mine if c.kind == "value" and c.minus is None}
    deltas = {(c.arm, c.minus): c.published.value for c in mine if c.kind == "difference" and not c.drop_seeds}
    rows = []
    for arm in order(runs["arm"], block.get("baselines", {})):
        group = runs[runs["arm"] == arm]
        values = group.set_index("seed")[metric].astype(float).dropna()
        if values.empty:
            continue
        bases = block.get("baselines", {}).items()
        base = next((b for prefix, b in bases if arm.startswith(prefix) and b != arm), None)
        row = {"arm": arm, "lr": " ".join(f"{lr:g}" for lr in sorted(set(group["lr"])))}
        row |= {"published": means.get(arm, math.nan), "published_delta": deltas.get((arm, base), math.nan)}
        for prefix, seeds in (("", set(values.index)), ("paper_", set(block.get("paper_seeds", [])))):
            chosen = values[values.index.isin(seeds)]
            if chosen.empty:
                continue
            e = stats.estimate(chosen)
            row |= {f"{prefix}n": e.n, f"{prefix}mean": e.mean, f"{prefix}se": e.se}
            other = runs[runs["arm"] == base].set_index("seed")[metric].astype(float).dropna()
            if other.index.intersection(chosen.index).empty:
                continue
            d = stats.paired(chosen, other[other.index.isin(seeds)], (arm, base), complete=False)
            row |= {f"{prefix}delta": d.mean, f"{prefix}delta_low": d.low, f"{prefix}delta_high": d.high}
            row |= {f"{prefix}delta_n": d.n, f"{prefix}d_z": d.d_z, f"{prefix}p": d.p}
        for column in ("head/lost", "head/null_lost", "head/kept_over_null", "rotation/mean_cos"):
            row[column] = group[column].astype(float).mean() if column in group else math.nan
        rows.append(row | {"baseline": base, "runs": " ".join(group["id"].astype(str))})
    return pd.DataFrame(rows)


def show_arms(table: pd.DataFrame) -> pd.DataFrame:
    """`arms` as texts; a column that holds nothing is left out."""
    get = table.reindex(columns=list(dict.fromkeys([*table.columns, *_NUMBERS, *(f"paper_{k}" for k in _NUMBERS)])))
    shown = pd.DataFrame({"arm": get["arm"], "lr": get["lr"]})
    for prefix, of in (("", ""), ("paper_", ", paper's seeds")):
        shown[f"n{of}"] = [number(x, "d") for x in get[f"{prefix}n"]]
        shown[f"loss ± se{of}"] = [_pm(m, s) for m, s in zip(get[f"{prefix}mean"], get[f"{prefix}se"], strict=True)]
        triple = zip(*(get[f"{prefix}delta{end}"] for end in ("", "_low", "_high")), strict=True)
        shown[f"delta [95 % CI]{of}"] = [interval(*x, spec="+.4f") for x in triple]
        if not prefix:
            shown["d_z"] = [number(x, ".2f") for x in get["d_z"]]
            shown["p"] = [number(x, ".2g") for x in get["p"]]
    for name, column, spec in (
        ("published", "published", ".4f"),
        ("published delta", "published_delta", "+.4f"),
        ("lost", "head/lost", ".4f"),
        ("null sqrt(1 - D/V)", "head/null_lost", ".4f"),
        ("kept energy / (D/V)", "head/kept_over_null", ".3f"),
        ("mean cos to W_0", "rotation/mean_cos", ".4f"),
    ):
        shown[name] = [number(x, spec) for x in get[column]]
    return shown.loc[:, [bool((shown[c] != "").any()) for c in shown]]


def means(runs: pd.DataFrame, metrics: list[str]) -> pd.DataFrame:
    """Of derived rows, one row an arm and metric: n, mean and interval over their units."""
    rows = []
    for arm, group in runs.groupby("arm", sort=False):
        for metric in metrics:
            if len(values := group[metric].dropna()):
                e = stats.estimate(values)
                rows.append({"arm": arm, "metric": metric, "n": e.n, "mean": e.mean, "low": e.low, "high": e.high})
    return pd.DataFrame(rows)


def show_means(table: pd.DataFrame) -> pd.DataFrame:
    """`means` as texts, a column a metric."""
    numbers = zip(table["mean"], table["low"], table["high"], strict=True)
    table = table.assign(shown=[interval(*x, spec=".3g") for x in numbers])
    wide = table.pivot(index="arm", columns="metric", values="shown").fillna("")
    return wide.loc[table["arm"].unique(), table["metric"].unique()].rename_axis(columns=None).reset_index()


# The set-up is the same for a whole table and stands under it.
_SETUP = re.compile(r"set-up: .*")
_NUMBERS = ["n", "mean", "se", "delta", "delta_low", "delta_high", "d_z", "p"]


def show_search(search: pd.DataFrame) -> pd.DataFrame:
    """Grid, losses and choice of each arm; an edge means that the best value may lie outside the grid."""

    def losses(row):
        pairs = zip(json.loads(row["grid"]), json.loads(row["losses"]), strict=True)
        return ", ".join(f"{_plain(k)}: {number(v, '.4f') or 'diverged'}" for k, v in pairs)

    rows = [
        {
            "arm": row["arm"],
            "key": row["key"],
            "seed": row["seed"],
            "split": row["split"],
            "grid: loss": losses(row),
            "choice": _plain(row["choice"]),
            "edge of the grid": "yes" if row["edge"] else "",
            "times extended": row["extended"],
        }
        for row in search.to_dict("records")
    ]
    return pd.DataFrame(rows)


def show_claims(verdicts: pd.DataFrame) -> pd.DataFrame:
    """Verdicts as texts: what is claimed, the published number, ours over all seeds and over the paper's."""

    def cell(row, value, low, high):
        if row["kind"] == "bound" and value == "ours" and pd.notna(row["n"]):
            return f"{row[value]:.0f} of {row['n']:.0f}"
        return interval(row[value], row[low], row[high], spec=".6g" if abs(row[value]) >= 1000 else ".4f")

    rows = [
        {
            "claim": f"{row['statement']} (`{row['id']}`)",
            "published": cell(row, "published", "published_low", "published_high")
            + {"se": " (± se)", "range": " (range)", "stated": " (as read)"}.get(row["published_interval"], ""),
            "ours [95 % CI]": cell(row, "ours", "low", "high"),
            "n": number(row["n"], "d"),
            "at the paper's n": cell(row, "ours_paper_n", "paper_n_low", "paper_n_high")
            + (f" (n {number(row['paper_n'], 'd')})" if number(row["paper_n"], "d") else ""),
            "verdict": row["verdict"],
            "note": _SETUP.sub("set-up differs (below)", row["note"]),
        }
        for row in verdicts.to_dict("records")
    ]
    return pd.DataFrame(rows)


def number(x, spec: str) -> str:
    """Formatted; nothing for a number that is not there."""
    if x is None or pd.isna(x):
        return ""
    return format(int(x) if spec == "d" else x, spec)


def interval(value, low, high, spec: str = ".4f") -> str:
    """value [low, high], or what of it there is."""
    value, low, high = (0.0 if abs(x) < 1e-12 else x for x in (value, low, high))  # no -0.0000 of rounding
    ends = "" if pd.isna(low) or pd.isna(high) else f"[{low:{spec.lstrip('+')}}, {high:{spec.lstrip('+')}}]"
    return f"{number(value, spec)} {ends}".strip()


def _pm(mean, se) -> str:
    return number(mean, ".4f") + ("" if pd.isna(se) else f" ± {se:.4f}")


def _plain(x) -> str:
    return f"{x:g}" if isinstance(x, int | float) else str(x)
