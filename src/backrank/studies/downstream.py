"""Downstream scores of a trained run (lost_in_backprop): its export, evaluated by EleutherAI's lm-eval.

Task `continuation` is made here of the held-out text, so that it needs no network: 64 tokens of context, and which of
four stretches of 32 tokens comes next, the other three being what follows other contexts. Chance is 1/4. Its items
depend on the data alone, so that all runs on the same data are asked the same.
"""

from __future__ import annotations

import difflib
import json
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import DictConfig

from ..config import ConfigError
from . import Measured

LOCAL = "continuation"
CONTEXT, NEXT, CHOICES, ITEMS = 64, 32, 4, 200
METRICS = ("acc_norm", "acc", "exact_match")  # a task's score is the first that it has
NEEDS = ("lm_eval", "accelerate")  # the second for its transformers models


def run(cfg: DictConfig, source: Any, root: Path) -> Measured:
    """downstream/<task>: score (acc_norm, acc or exact_match, 0 to 1); downstream/<task>_stderr: its standard error, as
    lm-eval gives it; downstream/items: how many were asked; downstream/average: the scores weighted by their items."""
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        problem = f"needs {', '.join(missing)}, which is not installed"
        raise ConfigError(
            "study", "downstream", problem, "pip install 'backrank[downstream]', or lm-eval and accelerate"
        )
    if cfg.parent is None:
        raise ConfigError(
            "parent", None, "is the run that study=downstream asks", "Name a finished one: parent=<run id>"
        )
    from transformers import AutoModelForCausalLM

    from .. import data, export
    from ..build import pick_device
    from ..rundir import RunDir

    parent, device = RunDir(root, cfg.parent), pick_device(cfg.device)
    meta, hashes = parent.read("meta.json") or {}, data.content_hash(cfg.data)
    if (meta["data_hash"], meta["tokenizer_hash"]) != (data.content(hashes), hashes.get("tokenizer")):
        problem = f"is not the data or the tokenizer of {cfg.parent} ({meta['data']})"
        raise ConfigError("data.name", cfg.data.name, problem, "Give the data settings of that run")
    task, tokenizer = export.trained_task(cfg, parent, "parent"), export.tokenizer_of(cfg.data, meta)
    with tempfile.TemporaryDirectory() as temporary, quiet():
        folder = Path(temporary)
        export.export(task, cfg, folder / "model", tokenizer)
        if tokenizer is None:
            raise ConfigError(
                "data.source", cfg.data.source, "is no text: there is nothing to ask", "Name a run on text"
            )
        if LOCAL in cfg.downstream.tasks:
            write_task(folder / "tasks", source.test, tokenizer, cfg.data)
        tasks, manager = find_tasks(cfg.downstream, folder / "tasks")
        model = AutoModelForCausalLM.from_pretrained(folder / "model").to(device)
        found = evaluate(model, tokenizer, tasks, manager, cfg)
    return Measured(found, parents=[cfg.parent], device=str(device))


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval prints and logs much; a run's standard output is its caller's."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logger.setLevel(level)


