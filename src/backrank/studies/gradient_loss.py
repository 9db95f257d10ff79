"""How much of the logit gradient a language model's head loses, and what the projection does to it (lost_in_backprop).

Measured is a pretrained model, the run that is its `parent`, or, without either, the initial weights. Documents are
read in order as one text, in sequences of data.sequence: of a pretrained model train, the largest split, of which seed
s reads the s-th part of data.eval_tokens (null: all); of other models the first data.eval_tokens of validation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from ..config import ConfigError
from ..data import eval_windows
from . import Measured

if TYPE_CHECKING:
    import torch

    from ..task import Task

SAMPLED = 4096  # tokens, spread over the text, whose coefficients are sorted and shuffled
LEAST_BATCH, TIMES = 64, 4  # batch sizes of the spectra: the batch of a step, a quarter of it, ...
SIGMAS_PER_DECADE = 16  # of a spectrum that is kept for figures


def prepare(cfg: DictConfig, root: Path) -> tuple[Task, torch.device, list[str]]:
    """The model that a config measures, its device and its parents. Raises ConfigError for a head that is not W h."""
    from ..build import build_task, inherit, pick_device
    from ..rundir import RunDir

    device = pick_device(cfg.device)
    task = build_task(cfg)[0]
    if not task.head.linear:
        problem = f"gives a head without one gradient in its logits, which study={cfg.study} measures"
        raise ConfigError("intervention", list(cfg.intervention), problem, "Leave it out")
    if cfg.parent:
        inherit(task, RunDir(root, cfg.parent))
    return task.to(device), device, [cfg.parent] if cfg.parent else []


def text_of(cfg: DictConfig, source: Any, stream: Any) -> Iterator[Any]:
    """The batches of the text that is measured, about 1,024 tokens each. Raises ConfigError where its part is none."""
    if not cfg.model.path or cfg.parent:
        yield from stream.evaluation("validation", True)
        return
    ids, T = source.train, cfg.data.sequence
    size = cfg.data.eval_tokens or len(ids)
    start, batch = (cfg.seed - 1) * size, max(1, 1024 // T)
    if not 0 <= start <= start + size <= len(ids):
        problem = f"its part of {size} tokens is none of the {len(ids)} of the train split"
        raise ConfigError("seed", cfg.seed, problem, f"Use seeds 1 to {len(ids) // size}, or lower data.eval_tokens")
    for at in range(start, start + size - 1, batch * T):
        piece = ids[at : min(at + batch * T + 1, start + size)]
        yield from map(stream.to_device, eval_windows(piece, T, None, batch))


def run(cfg: DictConfig, source: Any, root: Path) -> Measured:
    """head/<name> of theory.logit_gradient's summary, controls and moved; rank/<name> of the batch of a step:

    batch, vocabulary: its tokens, V; contexts: different ones, a context being what its sequence holds before the
    token; next_tokens: different ones; unique: contexts whose next token no other has; numerical: singular values of G
    over 1e-6 of the first; erank; components_70, components_999: how many hold 70 and 99.9 % of the norm of G, and
    ..._energy of its square.

    Rows: `logit/<name>` of these by batch size (in `index`), `logit/sigma` by position in the whole batch's spectrum,
    `sorted/<name>` by position among a token's coefficients, `lost/<token|weighted>` by share of the tokens.
    """
    import torch

    from ..seeding import generator
    from ..theory import logit_gradient as measure

    task, device, parents = prepare(cfg, root)
    stream = source.stream(cfg, device)
    space = measure.column_space(task.head.weight.detach())
    step = cfg.train.batch * cfg.train.accumulate * cfg.data.sequence
    if not hasattr(source, "validation"):
        raise ConfigError("data.source", cfg.data.source, f"is no text, which study={cfg.study} reads", "Use data=text")
    available = len(source.train if cfg.model.path and not cfg.parent else source.validation)
    # odd, and counted on from batch to batch: all places of a sequence come up
    stride = max(1, min(available, cfg.data.eval_tokens or available) // SAMPLED) | 1

    passed, sample, batch, contexts, taken, read = [], [], [], [], 0, 0
    with torch.no_grad(), task.evaluating():
        for x, y in text_of(cfg, source, stream):
            H, targets = task.hidden(x), y.flatten()
            passed.append(measure.passed(H, targets, space))
            spread = every(stride, read)
            sample.append((H[spread].clone(), targets[spread]))
            read += len(H)
            if taken < step:
                seen = (targets != measure.IGNORE)[: step - taken].nonzero()[:, 0]
                batch.append((H[seen].clone(), targets[seen]))
                rows = x.cpu().numpy()
                contexts += [hash(rows[i // x.shape[1], : i % x.shape[1] + 1].tobytes()) for i in seen.tolist()]
                taken += len(seen)
    tokens = measure.Passed(*(torch.cat(part) for part in zip(*passed, strict=True)))
    H_sample, y_sample = (torch.cat(part) for part in zip(*sample, strict=True))
    moved = measure.moved(H_sample, y_sample, space)
    found = measure.summary(tokens, space) | moved.metrics
    found |= measure.controls(H_sample, y_sample, space, generator(cfg.seed, "head"))
    found = {f"head/{name}": value for name, value in found.items()}

    H_batch, y_batch = (torch.cat(part) for part in zip(*batch, strict=True))
    sizes = [taken // TIMES**k for k in range(20) if k == 0 or taken // TIMES**k >= LEAST_BATCH]
    rows = []
    for n, s in measure.spectra(H_batch, space.W_VD, y_batch, sizes).items():
        ranks = ranks_of(s, y_batch[:n], contexts[:n])
        rows += [row(f"logit/{name}", n, value) for name, value in ranks.items()]
    at = measure.places(len(s), SIGMAS_PER_DECADE)
    rows += [row("logit/sigma", k, value) for k, value in zip(at.tolist(), s.cpu()[at - 1].tolist(), strict=True)]
    found |= {f"rank/{name}": value for name, value in ranks.items()}  # of the largest batch, the last
    found |= {"rank/batch": taken, "rank/vocabulary": len(space.W_VD)}
    for name, values in moved.curves.items():
        rows += [row(f"sorted/{name}", k, v) for k, v in zip(moved.places.tolist(), values.tolist(), strict=True)]
    each = measure.lost(tokens.total_N.clamp(min=1e-300), tokens.kept_N)
    shares = [i / 100 for i in range(1, 100)]
    for name, weights in (("token", None), ("weighted", tokens.loss_N)):
        values, _ = measure.quantiles(each, weights, shares)
        rows += [row(f"lost/{name}", share, value) for share, value in zip(shares, values, strict=True)]
    return Measured({name: float(value) for name, value in found.items()}, rows, parents, str(device))


def every(stride: int, read: int) -> slice:
    """Of a batch in front of which `read` tokens lie, those at multiples of stride in the whole text."""
    return slice(-read % stride, None, stride)


def ranks_of(s: torch.Tensor, targets_N: torch.Tensor, contexts: list[int]) -> dict[str, float]:
    """What `run` says of a batch, from the spectrum of its G."""
    from ..spectra import effective_rank
    from ..theory import logit_gradient as measure

    followed = set(zip(contexts, targets_N.tolist(), strict=True))
    by_context, by_token = (Counter(pair[i] for pair in followed) for i in (0, 1))
    return {
        "contexts": len(by_context),
        "next_tokens": len(by_token),
        "unique": len({context for context, token in followed if by_token[token] == 1}),
        "numerical": int((s > measure.RESOLVED * s[0]).sum()),
        "erank": effective_rank(s),
        **{f"components_{name}{'_energy' * squared}": measure.components(s, share, squared)
           for name, share in (("70", 0.7), ("999", 0.999)) for squared in (False, True)},
    }  # fmt: skip


def row(kind: str, at: float, value: float) -> dict[str, Any]:
    """One point of a curve, for layers.jsonl."""
    return {"layer": f"{at:g}", "kind": kind, "index": at, "value": value}
