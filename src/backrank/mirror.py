"""Mirrors a run folder to W&B: a child process follows metrics.jsonl and layers.jsonl and sends what they hold.

A process of its own, because the library may block for minutes, installs exit hooks and keeps one state per process:
the run never imports it, never waits for it, and can kill it. A live run, a resumed one and one sent long after its end
all take the same path, from the first row of the files. Imports no torch.

Steps: each family of names has its own axis (`train/loss` against `train/step`, `rank/<layer>/erank` against
`rank/step`), so late spectra of an early step are not dropped. Rows of layers.jsonl are named <kind>/<layer>/<field>.
A run that W&B knows already is resumed there, and rows up to the step it has on the axis are left out: one value for
each metric and step. The W&B id is the run's id; if older folders `<id>.old-<n>` exist it ends in `-<n + 1>`, since a
rerun must not be mixed with what it replaced.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from backrank.recorder import LAYERS, METRICS, atomic_write, read_rows

SENT = "wandb.json"  # in the run folder once W&B holds the whole run
POLL_S = 1.0
log = logging.getLogger(__name__)


def wandb_id(folder: Path) -> str:
    older = sum(path.name.startswith(f"{folder.name}.old-") for path in folder.parent.iterdir())
    return f"{folder.name}-{older + 1}" if older else folder.name


def describe(folder: Path, logger: Any) -> dict[str, Any]:
    """What W&B is told about a run, from its config.yaml: plain data, interpolations resolved."""
    config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"), resolve=True)
    init = {
        "project": logger.project, "entity": logger.entity, "id": wandb_id(folder), "config": config,
        "name": config.get("label") or folder.name, "group": config.get("experiment"), "job_type": config.get("scale"),
        "tags": list(config.get("intervention") or []), "dir": str(folder),
    }  # fmt: skip
    return {"init": init, "mode": logger.mode, "timeout_s": logger.timeout_s}


class WandbMirror:
    """The child process that sends one run folder. No method raises; the first thing that goes wrong is logged, once.

    `begin` returns at once; `close` waits at most 0.9 of `logger.timeout_s` seconds, then kills the child. Needs
    config.yaml in the folder by then.
    """

    def __init__(self, folder: Path, logger: Any, offline: bool = True):
        """offline: whether a run that cannot be sent now is kept in W&B's own offline format."""
        self.folder, self.logger, self.offline = Path(folder), logger, offline
        self._child: subprocess.Popen | None = None
        self._noticed = False

    def begin(self) -> None:
        try:
            head = describe(self.folder, self.logger) | {"offline": self.offline}
            # Its own session: Ctrl-C ends the run, and the end of the run ends the child.
            self._child = subprocess.Popen(
                [sys.executable, "-m", "backrank.mirror"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, start_new_session=True,
            )  # fmt: skip
            self._reader = threading.Thread(target=self._listen, args=(self._child.stdout,), daemon=True)
            self._reader.start()
            print(json.dumps(head), file=self._child.stdin, flush=True)
        except Exception as error:
            self._notice(f"not started ({error})")

    def close(self, exit_code: int = 0, limit_s: float | None = None) -> bool:
        """End the W&B run; exit_code other than 0 marks it failed. True if W&B now holds the whole run."""
        child, self._child = self._child, None
        if child is None:
            return False
        try:
            with suppress(OSError):  # it may have ended by itself
                print(exit_code, file=child.stdin, flush=True)
            try:
                child.wait(0.9 * self.logger.timeout_s if limit_s is None else limit_s)
            except subprocess.TimeoutExpired:
                child.kill()
                self._notice("not finished in time")
            self._reader.join(timeout=0.5)
            if child.wait():
                self._notice(f"ended with code {child.returncode}")
        except Exception as error:
            child.kill()
            self._notice(f"failed ({error})")
        return (self.folder / SENT).exists()

    def _listen(self, lines: Any) -> None:
        for line in lines:
            self._notice(line.strip())

    def _notice(self, problem: str) -> None:
        if not self._noticed:
            self._noticed = True
            log.warning("W&B mirror: %s. The run goes on; scripts/sync_wandb.py sends it from its own files", problem)


def backfill(folder: Path, logger: Any, limit_s: float = 600.0) -> bool:
    """Send a finished run from its files, once; True if W&B holds it. Raises ConfigError if a file is damaged."""
    folder = Path(folder)
    if (folder / SENT).exists():
        return True
    for name in (METRICS, LAYERS):
        read_rows(folder / name, finished=True)
    mirror = WandbMirror(folder, logger, offline=False)
    mirror.begin()
    return mirror.close(0, limit_s)


def named(file: str, row: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(W&B name, value) of one row: numbers, non-finite ones restored; lists, and how many values they lost."""
    for field, value in row.items():
        if field in ("step", "layer", "kind", "nonfinite"):
            continue
        name = field if file == METRICS else f"{row['kind']}/{row['layer']}/{field}"
        lost = row.get("nonfinite", {}).get(field)
        if isinstance(lost, str):
            value = float(lost)
        elif lost:
            yield f"{name}_nonfinite", lost
        if value and isinstance(value, list) or isinstance(value, (int, float)):
            yield name, value


def payloads(file: str, rows: list[dict], known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What to log, one dict for each run of rows of equal step; `known`: last step W&B has on each axis."""
    payload: dict[str, Any] = {}
    for index, row in enumerate(rows):
        for name, value in named(file, row):
            axis = name.split("/")[0] + "/step"
            if row["step"] > known.get(axis, -1):
                payload |= {name: value, axis: row["step"]}
        if payload and (index + 1 == len(rows) or rows[index + 1]["step"] != row["step"]):
            yield payload
            payload = {}


def follow(folder: Path, stop: threading.Event) -> Iterator[tuple[str, list[dict]]]:
    """Whole lines of both files as they appear, until one pass after `stop` is set."""
    position = {METRICS: 0, LAYERS: 0}
    last = False
    while not last:
        last = stop.wait(POLL_S)
        for name in position:
            with open(folder / name, "rb") as file:
                file.seek(position[name])
                lines, end, _ = file.read().rpartition(b"\n")
            position[name] += len(lines + end)
            yield name, [json.loads(line) for line in lines.split(b"\n") if line]


def start(head: dict[str, Any]) -> Any:
    """Open the W&B run: as asked, else offline; None if switched off. Raises what W&B raised if offline is refused."""
    import wandb

    folder = Path(head["init"]["dir"])
    asked = os.environ.get("WANDB_MODE", "online") if head["mode"] == "auto" else head["mode"]
    modes = [asked, "offline"] if asked == "online" and head["offline"] else [asked]
    if asked == "disabled":
        return None
    settings = wandb.Settings(
        silent=True, console="off", disable_git=True, disable_code=True, disable_job_creation=True,
        x_disable_stats=True, init_timeout=0.3 * head["timeout_s"] if head["offline"] else 30,
    )  # fmt: skip
    for mode in modes:
        # What an earlier attempt left here is older than the JSONL it would be sent from again.
        shutil.rmtree(folder / "wandb", ignore_errors=True)
        try:
            resume = {"resume": "allow"} if mode == "online" else {}
            return wandb.init(**head["init"], mode=mode, settings=settings, **resume)
        except Exception as error:
            if mode == modes[-1]:
                raise
            print(f"{' '.join(str(error).split())[:200]}; kept offline", flush=True)
            wandb.teardown()  # forgets the failed attempt, which still holds the run's id


def send(run: Any, folder: Path, stop: threading.Event) -> None:
    """Log the rows of both files to `run` as they appear, until `stop`, except what the run had before."""
    from wandb import Histogram

    known = {key: run.summary[key] for key in list(run.summary.keys()) if key.endswith("/step")}
    families: set[str] = set()
    for name, rows in follow(folder, stop):
        for payload in payloads(name, rows, known):
            for family in {key.split("/")[0] for key in payload} - families:
                run.define_metric(f"{family}/step")
                run.define_metric(f"{family}/*", step_metric=f"{family}/step")
                families.add(family)
            run.log({key: Histogram(value) if isinstance(value, list) else value for key, value in payload.items()})


def main() -> None:
    """The child. stdin: one line of JSON (`describe`), at the end the exit code; closed without one: the run died."""
    head = json.loads(sys.stdin.readline())
    folder, stop, code = Path(head["init"]["dir"]), threading.Event(), []

    def wait_for_end() -> None:
        line = sys.stdin.readline()
        code.extend([int(line)] if line else [])
        stop.set()
        if not line:  # nobody is left to kill this process
            time.sleep(head["timeout_s"])
            os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()
    try:
        (folder / SENT).unlink(missing_ok=True)
        if run := start(head):
            send(run, folder, stop)
            sent = {"id": run.id, "url": run.url} if code and not run.offline else None
            run.finish(exit_code=code[0] if code else 1)
            if sent:
                atomic_write(folder / SENT, json.dumps(sent) + "\n")
    except Exception as error:
        print(f"stopped ({type(error).__name__}: {' '.join(str(error).split())[:200]})", flush=True)
    os._exit(0)  # W&B's exit hooks may wait for an unreachable server; everything is written by now


if __name__ == "__main__":
    main()
