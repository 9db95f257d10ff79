"""Claims against runs: one row of claims.csv for each, with its verdict. Kinds and rules: claims.py, verdicts.py."""

from __future__ import annotations

import dataclasses
import itertools
import math
from fnmatch import fnmatch
from typing import Any

import numpy as np
import pandas as pd

from . import stats
from .claims import ClaimError, ClaimSet, number
from .verdicts import (
    ADDS_UP,
    BROKEN,
    BY_CONSTRUCTION,
    CONSISTENT,
    CONTRADICTION,
    DIFFERS,
    KEPT,
    MARGIN,
    NEEDS_SCALE,
    NOT_ADDS_UP,
    NOT_RUN,
    RATIO_MARGIN,
    REPRODUCED,
    SAME_DIRECTION,
    UNDERPOWERED,
    effect_verdict,
    no_effect_verdict,
    ordering_verdict,
    value_verdict,
)

COLUMNS = [
    *("id", "published_key", "statement", "kind", "published", "published_low", "published_high", "published_interval"),
    *("ours", "low", "high", "n", "ours_paper_n", "paper_n_low", "paper_n_high", "paper_n", "verdict"),
    *("scale", "data", "runs", "note", "experiment", "source"),
]


class NotRecorded(Exception):
    """A metric that no run holds."""


def judge(claims: ClaimSet, runs: pd.DataFrame, scale: str, planned: dict[str, dict[str, list[int]]] | None = None):
    """Judge every claim; returns the table with COLUMNS.

    planned: experiment -> arm -> seeds, to state "n of planned"; without it, the seeds that any arm of the experiment
    shows. Raises ClaimError for duplicate seeds, for arms on different data and, where a claim says `complete: true`,
    for missing seeds.
    """
    final = runs[runs["stage"] == "final"]
    rows = [_Judge(claims, claim, final, scale, (planned or {}).get(claim.experiment)).row() for claim in claims.claims]
    return pd.DataFrame(rows, columns=COLUMNS)


