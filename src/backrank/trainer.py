"""The training loop. It knows no concrete model, data set, intervention or probe.

Everything that can happen to a gradient is: the task's sites, clipping, and the interventions around the update.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]
log = logging.getLogger(__name__)


class Probe(Protocol):
    state: dict[str, Tensor]

    def due(self, step: int, steps: int) -> bool: ...
    def measure(self, snapshot: Any) -> tuple[dict[str, float], list[dict[str, Any]]]: ...


class NonFiniteLoss(Exception):
    """A loss, weight or gradient is NaN or infinite; its step is in the record, the last good checkpoint is kept."""


class Interrupted(Exception):
    """A signal asked the run to stop; its state is saved."""


@dataclass
class Trainer:
    """One run. `batch_at(i)` is the i-th micro-batch since the start, so that a step's data depends on nothing else."""

    task: nn.Module
    optimiser: torch.optim.Optimizer
    lr_at: Callable[[int], float]
    batch_at: Callable[[int], Batch]
    evaluate: Callable[..., dict[str, float]]  # (split, whole=True); not whole: the part that draws the curve
    snapshot: Callable[[int, Any], Any]
    probes: list[Probe]
    recorder: Any
    save: Callable[[dict[str, Any]], None]
    steps: int
    accumulate: int
    clip: float
    autocast: Callable[[], Any]
    every: Any
    forward: Callable[..., Tensor]  # the task, possibly compiled or wrapped
    parallel: Any  # this process among those of the run
    step: int = 0
    seconds: float = 0.0  # spent in earlier calls of the same run
    pending: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    # ---------------------------------------------------------------------------------------------------- the loop

    def fit(self) -> None:
        interventions = self.task.interventions
        head = self.task.head
        parameters = [p for p in self.task.parameters() if p.requires_grad]
        self.started = time.perf_counter()
        if self.step == 0:
            self.observe()
        with stop_on_signals(self.stop, once=self.parallel.world == 1):
            while self.step < self.steps:
                tick = time.perf_counter()
                lr = self.lr_at(self.step)
                for group in self.optimiser.param_groups:
                    group["lr"] = lr
                self.parallel.unshard()
                for intervention in interventions:
                    intervention.begin_step(self.step, head)
                batches = [self.batch_at(self.step * self.accumulate + i) for i in range(self.accumulate)]
                # one denominator for the whole step: uneven micro-batches and processes add up to the same gradient
                tokens = self.parallel.total(sum((y >= 0).sum() for _, y in batches))
                total = 0.0
                for i, (x, y) in enumerate(batches, start=1):
                    with self.autocast(), self.parallel.accumulating(i < self.accumulate):
                        loss = self.forward(x, y, tokens)
                    loss.backward()
                    total = total + loss.detach()
                most = self.clip if self.clip > 0 else float("inf")
                norm = self.parallel.whole(nn.utils.clip_grad_norm_(parameters, most))
                for intervention in interventions:
                    intervention.before_update(head)
                self.optimiser.step()
                for intervention in reversed(interventions):
                    intervention.after_update(head)
                self.optimiser.zero_grad(set_to_none=True)
                self.step += 1
                # tensors, not numbers: the device is waited for at the log cadence only
                self.pending.append(
                    (
                        self.step,
                        {
                            "train/loss": self.parallel.total(total),
                            "optim/lr": lr,
                            "optim/grad_norm": norm,
                            "time/step_ms": (time.perf_counter() - tick) * 1e3,
                        },
                    )
                )
                self.after_step()
            self.flush()
            self.parallel.alone(self.finish)

    # ----------------------------------------------------------------------------------- what happens between steps

    def after_step(self) -> None:
        last = self.step == self.steps
        if last or (self.every.log and self.step % self.every.log == 0):
            self.flush()
        self.observe()
        if not last and self.parallel.any(self.stop.is_set()):
            self.checkpoint()
            raise Interrupted(f"stopped at step {self.step}; the same command continues it")
        if not last and self.every.checkpoint and self.step % self.every.checkpoint == 0:
            self.checkpoint()

    def flush(self) -> None:
        """Writes the rows of the steps since the last call; a non-finite loss ends the run after its row is written."""
        for step, row in self.pending:
            self.recorder.metrics(step, {k: float(v) for k, v in row.items()})
            if not torch.isfinite(torch.as_tensor(row["train/loss"])):
                self.recorder.flush()
                raise NonFiniteLoss(
                    f"train/loss is {float(row['train/loss'])} at step {step}: lower optim.lr, or see "
                    f"optim/grad_norm before it; the last good checkpoint is kept"
                )
        if self.pending and self.every.log:
            step, row = self.pending[-1]
            log.info(
                "step %d/%d  loss %.4f  lr %.1e  grad norm %.3f",
                step,
                self.steps,
                float(row["train/loss"]),
                row["optim/lr"],
                float(row["optim/grad_norm"]),
            )
        self.pending.clear()

    def observe(self) -> None:
        """Probes and the validation curve; both only read, in the first process."""
        due = [p for p in self.probes if p.due(self.step, self.steps)]
        curve = self.every.eval and self.step % self.every.eval == 0 and 0 < self.step < self.steps
        if not due and not curve:
            return
        self.flush()
        self.parallel.alone(lambda: self.measure(due, curve))

    def measure(self, due: list[Probe], curve: bool) -> None:
        if curve:
            measured = self.evaluate("validation", whole=False)
            self.recorder.metrics(self.step, {f"val/curve_{k}": v for k, v in measured.items()})
        snapshots: dict[int, Any] = {}
        with frozen_rng(), self.parallel.whole_task.evaluating():
            for probe in due:
                size = probe.sequences
                if size not in snapshots:
                    snapshots[size] = self.snapshot(self.step, size)
                metrics, rows = probe.measure(snapshots[size])
                if metrics:
                    self.recorder.metrics(self.step, metrics)
                if rows:
                    self.recorder.layers(self.step, rows)
                    if bad := [row["layer"] for row in rows if row.get("nonfinite_entries")]:
                        self.recorder.flush()
                        raise NonFiniteLoss(
                            f"{', '.join(bad)} holds non-finite entries at step {self.step}; "
                            f"the last good checkpoint is kept"
                        )

    def finish(self) -> None:
        splits = {"validation": "val", "test": "test", **({"train": "fit"} if self.every.fit else {})}
        for split, name in splits.items():
            self.recorder.metrics(self.step, {f"{name}/{k}": v for k, v in self.evaluate(split).items()})
        self.recorder.flush()

    # -------------------------------------------------------------------------------------------------- checkpoints

    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.started

    def checkpoint(self) -> None:
        self.flush()
        self.save(
            {
                "step": self.step,
                "seconds": self.elapsed(),
                "task": self.task.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "interventions": [i.state for i in self.task.interventions],
                "probes": [p.state for p in self.probes],
                "rng": torch.get_rng_state(),
                "rng_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
                "offsets": self.recorder.offsets(),
            }
        )

    def restore(self, state: dict[str, Any]) -> None:
        self.parallel.restore(self.task, self.optimiser, state)
        for owner, saved in zip(
            [*self.task.interventions, *self.probes], [*state["interventions"], *state["probes"]], strict=True
        ):
            for name, tensor in saved.items():
                if name in owner.state:
                    owner.state[name].copy_(tensor)  # in place: compiled code and closures read this very tensor
                else:
                    owner.state[name] = tensor
        torch.set_rng_state(state["rng"])
        if state["rng_cuda"]:
            torch.cuda.set_rng_state_all(state["rng_cuda"])
        with self.parallel.agreeing():
            self.recorder.truncate(state["offsets"])
        self.step, self.seconds = state["step"], state["seconds"]


@contextmanager
def frozen_rng():
    """What runs inside draws from copies of the generators."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def stop_on_signals(stop: threading.Event, once: bool = True):
    """Ctrl-C and TERM set the event: the step is finished and saved. A second Ctrl-C is Python's own, if `once`.

    Several processes get a signal from the terminal or scheduler, and from torchrun again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        stop.set()
        if once:
            signal.signal(number, previous[number])

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
