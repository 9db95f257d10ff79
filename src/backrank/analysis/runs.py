"""Run folders -> committed rows of a paper and scale: runs, layers, curves, features and searches.

Imports no torch.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from .. import data
from ..config import ConfigError
from ..recorder import atomic_write, read_rows
from ..rundir import RunDir, code_hash, same_code

if TYPE_CHECKING:
    from ..plan import Job, Study

LAYER_COLUMNS = [
    "step",
    "layer",
    "kind",
    "part",
    "erank",
    "erank_sigma",
    "participation",
    "stable_rank",
    "sigma_1",
    "frobenius",
    "tau",
    "index",
    "initial_share",
    "erank_of_mean",
    "c_data",
    "uniform",
    "directional",
    "exponent",
    "tail",
    "ks",
    "gap",
    "gap_neighbours",
    "gap_initial",
    "value",
]


def row_of(job: Job, rundir: RunDir, study: Study) -> dict[str, Any] | None:
    """One row of runs.csv, or None while the run is neither done nor failed."""
    summary, meta, failed = (rundir.read(n) for n in ("summary.json", "meta.json", "failed.json"))
    if summary is None and failed is None:
        return None
    paper, experiment = job.experiment.split("/")
    cfg = study.config(job.arm)[0]
    settings = dict(job.settings)
    meta = meta or {}
    row = {
        "id": job.id,
        "paper": paper,
        "experiment": experiment,
        "arm": job.arm,
        "scale": study.scale,
        "seed": job.seed,
        "stage": job.stage,
        "searched": job.seed == study.plan.search.seed,
        "status": "done" if summary else "failed",
        "diverged": bool(failed and failed["diverged"]) and not summary,
        "lr": settings.get("optim.lr", cfg.optim.lr),
        "weight_decay": cfg.optim.weight_decay,
        "optimizer": cfg.optim.name,
        "step_tokens": cfg.train.batch * cfg.train.accumulate * cfg.data.sequence,
        "params": meta.get("params"),
        "data": meta.get("data"),
        "data_hash": meta.get("data_hash"),
        "tokenizer_hash": meta.get("tokenizer_hash"),
        "code_hash": meta.get("code_hash"),
        "stale": False,  # `marked` says
        "device": meta.get("device"),
        "threads": meta.get("threads"),
        "torch": meta.get("versions", {}).get("torch"),
        "git_sha": meta.get("git_sha"),
        "dirty": meta.get("dirty"),
        "started": meta.get("started"),
        "order_hash": meta.get("order_hash", "")[:12],
        "init_hash": meta.get("init_hash", {}).get("backbone", "")[:12],
    }
    for key, value in (summary or {}).items():
        row[column(key)] = value
    row.setdefault("val_loss_active", row.get("val_loss"))  # a head without further classes has only active ones
    return row


def column(metric: str) -> str:
    """Where runs.csv has a metric of summary.json."""
    return metric.replace("val/", "val_").replace("test/", "test_").replace("train/", "train_")


def feature_rows(row: dict[str, Any], rundir: RunDir, study: Study) -> list[dict[str, Any]]:
    """Rows of features.csv: settings, loss now, next and at the end, and features of each checkpoint of a finished run.

    A checkpoint is a step, the initial one apart, with both a validation loss and the probe head_features; the last one
    has the final loss and no next. rank is the width, vocab the tokenizer's, unless an intervention sets another.
    """
    cfg = study.config(row["arm"])[0]
    if "head_features" not in cfg.probe:
        return []
    own = dict(cfg.intervention)
    classes = own.pop("vocab_expansion", {"size": cfg.data.vocab_size})["size"]
    condition = {key: row[key] for key in ("id", "experiment", "arm", "seed", "data", "lr")} | {
        "method": "+".join(own) or "ordinary",
        "width": cfg.model.width,
        "vocab": classes,
        "rank": next((settings.rank for settings in own.values() if "rank" in settings), cfg.model.width),
    }
    steps: dict[int, dict[str, Any]] = {}
    for metrics in read_rows(rundir.path / "metrics.jsonl", finished=True):
        steps.setdefault(metrics["step"], {}).update(metrics)
    rows = []
    for step, metrics in sorted(steps.items()):
        features = {k.removeprefix("features/"): v for k, v in metrics.items() if k.startswith("features/")}
        loss = metrics.get("val/curve_loss", metrics.get("val/loss"))
        if features and loss is not None:
            at = {"step": step, "progress": step / row["steps"], "loss": loss, "next_loss": None}
            rows.append({**condition, **at, "final_loss": row["val_loss"], **features})
    for now, after in itertools.pairwise(rows):
        now["next_loss"] = after["loss"]
    return rows


def curve_rows(row: dict[str, Any], rundir: RunDir) -> list[dict[str, Any]]:
    """Rows of curves.parquet: the validation loss over the steps of a finished run, on the part for the curve."""
    return [
        {**{key: row[key] for key in ("id", "experiment", "arm", "seed")}, "step": metrics["step"],
         "loss": metrics["val/curve_loss"]}
        for metrics in read_rows(rundir.path / "metrics.jsonl", finished=True)
        if "val/curve_loss" in metrics
    ]  # fmt: skip


def collect(studies: Sequence[Study], root: Path, folder: Path, force: bool = False) -> None:
    """Joins the local runs of these studies with the committed rows of `folder` and writes them back.

    Rows of an experiment whose data differs from the local runs' (the default text differs between Python versions) are
    no part of the same table: they are replaced, if that does not leave fewer runs or with `force`.
    """
    from ..sweep import Sweep

    rows, layers, curves, features, searches = [], [], [], [], []
    for study in studies:
        progress = Sweep([study], root, committed=committed_losses(folder)).progress()[0]
        for job in progress.jobs:
            rundir = RunDir(root, job.id)
            if (row := row_of(job, rundir, study)) is None:
                continue
            rows.append(row)
            if row["status"] == "done" and job.stage == "final":
                for layer in read_rows(rundir.path / "layers.jsonl", finished=True):
                    layers.append(
                        {
                            **{k: row[k] for k in ("id", "experiment", "arm", "seed")},
                            **{c: layer.get(c) for c in LAYER_COLUMNS},
                        }
                    )
                curves += curve_rows(row, rundir)
                features += feature_rows(row, rundir, study)
        for c in progress.choices:
            for key in c.best:
                searches.append(
                    {
                        "experiment": c.experiment.split("/")[1],
                        "arm": c.arm,
                        "seed": c.seed,
                        "split": c.split,
                        "key": key,
                        "grid": json.dumps([p[key] for p in c.points]),
                        "losses": json.dumps(finite(c.losses)),
                        "test_losses": json.dumps(finite(c.test_losses)),
                        "choice": c.best[key],
                        "edge": key in c.edges,
                        "extended": c.extended,
                        "runs": json.dumps(c.runs),
                    }
                )
    planned = {
        s.name.split("/")[-1]: ({data.content(s.config(arm)[1]) for arm in s.arms}, len(s.arms) * len(s.seeds))
        for s in studies
    }
    old = without_other_data(read_table(folder / "runs.csv"), planned, folder, force)
    if not rows:
        if not (table := read_table(folder / "runs.csv")).empty:
            atomic_write(folder / "runs.csv", marked(table, studies, folder).to_csv(index=False))
        return
    folder.mkdir(parents=True, exist_ok=True)
    runs = join(old, rows, ["experiment", "arm", "seed", "id"])
    final = runs[runs["stage"] == "final"]
    # a changed choice or config leaves the final run it replaces behind
    superseded = final.duplicated(["experiment", "arm", "seed"], keep=False) & ~final["id"].isin(
        {r["id"] for r in rows}
    )
    runs = marked(runs.drop(final[superseded].index), studies, folder)
    atomic_write(folder / "runs.csv", runs.to_csv(index=False))
    kept = set(runs["id"])
    table = join(read_table(folder / "features.csv"), features, ["experiment", "arm", "seed", "id", "step"])
    if len(table):
        table = table[table["id"].isin(kept)]
        atomic_write(folder / "features.csv", table.to_csv(index=False, float_format="%.8g"))
    search = join(read_table(folder / "search.csv"), searches, ["experiment", "arm", "key"])
    if len(search):  # nothing to choose is no table: an empty file cannot be read back
        atomic_write(folder / "search.csv", search.to_csv(index=False))
    for name, new, keys in (("layers", layers, ["layer", "kind"]), ("curves", curves, [])):
        path = folder / f"{name}.parquet"
        table = join(read_table(path), new, ["experiment", "id", "step", *keys])
        if len(table):
            table = table[table["id"].isin(kept)]
            table = table.astype(dict.fromkeys(table.columns[table.dtypes == "float64"], "float32"))
            buffer = io.BytesIO()
            table.to_parquet(buffer, index=False, compression="zstd")
            atomic_write(path, buffer.getvalue())


def marked(runs: pd.DataFrame, studies: Sequence[Study], folder: Path) -> pd.DataFrame:
    """The rows with what these studies say of theirs: `stale`, neither of the current code nor of code that a recheck
    found to give the same numbers (`same_code`), and `rechecked`, of such code."""
    known = {}  # experiment and arm -> the hashes that count -> by a recheck?
    for study in studies:
        name = study.name.split("/")[-1]
        for arm in study.arms:
            code = code_hash(study.config(arm)[0])
            known[name, arm] = {c: c != code for c in same_code(folder, name, arm, code)}
    flags = [
        (bool(row["stale"]), row.get("rechecked") is True)
        if (counts := known.get((row["experiment"], row["arm"]))) is None
        else (row["code_hash"] not in counts, counts.get(row["code_hash"], False))
        for row in runs.to_dict("records")
    ]
    return runs.assign(stale=[stale for stale, _ in flags], rechecked=[rechecked for _, rechecked in flags])


def without_other_data(
    old: pd.DataFrame, planned: dict[str, tuple[set[str], int]], folder: Path, force: bool
) -> pd.DataFrame:
    """The committed rows that may stand beside runs of the planned data: {experiment: (its hashes, final runs)}.

    Raises ConfigError where the plan has fewer runs than the rows it would replace.
    """
    if old.empty:
        return old
    pairs = zip(old["experiment"], old["data_hash"], strict=True)
    other = old[[name in planned and pd.notna(digest) and digest not in planned[name][0] for name, digest in pairs]]
    for name, rows in other[(other["status"] == "done") & (other["stage"] == "final")].groupby("experiment"):
        digests, runs = planned[name]
        if runs < len(rows) and not force:
            raise ConfigError(
                "RESULTS",
                folder,
                f"holds {len(rows)} runs of {name} on data {rows['data_hash'].iloc[0][:8]}; "
                f"this plan has {runs} on data {', '.join(sorted(d[:8] for d in digests))}",
                "RESULTS=<another folder> keeps both, FORCE=1 replaces them",
            )
    return old.drop(other.index)


def join(old: pd.DataFrame, rows: list[dict[str, Any]], keys: list[str]) -> pd.DataFrame:
    """Old rows and new ones, the new winning by key; sorted, so that a diff shows what is new."""
    frames = [f for f in (old, pd.DataFrame(rows)) if len(f)]
    if not frames:
        return pd.DataFrame()
    return pd.concat(frames, ignore_index=True).drop_duplicates(keys, keep="last").sort_values(keys, ignore_index=True)


def finite(values: Sequence[float]) -> list[float | None]:
    return [v if v < float("inf") else None for v in values]


def read_table(path: Path) -> pd.DataFrame:
    if not path.exists():
        return pd.DataFrame()
    text = dict.fromkeys(("id", "arm", "code_hash", "order_hash", "init_hash", "data_hash", "git_sha"), str)
    return pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path, dtype=text)


def committed_losses(folder: Path, fresh: bool = False) -> dict[str, dict[str, float]]:
    """id -> final losses by split of the committed rows; a diverged run's are infinite. `fresh`: of no stale row."""
    table = read_table(folder / "runs.csv")
    losses = {}
    for row in table.to_dict("records"):
        if fresh and row["stale"]:
            continue
        if row["status"] == "done":
            losses[row["id"]] = {"validation": row.get("val_loss"), "test": row.get("test_loss")}
        elif row.get("diverged"):
            losses[row["id"]] = {"validation": float("inf"), "test": float("inf")}
    return losses


def seconds_by_experiment(folder: Path) -> dict[tuple[str, str], float]:
    """(experiment, scale) -> mean core seconds of a committed run."""
    found = {}
    for path in folder.glob("*/runs.csv"):
        table = read_table(path)
        for name, group in table[table.status == "done"].groupby("experiment"):
            found[f"{folder.name}/{name}", path.parent.name] = float(group["core_s"].mean())
    return found
