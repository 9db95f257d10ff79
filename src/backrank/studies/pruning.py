"""What a trained network keeps when its matrices are cut to a share of their parameters (backward_bottleneck).

Cut are the counted matrices but the classifier, which at few classes is no matrix to speak of.

rank       the leading singular directions: k (n + m) of n m parameters
range      the same number of directions, the leading ones of range(P_{>k}^T) on the side of the layer's output: by the
           paper the columns of every gradient lie in it. They are the leading eigenvectors of E[G G^T], G the gradient
           of <h, v>, h the states in front of the head and v Gaussian
magnitude  the largest entries of each matrix; what it would cost to say where they are is not counted
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ..config import ConfigError
from . import Measured

if TYPE_CHECKING:
    from torch import Tensor

    from ..task import Task

METHODS = ("rank", "range", "magnitude")
KEPT = (0.8, 0.6, 0.4, 0.3, 0.2, 0.1, 0.05)
DRAWS, BATCH = 8, 256


def run(cfg: DictConfig, source: Any, root: Path) -> Measured:
    """prune/accuracy, prune/loss: whole; prune/<method>_<percent>: accuracy at that share of the parameters;
    prune/<method>_mean: the mean of these; prune/<method>_least: the smallest share within a point of the whole."""
    import torch

    from ..build import build_task, inherit, pick_device
    from ..probes.spectra import parts
    from ..rundir import RunDir

    if cfg.parent is None:
        raise ConfigError("parent", None, "is the run that study=pruning cuts", "Name a finished one: parent=<run id>")
    device = pick_device(cfg.device)
    task = build_task(cfg)[0].to(device)
    inherit(task, RunDir(root, cfg.parent))
    stream = source.stream(cfg, device)
    named = dict(task.named_parameters())
    weights = {name: named[name].data for name in parts(task)["block"] if not name.startswith("head.")}
    trained = {name: W.clone() for name, W in weights.items()}
    with torch.random.fork_rng():
        torch.manual_seed(cfg.seed)
        bases = backward_ranges(task, stream.held_out(min(BATCH, max(1, 4096 // cfg.data.sequence)))[0], trained)
    whole = task.evaluate(stream.evaluation("test", True))
    found = {"prune/accuracy": whole["accuracy"], "prune/loss": whole["loss"]}
    for method in METHODS:
        curve = {}
        for kept in KEPT:
            for name, W in weights.items():
                W.copy_(cut(trained[name], kept, method, bases[name]))
            curve[kept] = task.evaluate(stream.evaluation("test", True))["accuracy"]
            found[f"prune/{method}_{100 * kept:g}"] = curve[kept]
        found[f"prune/{method}_mean"] = sum(curve.values()) / len(curve)
        found[f"prune/{method}_least"] = min(
            (k for k, a in curve.items() if a >= whole["accuracy"] - 0.01), default=1.0
        )
    return Measured(found, parents=[cfg.parent], device=str(device))


def cut(W: Tensor, kept: float, method: str, basis: tuple[Tensor, bool]) -> Tensor:
    """W with `kept` of its parameters, or of rank 1 if that has more, in its own shape.

    basis: directions of the output side by falling importance, and whether that side is the columns.
    """
    import torch

    M = W.flatten(1).double()
    n, m = M.shape
    if method == "magnitude":
        many = round(kept * n * m)
        out = torch.zeros_like(M).flatten()
        largest = M.flatten().abs().topk(many).indices
        out[largest] = M.flatten()[largest]
        return out.to(W).view_as(W)
    rank = max(1, round(kept * n * m / (n + m)))
    if method == "range":
        U, columns = basis
        U = U[:, :rank]
        M = M @ U @ U.T if columns else U @ (U.T @ M)
    else:
        U, s, Vh = torch.linalg.svd(M, full_matrices=False)
        M = (U[:, :rank] * s[:rank]) @ Vh[:rank]
    return M.to(W).view_as(W)


def backward_ranges(task: Task, x: Tensor, weights: dict[str, Tensor]) -> dict[str, tuple[Tensor, bool]]:
    """By matrix the eigenvectors of E[G G^T], most important first, on the side of the output."""
    import torch
    from transformers.pytorch_utils import Conv1D

    named = {name: p for name, p in task.named_parameters() if name in weights}
    columns = {name: isinstance(task.get_submodule(name.rpartition(".")[0]), Conv1D) for name in named}
    grams: dict[str, Tensor] = {}
    with task.evaluating():
        for _ in range(DRAWS):
            hidden = task.hidden(x)
            gradients = torch.autograd.grad(hidden, list(named.values()), torch.randn_like(hidden))
            for name, G in zip(named, gradients, strict=True):
                M = G.flatten(1).double()
                M = M.T if columns[name] else M
                grams[name] = grams.get(name, 0) + M @ M.T
    return {name: (torch.linalg.eigh(gram)[1].flip(1), columns[name]) for name, gram in grams.items()}
