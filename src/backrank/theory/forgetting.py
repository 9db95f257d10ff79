"""How much of the initial weights a recipe's weight decay alone leaves (backward_bottleneck's forgetting budget)."""

import math
from typing import NamedTuple

import numpy as np


class Forgetting(NamedTuple):
    factor: float  # w_T / w_0 without data gradient; with heavy momentum it may be negative
    nats: float  # -ln |factor|
    approx_nats: float  # sum of lr * lambda / (1 - momentum)


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
    w, v, log_scale = 1.0, 0.0, 0.0
    for lr in rates.tolist():
        v = momentum * v + weight_decay * w
        w -= lr * v
        size = max(abs(w), abs(v))
        if 0 < size < 1e-100:  # the recursion is linear: rescaled, it does not underflow
            w, v, log_scale = w / size, v / size, log_scale + math.log(size)
    nats = math.inf if w == 0 else -(math.log(abs(w)) + log_scale)
    return Forgetting(math.copysign(math.exp(-nats), w), nats, approx)
