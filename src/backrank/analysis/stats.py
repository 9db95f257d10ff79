"""Statistics over paired seeds: the seed is the unit, and arms of one seed share data order and common weights.

Every interval is two-sided 95 %. One seed gives a mean and no interval (nan), never a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy import special, stats

LEVEL = 0.95
TAIL = (1 + LEVEL) / 2


class SeedError(ValueError):
    """Seeds that do not pair: names the arm and the seeds."""


@dataclass(frozen=True)
class Estimate:
    """Mean over n seeds with Student's t (n - 1 degrees of freedom) against `null`; same unit as the values."""

    mean: float
    sd: float
    n: int
    null: float = 0.0

    @property
    def se(self) -> float:
        return self.sd / math.sqrt(self.n)

    @property
    def low(self) -> float:
        return self.mean - t_quantile(self.n) * self.se

    @property
    def high(self) -> float:
        return self.mean + t_quantile(self.n) * self.se

    @property
    def p(self) -> float:
        """Two-sided p of mean = null; nan for one seed, 0 or 1 for values without any spread."""
        if not self.sd > 0:
            return math.nan if math.isnan(self.sd) else float(self.mean == self.null)
        return float(2 * stats.t.sf(abs(self.mean - self.null) / self.se, self.n - 1))

    @property
    def d_z(self) -> float:
        """Cohen's d_z = (mean - null) / sd of the paired differences; nan without spread."""
        return (self.mean - self.null) / self.sd if self.sd > 0 else math.nan


@dataclass(frozen=True)
class Ratio:
    """A ratio of means with Fieller's interval; `bounded` is False where the denominator may be 0 (+-inf then)."""

    value: float
    low: float
    high: float
    n: int
    bounded: bool


def t_quantile(n: int) -> float:
    """Student's t at 97.5 % for n values (n - 1 degrees of freedom); nan for n < 2."""
    return float(stats.t.ppf(TAIL, n - 1)) if n > 1 else math.nan


def align(arms: dict[str, pd.Series], complete: bool = True) -> pd.DataFrame:
    """Join arms (name -> values indexed by seed) into a table seeds x arms.

    Raises SeedError for a seed that occurs twice in an arm, a value that is not finite, and, unless `complete` is
    False, a seed that some other arm has and this one lacks. With `complete=False` only common seeds remain.
    """
    for arm, values in arms.items():
        if len(twice := values.index[values.index.duplicated()].unique()):
            raise SeedError(f"arm {arm}: seed {_list(twice)} occurs more than once")
        if len(bad := values.index[~np.isfinite(values.astype(float))]):
            raise SeedError(f"arm {arm}: the value of seed {_list(bad)} is not finite")
    table = pd.DataFrame(arms, dtype=float).sort_index()
    lacks = {arm: table.index[table[arm].isna()] for arm in table if table[arm].isna().any()}
    if complete and lacks:
        raise SeedError("; ".join(f"arm {arm}: seed {_list(seeds)} is missing" for arm, seeds in lacks.items()))
    return table.dropna()


def estimate(values, null: float = 0.0) -> Estimate:
    """Mean and spread of independent values (one per seed). Raises ValueError when there is none."""
    values = np.asarray(values, float)
    if not len(values):
        raise ValueError("no values")
    return Estimate(float(values.mean()), float(values.std(ddof=1)) if len(values) > 1 else math.nan, len(values), null)


def paired(a: pd.Series, b: pd.Series, names=("a", "b"), complete: bool = True) -> Estimate:
    """Estimate of a - b over the same seeds (both indexed by seed). Raises SeedError as `align` does."""
    table = align({names[0]: a, names[1]: b}, complete)
    return estimate(table[names[0]] - table[names[1]])


def signs(values) -> tuple[int, int, int]:
    """How many values are above, below and exactly 0."""
    values = np.asarray(values, float)
    return int((values > 0).sum()), int((values < 0).sum()), int((values == 0).sum())


def welch(mean_a, se_a, n_a, mean_b, se_b, n_b) -> tuple[float, float, float]:
    """a - b and its interval from means and standard errors (Welch-Satterthwaite degrees of freedom).

    A side of one value has no standard error (nan): it is then taken as one more draw with the other side's spread,
    which gives the prediction interval. nan when neither side has a spread.
    """
    if n_a == 1 or n_b == 1:
        sd, n = (se_b * math.sqrt(n_b), n_b) if n_a == 1 else (se_a * math.sqrt(n_a), n_a)
        half = t_quantile(n) * sd * math.sqrt(1 + 1 / n)
    else:
        a, b = se_a**2, se_b**2
        df = (a + b) ** 2 / (a**2 / (n_a - 1) + b**2 / (n_b - 1)) if a + b else 1
        half = float(stats.t.ppf(TAIL, df)) * math.sqrt(a + b)
    return mean_a - mean_b, mean_a - mean_b - half, mean_a - mean_b + half


def fieller(a, b) -> Ratio:
    """mean(a) / mean(b) of paired values with Fieller's interval: all q with |mean(a - q b)| <= t se(a - q b).

    Where mean(b) does not differ from 0 that set is unbounded (the line, or a line with a gap): reported as
    (-inf, inf) with `bounded=False`, which supports no verdict.
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    n, ma, mb = len(a), a.mean(), b.mean()
    value = float(ma / mb) if mb else math.nan
    if n < 2:
        return Ratio(value, math.nan, math.nan, n, False)
    (aa, ab), (_, bb) = t_quantile(n) ** 2 * np.cov(a, b) / n
    square, half_linear, constant = mb**2 - bb, ma * mb - ab, ma**2 - aa
    if square <= 0:
        return Ratio(value, -math.inf, math.inf, n, False)
    root = math.sqrt(max(half_linear**2 - square * constant, 0.0))
    return Ratio(value, float((half_linear - root) / square), float((half_linear + root) / square), n, True)


def d_z_interval(d_z: float, n: int) -> tuple[float, float]:
    """Sampling interval of a Cohen's d_z from n pairs, by inverting the noncentral t distribution."""
    if n < 2 or math.isnan(d_z):
        return math.nan, math.nan
    t = d_z * math.sqrt(n)
    return tuple(float(special.nctdtrinc(n - 1, p, t)) / math.sqrt(n) for p in (TAIL, 1 - TAIL))


def sd_interval(sd: float, n: int) -> tuple[float, float]:
    """Sampling interval of a standard deviation from n values, by the chi-squared distribution."""
    if n < 2:
        return math.nan, math.nan
    return tuple(sd * math.sqrt((n - 1) / stats.chi2.ppf(p, n - 1)) for p in (TAIL, 1 - TAIL))


def mover(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    """a - b and its interval, from (value, low, high) of two independent estimates with intervals of any shape.

    Each end takes the distances that push the difference there, added in squares (Zou and Donner 2008).
    """
    diff = a[0] - b[0]
    return diff, diff - math.hypot(a[0] - a[1], b[2] - b[0]), diff + math.hypot(a[2] - a[0], b[0] - b[1])


def _list(seeds) -> str:
    return ", ".join(str(seed) for seed in seeds)
