"""Spectra of weights, gradients and output errors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .base import Measured, Probe, Snapshot

if TYPE_CHECKING:
    from torch import Tensor


def layer_rows(matrices: dict[str, dict[str, Tensor]], kind: str) -> Measured:
    """Rows of layers.jsonl for {part: {layer: matrix}}; the metric is the plain mean over the block matrices."""
    from ..spectra import spectrum_rows

    rows: list[dict[str, Any]] = []
    for part, named in matrices.items():
        rows += [{**row, "kind": kind, "part": part} for row in spectrum_rows(named)]
    metrics = {f"rank/{row['layer']}/erank": row["erank"] for row in rows} if kind == "weight" else {}
    block = [row["erank"] for row in rows if row["part"] == "block"]
    metrics[f"rank/{kind}_mean"] = sum(block) / len(block) if block and None not in block else float("nan")
    return metrics, rows


def parts(task: Any) -> dict[str, dict[str, Tensor]]:
    """Every matrix of the model by part: block (the papers' layer list), and apart from it the others.

    The list is all matrices between embedding and head; a backbone may narrow it (`counted`, a pattern of names) or
    add the head (`counts_head`).
    """
    from torch.nn import Parameter

    from ..spectra import block_matrices, other_matrices

    block, other = block_matrices(task), other_matrices(task)
    if not isinstance(task.head.weight, Parameter):  # a product's own spectrum, beside those of its factors
        other["head.weight"] = task.head.weight.detach()
    if pattern := getattr(task.backbone, "counted", None):
        other |= {name: block.pop(name) for name in list(block) if not re.search(pattern, name)}
    if getattr(task.backbone, "counts_head", False):
        block["head.weight"] = other.pop("head.weight")
    return {"block": block, "other": other}


@dataclass
class WeightSpectrum(Probe):
    """Effective rank, its other definitions, sigma_1 and norms of every weight matrix (backward_bottleneck)."""

    def measure(self, snapshot: Snapshot) -> Measured:
        return layer_rows(parts(snapshot.task), "weight")


@dataclass
class GradientSpectrum(Probe):
    """The same of the gradient of every weight matrix; through_sites measures the one that interventions altered."""

    every: int = 0
    through_sites: bool = False

    def measure(self, snapshot: Snapshot) -> Measured:
        gradients = snapshot.gradients(self.through_sites)
        named = {
            part: {layer: gradients[layer].flatten(1) for layer in layers if layer in gradients}
            for part, layers in parts(snapshot.task).items()
        }
        return layer_rows(named, "gradient")


@dataclass
class OutputError(Probe):
    """r_out: effective rank of the N x V matrix of output errors softmax - onehot, and its null (backward_bottleneck).

    The same matrix is the logit gradient G of lost_in_backprop, so its rank is measured here too. The null is a uniform
    softmax on the same targets: about exp of the batch's unigram entropy.
    """

    every: int = 0

    def measure(self, snapshot: Snapshot) -> Measured:
        import torch

        from ..head import IGNORE, residual_chunks
        from ..spectra import effective_rank, gram_spectrum

        targets = snapshot.targets_N
        supervised = targets != IGNORE  # a held-out split shorter than the batch is padded
        errors = torch.cat([e for _, e in residual_chunks(snapshot.hidden_ND, snapshot.weight_VD, targets)])[supervised]
        s = gram_spectrum(errors)
        vocab = errors.shape[1]
        return {
            "output/r_out": float(effective_rank(s)),
            "output/r_out_null": float(effective_rank(uniform_error_spectrum(targets[supervised], vocab))),
            "output/errors": errors.shape[0],
        }, []


def uniform_error_spectrum(targets_N: Tensor, vocab: int) -> Tensor:
    """Singular values of the N x V matrix 1/V - onehot(y) in closed form.

    E^T E = N u u^T - u c^T - c u^T + diag(c) with u = 1/V and c the class counts; the classes that never occur share
    one direction, which keeps the problem at (classes that occur + 1)^2.
    """
    import torch

    counts = torch.bincount(targets_N, minlength=vocab).double()
    seen = counts[counts > 0]
    never = vocab - len(seen)
    u = torch.full((len(seen) + 1,), 1 / vocab, dtype=torch.float64, device=counts.device)
    u[-1] = never**0.5 / vocab
    c = torch.cat([seen, seen.new_zeros(1)])
    gram = seen.sum() * u.outer(u) - u.outer(c) - c.outer(u) + torch.diag(c)
    return torch.linalg.eigvalsh(gram).clamp(min=0).sqrt().flip(0)
