"""Tiny runs in this very process: width 8, vocabulary 32, two layers, 20 steps, 13 micro-batches an epoch; 0.3 s each.

The vocabulary of 32 characters (a tokenizer.json of single characters, no bytes) is the one for which interventions
declare `example` and `neutral`, so their settings go through the whole path, command line included.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backrank import data, run
from backrank.compose import compose_run
from backrank.interventions import INTERVENTIONS
from backrank.recorder import read_rows
from backrank.rundir import RunDir

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz.,-'"
EPOCH = 13  # micro-batches of 4 x 16 tokens


@pytest.fixture(autouse=True)
def _quiet_and_repeatable(monkeypatch):
    torch.set_num_threads(1)
    for name in ("FRESH", "BACKRANK_RUNS", "BACKRANK_DATA", "BACKRANK_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> list[str]:
    """Overrides of the tiny run; append your own, the later one wins. Text and cache serve the whole session."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("tiny-text")
    rng = random.Random(0)
    words = ["".join(rng.choices(CHARACTERS[2:28], k=rng.randint(1, 6))) for _ in range(60)]
    for split, length in (("train", EPOCH * 64 + 10), ("validation", 300), ("test", 200)):
        text = "".join(rng.choice(words) + rng.choice("      .,-'\n") for _ in range(length))
        (folder / f"{split}.txt").write_text(text[:length])
    tokenizer = models.BPE(vocab={c: i for i, c in enumerate(CHARACTERS)}, merges=[])
    Tokenizer(tokenizer).save(str(folder / "characters.json"))
    return [
        "device=cpu", "data=text", f"data.path={folder}", f"data.tokenizer={folder}/characters.json",
        "data.vocab_size=32", "data.sequence=16", f"data.cache={folder}/cache", "model.width=8", "model.layers=2",
        "model.heads=2", "train.steps=20", "train.batch=4", "optim.warmup=4", "every.log=4", "every.eval=5",
        "every.eval_tokens=64", "every.checkpoint=10",
    ]  # fmt: skip


@dataclass
class Ran:
    """What a run left: exit code, its folder, and what is in there (None, [] for what is missing)."""

    code: int
    folder: Path | None

    def read(self, name: str) -> dict[str, Any] | None:
        path = self.folder and self.folder / name
        return json.loads(path.read_text()) if path and path.exists() else None

    @property
    def summary(self) -> dict[str, Any] | None:
        return self.read("summary.json")

    @property
    def rows(self) -> list[dict[str, Any]]:
        return read_rows(self.folder / "metrics.jsonl", finished=False) if self.folder else []

    @property
    def layers(self) -> list[dict[str, Any]]:
        return read_rows(self.folder / "layers.jsonl", finished=False) if self.folder else []

    @property
    def checkpoint(self) -> dict[str, Any]:
        return torch.load(self.folder / "checkpoint.pt", weights_only=True)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.checkpoint["task"]

    def series(self, name: str) -> dict[int, Any]:
        """step -> value of one metric."""
        return {row["step"]: row[name] for row in self.rows if name in row}


@pytest.fixture
def train(tiny, tmp_path, monkeypatch):
    """train(*overrides, runs="runs") runs `backrank.run.main` with the tiny settings and returns a Ran.

    The same overrides and the same `runs` (a folder name within tmp_path) mean the same run: it is continued.
    """
    folders = []

    class Spy(RunDir):
        def __init__(self, *args):
            super().__init__(*args)
            folders.append(self.path)

    monkeypatch.setattr(run, "RunDir", Spy)

    def train(*overrides: str, runs: str = "runs") -> Ran:
        folders.clear()
        code = run.main([*tiny, f"runs={tmp_path / runs}", *overrides])
        return Ran(code, folders[-1] if folders else None)

    return train


@pytest.fixture
def config(tiny, tmp_path):
    """config(*overrides) composes the tiny settings into a validated config."""

    def config(*overrides: str):
        cfg = compose_run([*tiny, f"runs={tmp_path}", *overrides])
        run.identify(cfg)
        return cfg

    return config


class Memory:
    """A recorder and a checkpoint that live in memory."""

    def __init__(self):
        self.rows, self.layer_rows, self.saved = [], [], []
        self.flush = lambda: None
        self.offsets = dict
        self.truncate = self.close = lambda *_: None

    def metrics(self, step, values):
        self.rows.append({"step": step, **values})

    def layers(self, step, rows):
        self.layer_rows += [{"step": step, **row} for row in rows]

    def losses(self):
        return [row["train/loss"] for row in self.rows if "train/loss" in row]


@pytest.fixture
def trainer(config):
    """trainer(*overrides) builds what a run builds, without a folder: a Trainer whose recorder is a Memory."""

    def trainer(*overrides: str, **replaced: Any):
        from backrank.build import build

        cfg = config(*overrides)
        memory = Memory()
        built, record = build(cfg, data.load(cfg.data), SimpleNamespace(save=memory.saved.append), memory)
        built.cfg, built.record = cfg, record
        for name, value in replaced.items():
            setattr(built, name, value)
        return built

    return trainer


def with_intervention(*chosen: tuple[str, dict[str, Any]]) -> list[str]:
    """Overrides that choose interventions: ("backward_rank", {"rank": 3}), ..."""
    return [f"intervention=[{','.join(name for name, _ in chosen)}]"] + [
        f"intervention.{name}.{key}={'null' if value is None else value}"
        for name, settings in chosen for key, value in settings.items()
    ]  # fmt: skip


# Further settings of an intervention that take another path through it than its `example`.
VARIANTS = {
    "backward_rank": [
        {"rank": 3, "refresh_every": 7},
        {"rank": 3, "basis": "gradient"},
        {"rank": 3, "basis": "random"},
        {"rank": 3, "basis": "random", "refresh_every": 3},
        {"rank": 3, "rms": "token"},
        {"rank": 3, "basis": "random", "rms": "none"},
    ],
    "head_residual": [{"at": "update"}, {"at": "gradient", "match": True}, {"at": "update", "keep": True}],
    "feedback_route": [
        {"scale": 0.5, "depths": [1, 2]},
        {"scale": 0.5, "matrix": "residual"},
        {"scale": 0.5, "matrix": "oja", "rank": 3, "memory": 5.0},
        {"scale": 0.5, "matrix": "frequent_directions", "rank": 3, "depths": [1, 2]},
    ],
    "intermediate_loss": [{"scale": 0.5, "depths": [1, 2]}],
}
CHOSEN = [
    pytest.param(name, settings, id="-".join([name, *(f"{k}={v}" for k, v in settings.items())]))
    for name, cls in INTERVENTIONS.items()
    for settings in [cls.example, *VARIANTS.get(name, [])]
]
every_intervention = pytest.mark.parametrize(("name", "settings"), CHOSEN)