class _Judge:
    """One claim against the runs: collects the row and the notes on the way."""

    def __init__(self, claims, claim, runs, scale, planned):
        self.claims, self.claim, self.scale, self.notes = claims, claim, scale, []
        mine = runs[runs["experiment"] == claim.experiment]
        if claim.kind == "ordering" and claim.arms:  # a scale may have fewer: the steps between the others
            have = set(mine["arm"]) if planned is None else planned
            here = [arm for arm in claim.arms if arm in have]
            if 2 < len(here) < len(claim.arms):
                self.claim = claim = dataclasses.replace(claim, arms=here)
                self.notes.append(f"here of {', '.join(here)}")
        self.planned = planned or {arm: sorted(set(mine["seed"])) for arm in claim.names}
        self.runs = mine[(mine["status"] == "done") & mine["arm"].isin(claim.names)]

    def row(self) -> dict[str, Any]:
        c = self.claim
        p = c.published
        row = {k: getattr(c, k) for k in ("id", "published_key", "statement", "kind", "experiment", "source")}
        row |= {"published": p.value, "published_low": p.low, "published_high": p.high}
        row |= {"published_interval": p.interval, "scale": "page", "data": "published"}
        try:
            row |= self.page() if c.inputs else {"scale": self.scale, "data": ""} | self.measured()
        except (stats.SeedError, pd.errors.UndefinedVariableError) as error:
            raise ClaimError(f"{self.claims.path}: claim {c.id}: {error}") from error
        if isinstance(c.minus, int | float):  # compared with a number: shown as it is, not less that number
            shifted = ("published", "published_low", "published_high", "ours", "low", "high")
            for key in (*shifted, "ours_paper_n", "paper_n_low", "paper_n_high"):
                if key in row:
                    row[key] += c.minus
        reasons = [why for pattern, why in self.claims.by_construction.items() if fnmatch(c.id, pattern)]
        if row["verdict"] == REPRODUCED and reasons:
            row["verdict"] = BY_CONSTRUCTION
        if row["verdict"] in (BY_CONSTRUCTION, KEPT):
            self.notes += reasons
        if row["verdict"] in (DIFFERS, SAME_DIRECTION) and c.setup_note:
            self.notes.append(f"set-up: {c.setup_note}")
        return row | {"note": "; ".join(self.notes)}

    # The page's own numbers

    def page(self) -> dict[str, Any]:
        c, known, cases = self.claim, self.claims.published, range(_cases(self.claim.inputs))
        if c.kind == "bound":
            frame = pd.DataFrame([{k: number(_pick(v, i), known)[1] for k, v in c.inputs.items()} for i in cases])
            return self.bound(frame)
        results = [self.evaluate(case) for case in cases]
        if c.kind == "calculation":
            (value, low, high), (least, printed, most) = results[0], number(c.equals, known)
            # All are printed rounded: they agree if what the rounding allows overlaps (edges up to float error).
            edge = 1e-9 * abs(printed)
            agree = low <= most + edge and high >= least - edge
            self.notes.append(f"{c.expression} = {value:.6g} (rounded inputs allow {low:.6g} to {high:.6g})")
            return {"published": printed, "ours": value, "low": low, "high": high,
                    "verdict": ADDS_UP if agree else NOT_ADDS_UP}  # fmt: skip
        low, high = (number(x, known)[1] for x in c.stated)
        outside = [r for r in results if r[1] > high or r[2] < low]
        worst = max(results, key=lambda r: max(r[0] - high, low - r[0]))
        found = ", ".join(f"{r[0]:.4g}" for r in results)
        self.notes.append(f"{found} against {low:g} to {high:g}: {len(outside)} of {len(results)} outside")
        return {"published": math.nan, "published_low": low, "published_high": high, "published_interval": "stated",
                "ours": worst[0], "low": worst[1], "high": worst[2], "n": len(results),
                "verdict": CONTRADICTION if outside else CONSISTENT}  # fmt: skip

    def evaluate(self, case: int) -> tuple[float, float, float]:
        """The expression at the printed inputs, and its least and largest value as these vary within their rounding."""
        numbers = {k: number(_pick(v, case), self.claims.published) for k, v in self.claim.inputs.items()}
        corners = [dict(zip(numbers, corner, strict=True)) for corner in itertools.product(*numbers.values())]
        values = np.broadcast_to(pd.DataFrame(corners).eval(self.claim.expression), len(corners))
        centre = [corner == {k: v[1] for k, v in numbers.items()} for corner in corners].index(True)
        return float(values[centre]), float(values.min()), float(values.max())

    # Our runs

    def measured(self) -> dict[str, Any]:
        c = self.claim
        if (c.scales or ("paper" if c.kind == "value" else "any")) == "paper" and self.scale != "paper":
            return {"verdict": NEEDS_SCALE}
        try:
            table = self.table()
            row = {} if table is None or table.empty else self.verdict(table)
        except NotRecorded as error:
            self.notes.append(f"{error} is not recorded")
            row = {}
        if not row:
            return {"verdict": NOT_RUN}
        used = self.runs[self.runs["seed"].isin(table.index)]
        # units that are no runs may each rest on data of their own, but then all arms on the same
        derived = "derived" in used and used["derived"].eq(True).all()
        sets = used.groupby("seed")["data_hash"].nunique().max() if derived else used["data_hash"].nunique()
        if sets > 1:
            raise stats.SeedError(f"arms on different data: {', '.join(sorted(set(used['data'].astype(str))))}")
        data = ", ".join(sorted(set(used["data"].astype(str))))
        if self.scale != "paper":
            self.notes.append(f"judged at the {self.scale} scale ({data}), not the paper's")
        want = {seed for arm in c.names for seed in self.planned.get(arm, [])} - set(c.drop_seeds)
        if len(table) < len(want):
            self.notes.append(f"{len(table)} of {len(want)} planned seeds")
        if stale := int(used["stale"].astype(bool).sum()):
            self.notes.append(f"{stale} runs of older code")
        theirs = table[table.index.isin(c.paper_seeds)]
        if len(theirs):
            small = self.numbers(theirs)
            row |= {"ours_paper_n": small["ours"], "paper_n_low": small["low"], "paper_n_high": small["high"]}
            row |= {"paper_n": len(theirs)}
        return row | {"data": data, "runs": " ".join(dict.fromkeys(used["id"].astype(str)))}

    def table(self) -> pd.DataFrame | None:
        """Seeds x arms of the metric over common seeds; None (and a note) where an arm has no run."""
        c = self.claim
        if missing := [arm for arm in c.names if arm not in set(self.runs["arm"])]:
            if len(missing) < len(c.names):
                self.notes.append(f"no runs of {', '.join(missing)}")
            return None
        series, metric = {}, c.measured or c.metric
        for arm in c.names:
            rows = self.runs[(self.runs["arm"] == arm) & ~self.runs["seed"].isin(c.drop_seeds)].set_index("seed")
            values = evaluate(rows, metric)
            if len(bad := values.index[~np.isfinite(values)]):
                # A diverged or unmeasured run has no place in a mean; it is named, and counts as missing.
                self.notes.append(f"{arm}: no finite {metric} at seed {', '.join(map(str, bad))}")
            series[arm] = values[np.isfinite(values)]
        return stats.align(series, c.complete)

    def contrast(self, table: pd.DataFrame) -> stats.Estimate | stats.Ratio:
        c = self.claim
        base = table[c.baseline] if c.baseline else 0.0
        other_base = table[c.other_baseline] if c.other_baseline else base
        if c.over:
            return stats.fieller(table[c.arm] - base, table[c.over] - other_base)
        other = table[c.minus] - other_base if isinstance(c.minus, str) else float(c.minus or 0.0)
        return stats.estimate(table[c.arm] - base - other)

    def steps(self, table: pd.DataFrame) -> list[stats.Estimate]:
        pairs = self.claim.pairs or list(itertools.pairwise(self.claim.arms))
        return [stats.estimate(table[high] - table[low]) for low, high in pairs]

    def numbers(self, table: pd.DataFrame) -> dict[str, float]:
        """ours, low, high and n of a claim over the seeds in `table`."""
        c = self.claim
        if c.kind == "bound":
            cases = self.cases(table)
            found = int((cases["measured"] <= cases["bound"]).sum()), math.nan, math.nan, len(cases)
        elif c.kind == "ordering":
            least = min(self.steps(table), key=lambda step: step.mean)
            found = least.mean, least.low, least.high, least.n
        else:
            e = self.contrast(table)
            if c.stat == "d_z":
                found = e.d_z, *stats.d_z_interval(e.d_z, e.n), e.n
            elif c.stat == "sd":
                found = e.sd, *stats.sd_interval(e.sd, e.n), e.n
            else:
                found = e.value if c.over else e.mean, e.low, e.high, e.n
        return dict(zip(("ours", "low", "high", "n"), found, strict=True))

    def verdict(self, table: pd.DataFrame) -> dict[str, Any]:
        c, p = self.claim, self.claim.published
        if c.kind == "bound":
            return self.bound(self.cases(table))
        numbers = self.numbers(table)
        ours, low, high = numbers["ours"], numbers["low"], numbers["high"]
        if c.kind == "ordering":
            steps = self.steps(table)
            self.notes.append("steps " + ", ".join(f"{s.mean:+.4f} [{s.low:.4f}, {s.high:.4f}]" for s in steps))
            return numbers | {"verdict": ordering_verdict(steps)}
        if c.kind == "no_effect":
            null = 1.0 if c.over else 0.0
            margin = c.margin if c.margin is not None else RATIO_MARGIN if c.over else MARGIN
            return numbers | {"verdict": no_effect_verdict(low, high, null, margin)}
        if c.kind in ("difference", "ratio"):
            return numbers | {"verdict": effect_verdict(low, high, float(c.kind == "ratio"), p, c.direction, c.margin)}
        if c.stat == "mean":
            verdict, note = value_verdict(self.contrast(table), p, c.tolerance)
            self.notes.append(note)
            return numbers | {"verdict": verdict}
        if c.tolerance == "sampling":
            theirs = {"d_z": stats.d_z_interval, "sd": stats.sd_interval}[c.stat](p.value, int(p.n))
            diff, least, most = stats.mover((ours, low, high), (p.value, *theirs))
            self.notes.append(f"ours - published {diff:+.3g} [{least:.3g}, {most:.3g}]")
            verdict = UNDERPOWERED if math.isnan(least) else REPRODUCED if least <= 0 <= most else DIFFERS
            return numbers | {"verdict": verdict}
        accept = p.value - c.tolerance, p.value + c.tolerance
        self.notes.append(f"accepted {accept[0]:.3g} to {accept[1]:.3g}")
        return numbers | {"verdict": REPRODUCED if accept[0] <= ours <= accept[1] else DIFFERS}

    def cases(self, table: pd.DataFrame) -> pd.DataFrame:
        """measured and bound, one row a case: each seed of each pair, or each run of the arms."""
        c = self.claim
        if c.pairs:
            parts = [pd.DataFrame({"measured": table[low], "bound": table[high]}) for low, high in c.pairs]
        else:
            rows = self.runs[self.runs["seed"].isin(table.index)]
            parts = [pd.DataFrame({"measured": evaluate(rows, c.measured), "bound": evaluate(rows, str(c.bound))})]
        return pd.concat(parts, ignore_index=True)

    def bound(self, cases: pd.DataFrame) -> dict[str, Any]:
        c = self.claim
        if c.inputs:
            cases = pd.DataFrame({k: evaluate(cases, str(getattr(c, k))) for k in ("measured", "bound")})
        kept = cases["measured"] <= cases["bound"]
        slack = cases["bound"] - cases["measured"]
        self.notes.append(f"{kept.sum()} of {len(cases)} cases kept; bound minus measured: "
                          f"median {slack.median():.4g}, least {slack.min():.4g}")  # fmt: skip
        if c.vacuous:
            self.notes.append(f"the bound tests nothing: {c.vacuous}")
        return {"ours": int(kept.sum()), "n": len(cases), "verdict": KEPT if kept.all() else BROKEN}


def evaluate(rows: pd.DataFrame, expression: str) -> pd.Series:
    """A column, or an expression over columns (names that hold / or @ go in backticks), as floats; else NotRecorded."""
    if expression in rows.columns:
        return rows[expression].astype(float)
    try:
        return pd.Series(np.broadcast_to(rows.eval(expression), len(rows)), rows.index, dtype=float)
    except pd.errors.UndefinedVariableError:
        raise NotRecorded(expression) from None


def _cases(inputs: dict[str, Any]) -> int:
    return max(len(v) if isinstance(v, list) else 1 for v in inputs.values())


def _pick(reference: Any, case: int) -> Any:
    return reference[case] if isinstance(reference, list) else reference
