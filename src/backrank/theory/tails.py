"""The tail recursion tau(t+1) <= M tau(t) of backward_bottleneck, run exactly as an equality.

tau_k is sigma_{r_out+1} of layer k, counted from the input; M_kk = 1 - decay, M_kj = coupling_j for j > k, with
decay = mu lambda (a step) and coupling_j = 2 mu C_data c_j. Shapes: L layers, T times.

M = r (I + N) with N nilpotent, so M^t = r^t sum_i C(t, i) N^i, i < L. The sum has no negative term: in logarithms it
neither cancels nor overflows, and costs the same at every t.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

BELOW = 1e-3  # the share of the initial tail at which the page's explorer calls it forgotten: ln(1000) nats
EXPLORER_FACTOR = 5.0  # T_converge / T_forget of the explorer at its one published setting, depth 12


def recursion_matrix(decay, coupling, layers=None):
    """M, L x L upper triangular, float64. `coupling` is one number (with `layers`) or one per layer; the first is idle.

    Raises ValueError unless 0 < decay < 1 and every coupling is finite and non-negative.
    """
    coupling = np.asarray(coupling, dtype=np.float64)
    coupling = np.broadcast_to(coupling, (coupling.size if layers is None else layers,))
    if not 0 < decay < 1:
        raise ValueError(f"decay (mu * lambda) must lie in (0, 1), got {decay}")
    if not (np.isfinite(coupling) & (coupling >= 0)).all():
        raise ValueError(f"couplings must be finite and non-negative, got {coupling.tolist()}")
    return np.triu(np.tile(coupling, (len(coupling), 1)), 1) + (1 - decay) * np.eye(len(coupling))


def spectral_radius(M_LL):
    """Largest modulus on the diagonal, which for an upper triangular M is rho(M); ValueError for another M."""
    M = np.asarray(M_LL)
    if np.tril(M, -1).any():
        raise ValueError("the spectral radius is read off the diagonal: M must be upper triangular")
    return float(np.abs(np.diag(M)).max())


def _log_powers(M, tau):
    """log r and log(N^i tau), i < L, an L x L array."""
    r = spectral_radius(M)
    if not np.allclose(np.diag(M), r, rtol=1e-12, atol=0) or r == 0:
        raise ValueError("the closed form needs one positive decay factor for all layers")
    with np.errstate(divide="ignore"):
        log_N = np.log(np.triu(M, 1) / r)
        powers = [np.log(np.ones(len(M)) if tau is None else np.asarray(tau, dtype=np.float64))]
    while len(powers) < len(M):
        powers.append(logsumexp(log_N + powers[-1], axis=1))
    return math.log(r), np.stack(powers)


def _log_tails(log_r, powers, times):
    t, i = np.asarray(times, dtype=np.float64)[:, None], np.arange(len(powers) - 1)
    with np.errstate(divide="ignore"):
        binomial = np.cumsum(np.log(np.maximum(t - i, 0)) - np.log(i + 1), axis=1)  # log C(t, i + 1), -inf past t
    binomial = np.concatenate([np.zeros_like(t), binomial], axis=1)
    return t * log_r + logsumexp(binomial[:, :, None] + powers, axis=1)


def log_tails(M_LL, times, tau_L=None):
    """ln of M^t tau, T x L, at any T whole times >= 0, from non-negative tails `tau_L` (default: ones).

    The bound on measured tails; in logarithms because with the page's own couplings it passes 1e71. ValueError unless
    M is upper triangular with equal positive diagonal.
    """
    M = np.asarray(M_LL, dtype=np.float64)
    return _log_tails(*_log_powers(M, tau_L), np.atleast_1d(times))


class TailRun(NamedTuple):
    steps: int  # the first t with max tau < below
    log10_peak: float  # of max tau over all t
    peak_step: int


def _first(true_at, low, high):
    """The smallest whole number in (low, high] where a predicate that changes once, to true, holds."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if true_at(middle) else (middle, high)
    return high


def tail_steps(decay, coupling, layers=None, below=BELOW):
    """Steps until the largest tail, from 1 in every layer, falls below `below` (in (0, 1)), and its peak: a TailRun.

    Equal to stepping, by bisection. With couplings that depend on j alone the largest tail is tau_1, and
    p_k = tau_k / r^t is log-concave: p_k / p_{k+1} is 1 + c p_{k+1}'s running sum over p_{k+1} itself, which rises as
    long as p_{k+1} is log-concave, so p_k(t+1) / p_k(t) = 1 + sum_j c_j p_j / p_k falls. Hence one peak, one crossing.
    """
    if not 0 < below < 1:
        raise ValueError(f"below must lie in (0, 1), the initial tails being 1; got {below}")
    log_r, powers = _log_powers(recursion_matrix(decay, coupling, layers), None)

    def log_max(t):
        return float(_log_tails(log_r, powers, np.array([t])).max())

    high = 1
    while log_max(high) >= math.log(below):
        high *= 2
    steps = _first(lambda t: log_max(t) < math.log(below), high // 2, high)
    peak = _first(lambda t: log_max(t + 1) <= log_max(t), -1, steps)
    return TailRun(steps, log_max(peak) / math.log(10), peak)


def forget_steps(decay, below=BELOW):
    """The explorer's T_forget, ln(1 / below) / decay + 1 steps: 692 at decay 0.01."""
    return math.log(1 / below) / decay + 1


def converge_steps(decay, factor=EXPLORER_FACTOR, below=BELOW):
    """The explorer's T_converge as a multiple of T_forget: 3,459 at decay 0.01, depth 12. A guess; one point known."""
    return factor * forget_steps(decay, below)


class Growth(NamedTuple):
    exponent: float  # slope of ln T against ln L: 1 is linear, near 0 logarithmic or flat
    r2_linear: float  # of T = a + b L
    r2_log: float  # of T = a + b ln L
    better: str  # "linear" or "log"


def growth(depths, steps):
    """How times T grow with depths L (three different ones at least): a Growth of least-squares fits."""
    L, T = np.asarray(depths, dtype=np.float64), np.asarray(steps, dtype=np.float64)
    if len(np.unique(L)) < 3 or (L < 1).any() or (T <= 0).any():
        raise ValueError(f"growth needs three different depths >= 1 and positive times, got {depths}, {steps}")
    exponent = float(np.polyfit(np.log(L), np.log(T), 1)[0])
    r2_linear, r2_log = (float(np.corrcoef(x, T)[0, 1] ** 2) for x in (L, np.log(L)))
    return Growth(exponent, r2_linear, r2_log, "linear" if r2_linear >= r2_log else "log")
