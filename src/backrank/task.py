"""Forward through the sites, loss, evaluation. Shapes: B batch, T time, N = B*T tokens, D width, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .head import resolve_loss
from .interventions import Intervention


class LanguageModel(nn.Module):
    """Backbone, head and loss, with the two gradient sites between them."""

    def __init__(self, backbone: nn.Module, head: nn.Module, interventions: list[Intervention], loss: str):
        super().__init__()
        self.backbone, self.head = backbone, head
        self.interventions = interventions
        self.loss_name = loss

    def hidden(self, x_BT: Tensor) -> Tensor:
        """Hidden states in front of the head, N x D."""
        return self.backbone(x_BT).flatten(0, 1)

    def loss(self, x_BT: Tensor, y_BT: Tensor, denominator: float, sites: bool = True, loss: str = "") -> Tensor:
        """Cross-entropy in nats: the sum over the supervised tokens divided by `denominator`.

        The gradient meets the interventions in the order of the config, so the first is the last in the forward pass.
        """
        hidden_ND, weight_VD = self.hidden(x_BT), self.head.weight
        if sites:
            for intervention in reversed(self.interventions):
                hidden_ND = intervention.hidden(hidden_ND)
                weight_VD = intervention.weight(weight_VD)
        return resolve_loss(loss or self.loss_name)(hidden_ND, weight_VD, y_BT.flatten(), denominator)

    def forward(self, x_BT: Tensor, y_BT: Tensor, denominator: float) -> Tensor:
        return self.loss(x_BT, y_BT, denominator)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
        """Mean loss in nats a token over the batches, past all sites, by the plain loss.

        `loss_active` (only where the head has classes that are never a target) leaves those out of the softmax.
        """
        weight, active = self.head.weight, self.head.active
        sums = torch.zeros(2, dtype=torch.float64, device=weight.device)
        tokens = 0
        for x_BT, y_BT in batches:
            logits = (self.hidden(x_BT) @ weight.T).float()
            y_N = y_BT.flatten()
            # summed in float64: differences between arms are looked at to 1e-4 nats and below
            sums[0] += F.cross_entropy(logits, y_N, reduction="none").double().sum()
            if active < weight.shape[0]:
                sums[1] += F.cross_entropy(logits[:, :active], y_N, reduction="none").double().sum()
            tokens += int((y_N != -100).sum())
        total, restricted = (sums / max(tokens, 1)).tolist()
        result = {"loss": total, "tokens": tokens}
        if active < weight.shape[0]:
            result["loss_active"] = restricted
        return result if tokens else {**result, "loss": math.nan}
