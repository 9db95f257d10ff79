"""claims.yaml -> verdicts. What a verdict needs is fixed here and in the claims file, before any run is looked at.

`runs` is the table of runs (runs.csv): id, experiment, arm, seed, stage, status, stale, data, data_hash and a column a
metric. The seed is the unit; contrasts are paired over seeds. All seeds decide; the value over the paper's own seeds
stands beside it.

kind           fields beside experiment and metric       verdict
value          arm [minus] [stat] [tolerance]            reproduced | differs
difference     arm minus [direction]                     reproduced | same direction | underpowered | differs
ratio          arm over [baseline] [direction]           the same, against 1, Fieller's interval
no_effect      arm minus|over [baseline] [margin]        reproduced | underpowered | differs
ordering       arms (metric rises) or pairs              reproduced | same direction | differs
bound          pairs, or measured and bound              kept | broken, with cases and slack
calculation    inputs expression equals                  adds up | does not add up, at the printed digits
contradiction  inputs expression stated                  contradiction | consistent
A claim whose id fits a pattern of `by_construction` could not fail: by construction instead of reproduced, with the
reason. Without runs: not run. Kind `value` (or `scales: paper`) at another scale: needs the paper's scale.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, fields
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from . import stats
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
    Published,
    effect_verdict,
    no_effect_verdict,
    ordering_verdict,
    value_verdict,
)

NEEDS = {  # fields a kind cannot do without; "a|b" is one of them
    "value": ["experiment", "arm", "published_key|published"],
    "difference": ["experiment", "arm", "minus", "published_key|published|direction"],
    "ratio": ["experiment", "arm", "over", "published_key|published|direction"],
    "no_effect": ["experiment", "arm", "minus|over"],
    "ordering": ["experiment", "arms|pairs"],
    "bound": ["pairs|measured", "pairs|bound", "experiment|inputs", "pairs|arm|inputs"],
    "calculation": ["inputs", "expression", "equals"],
    "contradiction": ["inputs", "expression", "stated"],
}
COLUMNS = [
    *("id", "published_key", "statement", "kind", "published", "published_low", "published_high", "published_interval"),
    *("ours", "low", "high", "n", "ours_paper_n", "paper_n_low", "paper_n_high", "paper_n", "verdict"),
    *("scale", "data", "runs", "note", "experiment", "source"),
]


class ClaimError(ValueError):
    """A claims file that cannot be judged: names the file, the claim and the problem."""


class NotRecorded(Exception):
    """A metric that no run holds."""


@dataclass
class Claim:
    """One row of claims.yaml; see the module docstring. Arms are names; `minus` may also be a number."""

    id: str
    statement: str
    kind: str
    source: str
    published_key: str | None = None
    published: Any = None
    experiment: str | None = None
    metric: str = "val_loss"
    arm: str | list[str] | None = None
    minus: str | float | None = None
    over: str | None = None
    baseline: str | None = None
    arms: list[str] | None = None
    pairs: list[list[str]] | None = None
    stat: str = "mean"
    direction: str | None = None
    margin: Any = None
    tolerance: float | str | None = None
    scales: str | None = None
    drop_seeds: list[int] = field(default_factory=list)
    paper_seeds: list[int] = field(default_factory=list)
    complete: bool = True
    inputs: dict[str, Any] | None = None
    expression: str | None = None
    equals: Any = None
    stated: list | None = None
    measured: str | None = None
    bound: str | float | None = None
    vacuous: str | None = None
    setup_note: str | None = None

    @property
    def names(self) -> list[str]:
        """The arms this claim reads."""
        flat = [*np.ravel(self.arm or []), self.minus, self.over, self.baseline, *(self.arms or [])]
        flat += [arm for pair in self.pairs or [] for arm in pair]
        return list(dict.fromkeys(str(arm) for arm in flat if isinstance(arm, str)))


@dataclass(frozen=True)
class ClaimSet:
    paper: str
    experiments: dict[str, dict[str, Any]]
    claims: list[Claim]
    published: dict[str, Published]
    path: Path
    by_construction: dict[str, str] = field(default_factory=dict)  # pattern of ids -> why the row could not fail


def load_published(path: Path, paper: str) -> dict[str, Published]:
    """Numbers of one paper by key; cells are read as text, so that the printed digits stay known."""
    table = pd.read_csv(path, dtype=str, keep_default_na=False)
    return {row["key"]: Published.of(row) for row in table[table["paper"] == paper].to_dict("records")}


def load_claims(path: Path, published_csv: Path) -> ClaimSet:
    """Read and check claims.yaml. Raises ClaimError naming file, claim and problem."""
    path = Path(path)
    raw = yaml.safe_load(path.read_text())
    published, experiments, claims = load_published(published_csv, raw["paper"]), raw.get("experiments", {}), []
    for template in raw["claims"]:
        for row in _expand(template):
            block = experiments.get(row.get("experiment"), {})
            block = {k: block[k] for k in ("paper_seeds", "setup_note") if k in block}
            claims.append(_claim(path, raw.get("defaults", {}) | block | row, published, experiments))
    if twice := [c.id for i, c in enumerate(claims) if c.id in {d.id for d in claims[:i]}]:
        raise ClaimError(f"{path}: claim {twice[0]}: the id occurs twice")
    reasons = raw.get("by_construction", {})
    if idle := [pattern for pattern in reasons if not any(fnmatch(c.id, pattern) for c in claims)]:
        raise ClaimError(f"{path}: by_construction {idle[0]}: no claim has such an id")
    return ClaimSet(raw["paper"], experiments, claims, published, path, reasons)


def _expand(row: dict[str, Any]) -> list[dict[str, Any]]:
    """`for: {r: [16, 8]}` writes a row once for each value (their product), with {r} replaced in every text."""

    def fill(x, values):
        if isinstance(x, dict):
            return {k: fill(v, values) for k, v in x.items()}
        if isinstance(x, list):
            return [fill(v, values) for v in x]
        for k, v in values.items() if isinstance(x, str) else ():
            x = x.replace("{" + k + "}", str(v))
        return x

    keys = row.get("for", {})
    body = {k: v for k, v in row.items() if k != "for"}
    return [fill(body, dict(zip(keys, values, strict=True))) for values in itertools.product(*keys.values())]


def _claim(path: Path, row: dict[str, Any], published: dict[str, Published], experiments) -> Claim:
    def fail(problem):
        raise ClaimError(f"{path}: claim {row.get('id', '?')}: {problem}")

    if missing := [k for k in ("id", "statement", "kind", "source") if not row.get(k)]:
        fail(f"field {missing[0]} is missing")
    if unknown := set(row) - {f.name for f in fields(Claim)}:
        fail(f"unknown field {sorted(unknown)[0]}")
    if row["kind"] not in NEEDS:
        fail(f"unknown kind {row['kind']} (known: {', '.join(NEEDS)})")
    for need in NEEDS[row["kind"]]:
        if all(row.get(k) is None for k in need.split("|")):
            fail(f"field {need.replace('|', ' or ')} is missing for kind {row['kind']}")
    if (key := row.get("published_key")) is not None and key not in published:
        fail(f"published_key {key} is not in published.csv")
    if row.get("experiment") and row["experiment"] not in experiments:
        fail(f"experiment {row['experiment']} is not listed under experiments")
    if row.get("direction") not in (None, "above", "below") or row.get("stat", "mean") not in ("mean", "d_z", "sd"):
        fail("direction must be above or below, stat must be mean, d_z or sd")
    claim = Claim(**row)
    try:
        claim.published = published[key] if key and claim.published is None else Published.of(claim.published or {})
        for reference in [*(claim.inputs or {}).values(), claim.equals, *(claim.stated or [])]:
            for item in reference if isinstance(reference, list) else [reference]:
                _number(item, published)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        fail(f"{error.args[0]} is neither a number nor a number of published.csv")
    p = claim.published
    if claim.kind in ("difference", "ratio") and p.value == float(claim.kind == "ratio"):
        fail("the published value is no effect: the kind is no_effect")
    if claim.kind == "value" and claim.tolerance is None and math.isnan(p.se) and p.interval != "range":
        fail("no error is published, so field tolerance is missing")
    return claim


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
        reasons = [why for pattern, why in self.claims.by_construction.items() if fnmatch(c.id, pattern)]
        if row["verdict"] == REPRODUCED and reasons:
            row["verdict"] = BY_CONSTRUCTION
            self.notes += reasons
        if row["verdict"] in (DIFFERS, SAME_DIRECTION) and c.setup_note:
            self.notes.append(f"set-up: {c.setup_note}")
        return row | {"note": "; ".join(self.notes)}

    # The page's own numbers

    def page(self) -> dict[str, Any]:
        c, known, cases = self.claim, self.claims.published, range(_cases(self.claim.inputs))
        if c.kind == "bound":
            frame = pd.DataFrame([{k: _number(_pick(v, i), known)[1] for k, v in c.inputs.items()} for i in cases])
            return self.bound(frame)
        results = [self.evaluate(case) for case in cases]
        if c.kind == "calculation":
            (value, low, high), (least, printed, most) = results[0], _number(c.equals, known)
            # All are printed rounded: they agree if what the rounding allows overlaps (edges up to float error).
            edge = 1e-9 * abs(printed)
            agree = low <= most + edge and high >= least - edge
            self.notes.append(f"{c.expression} = {value:.6g} (rounded inputs allow {low:.6g} to {high:.6g})")
            return {"published": printed, "ours": value, "low": low, "high": high,
                    "verdict": ADDS_UP if agree else NOT_ADDS_UP}  # fmt: skip
        low, high = (_number(x, known)[1] for x in c.stated)
        outside = [r for r in results if r[1] > high or r[2] < low]
        worst = max(results, key=lambda r: max(r[0] - high, low - r[0]))
        found = ", ".join(f"{r[0]:.4g}" for r in results)
        self.notes.append(f"{found} against {low:g} to {high:g}: {len(outside)} of {len(results)} outside")
        return {"published": math.nan, "published_low": low, "published_high": high, "published_interval": "stated",
                "ours": worst[0], "low": worst[1], "high": worst[2], "n": len(results),
                "verdict": CONTRADICTION if outside else CONSISTENT}  # fmt: skip

    def evaluate(self, case: int) -> tuple[float, float, float]:
        """The expression at the printed inputs, and its least and largest value as these vary within their rounding."""
        numbers = {k: _number(_pick(v, case), self.claims.published) for k, v in self.claim.inputs.items()}
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
        if used["data_hash"].nunique() > 1:
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
        if c.over:
            return stats.fieller(table[c.arm] - base, table[c.over] - base)
        other = table[c.minus] if isinstance(c.minus, str) else float(c.minus or 0.0)
        return stats.estimate(table[c.arm] - other)

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
            return numbers | {"verdict": effect_verdict(low, high, float(c.kind == "ratio"), p, c.direction)}
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


def _number(item: Any, published: dict[str, Published]) -> tuple[float, float, float]:
    """(least, value, most) of a reference: a YAML number is exact; a text is a published key (`key`, `key:low`,
    `key:high`, `key:n`) or a printed number, and stands for all that rounds to it. Raises KeyError with the text."""
    if item is None or isinstance(item, int | float):
        return (item,) * 3
    key, _, part = item.partition(":")
    if key in published:
        printed = published[key].digits[part or "value"]
        if part == "n":
            return (float(printed),) * 3
    else:
        printed = item
    try:
        number = Decimal(printed)
    except InvalidOperation:
        raise KeyError(item) from None
    half = Decimal(5).scaleb(number.as_tuple().exponent - 1)
    return float(number - half), float(number), float(number + half)


def _cases(inputs: dict[str, Any]) -> int:
    return max(len(v) if isinstance(v, list) else 1 for v in inputs.values())


def _pick(reference: Any, case: int) -> Any:
    return reference[case] if isinstance(reference, list) else reference
