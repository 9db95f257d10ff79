"""Whole papers: plan, run, collect, report. What the Makefile's targets and -m call; imports no torch.

    python -m backrank.reproduce run|plan|status|report|recheck <paper> [<paper> ...]

Settings come from the environment, so that no value needs quoting: SCALE, ONLY (experiments), SEEDS, JOBS, DEVICE,
LOGGER, REUSE=1 (committed rows count as done), FRESH=1 (rerun stale runs), FORCE=1 (a report of fewer runs),
RESULTS (folder of the committed rows and reports).
BACKRANK_DATA and BACKRANK_RUNS are read by the configs.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import data
from .config import CONFIGS, SCALES, ConfigError, nearest
from .plan import Study, experiments
from .rundir import RESULTS, RunDir, git
from .sweep import Sweep, default_workers

PAPERS = tuple(sorted(p.name for p in (CONFIGS / "experiment").iterdir()))


def split(value: str | None) -> list[str]:
    return [v.strip() for v in (value or "").split(",") if v.strip()]


def number(name: str, value: str, least: int) -> int:
    try:
        if int(value) >= least:
            return int(value)
    except ValueError:
        pass
    raise ConfigError(name, value, f"is no whole number of {least} or more", f"For example {name}={least + 1}")


class Settings:
    """The environment, checked."""

    def __init__(self, env: Mapping[str, str] = os.environ):
        self.scale = env.get("SCALE") or "laptop"
        if self.scale not in SCALES:
            raise ConfigError("SCALE", self.scale, "is not known", nearest(self.scale, SCALES))
        self.results = Path(env.get("RESULTS") or RESULTS)
        self.only = split(env.get("ONLY"))
        self.seeds = [number("SEEDS", s, 0) for s in split(env.get("SEEDS"))] or None
        self.jobs = number("JOBS", env["JOBS"], 1) if env.get("JOBS") else default_workers(env.get("DEVICE") or "auto")
        self.fresh, self.reuse, self.force = (env.get(k) not in (None, "", "0") for k in ("FRESH", "REUSE", "FORCE"))
        self.extra = [f"{name.lower()}={env[name]}" for name in ("DEVICE", "LOGGER") if env.get(name)]

    def studies(self, paper: str) -> list[Study]:
        names = experiments(paper)
        if not names:
            raise ConfigError("paper", paper, "has no experiments", nearest(paper, PAPERS))
        chosen = []
        for name in self.only:
            full = name if "/" in name else f"{paper}/{name}"
            if full not in names:
                known = [n.split("/")[1] for n in names]
                raise ConfigError("ONLY", name, f"is no experiment of {paper}", nearest(name, known))
            chosen.append(full)
        return [Study(name, self.scale, self.extra, seeds=self.seeds) for name in chosen or names]


def studies_of(
    point: dict[str, str], arms: Sequence[str] | None, seeds: Sequence[str] | None, swept: Sequence[str] = ()
) -> list[Study]:
    """The study of one point of a command-line sweep; `swept`: the keys that vary."""
    named = " ".join(f"{key}={point[key]}" for key in swept if key != "experiment")
    point = dict(point)
    experiment, scale = point.pop("experiment", None), point.pop("scale", "laptop")
    if experiment is not None and experiment not in experiments():
        raise ConfigError("experiment", experiment, "does not exist", nearest(experiment, experiments()))
    extra = [f"{key}={value}" for key, value in point.items()]
    return [Study(experiment, scale, extra, arms, [number("seed", s, 0) for s in seeds] if seeds else None, named)]


def swept(arguments: Sequence[str]) -> list[Study]:
    """The studies of a command line: `arm` and `seed` go into the plans, every other sweep multiplies them."""
    from .compose import parse

    axes: dict[str, list[str]] = {}
    for override in parse(arguments):
        values = (
            override.sweep_string_iterator() if override.is_sweep_override() else [override.get_value_element_as_str()]
        )
        axes[override.get_key_element()] = list(values)
    arms, seeds = axes.pop("arm", None), axes.pop("seed", None)
    vary = [key for key, values in axes.items() if len(values) > 1]
    points = (dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values()))
    return [study for point in points for study in studies_of(point, arms, seeds, vary)]


def runs_root(studies: Sequence[Study]) -> Path:
    from .run import runs_root as of

    return of(studies[0].config(studies[0].arms[0])[0])


def execute(studies: Sequence[Study], env: Mapping[str, str] = os.environ, **options: Any) -> int:
    """Runs the studies with JOBS workers; returns the exit code."""
    settings = Settings(env)
    started = time.time()
    for study in studies:  # all bad input is found before anything runs
        for arm in study.arms:
            if study.config(arm)[0].device == "cuda" and not has_cuda():
                raise ConfigError("device", "cuda", "is not there", "Use device=cpu (DEVICE=cpu)")
    sweep = Sweep(studies, runs_root(studies), settings.jobs, settings.fresh, **options)
    code = sweep.run()
    print(
        f"{len(sweep.ran)} runs done, {len(sweep.skipped)} skipped, {len(sweep.failed)} failed "
        f"in {(time.time() - started) / 60:.1f} min; folders in {sweep.root}"
    )
    return code


def submit(arguments: Sequence[str], launch: Callable[..., Any], env: Mapping[str, str] = os.environ) -> int:
    """Executes a sweep by JOBS jobs of a launcher, launch(worker, jobs, folder); returns the exit code.

    Each job is one worker of the whole plan and the folders' locks share out the runs, as between machines: what a
    search opens begins when its last run ends, whichever job that is, and a job that is lost costs its run in hand.
    """
    settings, studies = Settings(env), swept(arguments)
    root, began = runs_root(studies), time.time()
    before = Sweep(studies, root, fresh=settings.fresh)
    left, problem = len(before.left()), ""
    if left:
        folder, jobs = root / ".jobs", min(left, settings.jobs)
        print(f"{left} runs to do by {jobs} jobs; their output is below {folder}", flush=True)
        try:
            for job in launch(functools.partial(work, list(arguments), began), jobs, str(folder)):
                _ = job.return_value  # raises what ended it
        except KeyboardInterrupt:
            print("not waiting any longer: jobs that the scheduler has go on until they are cancelled there")
            return 130
        except Exception as error:
            problem = f"a job ended before its work: {type(error).__name__}: {error}"
    after = Sweep(studies, root, fresh=settings.fresh, since=began)
    for job in after.left():
        after.failed[job.id] = job, "was left by all jobs"
    after.ran = dict.fromkeys(after.skipped - before.skipped, 0.0)
    after.skipped &= before.skipped
    after.report()
    print(
        f"{problem + chr(10) if problem else ''}{len(after.ran)} runs done, {len(after.skipped)} skipped, "
        f"{len(after.failed)} failed in {(time.time() - began) / 60:.1f} min; folders in {root}"
    )
    return 1 if after.failed or problem else 0


def work(arguments: Sequence[str], since: float, _: Any) -> int:
    """One job of `submit`."""
    return execute(swept(arguments), {**os.environ, "JOBS": "1"}, since=since)


@functools.cache
def has_cuda() -> bool:
    """Asks torch in a process of its own."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


