"""Spectra of weights, gradients and output errors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from omegaconf import DictConfig

from ..config import ConfigError
from .base import Measured, Probe, Snapshot

if TYPE_CHECKING:
    from torch import Tensor


def layer_rows(
    matrices: dict[str, dict[str, Tensor]], kind: str, known: dict[str, dict[str, Tensor]] | None = None
) -> Measured:
    """Rows of layers.jsonl for {part: {layer: matrix}}; the metric is the plain mean over the block matrices.

    known: {part: {layer: singular values}} of parts whose spectra are there already.
    """
    from ..spectra import spectrum_rows

    rows: list[dict[str, Any]] = []
    for part, named in matrices.items():
        rows += [{**row, "kind": kind, "part": part} for row in spectrum_rows(named, (known or {}).get(part))]
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
    for name in [name for name in block if ".parametrizations." in name]:  # the matrix that is used, not what makes it
        path, _, rest = name.partition(".parametrizations.")
        del block[name]
        block[f"{path}.{rest.split('.')[0]}"] = getattr(task.get_submodule(path), rest.split(".")[0]).detach()
    if not isinstance(task.head.weight, Parameter):  # a product's own spectrum, beside those of its factors
        other["head.weight"] = task.head.weight.detach()
    if pattern := getattr(task.backbone, "counted", None):
        other |= {name: block.pop(name) for name in list(block) if not re.search(pattern, name)}
    if getattr(task.backbone, "counts_head", False):
        block["head.weight"] = other.pop("head.weight")
    return {"block": block, "other": other}


@dataclass
class WeightSpectrum(Probe):
    """Effective rank, its other definitions, sigma_1 and norms of every weight matrix (backward_bottleneck).

    With the `sequences` of other probes it shares their snapshot, and so the spectra of the counted matrices.
    """

    def measure(self, snapshot: Snapshot) -> Measured:
        return layer_rows(parts(snapshot.task), "weight", {"block": block_spectra(snapshot)})


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
    softmax on the same targets: about exp of the batch's unigram entropy. Both also of the first n errors for each n of
    `sizes`, as far as a short held-out split reaches: r_out_<n>, r_out_null_<n>.
    """

    every: int = 0
    sizes: list[int] | None = None

    def check(self, cfg: DictConfig) -> None:
        super().check(cfg)
        errors = self.sequences * cfg.data.sequence
        for n in self.sizes or ():
            if not 1 <= n <= errors:
                problem = f"is not between 1 and the {errors} errors of the batch"
                raise ConfigError("probe.output_error.sizes", n, problem, "Raise probe.output_error.sequences")

    def measure(self, snapshot: Snapshot) -> Measured:
        from ..head import IGNORE
        from ..spectra import effective_rank, gram_spectrum

        targets, vocab = snapshot.targets_N[snapshot.targets_N != IGNORE], snapshot.weight_VD.shape[0]
        metrics = {
            "output/r_out": r_out(snapshot),
            "output/r_out_null": effective_rank(uniform_error_spectrum(targets, vocab)),
            "output/errors": len(targets),
        }
        sizes = [n for n in self.sizes or () if n <= len(targets)]
        errors = output_errors(snapshot) if sizes else None
        for n in sizes:
            metrics[f"output/r_out_{n}"] = effective_rank(gram_spectrum(errors[:n]))
            metrics[f"output/r_out_null_{n}"] = effective_rank(uniform_error_spectrum(targets[:n], vocab))
        return metrics, []


def output_errors(snapshot: Snapshot) -> Tensor:
    """softmax - onehot of the supervised tokens or images, N x V: a held-out split shorter than the batch is padded."""
    import torch

    from ..head import IGNORE, residual_chunks

    targets = snapshot.targets_N
    chunks = residual_chunks(snapshot.hidden_ND, snapshot.weight_VD, targets)
    return torch.cat([e for _, e in chunks])[targets != IGNORE]


def r_out(snapshot: Snapshot) -> float:
    """Effective rank of the output errors."""
    from ..spectra import effective_rank, gram_spectrum

    return snapshot.once("r_out", lambda: effective_rank(gram_spectrum(output_errors(snapshot))))


# kinds of models with matrices between embedding and head
WITH_MATRICES = ("gpt2", "llama", "pretrained", "toy", "vit", "resnet", "two_layer")


def block_spectra(snapshot: Snapshot) -> dict[str, Tensor]:
    """Singular values of every counted matrix, on the CPU."""
    from ..spectra import gram_spectrum

    def compute() -> dict[str, Tensor]:
        block = parts(snapshot.task)["block"]
        spectra = gram_spectrum(list(block.values()), block)
        return {layer: s.cpu() for layer, s in zip(block, spectra, strict=True)}

    return snapshot.once("block_spectra", compute)


@dataclass
class SpectrumShape(Probe):
    """Is the spectrum of a counted matrix heavy-tailed, and does it have a gap at r = ceil(r_out)?

    exponent, tail, ks        power law fitted to the `tail` largest eigenvalues of W W^T (spectra.tail_exponent)
    gap, gap_neighbours       sigma_r / sigma_{r+1}, and what a smooth fall would give there (spectra.gap_ratio)
    gap_initial               the initial weights' gap at this r; their exponent is the one of step 0

    shape/<name>: the plain mean over the matrices that have such a value (left out where none has); shape/fitted and
    shape/gaps count them.
    """

    kinds: ClassVar[tuple[str, ...]] = WITH_MATRICES

    every: int = 0

    def measure(self, snapshot: Snapshot) -> Measured:
        from ..spectra import gap_ratio, tail_exponent

        spectra, rank, rows = block_spectra(snapshot), r_out(snapshot), []
        if snapshot.step == 0:
            self.state = {layer: s.clone() for layer, s in spectra.items()}
        r = math.ceil(rank) if math.isfinite(rank) else 0
        for layer, s in spectra.items():
            first = self.state.get(layer, s.new_zeros(0))
            fit = tail_exponent(s) or (None, None, None)
            gap, neighbours = gap_ratio(s, r)
            rows.append(
                {
                    "layer": layer,
                    "kind": "shape",
                    "part": "block",
                    **dict(zip(("exponent", "tail", "ks"), fit, strict=True)),
                    "gap": gap,
                    "gap_neighbours": neighbours,
                    "gap_initial": gap_ratio(first, r)[0],
                    "index": r,
                }
            )

        def found(name: str) -> list[float]:
            return [row[name] for row in rows if row[name] is not None]

        names = ("exponent", "ks", "gap", "gap_neighbours", "gap_initial")
        metrics = {f"shape/{name}": sum(v) / len(v) for name in names if (v := found(name))}
        return metrics | {"shape/fitted": len(found("exponent")), "shape/gaps": len(found("gap"))}, rows


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
