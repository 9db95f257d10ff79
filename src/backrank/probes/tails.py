"""Tails of the weights and what couples them: the quantities of backward_bottleneck's recursion."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from .base import Measured, Probe, Snapshot
from .spectra import WITH_MATRICES, block_spectra, r_out

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..task import Task

CUTOFF = 1e-6  # sigma_min^+ is the smallest singular value above this share of sigma_1


@dataclass
class TailNorms(Probe):
    """tau_k = sigma_{r+1}(W_k) of every counted matrix, r = ceil(r_out); 0 where a matrix has no such value.

    Rows "tail", tail/mean and tail/max take r_out as it is at the step, on the probe's batch. Rows "tail_frozen" take
    the final r_out for every step: written at the end, each under its own step, from spectra that the checkpoint keeps
    until then. `index` is r + 1.
    """

    kinds: ClassVar[tuple[str, ...]] = WITH_MATRICES

    every: int = 0

    def prepare(self, cfg: DictConfig, task: Task) -> None:
        self.last = cfg.train.steps

    def measure(self, snapshot: Snapshot) -> Measured:
        import torch

        spectra, rank = block_spectra(snapshot), r_out(snapshot)
        for name, values in {"steps": torch.tensor([snapshot.step]), **spectra}.items():
            past = self.state.get(name, values.new_empty(0, len(values)).float())
            self.state[name] = torch.cat([past, values[None].float()])
        if not math.isfinite(rank):  # the loss is about to say why
            return {"tail/index": math.nan, "tail/mean": math.nan, "tail/max": math.nan}, []
        rows = tail_rows(spectra, "tail", rank)
        tails = [row["tau"] for row in rows]
        metrics = {"tail/index": rows[0]["index"], "tail/mean": sum(tails) / len(tails), "tail/max": max(tails)}
        if snapshot.step == self.last:
            for i, step in enumerate(self.state["steps"]):
                past = {layer: self.state[layer][i] for layer in spectra}
                rows += [{**row, "step": int(step)} for row in tail_rows(past, "tail_frozen", rank)]
        return metrics, rows


def tail_rows(spectra: dict[str, Tensor], kind: str, rank: float) -> list[dict[str, Any]]:
    from ..spectra import tail_norm

    r, about = math.ceil(rank), {"kind": kind, "part": "block"}
    return [{"layer": layer, **about, "tau": tail_norm(s, r), "index": r + 1} for layer, s in spectra.items()]


@dataclass
class Coupling(Probe):
    """C_data and c_j of the recursion: M_kj = 2 mu C_data c_j, of which a sufficient condition is made (C_data c_max).

    C_data of a layer: mean over the batch's tokens or images of ||e|| ||a||, e the output error, a the vector that
    enters the layer's matrix (of a convolution the patch under the kernel); where one error belongs to many positions,
    ||a|| is their mean. coupling/c_data is the plain mean over the counted layers.
    c_j: uniform 1 / sigma_min^+(W_j), directional 1 / sigma_r(W_j), r = ceil(r_out), at most the index of sigma_min^+.
    coupling/uniform_max and directional_max are the largest c_j, the products are C_data times these.
    """

    kinds: ClassVar[tuple[str, ...]] = WITH_MATRICES

    every: int = 0

    def measure(self, snapshot: Snapshot) -> Measured:
        rows = couplings(snapshot)
        c_data = mean_of(rows, "c_data")
        metrics = {"coupling/c_data": c_data}
        for kind in ("uniform", "directional"):
            most = max(row[kind] for row in rows)
            metrics |= {f"coupling/{kind}_max": most, f"coupling/{kind}_product": c_data * most}
        return metrics, [dict(row) for row in rows]


@dataclass
class TailBound(Probe):
    """tau_k(t+1) <= (1 - mu lambda) tau_k(t) + 2 mu C_data sum_{j>k} c_j tau_j(t), at pairs of successive steps.

    Measures at every `every`-th step and at the one after it; r is that of the first of the two, C_data the mean over
    the counted layers (see Coupling), mu the learning rate of the step, lambda 0 for a matrix that does not decay. The
    recursion is that of plain SGD: of momentum and Adam's division it says nothing.

    rows "tail_bound"                tau (measured, at t + 1), its bound with the `uniform` and the `directional` c_j
    bound/kept_<c>, bound/ratio_<c>  share of the layers and pairs so far that keep it; median of bound over measured
    bound/cases                      how many these are: a matrix without a singular value r + 1 is none
    """

    kinds: ClassVar[tuple[str, ...]] = WITH_MATRICES

    every: int = 10

    def prepare(self, cfg: DictConfig, task: Task) -> None:
        from ..optim import parameter_kinds

        self.optim, self.steps = SimpleNamespace(**OmegaConf.to_container(cfg.optim, resolve=True)), cfg.train.steps
        self.parameter_kinds = parameter_kinds(task)

    def due(self, step: int, steps: int) -> bool:
        return super().due(step, steps) or (self.every > 0 and step % self.every == 1)

    def measure(self, snapshot: Snapshot) -> Measured:
        import torch

        from ..spectra import tail_norm

        spectra, rows = block_spectra(snapshot), []
        ratios = self.state.get("ratios", torch.zeros(0, 2, dtype=torch.float64))
        if "bounds" in self.state and int(self.state["step"]) == snapshot.step - 1:
            r, found = int(self.state["r"]), []
            for (layer, s), bounds in zip(spectra.items(), self.state["bounds"].tolist(), strict=True):
                tau = tail_norm(s, r)
                row = {"layer": layer, "kind": "tail_bound", "part": "block", "tau": tau, "index": r + 1}
                rows.append(row | dict(zip(("uniform", "directional"), bounds, strict=True)))
                found += [[bound / tau for bound in bounds]] if tau > 0 else []
            ratios = torch.cat([ratios, torch.tensor(found, dtype=torch.float64).reshape(-1, 2)])
        if self.due(snapshot.step + 1, self.steps) and math.isfinite(rank := r_out(snapshot)):
            self.state |= {"step": torch.tensor(snapshot.step), "r": torch.tensor(math.ceil(rank))}
            self.state["bounds"] = self.bounds(snapshot, math.ceil(rank))
        self.state["ratios"] = ratios
        metrics = {"bound/cases": len(ratios)}
        for kind, of in zip(("uniform", "directional"), ratios.T, strict=True):
            if len(of):
                metrics |= {
                    f"bound/kept_{kind}": float((of >= 1).double().mean()),
                    f"bound/ratio_{kind}": float(of.median()),
                }
        return metrics, rows

    def bounds(self, snapshot: Snapshot, r: int) -> Tensor:
        """The bound on every layer's next tail, L x 2: by the uniform and by the directional c_j."""
        import torch

        from ..optim import lr_at
        from ..spectra import tail_norm

        rows, lr = couplings(snapshot), lr_at(snapshot.step, self.steps, self.optim)
        tau = torch.tensor([tail_norm(s, r) for s in block_spectra(snapshot).values()], dtype=torch.float64)
        decays = [self.parameter_kinds.get(row["layer"], "head") in self.optim.decay for row in rows]
        kept = 1 - lr * self.optim.weight_decay * torch.tensor(decays, dtype=torch.float64)
        c = torch.tensor([[row["uniform"], row["directional"]] for row in rows], dtype=torch.float64)
        pushed = torch.where(tau[:, None] > 0, c * tau[:, None], 0.0)
        later = pushed.flip(0).cumsum(0).flip(0) - pushed  # j > k
        return (kept * tau)[:, None] + 2 * lr * mean_of(rows, "c_data") * later