# ------------------------------------------------------------------------------------------------------ the commands


def run(paper: str, settings: Settings) -> int:
    from .analysis.runs import collect, committed_losses

    studies = settings.studies(paper)
    folder = settings.results / paper / settings.scale
    last = [time.time()]

    def collect_now_and_then() -> None:  # rows are kept as they come
        if time.time() - last[0] > 60:
            collect(studies, runs_root(studies), folder, settings.force)
            last[0] = time.time()

    collect(studies, runs_root(studies), folder, settings.force)  # refuses now rather than after hours
    committed = committed_losses(folder, settings.fresh) if settings.reuse else {}
    code = execute(studies, committed=committed, after_each=collect_now_and_then)
    collect(studies, runs_root(studies), folder, settings.force)
    if code != 130 and (folder / "runs.csv").exists():
        report(paper, settings, studies)
    if settings.scale != "paper":
        slug = paper.replace("_", "-")
        print(
            f"At the paper's sizes: make reproduce-{slug} SCALE=paper DATA=<folder>; what that takes: "
            f"make plan-{slug} SCALE=paper"
        )
    return code


def report(paper: str, settings: Settings, studies: Sequence[Study] | None = None) -> int:
    from .analysis.report import ReportError
    from .analysis.report import report as write
    from .analysis.runs import collect

    studies = studies or settings.studies(paper)
    folder = settings.results / paper / settings.scale
    collect(studies, runs_root(studies), folder, settings.force)
    planned = {s.name.split("/")[1]: dict.fromkeys(s.arms, s.seeds) for s in studies}
    hashes = committed_data(f"results/{paper}/{settings.scale}/runs.csv")
    try:
        path = write(
            paper, settings.scale, settings.results, force=settings.force, planned=planned, committed_data=hashes
        )
    except ReportError as error:
        raise ConfigError("report", folder, str(error), "Finish the runs first, or FORCE=1") from None
    print(f"report: {path}")
    print(verdicts(folder))
    return 0


def recheck(paper: str, settings: Settings) -> int:
    from .recheck import recheck as check

    code = check(paper, settings)
    return max(code, report(paper, settings)) if code != 130 else code


def committed_data(path: str) -> dict[str, str]:
    """Data name -> content hash in the rows that git holds at this path."""
    import io

    import pandas as pd

    text = git("show", f"HEAD:{path}")
    rows = pd.read_csv(io.StringIO(text), dtype=str) if text else pd.DataFrame({"data": [], "data_hash": []})
    return dict(rows[["data", "data_hash"]].dropna().itertuples(index=False))


def verdicts(folder: Path) -> str:
    """The claims in a few lines: how many of each verdict."""
    from .analysis.runs import read_table

    counts = read_table(folder / "claims.csv")["verdict"].value_counts()
    return "claims: " + ", ".join(f"{n} {verdict}" for verdict, n in counts.items())


