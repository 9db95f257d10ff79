"""A run's folder: who holds it, what state it is in, its checkpoint and its provenance. Imports no torch at the top.

`<root>/<id>/` holds config.yaml, meta.json, metrics.jsonl, layers.jsonl, checkpoint.pt, log.txt and, last and atomic,
summary.json: a folder with a summary is done. While several processes train (`fsdp`) the checkpoint is a folder
`shards-<step>/` of their pieces. failed.json tells why a run stopped with an error.
"""

from __future__ import annotations

import ast
import csv
import fcntl
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .config import ROOT, SOURCES, ConfigError
from .recorder import atomic_write, disk


class Held(Exception):
    """Another process is working on this run."""


class RunDir:
    def __init__(self, root: Path | str, run_id: str):
        self.root, self.id = Path(root), run_id
        self.path = self.root / run_id
        self.lock = self.root / ".locks" / run_id

    # ------------------------------------------------------------------------------------------------------- state

    def read(self, name: str, damaged_is_none: bool = False) -> dict[str, Any] | None:
        """A JSON file of the folder; None if there is none. Written atomically, so a torn one is an error."""
        path = self.path / name
        try:
            value = json.loads(path.read_text())
            if not isinstance(value, dict):
                raise ValueError("not an object")
            return value
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            if damaged_is_none:
                return None
            remedy = f"Run with FRESH=1, or move {self.path} away"
            raise ConfigError("runs", path, f"is no valid JSON ({error})", remedy) from None

    @property
    def done(self) -> bool:
        return (self.path / "summary.json").exists()

    def state(self) -> str:
        """done, running, failed, interrupted or pending."""
        if self.done:
            return "done"
        if self.holder():
            return "running"
        if (self.path / "failed.json").exists():
            return "failed"
        return "interrupted" if self.path.exists() else "pending"

    def holder(self) -> str | None:
        """Who holds the lock now, if anybody does."""
        try:
            with open(self.lock) as f:
                fcntl.flock(f, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except BlockingIOError:
            return self.lock.read_text().strip() or "another process"
        return None

    @contextmanager
    def claim(self) -> Iterator[None]:
        """One writer a folder, over processes and machines; freed by the system when the holder dies. Raises Held."""
        with disk(self.root):
            self.lock.parent.mkdir(parents=True, exist_ok=True)
            f = open(self.lock, "a+")  # noqa: SIM115 - held until the run ends
        with f:
            for attempt in range(5):
                try:
                    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if attempt == 4:
                        raise Held(f"run {self.id} is held by {self.holder() or 'another process'}") from None
                    time.sleep(0.02)  # `holder` looks by locking too, for a moment
            f.truncate(0)
            f.write(f"{socket.gethostname()} pid {os.getpid()} since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
            f.flush()
            yield
            f.truncate(0)

    def set_aside(self) -> Path | None:
        """Moves the folder, if there is one, to `<id>.old-<n>`, which is returned: nothing is overwritten."""
        if not self.path.exists():
            return None
        n = 1
        while (target := self.root / f"{self.id}.old-{n}").exists():
            n += 1
        with disk(self.root):
            self.path.rename(target)
        return target

    # -------------------------------------------------------------------------------------------------- checkpoints

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    def save(self, state: dict[str, Any]) -> None:
        """Replaces the checkpoint as a whole. Raises NonFiniteLoss rather than replace a good one by a broken one."""
        import torch

        self.refuse_nonfinite(state["step"], state["task"])
        partial = self.checkpoint.with_suffix(".tmp")
        with disk(self.path):
            try:
                with open(partial, "wb") as file:
                    torch.save(state, file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, self.checkpoint)
            except RuntimeError as error:  # torch's writer hides what the system said
                raise error.__context__ if isinstance(error.__context__, OSError) else OSError(str(error)) from None
            finally:
                partial.unlink(missing_ok=True)
            for folder in self.path.glob("shards-*"):
                shutil.rmtree(folder)

    def refuse_nonfinite(self, step: int, weights: dict[str, Any]) -> None:
        from .trainer import NonFiniteLoss

        if bad := [name for name, weight in weights.items() if not weight.isfinite().all()]:
            raise NonFiniteLoss(
                f"{', '.join(bad)} holds non-finite entries at step {step}; the last good checkpoint is kept"
            )

    def adopt(self, draft: Path, step: int) -> None:
        """Makes a finished folder of pieces the checkpoint, in place of the one before, of whatever kind."""
        target = self.path / f"shards-{step}"
        with disk(self.path):
            if not target.exists():  # else it was saved at this very step
                draft.rename(target)
            self.checkpoint.unlink(missing_ok=True)
            for folder in self.path.glob("shards-*"):
                if folder != target:
                    shutil.rmtree(folder)

    def load(self) -> dict[str, Any] | None:
        """The checkpoint, or None. Only tensors and plain data are unpickled.

        Of one in pieces (several processes, `fsdp`) all but weights and optimiser, with its folder as `sharded`.
        """
        import torch

        steps = sorted(int(p.name.partition("-")[2]) for p in self.path.glob("shards-*"))
        folder = self.path / f"shards-{steps[-1]}" if steps else None
        if folder is None and not self.checkpoint.exists():
            return None
        try:
            path = folder / "rest.pt" if folder else self.checkpoint
            state = torch.load(path, map_location="cpu", weights_only=True)
            return {**state, "sharded": str(folder)} if folder else state
        except Exception as error:
            raise ConfigError(
                "runs",
                self.checkpoint,
                f"cannot be read as a checkpoint ({type(error).__name__})",
                f"FRESH=1 starts the run anew and keeps this folder as {self.id}.old-<n>",
            ) from error


# ------------------------------------------------------------------------------------------------------- provenance

RESULTS = ROOT / "results"

# The modules that decide a run's numbers; those of models, data and interventions count for the runs that use them.
NUMERIC = ("trainer", "task", "head", "grad", "seeding", "optim", "build", "interventions/base")


@functools.cache
def _stripped_file(path: Path) -> str:
    return stripped(path.read_text())


def code_hash(cfg: Any) -> str:
    """Hash of the modules that decide this config's numbers, without comments, docstrings and layout: 12 hex digits."""
    from .interventions import INTERVENTIONS

    own = Path(__file__).parent
    kinds = [f"models/{cfg.model.kind}"]
    for kind in kinds:  # grows while it is read: the toy is GPT-2's blocks, which are a decoder's
        source = (own / f"{kind}.py").read_text()
        kinds += [f"models/{name}" for name in re.findall(r"^from \. import (\w+)", source, re.MULTILINE)]
    files = [own / f"{name}.py" for name in (*NUMERIC, *kinds, f"data/{SOURCES[cfg.data.source]}")]
    if cfg.data.source == "shards":  # windows and their evaluation are those of text
        files.append(own / "data" / "tokens.py")
    if cfg.study:
        studies = [own / "studies" / f"{cfg.study}.py"]
        for study in studies:  # grows while it is read: one study may be made of another's parts
            source = study.read_text()
            studies += [
                own / "studies" / f"{name}.py" for name in re.findall(r"^from \.(\w+) import", source, re.MULTILINE)
            ]
            uses = set(re.findall(r"\w+", " ".join(re.findall(r"from \.\.theory\b(.*)", source))))
            files += [path for path in sorted((own / "theory").glob("*.py")) if path.stem in uses]
            uses = set(re.findall(r"\w+", " ".join(re.findall(r"from \.\. import (.*)", source))))
            files += [path for path in sorted(own.glob("*.py")) if path.stem in uses]
        files += studies
    if cfg.study or "adapters" in cfg.intervention:  # their numbers rest on spectra
        files += [own / "spectra.py", own / "probes" / "spectra.py"]
    files += sorted({Path(sys.modules[INTERVENTIONS[i].__module__].__file__ or "") for i in cfg.intervention})
    digest = hashlib.sha256()
    for path in files:
        digest.update(_stripped_file(path).encode())
    return digest.hexdigest()[:12]


def same_code(folder: Path, experiment: str, arm: str, code: str) -> set[str]:
    """Hashes of the code that gives an arm the numbers that `code` gives it, itself included.

    These are the ones that `same` rows of the folder's same_code.csv (which a recheck writes) connect with it.
    """
    try:
        rows = list(csv.DictReader((folder / "same_code.csv").read_text().splitlines()))
    except FileNotFoundError:
        rows = []
    arms = (row for row in rows if (row["experiment"], row["arm"], row["verdict"]) == (experiment, arm, "same"))
    pairs, found = [{row["old"], row["new"]} for row in arms], {code}
    while more := set().union(*(pair for pair in pairs if pair & found)) - found:
        found |= more
    return found


def counting(cfg: Any, code: str) -> set[str]:
    """`same_code` of the experiment and arm of a config."""
    if not cfg.experiment or not cfg.arm:
        return {code}
    paper, name = cfg.experiment.split("/")
    return same_code(Path(os.environ.get("RESULTS") or RESULTS) / paper / cfg.scale, name, cfg.arm, code)


def stripped(source: str) -> str:
    """Python source without comments, docstrings and layout."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body
            if body and isinstance(body[0], ast.Expr) and isinstance(getattr(body[0], "value", None), ast.Constant):
                node.body = body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def git(*args: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, timeout=10)
        return done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


@functools.cache
def _git_state() -> tuple[str, str]:
    """Commit and uncommitted changes when this process first asked: of the code that it has loaded."""
    return git("rev-parse", "HEAD"), git("diff", "HEAD", "--", "src", "configs")


def provenance() -> dict[str, Any]:
    """Where a run comes from: git state, versions, machine, command."""
    versions = {"python": platform.python_version()}
    for package in ("torch", "transformers", "numpy", "tokenizers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = ""
    sha, diff = _git_state()
    return {
        "git_sha": sha,
        "dirty": bool(diff),
        "diff": diff[:200_000],
        "versions": versions,
        "host": socket.gethostname(),
        "command": " ".join(sys.argv),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def write_json(path: Path, value: dict[str, Any]) -> None:
    atomic_write(path, json.dumps(value, indent=1, sort_keys=True) + "\n")
