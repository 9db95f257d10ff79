"""Every experiment of every paper runs at the smoke scale, end to end, and its report names every arm."""

import pandas as pd
import pytest

from backrank import reproduce
from backrank.plan import Study, experiments

PAPERS = sorted({name.split("/")[0] for name in experiments()})


@pytest.mark.parametrize("paper", PAPERS)
def test_a_paper_runs_end_to_end(paper, tmp_path, monkeypatch):
    for name in ("ONLY", "SEEDS", "LOGGER", "DEVICE", "FRESH", "FORCE", "REUSE", "BACKRANK_DATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"SCALE": "smoke", "JOBS": "2", "RESULTS": tmp_path / "results"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("BACKRANK_RUNS", str(tmp_path / "runs"))
    if paper == "causal_test":  # which has the most runs; the others have two seeds, or parents
        monkeypatch.setenv("SEEDS", "1")
    assert reproduce.main(["run", paper]) == 0
    folder = tmp_path / "results" / paper / "smoke"
    runs = pd.read_csv(folder / "runs.csv")
    final = runs[(runs["stage"] == "final") & (runs["status"] == "done")]
    for name in experiments(paper):
        study = Study(name, "smoke", seeds=[1] if paper == "causal_test" else None)
        rows = final[final["experiment"] == name.split("/")[1]]
        have = set(zip(rows["arm"], rows["seed"], strict=True))
        planned = {(arm, seed) for arm in study.arms for seed in study.seeds}
        leaders = set(study.plan.parents.values())  # whose runs are there because others start from them
        assert planned <= have and {arm for arm, _ in have - planned} <= leaders, name
    report = (folder / "report.md").read_text()
    assert all(arm.replace("_", " ") in report or arm in report for arm in set(final["arm"]))
    assert not any(figure.stat().st_size < 5000 for figure in (folder / "figures").glob("*.png"))
    assert {p.stem for p in (folder / "figures").glob("*.png")} == {p.stem for p in (folder / "figures").glob("*.svg")}
    if paper != "lost_in_backprop":  # which has runs with parents and trunks, and studies
        return
    # asked again, there is nothing to do and nothing changes
    before = (folder / "runs.csv").read_bytes(), report
    assert reproduce.main(["run", paper]) == 0
    assert ((folder / "runs.csv").read_bytes(), (folder / "report.md").read_text()) == before