def plan(paper: str, settings: Settings) -> int:
    """What `run` would do: runs done and left, hours, disk, and whether the data is there."""
    from rich.console import Console
    from rich.table import Table

    from .analysis.runs import seconds_by_experiment

    table = Table(title=f"{paper} at scale {settings.scale}, JOBS={settings.jobs}")
    for column in ("experiment", "arms", "seeds", "done", "left", "core hours left", "disk MiB left", "data"):
        table.add_column(column, justify="left" if column in ("experiment", "data") else "right")
    total, known = 0.0, seconds_by_experiment(settings.results / paper)
    missing: list[str] = []
    for study in settings.studies(paper):
        try:
            cfg, hashes = study.config(study.arms[0])
        except ConfigError as error:
            missing.append(f"{study.name}: {error}")
            table.add_row(study.name, str(len(study.arms)), str(len(study.seeds)), "?", "?", "?", "?", "missing")
            continue
        sweep = Sweep([study], runs_root([study]))
        progress = sweep.progress()[0]
        done = sum(sweep.settled(study, j) for j in progress.jobs)
        left = len(progress.jobs) - done + progress.unnamed
        seconds = known.get((study.name, settings.scale)) or guess_seconds(cfg)
        hours = left * seconds / 3600
        total += hours
        table.add_row(
            study.name.split("/")[1],
            str(len(study.arms)),
            str(len(study.seeds)),
            str(done),
            str(left),
            f"{hours:.2f}",
            f"{left * 8 * parameters(cfg) / 2**20:.0f}",
            f"{cfg.data.name} {data.content(hashes)[:8]}",
        )
    console = Console(width=max(100, Console().width))
    console.print(table)
    console.print(f"about {total:.2f} core hours, {total / settings.jobs:.2f} hours with JOBS={settings.jobs}")
    for line in missing:
        console.print(line, markup=False)
    return 2 if missing else 0


def parameters(cfg: Any) -> int:
    m, d = cfg.model, cfg.data
    return 12 * m.layers * m.width**2 + (2 * d.vocab_size + d.sequence) * m.width


def guess_seconds(cfg: Any) -> float:
    """A run's seconds on one core from its arithmetic at 60 GFLOP/s and 15 ms a step; within about twofold.

    6 FLOP a parameter and token trained, 2 evaluated; embeddings are looked up, not multiplied.
    """
    m, d = cfg.model, cfg.data
    multiplied = 12 * m.layers * m.width**2 + d.vocab_size * m.width
    tokens = cfg.train.steps * cfg.train.batch * cfg.train.accumulate * d.sequence
    evaluated = 2 * (d.eval_tokens or 1_000_000)
    return multiplied * (6 * tokens + 2 * evaluated) / 60e9 + cfg.train.steps * 0.015


def status(papers: Sequence[str], settings: Settings) -> int:
    """The state of every run of the plans, as the folders tell it."""
    from collections import Counter

    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"scale {settings.scale}")
    for column in ("experiment", "done", "running", "failed", "interrupted", "pending", "stale"):
        table.add_column(column, justify="left" if column == "experiment" else "right")
    failures = []
    for paper in papers:
        for study in settings.studies(paper):
            try:
                sweep = Sweep([study], runs_root([study]))
            except ConfigError as error:
                failures.append(f"{study.name}: {error}")
                continue
            progress = sweep.progress()[0]
            states: Counter[str] = Counter()
            for job in progress.jobs:
                rundir = RunDir(sweep.root, job.id)
                state = rundir.state()
                states[state] += 1
                if state == "done" and not is_fresh(rundir, study, job.arm):
                    states["stale"] += 1
                if state == "failed":
                    why = (rundir.read("failed.json") or {}).get("message", "")
                    failures.append(f"failed {job.id} {job}: {why} (log: {rundir.path / 'log.txt'})")
                if state == "running":
                    failures.append(f"running {job.id} {job}: {rundir.holder()}")
            states["pending"] += progress.unnamed
            table.add_row(
                study.name, *(str(states[c]) for c in ("done", "running", "failed", "interrupted", "pending", "stale"))
            )
    console = Console(width=max(100, Console().width))
    console.print(table)
    for line in failures:
        console.print(line, markup=False)
    return 0


def is_fresh(rundir: RunDir, study: Study, arm: str) -> bool:
    from .run import is_current

    return is_current(rundir, study.config(arm)[0], fresh=True)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    commands = {"run": run, "plan": plan, "report": report, "recheck": recheck}
    if not argv or argv[0] not in (*commands, "status"):
        print(__doc__, file=sys.stderr)
        return 2
    command, papers = argv[0], [p.replace("-", "_") for p in argv[1:]]
    papers = papers or list(PAPERS)
    if command not in ("run", "recheck"):  # looking never fetches
        os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        settings = Settings()
        if command == "status":
            return status(papers, settings)
        code = 0
        for paper in papers:
            code = max(code, commands[command](paper, settings))
            if code == 130:
                break
        return code
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
