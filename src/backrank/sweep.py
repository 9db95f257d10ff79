"""Executes plans: JOBS worker processes, each run in its own locked folder, whatever finishes opening what comes next.

Finished runs are skipped, interrupted ones continue, a failed one stops no sibling, a run that another process holds is
waited for. The folders are the only state, so several machines may execute the same plan at once. Imports no torch.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .config import ConfigError
from .plan import Job, Progress, Study
from .recorder import disk
from .run import is_current, watched
from .rundir import Held, RunDir, write_json


@dataclass
class Sweep:
    """Runs of several studies at once. `committed` (id -> losses) counts as done where it is given.

    since: what failed in another worker of the same sweep, after this time, is not tried again (null: try all).
    """

    studies: Sequence[Study]
    root: Path
    workers: int = 1
    fresh: bool = False
    since: float | None = None
    committed: dict[str, dict[str, float]] = field(default_factory=dict)
    said: Callable[[str], None] = lambda line: print(line, flush=True)
    after_each: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.cond = threading.Condition()
        self.workers_alive: list[Worker | InProcess] = []
        self.running: set[str] = set()
        self.held: set[str] = set()
        self.failed: dict[str, tuple[Job, str]] = {}
        self.ran: dict[str, float] = {}  # id -> wall seconds in this call
        self.skipped: set[str] = set()
        self.seen: set[tuple[int, str]] = set()  # (study, id): settled or executed for it in this call
        self.needed: set[str] = set()  # runs that unfinished ones start from
        self.stopping = False
        self.error: BaseException | None = None
        self._losses: dict[str, dict[str, float]] = {}

    # --------------------------------------------------------------------------------------------- what is known

    def losses(self, run: str) -> dict[str, float] | None:
        if run not in self._losses:
            found = finished_losses(RunDir(self.root, run), self.fresh) or self.committed.get(run)
            if found is None:
                return None
            self._losses[run] = found
        return self._losses[run]

    def progress(self) -> list[Progress]:
        return [study.progress(self.losses, lambda run: run in self.failed) for study in self.studies]

    def next_job(self) -> tuple[int, Job, list[dict[str, Any]]] | None:
        """(study, a run that nobody has in hand and that is not done yet, what other studies watch in the same run).

        What is done already is counted on the way.
        """
        plans = self.progress()
        self.needed = {j.parent for p in plans for j in p.jobs
                       if j.parent and j.id not in self.committed and not RunDir(self.root, j.id).done}  # fmt: skip
        shortest: dict[str, int] = {}
        for study, progress in zip(self.studies, plans, strict=True):
            for job in progress.jobs:
                if job.trunk and job.id not in self.failed and not self.settled(study, job):
                    shortest[job.trunk] = min(job.steps, shortest.get(job.trunk, job.steps))
        for n, (study, progress) in enumerate(zip(self.studies, plans, strict=True)):
            for job in progress.jobs:
                if job.id in self.running | self.held or job.id in self.failed or (n, job.id) in self.seen:
                    continue
                if self.settled(study, job):
                    self.seen.add((n, job.id))
                    if job.id not in self.ran:
                        self.skipped.add(job.id)
                    continue
                if self.since is not None:
                    failure = RunDir(self.root, job.id).read("failed.json", damaged_is_none=True)
                    if failure and failure["time"] >= self.since:
                        self.failed[job.id] = job, failure["message"]
                        continue
                if job.parent:
                    parent = next(j for j in progress.jobs if j.id == job.parent)
                    if parent.id in self.running or not self.settled(study, parent):
                        continue
                if job.steps > shortest.get(job.trunk, job.steps):  # goes on from what that one leaves
                    continue
                others = [(m, j.arm) for m, p in enumerate(plans) if m != n for j in p.jobs if j.id == job.id]
                # a longer run that is still to come goes on from this one; for no other is a trunk kept
                if not any(job.trunk == j.trunk and job.steps < j.steps and not self.settled(s, j)
                           for s, p in zip(self.studies, plans, strict=True) for j in p.jobs if j.trunk):  # fmt: skip
                    job = replace(job, trunk="")
                return n, job, [watched(self.studies[m].config(arm)[0]) for m, arm in others]
        return None

    def left(self) -> list[Job]:
        """The runs that could begin now; what is done already, or failed since, is counted on the way."""
        found = []
        while following := self.next_job():
            study, job, _ = following
            self.seen.add((study, job.id))
            found.append(job)
        return found

    def settled(self, study: Study, job: Job) -> bool:
        """Whether a run needs no work: finished with all that this experiment asks for, or a search that diverged."""
        rundir, cfg = RunDir(self.root, job.id), study.config(job.arm)[0]
        if rundir.done:
            return is_current(rundir, cfg, self.fresh)
        if job.id in self.committed:
            return job.id not in self.needed  # its weights are
        known = self.losses(job.id)
        return job.stage == "search" and known is not None and not self.fresh

    # ------------------------------------------------------------------------------------------------- execution

    def run(self) -> int:
        """Executes until nothing is left. Returns the exit code: 0, 1 if a run failed, 130 after Ctrl-C."""
        with disk(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        main = threading.current_thread() is threading.main_thread()
        if self.workers == 1:
            self._loop(InProcess(self.fresh))
        else:
            previous = {n: signal.signal(n, self._interrupt) for n in (signal.SIGINT, signal.SIGTERM)} if main else {}
            try:
                workers = [Worker(self.fresh, n) for n in range(self.workers)]
                threads = [threading.Thread(target=self._loop, args=(w,)) for w in workers]
                for t in threads:
                    t.start()
                while any(t.is_alive() for t in threads):
                    time.sleep(0.1)
            finally:
                for number, handler in previous.items():
                    signal.signal(number, handler)
        if isinstance(self.error, Exception):
            raise self.error
        self.report()
        return 130 if self.stopping else 1 if self.failed else 0

    def _interrupt(self, number: int, frame: Any) -> None:
        if not self.stopping:
            self.said("stopping: runs in hand are saved, the same command continues them")
            self.stopping = True
            for worker in self.workers_alive:
                worker.interrupt()

    def _loop(self, worker: Worker | InProcess) -> None:
        self.workers_alive.append(worker)
        try:
            while not self.stopping:
                with self.cond:
                    found = self.next_job()
                    if found is None:
                        if not self.running and not self.held:
                            return
                        if not self.running:  # all that is left is in other hands: see whether they have finished
                            self.held.clear()
                        self.cond.wait(1.0)  # or a sibling's result opens more
                        continue
                    study, job, also = found
                    self.running.add(job.id)
                status, detail = worker.execute(job, also)
                with self.cond:
                    self.running.discard(job.id)
                    self._settle(study, job, status, detail)
                    self.cond.notify_all()
        except BaseException as error:  # a thread's own end would go unseen, and its siblings would wait for it
            self.error = self.error or error
            self.stopping = True
            for other in self.workers_alive:
                if other is not worker:
                    other.interrupt()
        finally:
            worker.close()

    def _settle(self, study: int, job: Job, status: str, detail: Any) -> None:
        self._losses.pop(job.id, None)
        if status == "held":
            self.held.add(job.id)
            return
        self.seen.add((study, job.id))  # once in a call, whatever comes out
        if status == "done":
            self.skipped.add(job.id)
        elif status == "interrupted" or self.stopping and status == "died":
            self.stopping = True
        elif status == "ran":
            self.ran[job.id] = detail["wall_s"]
            loss = f"{detail['val/loss']:.4f}" if "val/loss" in detail else "done"  # a study has none
            self.say(job, f"{loss} in {detail['wall_s']:.0f} s")
            self.after_each()
        elif status == "diverged" and job.stage == "search":  # a result of the search
            self.ran[job.id] = 0.0
            self.say(job, f"diverged: {detail}")
        else:
            if status == "died":
                with disk(self.root):  # it may have died before it began
                    RunDir(self.root, job.id).path.mkdir(exist_ok=True)
                write_json(
                    RunDir(self.root, job.id).path / "failed.json",
                    {"error": "WorkerDied", "message": detail, "time": time.time(), "diverged": False},
                )
            self.failed[job.id] = job, str(detail)
            self.say(job, f"FAILED: {detail}")

    def say(self, job: Job, what: str) -> None:
        """One line a run: what became of it, and how the whole sweep stands."""
        total, done, seconds = 0, 0, 0.0
        plans = self.progress()
        costs: dict[str, list[float]] = {}
        for study, progress in zip(self.studies, plans, strict=True):
            costs.setdefault(study.name, []).extend(self.ran[j.id] for j in progress.jobs if self.ran.get(j.id))
        overall = [c for of in costs.values() for c in of]
        for study, progress in zip(self.studies, plans, strict=True):
            finished = sum(self.losses(j.id) is not None and j.id not in self.failed for j in progress.jobs)
            left = len(progress.jobs) + progress.unnamed - finished - sum(j.id in self.failed for j in progress.jobs)
            total, done = total + len(progress.jobs) + progress.unnamed, done + finished
            known = costs.get(study.name) or overall
            seconds += left * sum(known) / len(known) if known else 0.0
        left = total - done - len(self.failed)
        eta = f", about {seconds / self.workers / 60:.0f} min" if seconds else ""
        counts = f"running {len(self.running)}, failed {len(self.failed)}, left {left}{eta}"
        self.said(f"[{done}/{total}] {job}: {what}  ({counts})")

    def report(self) -> None:
        if self.skipped:
            self.said(f"{len(self.skipped)} runs were done already and left as they are")
        blocked = {f"{s.name} {arm}" for s, p in zip(self.studies, self.progress(), strict=True) for arm in p.blocked}
        for name in sorted(blocked):
            self.said(f"{name}: its search has no usable result or its parent failed, so its final runs wait")
        if self.failed:
            self.said(f"{len(self.failed)} runs failed; the same command tries them again:")
            for job, why in self.failed.values():
                text = self.root / job.id / "log.txt"
                self.said(f"  {job.id} {job}: {why}" + (f" (log: {text})" if text.exists() else ""))


def finished_losses(rundir: RunDir, fresh: bool = False) -> dict[str, float] | None:
    """Final losses by split of a finished run; infinite ones of a run that diverged; None otherwise.

    With `fresh` a damaged summary counts as none.
    """
    summary = rundir.read("summary.json", damaged_is_none=fresh)
    if summary is not None:
        names = {"validation": "val/loss", "test": "test/loss"}
        return {split: summary.get(name, math.nan) for split, name in names.items()}  # a study has none
    failed = rundir.read("failed.json")
    if failed and failed["diverged"]:
        return {"validation": float("inf"), "test": float("inf")}
    return None


def attempt(job: Job, fresh: bool, also: Sequence[dict[str, Any]] = ()) -> tuple[str, Any]:
    """Runs one job in this process: (status, summary or message). `also` as in `run_one`."""
    from .compose import compose_run
    from .run import run_one

    try:
        outcome = run_one(compose_run(job.overrides), fresh, also, keep_trunk=bool(job.trunk))
        if outcome.id != job.id:
            return "failed", f"the config or its data changed since it was planned as {job.id}; start the command again"
        return outcome.status, outcome.summary
    except Held as error:
        return "held", str(error)
    except KeyboardInterrupt:
        return "interrupted", "stopped"
    except Exception as error:
        kind = type(error).__name__
        status = {"Interrupted": "interrupted", "NonFiniteLoss": "diverged"}.get(kind, "failed")
        return status, str(error) if isinstance(error, ConfigError) else f"{kind}: {error}"


THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def one_thread() -> dict[str, str]:
    """The environment of a worker: one thread unless the caller set another number, whatever JOBS is, so that a run's
    last bits do not depend on it. Two processes of two threads on two cores slow each other down many times."""
    return {name: os.environ.get(name, "1") for name in THREADS}


class InProcess:
    """One worker in the calling process."""

    def __init__(self, fresh: bool):
        self.fresh = fresh
        os.environ.update(one_thread())
        if torch := sys.modules.get("torch"):
            torch.set_num_threads(int(os.environ[THREADS[0]]))

    def execute(self, job: Job, also: Sequence[dict[str, Any]]) -> tuple[str, Any]:
        return attempt(job, self.fresh, also)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        pass


class Worker:
    """A process that runs one job after another (torch is imported once); if it dies, only its job fails."""

    def __init__(self, fresh: bool, number: int):
        self.fresh, self.number = fresh, number
        self.process: subprocess.Popen[str] | None = None
        self.stopping = False

    def execute(self, job: Job, also: Sequence[dict[str, Any]]) -> tuple[str, Any]:
        order = json.dumps({"job": vars(job), "fresh": self.fresh, "also": also}) + "\n"
        try:
            self._send(order)
        except BrokenPipeError:  # it died between two jobs
            self.close()
            self._send(order)
        assert self.process and self.process.stdout
        if self.stopping:  # asked to while it was being started
            self.interrupt()
        reply = self.process.stdout.readline()
        if reply:
            status, detail = json.loads(reply)
            return status, detail
        code = self.process.wait()
        return (
            "died",
            f"the worker was killed by {signal.Signals(-code).name}"
            if code < 0
            else f"the worker ended with exit code {code}",
        )

    def _send(self, order: str) -> None:
        if self.process is None or self.process.poll() is not None:
            env = {**os.environ, **one_thread()}
            if gpus():
                env["CUDA_VISIBLE_DEVICES"] = str(gpus()[self.number % len(gpus())])
            # its own session: Ctrl-C reaches the parent, which passes it on once
            self.process = subprocess.Popen(
                [sys.executable, "-m", "backrank.sweep", str(os.getpid())],
                env=env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )
        assert self.process.stdin
        self.process.stdin.write(order)
        self.process.stdin.flush()

    def interrupt(self) -> None:
        self.stopping = True
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        if self.process is not None and self.process.stdin:
            with suppress(BrokenPipeError):
                self.process.stdin.close()
            self.process.wait()


def gpus() -> list[str]:
    """The visible NVIDIA devices, without torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [v for v in visible.split(",") if v]
    return [str(n) for n in range(len(list(Path("/proc/driver/nvidia/gpus").glob("*"))))]


def default_workers(device: str = "auto") -> int:
    """One process a GPU, else one single-threaded process a core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (len(gpus()) if device != "cpu" else 0) or cores


def worker_main(parent: int) -> None:
    """stdin: one job a line; stdout: one reply a line. Stops, saving the run in hand, when its parent is gone."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is no reply

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    for line in sys.stdin:
        given = json.loads(line)
        job = {
            **given["job"],
            "overrides": tuple(given["job"]["overrides"]),
            "settings": tuple(map(tuple, given["job"]["settings"])),
        }
        reply = attempt(Job(**job), given["fresh"], given["also"])
        try:
            print(json.dumps(reply), file=replies, flush=True)
        except BrokenPipeError:  # nobody is left to read it
            os._exit(1)


if __name__ == "__main__":
    worker_main(int(sys.argv[1]))
