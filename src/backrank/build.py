"""Config -> objects, in one visible order. This is the first module of a run that imports torch."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig

from .config import ConfigError, make
from .distributed import Parallel
from .head import DenseHead, resolve_loss
from .interventions import INTERVENTIONS
from .models import build_backbone
from .optim import build_optimiser, lr_at, parameter_kinds
from .probes import PROBES
from .probes.base import Snapshot
from .recorder import Recorder
from .rundir import RunDir
from .seeding import generator, role_seed, tensor_hash
from .task import Task
from .trainer import Trainer


def pick_device(name: str) -> torch.device:
    """`auto` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("device", name, "is not there", "Use device=cpu")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def build_task(cfg: DictConfig) -> tuple[Task, dict[str, str]]:
    """The model with its interventions, and the hashes of its initial backbone and dense head.

    The dense head is drawn first, so that every arm shares it; what an intervention draws comes after it.
    """
    backbone = build_backbone(cfg)
    draws = generator(cfg.seed, "head")
    if cfg.model.tied:
        head = DenseHead(backbone.embedding.weight)
    elif cfg.model.path:
        head = DenseHead(backbone.head_weight)
    else:
        head = DenseHead.create(cfg.data.vocab_size, cfg.model.width, draws, cfg.model.head_std)
    hashes = {"backbone": tensor_hash(dict(backbone.named_parameters())), "head": tensor_hash({"": head.weight})}
    interventions = [make(INTERVENTIONS[name], node) for name, node in cfg.intervention.items()]
    for intervention in interventions:
        head = intervention.transform_head(head, draws, cfg.model.head_std)
    try:
        resolve_loss(cfg.train.loss)
    except ValueError as error:
        raise ConfigError("train.loss", cfg.train.loss, str(error), "Use train.loss=chunked") from None
    return Task(backbone, head, interventions, cfg.train.loss), hashes


def inherit(task: Task, parent: RunDir) -> dict[str, str]:
    """Loads the weights of a finished run; returns the hash of what was loaded."""
    state = parent.load()
    try:
        task.load_state_dict(state["task"])
    except (RuntimeError, TypeError) as error:
        problem = "has no weights" if state is None else f"has another shape ({str(error).splitlines()[-1].strip()})"
        raise ConfigError("parent", parent.id, problem, "Name a run of the same model, vocabulary and head") from None
    return {"parent": tensor_hash(state["task"])}


def build(
    cfg: DictConfig, source: Any, rundir: RunDir, recorder: Recorder, parallel: Parallel | None = None
) -> tuple[Trainer, dict[str, Any]]:
    """The trainer of a run, and what its record says of the model, its parameters and its data order.

    Every process of a run builds the same from the seed; nothing is sent between them.
    """
    parallel = parallel or Parallel()
    device = parallel.device(pick_device(cfg.device))
    torch.manual_seed(role_seed(cfg.seed, "training"))
    task, hashes = build_task(cfg)
    if cfg.parent:
        hashes = inherit(task, RunDir(rundir.root, cfg.parent))
    if parallel.mode != "none" and any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in task.modules()):
        problem = f"splits the batch over which model.kind={cfg.model.kind} normalises"
        raise ConfigError("parallel", parallel.mode, problem, "Set parallel=none")
    task.to(device)
    if cfg.train.channels_last:
        task.to(memory_format=torch.channels_last)
    stream = source.stream(cfg, device)
    for intervention in task.interventions:
        intervention.all_reduce = parallel.all_reduce
        intervention.attach(task, stream.fresh, role_seed(cfg.seed, "route"))
        intervention.state = {name: t.to(device) for name, t in intervention.state.items()}
    kinds, size = parameter_kinds(task), sum({id(p): p.numel() for p in task.parameters()}.values())
    forward = parallel.wrap(task)
    optimiser, decays = build_optimiser(task, cfg.optim)

    def evaluate(split: str, whole: bool = True) -> dict[str, float]:
        return parallel.whole_task.evaluate(stream.evaluation(split, whole))

    def snapshot(step: int, sequences: int) -> Snapshot:
        return Snapshot(parallel.whole_task, lambda: stream.held_out(sequences), step)

    probes = [make(PROBES[name], node) for name, node in cfg.probe.items()]
    if parallel.rank == 0:
        for probe in probes:
            probe.prepare(cfg, parallel.whole_task)

    autocast = partial(torch.autocast, device.type, torch.bfloat16) if cfg.train.amp == "bf16" else nullcontext
    if cfg.train.checkpointing:
        task.backbone.checkpoint_activations()
    if cfg.train.compile != "none":
        forward = torch.compile(task, backend=cfg.train.compile, fullgraph=True)
    trainer = Trainer(
        task=task,
        optimiser=optimiser,
        lr_at=lambda step: lr_at(step, cfg.train.steps, cfg.optim),
        batch_at=lambda index: parallel.share(stream.batch_at(index)),
        evaluate=evaluate,
        snapshot=snapshot,
        probes=probes,
        recorder=recorder,
        save=partial(parallel.save, rundir, task, optimiser),
        steps=cfg.train.steps,
        accumulate=cfg.train.accumulate,
        clip=cfg.optim.clip,
        autocast=autocast,
        every=cfg.every,
        forward=forward,
        parallel=parallel,
    )
    record = {
        "device": str(device) if device.type == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
        "parallel": {"mode": parallel.mode, "processes": parallel.world},
        "params": size,
        "init_hash": hashes,
        "order_hash": stream.order_hash(min(cfg.train.steps * cfg.train.accumulate, 10_000)),
        "facts": stream.facts,
        "parameter_kinds": kinds,
        "decaying": decays,
    }
    return trainer, record