def mean_of(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row[name] for row in rows) / len(rows)


def couplings(snapshot: Snapshot) -> list[dict[str, Any]]:
    """C_data and both c_j of every counted layer: the rows of `Coupling`."""
    import torch

    from ..head import IGNORE, residual_chunks

    def compute() -> list[dict[str, Any]]:
        chunks = residual_chunks(snapshot.hidden_ND, snapshot.weight_VD, snapshot.targets_N)
        e_N = torch.cat([e.norm(dim=1) for _, e in chunks])  # zero without supervision
        errors, rank, a_N = (snapshot.targets_N != IGNORE).sum(), r_out(snapshot), input_norms(snapshot)
        rows = []
        for layer, s in block_spectra(snapshot).items():
            positive = max(1, int((~(s <= CUTOFF * s[0])).sum()))
            r = min(max(1, math.ceil(rank)), positive) if math.isfinite(rank) else None
            rows.append(
                {
                    "layer": layer,
                    "kind": "coupling",
                    "part": "block",
                    "c_data": float((e_N * a_N[layer]).sum() / errors),
                    "uniform": float(1 / s[positive - 1]),
                    "directional": float(1 / s[r - 1]) if r else math.nan,
                }
            )
        return rows

    return snapshot.once("couplings", compute)


def input_norms(snapshot: Snapshot) -> dict[str, Tensor]:
    """Norm of what enters each counted matrix by token or image (N), the mean over its positions."""
    import torch

    task, norms = snapshot.task, {"head.weight": snapshot.hidden_ND.norm(dim=1)}

    def keep(layer: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        # torch's attention applies its output projection without calling the module
        x = attended(module, args[0]) if layer.endswith(".out_proj.weight") else args[0]
        norms[layer] = position_norms(module, x).reshape(len(snapshot.targets_N), -1).mean(1)

    with ExitStack() as hooks, torch.no_grad():
        for layer in block_spectra(snapshot):
            path = layer.rpartition(".")[0].removesuffix(".out_proj")
            if layer != "head.weight":
                hook = task.get_submodule(path).register_forward_pre_hook(partial(keep, layer))
                hooks.callback(hook.remove)
        task.hidden(snapshot.x_BT)
    return norms


def position_norms(module: nn.Module, x: Tensor) -> Tensor:
    """Norms of the vectors that meet the module's matrix: of the last axis, or of the patches of a convolution."""
    from torch import nn
    from torch.nn.functional import conv2d

    if not isinstance(module, nn.Conv2d):
        return x.norm(dim=-1)
    energy = x.square().sum(1, keepdim=True)
    ones = energy.new_ones(1, 1, *module.kernel_size)
    return conv2d(energy, ones, None, module.stride, module.padding, module.dilation).clamp(min=0).sqrt()


def attended(attention: nn.MultiheadAttention, x_BTD: Tensor) -> Tensor:
    """The attention's output in front of its output projection, B x T x D."""
    import torch
    from torch.nn.functional import multi_head_attention_forward

    x, width = x_BTD.transpose(0, 1), attention.embed_dim
    out, _ = multi_head_attention_forward(
        x, x, x, width, attention.num_heads, attention.in_proj_weight, attention.in_proj_bias, None, None, False, 0.0,
        torch.eye(width, dtype=x.dtype, device=x.device), None, training=False, need_weights=False,
    )  # fmt: skip
    return out.transpose(0, 1)
