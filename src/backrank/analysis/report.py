"""Committed rows of one paper and scale -> report.md, claims.csv, tables and figures beside them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ..config import ROOT, SCALES
from ..recorder import atomic_write
from . import claims as claims_module
from . import figures, tables
from .claims import ClaimSet


class ReportError(RuntimeError):
    """A report that must not be written: says why and how to write it nevertheless."""


@dataclass
class Results:
    """What a paper's figures may read: finished final runs, layer rows, search rows, claims and their verdicts."""

    paper: str
    scale: str
    runs: pd.DataFrame
    layers: pd.DataFrame
    search: pd.DataFrame
    claims: ClaimSet
    verdicts: pd.DataFrame

    def values(self, experiment: str, arm: str, metric: str = "val_loss") -> pd.Series:
        """The metric by seed. Raises figures.Missing where no run has it."""
        rows = self.runs[(self.runs["experiment"] == experiment) & (self.runs["arm"] == arm)].set_index("seed")
        values = rows[metric].astype(float).dropna() if metric in rows else rows.iloc[:, 0][:0]
        if values.empty:
            raise figures.Missing(f"{experiment}/{arm} has no {metric}")
        return values

    def caption(self, experiments) -> str:
        """Scale, data, n and where the run ids are, for every table and figure."""
        rows = self.runs[self.runs["experiment"].isin(list(experiments))]
        seeds = rows.groupby(["experiment", "arm"])["seed"].nunique()
        n = "0" if seeds.empty else f"{seeds.min()}" if seeds.min() == seeds.max() else f"{seeds.min()}-{seeds.max()}"
        data = ", ".join(sorted(set(rows["data"].astype(str))))
        return f"scale {self.scale}; data {data}; n = {n} seeds an arm; run ids in runs.csv"


def report(
    paper: str,
    scale: str,
    results_root: Path,
    *,
    force: bool = False,
    planned: dict[str, dict[str, list[int]]] | None = None,
    committed_data: dict[str, str] | None = None,
    experiments_root: Path = ROOT / "experiments",
) -> Path:
    """Write the report of `paper` at `scale` under results_root/<paper>/<scale>; returns the path of report.md.

    Reads runs.csv and, where they exist, layers.parquet and search.csv there. planned: experiment -> arm -> seeds, for
    "n of planned" and arms not run. committed_data: data name -> hash of the committed results; another hash is noted.
    Everything is built aside and moved into place at the end, report.md last. Raises ReportError if the report there
    counts more runs (unless `force`) or no run has finished, ClaimError for claims that cannot be judged.
    """
    out = Path(results_root) / paper / scale
    if not (out / "runs.csv").exists():
        raise ReportError(f"{out / 'runs.csv'} is not there: no run has finished yet")
    runs = pd.read_csv(out / "runs.csv", dtype={"id": str, "data": str, "data_hash": str})
    done = runs[runs["status"] == "done"]
    count, before = done["id"].nunique(), _count(out / "report.md")
    if count < before and not force:
        raise ReportError(
            f"{out / 'report.md'} counts {before} runs and this one only {count}: kept as it is. "
            "FORCE=1 (force=True) replaces it."
        )
    claims = claims_module.load_claims(experiments_root / paper / "claims.yaml", experiments_root / "published.csv")
    verdicts = claims_module.judge(claims, runs, scale, planned)
    layers = pd.read_parquet(out / "layers.parquet") if (out / "layers.parquet").exists() else pd.DataFrame()
    search = pd.read_csv(out / "search.csv") if (out / "search.csv").exists() else pd.DataFrame()
    results = Results(paper, scale, done[done["stage"] == "final"], layers, search, claims, verdicts)
    with tempfile.TemporaryDirectory(dir=out, prefix=".report-") as aside:
        stage = Path(aside)
        for name in ("tables", "figures"):
            (stage / name).mkdir()
        body = _experiments(results, stage) + _figures(results, stage, experiments_root / paper / "report.py")
        head = _head(results, runs, planned, committed_data or {})
        front = f"---\npaper: {paper}\nscale: {scale}\nruns: {count}\n---\n\n"
        atomic_write(stage / "claims.csv", verdicts.to_csv(index=False))
        text = front + "\n".join([*head, *_claims(results, stage), *body, *_larger(paper, scale)])
        atomic_write(stage / "report.md", text)
        for name in ("tables", "figures"):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("tables", "figures", "claims.csv", "report.md"):
            os.replace(stage / name, out / name)
    return out / "report.md"


