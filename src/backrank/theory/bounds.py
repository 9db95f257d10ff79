"""Bounds, closed forms and ratios of backward_bottleneck's page. Effective ranks are counts of dimensions."""

import math

from backrank.spectra import marchenko_pastur_erank


def gap_bound(dimension, width, samples, constant=1.0):
    """The generalisation gap C sqrt(r* r_A ln d / n); `dimension` is r* r_A, or whatever stands in its place.

    The page's example has r* = 5, r_A = 32 and yet 165 dimensions where the product is 160. C is not published, so
    only the scaling can be tested.
    """
    return constant * math.sqrt(dimension * math.log(width) / samples)


def nonvacuous_samples(dimension, width, constant=1.0, gap=1.0):
    """The number of samples (real-valued) above which `gap_bound` is below `gap`."""
    return (constant / gap) ** 2 * dimension * math.log(width)


def rank_limits(r_star, r_a):
    """(r* r_A, min(r*, r_A)): the page's bound on r_eff(G_1) and the one its own premise gives.

    Were the deltas inside a space of r* dimensions, the rank of G_1 = delta^T X could not pass min(r*, r_A); the
    product, at least as large as r_A >= rank(G_1), cannot fail.
    """
    return r_star * r_a, min(r_star, r_a)


def init_erank(shapes):
    """Mean effective rank of Gaussian n x m matrices of these `shapes`, n exp(-beta / 2) each: the value at init."""
    return math.fsum(marchenko_pastur_erank(n, m) for n, m in shapes) / len(shapes)


def compression(init, final):
    """1 - final / init of the mean effective rank, a share."""
    return 1 - final / init


def over_rout(erank, r_out):
    """r_eff(W) / r_out: above 1 it contradicts "r_eff(W) is bounded by r_out"."""
    return erank / r_out


def share_without_decay(without, with_decay):
    """The share of the rank reduction `with_decay` that is there `without` it (both in the same unit)."""
    return without / with_decay
