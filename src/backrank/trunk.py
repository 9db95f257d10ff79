"""Cool-downs that branch from one trunk (lost_in_backprop): runs that differ in length alone share what lies before.

Under optim.schedule=wsd the rate is constant up to the cool-down, so a run of n steps and a longer one take the same
steps, bit for bit, until the shorter one cools down. Each leaves its last checkpoint in front of that point, with the
rows up to there, in `<root>/.trunks/<key>/<step>/`; a run that starts takes the latest that lies in front of its own
cool-down. Whether there is one changes how long a run takes and nothing else. Imports no torch at the top.
"""

from __future__ import annotations

import logging
import os
import shutil
from typing import Any

from .config import ConfigError
from .recorder import LAYERS, METRICS, disk
from .rundir import RunDir

log = logging.getLogger("backrank")


class Trunk(RunDir):
    """The states that one trunk has left; `run` is the one that reads and adds to them, `last` its last constant step.

    key: what two runs must have in common: all that decides the numbers up to there, code and probes included.
    """

    def __init__(self, run: RunDir, key: str, last: int):
        super().__init__(run.root / ".trunks", key)
        self.run, self.last = run, last

    def steps(self) -> list[int]:
        return sorted(int(p.name) for p in self.path.glob("[0-9]*")) if self.path.exists() else []

    def branch(self) -> dict[str, Any] | None:
        """The state to start from, its rows put into the run's folder; None where there is none that can be read."""
        for step in reversed([s for s in self.steps() if s <= self.last]):
            state = RunDir(self.path, str(step))
            try:
                found = state.load()
                for name in (METRICS, LAYERS):
                    with disk(self.run.path):
                        shutil.copy(state.path / name, self.run.path / name)
            except (OSError, ConfigError):  # of a run that is just now leaving a later one, or damaged
                continue
            if found:
                return found | {"seconds": 0.0}
        return None

    def leave(self, state: dict[str, Any]) -> None:
        """Keeps a checkpoint that the run has just written, if it lies in front of the cool-down and is the latest."""
        step = state["step"]
        if step > self.last or step <= max(self.steps(), default=0):
            return
        draft = self.path / f".{step}.{os.getpid()}"
        shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
        try:
            draft.mkdir(parents=True)
            try:  # saving replaces the file, not its content
                os.link(self.run.checkpoint, draft / self.run.checkpoint.name)
            except OSError:  # a file system without links
                shutil.copy(self.run.checkpoint, draft / self.run.checkpoint.name)
            for name, size in state["offsets"].items():
                (draft / name).write_bytes((self.run.path / name).read_bytes()[:size])
            draft.rename(self.path / str(step))
        except OSError as error:  # somebody else was faster, or the disk is full: a run needs no trunk
            log.info("no trunk is left at step %d (%s)", step, error.strerror)
            shutil.rmtree(draft, ignore_errors=True)
        for older in self.steps()[:-1]:
            shutil.rmtree(self.path / str(older), ignore_errors=True)