def _count(path: Path) -> int:
    """Runs that an existing report counts; 0 without one."""
    lines = path.read_text().split("---")[1].splitlines() if path.exists() else []
    return next((int(line.split(":")[1]) for line in lines if line.startswith("runs:")), 0)


def _head(r: Results, runs: pd.DataFrame, planned, committed: dict[str, str]) -> list[str]:
    once = runs[runs["status"] == "done"].drop_duplicates("id")
    hours = (once["core_s"] if "core_s" in once else once["wall_s"] * once["threads"]).sum() / 3600
    data = sorted(set(zip(once["data"].fillna("?"), once["data_hash"].fillna("?"), strict=True)))
    seeds = sorted(set(r.runs["seed"]))
    lines = [
        f"# {r.paper} at the {r.scale} scale\n",
        f"- {len(once)} runs, {hours:.2g} core hours; seeds {_ranges(seeds)}; {_kinds(once)}.",
        "- Data: " + "; ".join(f"{name} (hash {digest[:12]})" for name, digest in data) + ".",
    ]
    for name, digest in data:
        if committed.get(name, digest) != digest:
            lines.append(f"- **Other data**: {name} has hash {digest}, the committed results have "
                         f"{committed[name]}.")  # fmt: skip
    failed = runs[runs["status"] == "failed"].drop_duplicates("id")
    stale = once[once["stale"].astype(bool)]
    edges = r.search[r.search["edge"].astype(bool)] if len(r.search) else r.search
    for what, rows in (("Runs of older code (stale)", stale), ("Failed runs", failed)):
        names = [f"{x['experiment']}/{x['arm']} seed {x['seed']} (`{x['id']}`)" for x in rows.to_dict("records")]
        lines.append(f"- {what}: {', '.join(names) or 'none'}.")
    names = [f"{x['experiment']}/{x['arm']} {x['key']} = {x['choice']}" for x in edges.to_dict("records")]
    lines.append(f"- Choices on the edge of their grid: {', '.join(names) or 'none'}.")
    have = set(r.runs["experiment"])
    if absent := [name for name in r.claims.experiments if name not in have]:
        lines.append(f"- Experiments not run: {', '.join(absent)}.")
    if planned:
        lines.append(f"- Planned and not done: {'; '.join(_missing(r, planned)) or 'none'}.")
    lines.append("- Every run's id, configuration hash, device and git commit: [runs.csv](runs.csv).\n")
    return lines


def _missing(r: Results, planned: dict[str, dict[str, list[int]]]) -> list[str]:
    """Seeds that are still to run, arms of equal lack together."""
    lines = []
    for experiment, arms in planned.items():
        lacking: dict[str, list[str]] = {}
        for arm, seeds in arms.items():
            if missing := sorted(set(seeds) - _seeds(r.runs, experiment, arm)):
                lacking.setdefault(_ranges(missing), []).append(arm)
        for seeds, names in lacking.items():
            who = "all arms" if len(names) == len(arms) else ", ".join(names)
            lines.append(f"{experiment}: {who}, seeds {seeds}")
    return lines


