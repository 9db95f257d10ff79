"""Paired statistics against scipy, simulation, closed forms and the figures that the paper prints."""

import math

import numpy as np
import pandas as pd
import pytest
import scipy.stats

from backrank.analysis import stats

RNG = np.random.default_rng(1)


def by_seed(values, seeds=None):
    return pd.Series(values, index=seeds or range(1, len(values) + 1))


@pytest.mark.parametrize("n", [2, 5, 20])
def test_paired_equals_scipy(n):
    a, b = RNG.normal(1, 2, n), RNG.normal(0, 1, n)
    e, oracle = stats.paired(by_seed(a), by_seed(b)), scipy.stats.ttest_rel(a, b)
    assert (e.low, e.high) == pytest.approx(tuple(oracle.confidence_interval(0.95)))
    assert e.p == pytest.approx(oracle.pvalue)
    assert e.d_z == pytest.approx((a - b).mean() / (a - b).std(ddof=1))
    one = scipy.stats.ttest_1samp(a, 0.7)
    assert stats.estimate(a, null=0.7).p == pytest.approx(one.pvalue)


def test_pairs_by_seed_not_by_position():
    a, b = by_seed([1.0, 2.0, 3.0]), by_seed([3.5, 1.5, 2.5], [3, 1, 2])
    assert stats.paired(a, b).mean == pytest.approx(-0.5)
    assert stats.paired(a, b).sd == 0


def test_one_seed_has_a_mean_and_no_interval():
    e = stats.paired(by_seed([2.0]), by_seed([1.5]))
    assert e.mean == 0.5
    assert all(math.isnan(x) for x in (e.low, e.high, e.p, e.d_z, e.se))


def test_no_spread():
    e = stats.estimate([1.0, 1.0, 1.0], null=1.0)
    assert (e.low, e.high, e.p) == (1, 1, 1)
    assert stats.estimate([2.0, 2.0]).p == 0


@pytest.mark.parametrize(
    "b, message",
    [
        (by_seed([1.0, 2.0]), "arm right: seed 3 is missing"),
        (by_seed([1.0, 2.0, 3.0, 4.0]), "arm left: seed 4 is missing"),
        (by_seed([1.0, 2.0, 3.0], [1, 2, 2]), "arm right: seed 2 occurs more than once"),
        (by_seed([1.0, math.inf, 3.0]), "arm right: the value of seed 2 is not finite"),
    ],
)
def test_seeds_that_do_not_pair_are_named(b, message):
    with pytest.raises(stats.SeedError, match=message):
        stats.paired(by_seed([1.0, 2.0, 3.0]), b, ("left", "right"))


def test_incomplete_only_when_asked():
    e = stats.paired(by_seed([1.0, 2.0, 3.0]), by_seed([0.0, 0.0], [2, 3]), complete=False)
    assert (e.n, e.mean) == (2, 2.5)
    with pytest.raises(stats.SeedError, match="more than once"):
        stats.paired(by_seed([1.0, 2.0], [1, 1]), by_seed([1.0]), complete=False)


def test_coverage_of_the_paired_interval():
    x = np.random.default_rng(0).normal(0.3, 1, (4000, 5))
    inside = [e.low <= 0.3 <= e.high for e in map(stats.estimate, x)]
    assert np.mean(inside) == pytest.approx(0.95, abs=0.012)


# mean, low, high, d_z of every published pair: the interval and the effect size must be the same statistics (n = 5).
PUBLISHED = [
    (0.0634, 0.0413, 0.0856, 3.55), (0.0804, 0.0503, 0.1104, 3.32), (0.2016, 0.1469, 0.2562, 4.58),
    (0.0808, 0.0303, 0.1313, 1.99), (0.1030, 0.0538, 0.1522, 2.60), (0.0913, 0.0569, 0.1256, 3.30),
    (0.0586, 0.0167, 0.1005, 1.74), (0.1795, 0.1547, 0.2042, 9.00), (0.1209, 0.0848, 0.1569, 4.16),
]  # fmt: skip


