"""Committed rows of one paper and scale -> report.md, claims.csv, tables and figures beside them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from ..config import ROOT, SCALES
from ..recorder import atomic_write
from . import figures, tables
from .claims import ClaimSet, load_claims
from .judge import judge
from .runs import read_table
from .verdicts import NOT_RUN


class ReportError(RuntimeError):
    """A report that must not be written: says why and how to write it nevertheless."""


@dataclass
class Results:
    """What a paper's figures and studies may read: every row of runs.csv in `table`, finished final runs in `runs` and,
    after them, derived rows; the other tables; claims and, once judged, their verdicts."""

    paper: str
    scale: str
    table: pd.DataFrame
    runs: pd.DataFrame
    layers: pd.DataFrame
    curves: pd.DataFrame
    search: pd.DataFrame
    features: pd.DataFrame
    claims: ClaimSet
    verdicts: pd.DataFrame = field(default_factory=pd.DataFrame)

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
        units = dict.fromkeys(self.claims.experiments.get(e, {}).get("unit", "seeds") for e in experiments)
        seeds = rows.groupby(["experiment", "arm"])["seed"].nunique()
        n = "0" if seeds.empty else f"{seeds.min()}" if seeds.min() == seeds.max() else f"{seeds.min()}-{seeds.max()}"
        data = ", ".join(sorted(set(rows["data"].astype(str))))
        return f"scale {self.scale}; data {data}; n = {n} {' or '.join(units)} an arm; run ids in runs.csv"


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

    Reads runs.csv and, where they exist, the other tables there. planned: experiment -> arm -> seeds, for
    "n of planned" and arms not run. committed_data: data name -> hash of the committed results; another hash is noted.
    Everything is built aside and moved into place at the end, report.md last. Raises ReportError if the report there
    counts more runs (unless `force`) or no run has finished, ClaimError for claims that cannot be judged.
    """
    out = Path(results_root) / paper / scale
    if not (out / "runs.csv").exists():
        raise ReportError(f"{out / 'runs.csv'} is not there: no run has finished yet")
    count, before = _finished(read_table(out / "runs.csv"))["id"].nunique(), _count(out / "report.md")
    if count < before and not force:
        raise ReportError(
            f"{out / 'report.md'} counts {before} runs and this one only {count}: kept as it is. "
            "FORCE=1 (force=True) replaces it."
        )
    results = load(paper, scale, out, planned=planned, experiments_root=experiments_root)
    module = _module(experiments_root / paper / "report.py")
    with tempfile.TemporaryDirectory(dir=out, prefix=".report-") as aside:
        stage = Path(aside)
        for name in ("tables", "figures"):
            (stage / name).mkdir()
        body = _experiments(results, stage) + _figures(results, stage, getattr(module, "FIGURES", {}))
        head = _head(results, planned, committed_data or {})
        front = f"---\npaper: {paper}\nscale: {scale}\nruns: {count}\n---\n\n"
        atomic_write(stage / "claims.csv", results.verdicts.to_csv(index=False))
        text = front + "\n".join([*head, *_claims(results, stage), *body, *_larger(paper, scale)])
        atomic_write(stage / "report.md", text)
        for name in ("tables", "figures"):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in ("tables", "figures", "claims.csv", "report.md"):
            os.replace(stage / name, out / name)
    return out / "report.md"


def load(
    paper: str,
    scale: str,
    folder: Path,
    *,
    planned: dict[str, dict[str, list[int]]] | None = None,
    experiments_root: Path = ROOT / "experiments",
) -> Results:
    """The tables in `folder`, what the paper derives from them, and every claim judged on both."""
    names = ("runs.csv", "layers.parquet", "curves.parquet", "search.csv", "features.csv")
    runs, layers, curves, search, features = (read_table(folder / name) for name in names)
    claims = load_claims(experiments_root / paper / "claims.yaml", experiments_root / "published.csv")
    done = _finished(runs)
    results = Results(paper, scale, runs, done[done["stage"] == "final"], layers, curves, search, features, claims)
    derived = _derived(results, getattr(_module(experiments_root / paper / "report.py"), "DERIVED", {}))
    results.runs = pd.concat([results.runs, *derived], ignore_index=True)
    results.verdicts = judge(claims, pd.concat([runs, *derived], ignore_index=True), scale, planned)
    return results


def _finished(runs: pd.DataFrame) -> pd.DataFrame:
    return runs[runs["status"] == "done"]


def _count(path: Path) -> int:
    """Runs that an existing report counts; 0 without one."""
    lines = path.read_text().split("---")[1].splitlines() if path.exists() else []
    return next((int(line.split(":")[1]) for line in lines if line.startswith("runs:")), 0)


