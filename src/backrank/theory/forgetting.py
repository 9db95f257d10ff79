"""How much of the initial weights a recipe's weight decay alone leaves (backward_bottleneck's forgetting budget)."""

import math
from typing import NamedTuple

import numpy as np


class Forgetting(NamedTuple):
    factor: float  # w_T / w_0 without data gradient; with heavy momentum it may be negative
    nats: float  # -ln |factor|
    approx_nats: float  # sum of lr * lambda / (1 - momentum)


def decay_steps(rates, weight_decay, momentum=0.0, state=(1.0, 0.0, 0.0)):
    """(w, v, s) after steps at `rates` with no data gradient, from such a state: w e^s and v e^s are the weight and its
    momentum buffer over w_0. The recursion of `forgetting`, piece by piece.
    """
    w, v, log_scale = state
    for lr in rates:
        v = momentum * v + weight_decay * w
        w -= lr * v
        size = max(abs(w), abs(v))
        if 0 < size < 1e-100:  # the recursion is linear: rescaled, it does not underflow
            w, v, log_scale = w / size, v / size, log_scale + math.log(size)
    return w, v, log_scale


def remaining(w, log_scale):
    """(factor, nats) of a state of `decay_steps`."""
    nats = math.inf if w == 0 else 0.0 - math.log(abs(w)) - log_scale
    return math.copysign(math.exp(-nats), w), nats


def forgetting(rates, weight_decay, momentum=0.0):
    """What is left of a weight after steps at learning `rates` (one per step) with no data gradient: a Forgetting.

    momentum > 0 is torch's SGD, exactly: v <- m v + lambda w, w <- w - lr v from v = 0. momentum = 0 is plain SGD and
    AdamW, whose decay is decoupled and so passes through no average: the product of 1 - lr lambda. ValueError unless
    0 <= momentum < 1.
    """
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
    rates = np.asarray(rates, dtype=np.float64)
    approx = weight_decay * math.fsum(rates) / (1 - momentum)
    w, _, log_scale = decay_steps(rates.tolist(), weight_decay, momentum)
    return Forgetting(*remaining(w, log_scale), approx)
