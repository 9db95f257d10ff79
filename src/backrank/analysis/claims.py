"""claims.yaml -> verdicts. What a verdict needs is fixed here and in the claims file, before any run is looked at.

`runs` is the table of runs (runs.csv): id, experiment, arm, seed, stage, status, stale, data, data_hash and a column a
metric. The seed is the unit; contrasts are paired over seeds. All seeds decide; the value over the paper's own seeds
stands beside it.

kind           fields beside experiment and metric       verdict
value          arm [minus] [stat] [tolerance]            reproduced | differs
difference     arm minus [baseline] [direction] [margin] reproduced | same direction | underpowered | differs
ratio          arm over [baseline] [direction]           the same, against 1, Fieller's interval
no_effect      arm minus|over [baseline] [margin]        reproduced | underpowered | differs
ordering       arms (metric rises) or pairs              reproduced | same direction | underpowered | differs
bound          pairs, or measured and bound              kept | broken, with cases and slack
calculation    inputs expression equals                  adds up | does not add up, at the printed digits
contradiction  inputs expression stated                  contradiction | consistent
`baseline` is taken off the arm, and `other_baseline` (null: the same) off the arm it is compared with.
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

from .verdicts import Published

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


class ClaimError(ValueError):
    """A claims file that cannot be judged: names the file, the claim and the problem."""


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
    other_baseline: str | None = None
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
        flat = [*np.ravel(self.arm or []), self.minus, self.over, self.baseline, self.other_baseline]
        flat += self.arms or []
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
                number(item, published)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        fail(f"{error.args[0]} is neither a number nor a number of published.csv")
    p = claim.published
    if claim.kind in ("difference", "ratio") and p.value == float(claim.kind == "ratio"):
        fail("the published value is no effect: the kind is no_effect")
    if claim.kind == "value" and claim.tolerance is None and math.isnan(p.se) and p.interval != "range":
        fail("no error is published, so field tolerance is missing")
    return claim


def number(item: Any, published: dict[str, Published]) -> tuple[float, float, float]:
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