def _claims(r: Results, stage: Path) -> list[str]:
    counts = pd.crosstab(r.verdicts["kind"], r.verdicts["verdict"])
    counts.loc["all"] = counts.sum()
    lines = ["## Claims\n", tables.markdown(counts.replace(0, "").reset_index())]
    lines.append("Rules: `src/backrank/analysis/claims.py`. All seeds decide; the paper's own seeds stand beside. "
                 "Run ids of each row: [claims.csv](claims.csv).\n")  # fmt: skip
    for experiment, rows in r.verdicts.groupby(r.verdicts["experiment"].fillna(""), sort=False):
        title = r.claims.experiments[experiment]["title"] if experiment else "The page's own numbers"
        caption = r.caption([experiment]) if experiment else "published figures only; no run"
        shown = tables.show_claims(rows)
        name = f"claims_{experiment or 'page'}"
        if set(rows["verdict"]) == {claims_module.NOT_RUN}:
            shown, caption = shown[["claim", "published", "verdict"]], f"scale {r.scale}; no run yet"
        lines += [f"### {title}\n", tables.write(stage / "tables", name, rows, shown, caption)]
        if note := r.claims.experiments.get(experiment, {}).get("setup_note"):
            lines.append(f"Set-up: {' '.join(note.split())}.\n")
    return lines


def _experiments(r: Results, stage: Path) -> list[str]:
    lines = []
    for experiment, block in r.claims.experiments.items():
        rows = r.runs[r.runs["experiment"] == experiment]
        if rows.empty:
            continue
        lines.append(f"## {block['title']}\n")
        for metric in block.get("metrics", ["val_loss"]):
            table = tables.arms(rows, experiment, r.claims, metric)
            if len(table):
                caption = (
                    f"{metric} in nats; delta: paired difference to the baseline; intervals are over seeds at the "
                    f"chosen rate and do not hold the choice itself, made on one seed; {r.caption([experiment])}"
                )
                shown = tables.show_arms(table)
                lines.append(tables.write(stage / "tables", f"{experiment}_{metric}", table, shown, caption))
        found = r.search[r.search["experiment"] == experiment] if len(r.search) else r.search
        if len(found):
            caption = f"search on one seed, chosen by the split named; {r.caption([experiment])}"
            wanted = tables.order(found["arm"], block.get("baselines", {}))
            shown = tables.show_search(found.sort_values("arm", key=lambda arm: arm.map(wanted.index), kind="stable"))
            lines.append(tables.write(stage / "tables", f"{experiment}_search", found, shown, caption))
    return lines


def _figures(r: Results, stage: Path, path: Path) -> list[str]:
    """The paper's own figures: FIGURES in its report.py, name -> (draw, experiments, caption)."""
    if not path.exists():
        return []
    spec = importlib.util.spec_from_file_location(f"report_{r.paper}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    lines = ["## Figures\n"]
    for name, (draw, experiments, caption) in module.FIGURES.items():
        footer = r.caption(experiments)
        try:
            figures.save(lambda draw=draw: draw(r), stage / "figures" / name, footer)
        except figures.Missing as error:
            lines.append(f"Figure `{name}` not run: {error}.\n")
            continue
        lines.append(f"![{name}](figures/{name}.png)\n\n*{caption} ({footer}; [svg](figures/{name}.svg))*\n")
    return lines


def _larger(paper: str, scale: str) -> list[str]:
    slug, larger = paper.replace("_", "-"), SCALES[SCALES.index(scale) + 1 :]
    if not larger:
        return ["## Larger scales\n", "This is the largest scale.\n"]
    lines = [f"make plan-{slug} SCALE={s}       # what it would run, hours, disk, data" for s in larger]
    lines += [f"make reproduce-{slug} SCALE={s}" for s in larger]
    return ["## Larger scales\n", "```", *lines, "```\n"]


def _seeds(runs: pd.DataFrame, experiment: str, arm: str) -> set[int]:
    return set(runs[(runs["experiment"] == experiment) & (runs["arm"] == arm)]["seed"])


def _ranges(seeds: list[int]) -> str:
    """1-5, 8 for [1, 2, 3, 4, 5, 8]."""
    starts = [s for s in seeds if s - 1 not in seeds]
    ends = [s for s in seeds if s + 1 not in seeds]
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _kinds(once: pd.DataFrame) -> str:
    return "; ".join(f"{column} {', '.join(sorted(set(once[column].astype(str))))}" for column in ("device", "torch"))
