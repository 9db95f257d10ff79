"""Forward through the sites, loss, evaluation.

Shapes: B batch, T time, N = B*T tokens (or N = B images), D width, V vocabulary or classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .head import resolve_loss
from .interventions import Intervention
from .interventions.base import Forward


class Task(nn.Module):
    """Backbone, head and loss, with the gradient sites between them: next-token prediction or classification."""

    def __init__(self, backbone: nn.Module, head: nn.Module, interventions: list[Intervention], loss: str):
        super().__init__()
        self.backbone, self.head = backbone, head
        self.interventions = interventions
        self.loss_name = loss

    def hidden(self, x: Tensor, taps: dict[int, Tensor] | None = None) -> Tensor:
        """Hidden states in front of the head, N x D; `taps` gets the states after the blocks that are its keys."""
        hidden_ND = self.backbone(x, taps).flatten(0, -2)
        for depth in taps or ():
            taps[depth] = taps[depth].flatten(0, -2)
        return hidden_ND

    def loss(self, x: Tensor, y: Tensor, denominator: float, sites: bool = True, loss: str = "") -> Tensor:
        """Cross-entropy in nats: the sum over the supervised tokens divided by `denominator`.

        The gradient meets the interventions in the order of the config, so the first is the last in the forward pass.
        """
        taps = {depth: None for i in self.interventions for depth in i.depths} if sites else {}
        hidden_ND, weight_VD, targets_N = self.hidden(x, taps), self.head.weight, y.flatten()
        at = Forward(hidden_ND, weight_VD, targets_N, denominator, taps)
        if sites:
            for intervention in reversed(self.interventions):
                hidden_ND = intervention.hidden(hidden_ND)
                weight_VD = intervention.weight(weight_VD)
        if self.head.linear:
            total = resolve_loss(loss or self.loss_name)(hidden_ND, weight_VD, targets_N, denominator)
        else:
            total = F.cross_entropy(self.head(hidden_ND).float(), targets_N, reduction="sum") / denominator
        for term in (i.loss(at) for i in self.interventions if sites):
            total = total if term is None else total + term
        return total

    def forward(self, x: Tensor, y: Tensor, denominator: float, sites: bool = True, loss: str = "") -> Tensor:
        return self.loss(x, y, denominator, sites, loss)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode inside, so that looking moves no running statistic; the former mode after."""
        mode = self.training
        self.eval()
        try:
            yield
        finally:
            self.train(mode)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Mean loss in nats a token (or image) and accuracy over the batches, past all sites, by the plain loss.

        `loss_active` (only where the head has classes that are never a target) leaves those out of the softmax.
        """
        weight, active = self.head.weight, self.head.active
        sums = torch.zeros(4, dtype=torch.float64, device=weight.device)
        with self.evaluating():
            for x, y in batches:
                hidden_ND = self.hidden(x)
                logits = (hidden_ND @ weight.T if self.head.linear else self.head(hidden_ND)).float()
                y_N = y.flatten()
                # summed in float64: differences between arms are looked at to 1e-4 nats and below
                sums[0] += F.cross_entropy(logits, y_N, reduction="none").double().sum()
                if active < weight.shape[0]:
                    sums[1] += F.cross_entropy(logits[:, :active], y_N, reduction="none").double().sum()
                sums[2] += (logits.argmax(1) == y_N).sum()
                sums[3] += (y_N != -100).sum()
        tokens = int(sums[3])
        total, restricted, right, _ = (sums / max(tokens, 1)).tolist()
        result = {"loss": total, "accuracy": right, "tokens": tokens}
        if active < weight.shape[0]:
            result["loss_active"] = restricted
        return result if tokens else {**result, "loss": math.nan, "accuracy": math.nan}
