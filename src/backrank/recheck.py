"""Recheck: evidence that newer code gives the numbers of the committed rows that older code made.

Stale arms that the same code makes with the same kinds of settings, whatever the numbers in them, are one case. Of each
case the cheapest run is trained again under the current code, in a folder that is removed afterwards, and every final
metric is compared with the committed row, to the last bit. What came out is a row of same_code.csv for every arm of the
case, from which `rundir.same_code` says whose rows count. Imports no torch.
"""

from __future__ import annotations

import copy
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from .analysis.runs import column, committed_losses, join, marked
from .config import SOURCES, ConfigError
from .identity import canonical
from .plan import Job, Progress, Study
from .recorder import atomic_write
from .rundir import RunDir, code_hash, same_code
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
        cases: dict[str, list[tuple[Study, dict[str, str], Job]]] = {}
        for study, row, job in picks:
            if job:
                cases.setdefault(case(study, row), []).append((study, row, job))
        for members in cases.values():
            members.sort(key=lambda member: float(member[1]["wall_s"] or "inf"))
        left = list(cases.values())
        same = 0

        def record() -> None:
            nonlocal same
            for members in [m for m in left if RunDir(root, m[0][2].id).done]:
                left.remove(members)
                _, row, job = members[0]
                arms = [{key: r[key] for key in ("experiment", "arm")} for _, r, _ in members]
                verdict = compare(row, RunDir(root, job.id), folder / "same_code.csv", arms)
                same += len(members) * (verdict == "same")
                also = f" (and {len(members) - 1} arms of the same kind)" if len(members) > 1 else ""
                print(f"{job}{also}: {verdict if verdict == 'same' else f'DIFFERENT: {verdict}'}", flush=True)

        sweep = Sweep(
            [Picked(s, [members[0][2] for members in left if members[0][0] is s]) for s in studies],
            Path(root),
            settings.jobs,
            said=lambda line: print(line.partition(" (log: ")[0], flush=True),  # a log that is removed here
            after_each=record,
        )
        code = sweep.run() if left else 0
        record()  # what two experiments share is run for one of them
    for _, row, _ in (p for p in picks if not p[2]):
        print(f"{row['experiment']} {row['arm']}: its plan has other runs now (settings or data); a rerun alone helps")
    print(f"recheck: {same} of {len(picks)} arms gave the same numbers" if picks else "recheck: nothing is stale")
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


def case(study: Study, row: dict[str, str]) -> str:
    """What two arms have in common whose runs take the same way through the same code: the code's versions, and all
    settings but the values of numbers that are not 0."""

    def kind(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kind(v) for key, v in value.items() if key != "content"}
        if isinstance(value, (list, tuple)):
            return [kind(v) for v in value]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return bool(value) if number else value

    cfg, hashes = study.config(row["arm"])
    plain = kind(canonical(cfg, hashes)) | {"seed": 1, "parent": cfg.parent is not None}
    plain["data"]["module"] = SOURCES[cfg.data.source]
    return json.dumps([row["code_hash"], code_hash(cfg), plain], sort_keys=True)


def compare(old: dict[str, str], rundir: RunDir, table: Path, arms: list[dict[str, str]]) -> str:
    """Compares a run with its committed row, adds the outcome to the table for these arms and returns it.

    The outcome is `same`, or the metric that differs most (relatively) and both values.
    """
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
        "old": old["code_hash"],
        "new": meta["code_hash"],
        **{key: old[key] for key in ("id", "seed")},
        "val_loss": str(summary.get("val/loss", "")),  # a study's run has none
        "git_sha": meta["git_sha"] + "-dirty" * meta["dirty"],
        "date": meta["started"][:10],
        "verdict": verdict,
    }
    known = pd.read_csv(table, dtype=str) if table.exists() else pd.DataFrame()
    rows = [{**arm, **row} for arm in arms]
    atomic_write(table, join(known, rows, ["experiment", "arm", "old", "new"]).to_csv(index=False))
    return verdict