def _head(r: Results, planned, committed: dict[str, str]) -> list[str]:
    done = _finished(r.table)
    once = done.drop_duplicates("id")
    hours = (once["core_s"] if "core_s" in once else once["wall_s"] * once["threads"]).sum() / 3600
    data = sorted(set(zip(once["data"].fillna("?"), once["data_hash"].fillna("?"), strict=True)))
    seeds = sorted(set(done[done["stage"] == "final"]["seed"]))
    lines = [
        f"# {r.paper} at the {r.scale} scale\n",
        f"- {len(once)} runs, {hours:.2g} core hours; seeds {_ranges(seeds)}; {_kinds(once)}.",
        "- Data: " + "; ".join(f"{name} (hash {digest[:12]})" for name, digest in data) + ".",
    ]
    for name, digest in data:
        if committed.get(name, digest) != digest:
            lines.append(f"- **Other data**: {name} has hash {digest}, the committed results have "
                         f"{committed[name]}.")  # fmt: skip
    failed = r.table[r.table["status"] == "failed"].drop_duplicates("id")
    stale = done[done["stale"].astype(bool)].drop_duplicates("id")
    edges = r.search[r.search["edge"].astype(bool)] if len(r.search) else r.search
    for what, rows in (("Runs of older code (stale)", stale), ("Failed runs", failed)):
        names = [f"{x['experiment']}/{x['arm']} seed {x['seed']} (`{x['id']}`)" for x in rows.to_dict("records")]
        lines.append(f"- {what}: {', '.join(names) or 'none'}.")
    if n := done.loc[done["rechecked"].eq(True), "id"].nunique() if "rechecked" in done else 0:
        lines.append(f"- {n} runs of older code count by recheck: a run of the same settings but for rates and ranks, "
                     "trained again under newer code, gave every final metric to the last bit "
                     "([same_code.csv](same_code.csv)).")  # fmt: skip
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
        if set(rows["verdict"]) == {NOT_RUN}:
            shown, caption = shown[["claim", "published", "verdict"]], f"scale {r.scale}; no run yet"
        lines += [f"### {title}\n", tables.write(stage / "tables", name, rows, shown, caption)]
    return lines


def _experiments(r: Results, stage: Path) -> list[str]:
    lines = []
    for experiment, block in r.claims.experiments.items():
        rows = r.runs[r.runs["experiment"] == experiment]
        if rows.empty:
            continue
        lines.append(f"## {block['title']}\n\n{_held(r, experiment)}\n")
        metrics = [m for m in block.get("metrics", ["val_loss"]) if m in rows]  # what no run has yet has no table
        if "unit" in block:
            caption = f"{block['caption']}; mean [95 % CI] over {block['unit']}; {r.caption([experiment])}"
            table = tables.means(rows, metrics)
            lines.append(tables.write(stage / "tables", experiment, table, tables.show_means(table), caption))
            continue
        for metric in metrics:
            table = tables.arms(rows, experiment, r.claims, metric)
            if len(table):
                caption = (
                    f"{metric}{' in nats' if 'loss' in metric else ''}; delta: paired difference to the baseline; "
                    f"intervals are over seeds at the "
                    f"chosen rate and do not hold the choice itself, made on one seed; {r.caption([experiment])}"
                )
                shown, name = tables.show_arms(table), metric.replace("/", "_")
                lines.append(tables.write(stage / "tables", f"{experiment}_{name}", table, shown, caption))
        found = r.search[r.search["experiment"] == experiment] if len(r.search) else r.search
        if len(found):
            caption = f"search on one seed, chosen by the split named; {r.caption([experiment])}"
            wanted = tables.order(found["arm"], block.get("baselines", {}))
            shown = tables.show_search(found.sort_values("arm", key=lambda arm: arm.map(wanted.index), kind="stable"))
            lines.append(tables.write(stage / "tables", f"{experiment}_search", found, shown, caption))
    return lines


HELD = {
    "Held": ("reproduced", "kept", "by construction"),
    "Held in its direction alone, or left open by too few seeds": ("same direction", "underpowered"),
    "Did not hold": ("differs", "broken"),
}


def _held(r: Results, experiment: str) -> str:
    """In a paragraph: which claims of an experiment held, which did not, with our value, and what they depend on."""
    rows = r.verdicts[r.verdicts["experiment"] == experiment]
    parts = []
    for name, verdicts in HELD.items():
        found = [f"`{x['id']}` ({x['ours']:.3g})" for x in rows.to_dict("records") if x["verdict"] in verdicts]
        parts.append(f"**{name}:** {', '.join(found) or 'none'}.")
    if note := r.claims.experiments[experiment].get("setup_note"):
        parts.append(f"**What it depends on:** {' '.join(note.split())}.")
    return " ".join(parts)


def _module(path: Path) -> Any:
    """The paper's own report.py: FIGURES, name -> (draw, experiments, caption), and DERIVED; None without one."""
    if not path.exists():
        return None
    spec = importlib.util.spec_from_file_location(f"report_{path.parent.name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _derived(r: Results, functions: dict[str, Callable[[Results], pd.DataFrame]]) -> list[pd.DataFrame]:
    """Rows that are computed from runs instead of trained, for each experiment name of DERIVED that has what it needs.

    A function returns arm, seed (the number of the unit: what is left out, drawn or split), id (the runs that a row
    rests on, separated by blanks) and metrics, or raises figures.Missing. The rows are judged and shown as those of
    runs are; they are none: they stand in no file, and are not counted.
    """
    found = []
    for experiment, function in functions.items():
        with suppress(figures.Missing):
            table = function(r)
            used = [r.runs[r.runs["id"].isin(ids.split())] for ids in table["id"]]
            shared = {"paper": r.paper, "experiment": experiment, "scale": r.scale, "stage": "final", "status": "done"}
            each = {
                key: [", ".join(sorted(set(rows[key].astype(str)))) for rows in used] for key in ("data", "data_hash")
            }
            found.append(
                table.assign(**shared, **each, derived=True, stale=[bool(rows["stale"].any()) for rows in used])
            )
    return found


def _figures(r: Results, stage: Path, drawn: dict[str, Any]) -> list[str]:
    if not drawn:
        return []
    lines = ["## Figures\n"]
    for name, (draw, experiments, caption) in drawn.items():
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
