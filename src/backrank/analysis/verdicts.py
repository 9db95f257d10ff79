"""The rules by which a claim is judged, as pure functions of intervals; which claim uses which is in claims.py."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from . import stats

REPRODUCED, SAME_DIRECTION, UNDERPOWERED, DIFFERS = "reproduced", "same direction", "underpowered", "differs"
ADDS_UP, NOT_ADDS_UP, CONTRADICTION, CONSISTENT = "adds up", "does not add up", "contradiction", "consistent"
KEPT, BROKEN, NOT_RUN, NEEDS_SCALE = "kept", "broken", "not run", "needs the paper's scale"
BY_CONSTRUCTION = "by construction"  # would be `reproduced`, but could not have failed
MARGIN, RATIO_MARGIN = 0.02, 0.10  # no effect: nats; share of a ratio


@dataclass(frozen=True)
class Published:
    """A published number. interval: se (mean -+ standard error), ci95, range or ''; `digits` keeps what was printed."""

    value: float = math.nan
    low: float = math.nan
    high: float = math.nan
    interval: str = ""
    n: float = math.nan
    digits: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, row: dict[str, Any]) -> Published:
        printed = {k: str(row[k]) for k in ("value", "low", "high", "n") if str(row.get(k, "")) not in ("", "None")}
        numbers = {k: float(v) for k, v in printed.items()}
        if "value" not in numbers and "low" in numbers and row.get("interval") != "range":
            numbers["value"] = (numbers["low"] + numbers["high"]) / 2
        return cls(interval=row.get("interval") or "", digits=printed, **numbers)

    @property
    def se(self) -> float:
        """Standard error; nan where the page gives none, or no n to judge it by."""
        half = (self.high - self.low) / 2
        if not self.n > 1 or self.interval not in ("se", "ci95"):
            return math.nan
        return half if self.interval == "se" else half / stats.t_quantile(self.n)

    @property
    def ci95(self) -> tuple[float, float]:
        """The published 95 % interval; the value twice where none is given."""
        if self.interval == "se":
            half = stats.t_quantile(self.n) * self.se
            return self.value - half, self.value + half
        return (self.value, self.value) if math.isnan(self.low) else (self.low, self.high)


def value_verdict(ours: stats.Estimate, published: Published, tolerance: float | None) -> tuple[str, str]:
    """Welch interval of ours - published holds 0; where no error is published, within the tolerance (or the range)."""
    if not math.isnan(published.se):
        diff, low, high = stats.welch(ours.mean, ours.se, ours.n, published.value, published.se, published.n)
        note = f"ours - published {diff:+.4f} [{low:.4f}, {high:.4f}]"
        return (REPRODUCED if low <= 0 <= high else DIFFERS), note
    wide = float(tolerance or 0.0)
    low, high = published.ci95 if published.interval == "range" else (published.value,) * 2
    # The last digit of a tolerance must not hang on binary rounding.
    inside = low - wide - 1e-12 <= ours.mean <= high + wide + 1e-12
    return (REPRODUCED if inside else DIFFERS), f"accepted {low - wide:.6g} to {high + wide:.6g}"


def effect_verdict(
    low: float,
    high: float,
    null: float,
    published: Published,
    direction: str | None = None,
    margin: float | None = None,
) -> str:
    """Verdict on a difference (null 0) or ratio (null 1) from our interval; the side is the published value's.

    Without a published value `direction` gives the side, and an interval inside the margin speaks against the effect.
    """
    side = published.value - null if direction is None else {"above": 1, "below": -1}[direction]
    if math.isnan(low):
        return UNDERPOWERED
    least, most = published.ci95
    if (low > null) if side > 0 else (high < null):
        overlaps = math.isnan(published.value) or (low <= most and high >= least)
        return REPRODUCED if overlaps else SAME_DIRECTION
    if not low <= null <= high:
        return DIFFERS
    if math.isnan(published.value):
        margin = margin if margin is not None else RATIO_MARGIN if null == 1 else MARGIN
        return DIFFERS if null - margin <= low and high <= null + margin else UNDERPOWERED
    return UNDERPOWERED if low <= published.value <= high else DIFFERS


def no_effect_verdict(low: float, high: float, null: float, margin: float | list) -> str:
    """Our interval inside null +- margin; a pair [below, above] (null: open) makes the margin one-sided."""
    if math.isnan(low):
        return UNDERPOWERED
    below, above = margin if isinstance(margin, list) else (-margin, margin)
    if (below is None or low >= null + below) and (above is None or high <= null + above):
        return REPRODUCED
    return UNDERPOWERED if low <= null <= high else DIFFERS


def ordering_verdict(steps: list[stats.Estimate]) -> str:
    """Every adjacent paired difference above 0 with its interval; else all means above 0; else whether one speaks
    against it: its interval lies below 0, or inside the margin of no effect."""
    if all(step.low > 0 for step in steps):
        return REPRODUCED
    if all(step.mean > 0 for step in steps):
        return SAME_DIRECTION
    against = any(step.high < 0 or -MARGIN <= step.low <= step.high <= MARGIN for step in steps)
    return DIFFERS if against else UNDERPOWERED
