"""Recheck: evidence that newer code gives the numbers of the committed rows that older code made.

Stale arms that the same code makes with the same settings but for rates, ranks and the like are one case. Of each case
the cheapest run is trained again under the current code, in a folder that is removed afterwards, and every final metric
is compared with the committed row, to the last bit. What came out is a row of same_code.csv for every arm of the case,
which names the run and its arm, and from which `rundir.same_code` says whose rows count. Imports no torch.
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
        planned = {s.name: planned_jobs(s, folder, Path(root)) for s in studies}
        picks = [(study, row, job) for study in studies for row, job in pick(study, stale, folder, planned[study.name])]
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
            [Picked(s, with_parents([m[0][2] for m in left if m[0][0] is s], planned[s.name])) for s in studies],
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


def planned_jobs(study: Study, folder: Path, root: Path) -> dict[str, Job]:
    """The runs of a plan by id, all of them final: of a search, diverging would be a result."""
    jobs = Sweep([study], root, committed=committed_losses(folder)).progress()[0].jobs
    return {job.id: replace(job, stage="final") for job in jobs}


def with_parents(jobs: list[Job], planned: dict[str, Job]) -> list[Job]:
    """The jobs, and before each what it starts from: their folders are not here."""
    found: dict[str, Job] = {}
    for job in jobs:
        line = [job]
        while line[0].parent:
            line.insert(0, planned[line[0].parent])
        found |= {j.id: j for j in line}
    return list(found.values())


def pick(
    study: Study, stale: pd.DataFrame, folder: Path, planned: dict[str, Job]
) -> Iterator[tuple[dict[str, str], Job | None]]:
    """For each arm, and each older code that no evidence connects with another: a stale row, of final runs and the
    searched seed first, and its job; None where the plan has no such run any more."""
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
    settings but the values, if they are not 0, of the optimiser's and the interventions' numbers (rates, ranks)."""

    def kind(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: kind(v) for key, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [kind(v) for v in value]
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return bool(value) if number else value

    cfg, hashes = study.config(row["arm"])
    plain = canonical(cfg, hashes) | {"seed": 1, "parent": cfg.parent is not None}
    plain |= {key: kind(plain[key]) for key in ("optim", "intervention")}
    plain["data"] |= {"content": SOURCES[cfg.data.source]}
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
        "ran": f"{old['experiment']} {old['arm']}",
        "val_loss": str(summary.get("val/loss", "")),  # a study's run has none
        "git_sha": meta["git_sha"] + "-dirty" * meta["dirty"],
        "date": meta["started"][:10],
        "verdict": verdict,
    }
    known = pd.read_csv(table, dtype=str) if table.exists() else pd.DataFrame()
    rows = [{**arm, **row} for arm in arms]
    atomic_write(table, join(known, rows, ["experiment", "arm", "old", "new"]).to_csv(index=False))
    return verdict
