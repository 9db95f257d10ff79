"""Recheck: evidence that newer code gives the numbers of the committed rows that older code made.

One run of each stale arm is trained again under the current code, in a folder that is removed afterwards, and every
final metric is compared with the committed row, to the last bit. What came out is a row of same_code.csv, from which
`rundir.same_code` says whose rows count. Imports no torch.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from .analysis.runs import column, committed_losses, join, marked
from .config import ConfigError
from .plan import Job, Progress, Study
from .recorder import atomic_write
from .rundir import RunDir, same_code
from .sweep import Sweep

if TYPE_CHECKING:
    from .reproduce import Settings

UNLIKE = ("id", "wall_s", "core_s")  # of a summary: what no two runs have in common, or all


class Picked(Study):
    """A study of which a sweep is to execute these jobs and nothing else."""

    def __init__(self, study: Study, jobs: list[Job]):
        vars(self).update(vars(study), jobs=jobs)

    def progress(self, *_: Any) -> Progress:
        return Progress(self.jobs)


def recheck(paper: str, settings: Settings) -> int:
    """Rechecks a paper's stale committed rows. Returns 0, 1 if rows stay stale, 130 after Ctrl-C."""
    folder = settings.results / paper / settings.scale
    with tempfile.TemporaryDirectory(prefix="backrank-recheck-") as root:
        here = copy.copy(settings)
        here.extra = [*(e for e in settings.extra if not e.startswith("logger=")), f"runs={root}"]
        studies = here.studies(paper)
        names = [study.name.split("/")[1] for study in studies]
        rows = pd.DataFrame()
        if (folder / "runs.csv").exists():
            rows = pd.read_csv(folder / "runs.csv", dtype=str).fillna("")  # as text: to the last bit
            rows = rows[rows["experiment"].isin(names) & (rows["status"] == "done")]
        if rows.empty:
            problem = f"has no finished runs of {', '.join(names)} to recheck"
            raise ConfigError("recheck", folder, problem, f"make reproduce-{paper.replace('_', '-')} makes them")
        stale = marked(rows, studies, folder).query("stale")
        picks = [(study, row, job) for study in studies for row, job in pick(study, stale, folder, Path(root))]
        left = [p for p in picks if p[2]]
        same = 0

        def record() -> None:
            nonlocal same
            for one in [p for p in left if RunDir(root, p[2].id).done]:
                left.remove(one)
                verdict = compare(one[1], RunDir(root, one[2].id), folder / "same_code.csv")
                same += verdict == "same"
                print(f"{one[2]}: {verdict if verdict == 'same' else f'DIFFERENT: {verdict}'}", flush=True)

        sweep = Sweep(
            [Picked(s, [job for of, _, job in left if of is s]) for s in studies],
            Path(root),
            settings.jobs,
            said=lambda line: print(line.partition(" (log: ")[0], flush=True),  # a log that is removed here
            after_each=record,
        )
        code = sweep.run() if left else 0
        record()  # what two experiments share is run for one of them
    for _, row, _ in (p for p in picks if not p[2]):
        print(f"{row['experiment']} {row['arm']}: its plan has other runs now (settings or data); a rerun alone helps")
    print(f"recheck: {same} of {len(picks)} runs gave the same numbers" if picks else "recheck: nothing is stale")
    if same < len(picks) and code != 130:
        print("The other arms stay stale. Another machine (processor, BLAS, torch, threads) may give other last bits "
              "under the same code: recheck where the rows were made. If it is the code: FRESH=1.")  # fmt: skip
    return code or int(same < len(picks))


def pick(study: Study, stale: pd.DataFrame, folder: Path, root: Path) -> Iterator[tuple[dict[str, str], Job | None]]:
    """For each arm, and each older code that no evidence connects with another: a stale row, of final runs and the
    searched seed first, and its job; None where the plan has no such run any more."""
    jobs = Sweep([study], root, committed=committed_losses(folder)).progress()[0].jobs
    planned = {job.id: replace(job, stage="final") for job in jobs}  # of a search, diverging would be a result
    name = study.name.split("/")[1]
    mine = stale[(stale["experiment"] == name) & stale["arm"].isin(study.arms)]
    mine = mine.assign(n=mine["seed"].astype(int), rest=mine["searched"] != "True", gone=~mine["id"].isin(planned))
    for arm, rows in mine.sort_values(["gone", "stage", "rest", "n"]).groupby("arm"):
        while len(rows):
            row = rows.iloc[0].to_dict()
            yield row, planned.get(row["id"])
            rows = rows[~rows["code_hash"].isin(same_code(folder, name, arm, row["code_hash"]))]


def compare(old: dict[str, str], rundir: RunDir, table: Path) -> str:
    """Compares a run with its committed row, adds the outcome to the table and returns it: `same`, or the metric that
    differs most (relatively) and both values."""
    summary, meta = rundir.read("summary.json") or {}, rundir.read("meta.json") or {}
    differences = {}
    for metric, now in summary.items():
        if metric not in UNLIKE and (then := old.get(column(metric))):
            a, b = float(then), math.nan if now is None else float(now)
            size = 0.0 if a == b else abs(a - b) / max(abs(a), abs(b))
            differences[f"{column(metric)} {a!r} -> {b!r}"] = math.inf if math.isnan(size) else size
    verdict = max(differences, key=lambda k: differences[k], default="no metric in common")
    if differences.get(verdict) == 0:
        verdict = "same"
    row = {
        **{key: old[key] for key in ("experiment", "arm")},
        "old": old["code_hash"],
        "new": meta["code_hash"],
        **{key: old[key] for key in ("id", "seed")},
        "val_loss": str(summary.get("val/loss", "")),  # a study's run has none
        "git_sha": meta["git_sha"] + "-dirty" * meta["dirty"],
        "date": meta["started"][:10],
        "verdict": verdict,
    }
    known = pd.read_csv(table, dtype=str) if table.exists() else pd.DataFrame()
    atomic_write(table, join(known, [row], ["experiment", "arm", "old", "new"]).to_csv(index=False))
    return verdict