@pytest.mark.parametrize("mean, low, high, d_z", PUBLISHED)
def test_published_pairs(mean, low, high, d_z):
    e = stats.Estimate(mean, mean / d_z, 5)
    assert (e.low, e.high) == pytest.approx((low, high), abs=3e-4)


def test_welch_equals_scipy():
    a, b = RNG.normal(0, 1, 5), RNG.normal(0.5, 3, 9)
    ea, eb = stats.estimate(a), stats.estimate(b)
    oracle = scipy.stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert stats.welch(ea.mean, ea.se, 5, eb.mean, eb.se, 9)[1:] == pytest.approx(tuple(oracle))


def test_welch_with_one_value_is_a_prediction_interval():
    b = np.array([1.0, 2.0, 4.0])
    diff, low, high = stats.welch(3.0, math.nan, 1, b.mean(), b.std(ddof=1) / 3**0.5, 3)
    half = scipy.stats.t.ppf(0.975, 2) * b.std(ddof=1) * (1 + 1 / 3) ** 0.5
    assert (low, high) == pytest.approx((diff - half, diff + half))
    assert math.isnan(stats.welch(3.0, math.nan, 1, 2.0, math.nan, 1)[1])


def test_fieller_ends_are_where_the_contrast_just_fails():
    b = RNG.normal(2, 0.4, 8)
    a = 1.5 * b + RNG.normal(0, 0.2, 8)
    r = stats.fieller(a, b)
    assert r.bounded and r.low < r.value < r.high
    for q in (r.low, r.high):
        assert stats.estimate(a - q * b).p == pytest.approx(0.05)


def test_fieller_agrees_with_a_bootstrap():
    rng = np.random.default_rng(3)
    b = rng.normal(2, 0.5, 60)
    a = 2 * b + rng.normal(0, 0.5, 60)
    picks = rng.integers(0, 60, (4000, 60))
    low, high = np.quantile(a[picks].mean(1) / b[picks].mean(1), [0.025, 0.975])
    assert stats.fieller(a, b).low == pytest.approx(low, abs=0.02)
    assert stats.fieller(a, b).high == pytest.approx(high, abs=0.02)


def test_fieller_without_a_denominator_is_unbounded():
    r = stats.fieller([1.0, 1.1, 0.9], [0.1, -0.2, 0.15])
    assert not r.bounded and (r.low, r.high) == (-math.inf, math.inf)
    assert math.isnan(stats.fieller([1.0], [2.0]).low)
    assert math.isnan(stats.fieller([1.0, 2.0], [1.0, -1.0]).value)


def test_effect_size_and_spread_intervals_cover():
    x = np.random.default_rng(5).normal(1.5, 1, (2000, 6))
    found = [stats.estimate(row) for row in x]
    d_z = [low <= 1.5 <= high for low, high in (stats.d_z_interval(e.d_z, e.n) for e in found)]
    sd = [low <= 1 <= high for low, high in (stats.sd_interval(e.sd, e.n) for e in found)]
    assert np.mean(d_z) == pytest.approx(0.95, abs=0.015)
    assert np.mean(sd) == pytest.approx(0.95, abs=0.015)
    assert math.isnan(stats.d_z_interval(1.0, 1)[0]) and math.isnan(stats.sd_interval(1.0, 1)[0])


def test_mover_is_welch_where_intervals_are_symmetric_and_wide_enough_for_replications():
    diff, low, high = stats.mover((3.0, 2.0, 4.0), (1.0, -1.0, 3.0))
    assert diff == 2 and low == pytest.approx(2 - 5**0.5) and high == pytest.approx(2 + 5**0.5)
    # a replication of the same effect at the same n agrees about as often as 95 % says, not 83 %
    rng = np.random.default_rng(0)

    def drawn():
        d_z = rng.normal(1.5, 1, 12).mean() / 1.0
        return d_z, *stats.d_z_interval(d_z, 12)

    hits = [low <= 0 <= high for _ in range(300) for _, low, high in [stats.mover(drawn(), drawn())]]
    assert 0.92 < np.mean(hits) <= 1


def test_signs():
    assert stats.signs([1.0, -2.0, 0.0, 3.0]) == (2, 1, 1)