def evaluate(model: Any, tokenizer: Any, tasks: list[Any], manager: Any, cfg: DictConfig) -> dict[str, float]:
    """The metrics of `run`."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    start = tokenizer.eos_token_id  # what stands in front of a text without context
    if start is None:
        start = tokenizer("\n", add_special_tokens=False).input_ids[-1:]
        start = start[0] if start else 0
    if tokenizer.pad_token is None:  # else the package adds one, which the model has no row for
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(start)
    T = cfg.data.sequence
    lm = HFLM(pretrained=model, tokenizer=tokenizer, max_length=T, batch_size=max(1, 8192 // T), prefix_token_id=start)
    try:
        result = simple_evaluate(
            model=lm,
            tasks=tasks,
            task_manager=manager,
            num_fewshot=cfg.downstream.shots,
            limit=cfg.downstream.limit,
            log_samples=False,
            bootstrap_iters=100,
        )
    except Exception as error:  # a task's own code, or settings that it does not take
        first = (str(error).splitlines() or [""])[0]
        problem = f"lm-eval: {type(error).__name__}: {first}"
        raise ConfigError("downstream.tasks", list(cfg.downstream.tasks), problem, "Leave that task out") from error
    found, total, items = {}, 0.0, 0
    for name, counted in result["n-samples"].items():
        scores = result["results"][name]
        keys = [key for metric in METRICS for key in scores if key.startswith(f"{metric},")]
        if not keys:
            continue
        found[f"downstream/{name}"] = float(scores[keys[0]])
        error = scores.get(keys[0].replace(",", "_stderr,"))
        if isinstance(error, float):
            found[f"downstream/{name}_stderr"] = error
        total, items = total + scores[keys[0]] * counted["effective"], items + counted["effective"]
    if not items:
        problem = f"has none of the scores {', '.join(METRICS)}"
        raise ConfigError("downstream.tasks", list(cfg.downstream.tasks), problem, "Name a task of choices or answers")
    return {**found, "downstream/average": total / items, "downstream/items": items}


def find_tasks(settings: DictConfig, made: Path) -> tuple[list[Any], Any]:
    """The tasks as lm-eval's objects, with their data loaded, and its manager.

    `made` holds the local task. The package's own tasks are looked at only for a name that is in no folder of ours,
    which saves seconds; without them nothing may touch the network.
    """
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    folders = [str(made)]
    if settings.include is not None:
        include = Path(settings.include).expanduser()
        folders.append(str(include))
        for path in sorted(include.rglob("*.yaml")):  # the package passes over what it cannot read
            try:
                load_yaml(path, resolve_func=False)
            except Exception as error:
                problem = f"is no task file ({' '.join(str(error).split())})"
                raise ConfigError("downstream.include", path, problem, "Correct it, or move it away") from error
    manager = TaskManager(include_path=folders, include_defaults=False)
    ours = set(settings.tasks) <= set(manager.all_tasks)
    if not ours:
        manager = TaskManager(include_path=folders)
    tasks: list[Any] = []
    for name in settings.tasks:
        if name not in manager.all_tasks:
            close = difflib.get_close_matches(name, [*manager.all_tasks, LOCAL], n=1)
            remedy = f"Did you mean {close[0]}? " * bool(close) + "All names: lm_eval ls tasks"
            raise ConfigError("downstream.tasks", name, "is no task of lm-eval, and none in downstream.include", remedy)
        try:
            loaded = manager.load(name)
        except Exception as error:  # a file's mistake, its data, the network: each has its own class
            first = " ".join(str(error).split())[:200]
            problem = f"cannot be loaded ({type(error).__name__}: {first})"
            remedy = "Correct its file" if ours else "Where there is no network, name tasks whose data is local"
            raise ConfigError("downstream.tasks", name, problem, remedy) from error
        group = loaded.get("groups", {}).get(name)
        tasks += [group] if group else loaded["tasks"].values()
    return tasks, manager


def write_task(folder: Path, ids: np.ndarray, tokenizer: Any, data: Any) -> None:
    """Task `continuation` as lm-eval's yaml and a jsonl, from the ids of a held-out split.

    Only stretches whose text gives the same ids again are asked, and none that goes over the end of a document.
    Raises ConfigError if there are fewer than CHOICES of them.
    """
    context = min(CONTEXT, max(1, 2 * data.sequence // 3))
    span = context + min(NEXT, max(1, data.sequence - context))
    draws = np.random.default_rng(0)
    kept: list[tuple[str, str]] = []
    for at in draws.permutation(len(ids) // span):
        piece = ids[at * span : (at + 1) * span].tolist()
        before, after = tokenizer.decode(piece[:context]), tokenizer.decode(piece[context:])
        same = tokenizer(before + after, add_special_tokens=False).input_ids == piece
        if same and after not in (a for _, a in kept) and tokenizer.eos_token_id not in piece:
            kept.append((before, after))
        if len(kept) == ITEMS:
            break
    if len(kept) < CHOICES:
        problem = f"has {len(kept)} stretches of {span} tokens to ask for, of {len(ids) // span} in the test split"
        raise ConfigError("data.name", data.name, problem, f"Give more text, or leave {LOCAL} out of downstream.tasks")
    folder.mkdir()
    with open(folder / f"{LOCAL}.jsonl", "w") as file:
        for n, (before, after) in enumerate(kept):
            others = draws.choice(len(kept) - 1, CHOICES - 1, replace=False)
            choices = [kept[i + (i >= n)][1] for i in others]
            label = int(draws.integers(CHOICES))
            choices.insert(label, after)
            file.write(json.dumps({"context": before, "choices": choices, "label": label}) + "\n")
    task = {
        "task": LOCAL,
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / f"{LOCAL}.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "context",
        "doc_to_choice": "choices",
        "doc_to_target": "label",
        "target_delimiter": "",
        "num_fewshot": 0,
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1},
    }
    (folder / f"{LOCAL}.yaml").write_text(json.dumps(task))  # which is YAML
