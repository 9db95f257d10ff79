"""How much of the initial weights is left, and what the data put in their place (backward_bottleneck)."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, ClassVar

from omegaconf import DictConfig, OmegaConf

from .base import Measured, Probe, Snapshot
from .spectra import WITH_MATRICES, layer_rows, parts

if TYPE_CHECKING:
    from ..task import Task


@dataclass
class Forgetting(Probe):
    """E = f W_0, f what weight decay alone leaves of a weight after the steps so far, and the remainder W - E.

    f is exact for the run's schedule: the product of 1 - lr lambda where the decay is decoupled (AdamW, Muon), else the
    recursion of torch's SGD with momentum. A matrix that does not decay has f = 1, a factorised head one f a factor
    that does. An intervention that changes the optimiser's step is not in it.

    forgetting/factor, forgetting/budget          f of what decays, and -ln |f| in nats
    rows "remainder", forgetting/remainder_mean   spectra of W - E, and their mean r_eff: to be held against r_out
    initial_share, forgetting/initial_share_mean  ||E||^2 / ||W||^2, squared Frobenius norms
    """

    kinds: ClassVar[tuple[str, ...]] = WITH_MATRICES

    every: int = 0

    def prepare(self, cfg: DictConfig, task: Task) -> None:
        import torch

        from ..optim import parameter_kinds

        self.optim, self.steps = SimpleNamespace(**OmegaConf.to_container(cfg.optim, resolve=True)), cfg.train.steps
        kinds = parameter_kinds(task)
        decays = [name for name, kind in kinds.items() if kind in self.optim.decay]
        self.state = {layer: W.clone() for layer, W in parts(task)["block"].items()}
        self.powers = {
            layer: decays.count(layer) if layer in kinds else sum(name.startswith("head.") for name in decays)
            for layer in self.state
        }
        self.state["decay"] = torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)  # of decay_steps, and its step

    def measure(self, snapshot: Snapshot) -> Measured:
        from ..optim import lr_at
        from ..theory.forgetting import decay_steps, remaining

        *decayed, done = self.state["decay"].tolist()
        rates = (lr_at(step, self.steps, self.optim) for step in range(int(done), snapshot.step))
        momentum = self.optim.momentum if self.optim.name == "sgd" else 0.0
        decayed = decay_steps(rates, self.optim.weight_decay, momentum, decayed)
        self.state["decay"].copy_(self.state["decay"].new_tensor([*decayed, snapshot.step]))
        factor, nats = remaining(decayed[0], decayed[2])

        remainders, shares = {}, {}
        for layer, W in parts(snapshot.task)["block"].items():
            E = factor ** self.powers[layer] * self.state[layer].double()
            remainders[layer] = W.double() - E
            shares[layer] = float((E.norm() / W.double().norm()).square())
        metrics, rows = layer_rows({"block": remainders}, "remainder")
        for row in rows:
            row["initial_share"] = shares[row["layer"]]
        return {
            "forgetting/factor": factor,
            "forgetting/budget": nats,
            "forgetting/remainder_mean": metrics["rank/remainder_mean"],
            "forgetting/initial_share_mean": sum(shares.values()) / len(shares),
        }, rows
