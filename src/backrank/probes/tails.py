"""Tails of the weights and what couples them: the quantities of backward_bottleneck's recursion."""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig

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
        import torch

        from ..head import IGNORE, residual_chunks

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
        c_data = sum(row["c_data"] for row in rows) / len(rows)
        metrics = {"coupling/c_data": c_data}
        for kind in ("uniform", "directional"):
            most = max(row[kind] for row in rows)
            metrics |= {f"coupling/{kind}_max": most, f"coupling/{kind}_product": c_data * most}
        return metrics, rows


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
