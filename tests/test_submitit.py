"""A sweep by the jobs of Hydra's submitit launcher, on this machine."""

import json

import pytest

pytest.importorskip("hydra_plugins.hydra_submitit_launcher")

from backrank import run  # noqa: E402
from backrank.reproduce import submit as submit_jobs  # noqa: E402


@pytest.fixture
def submit(tiny, tmp_path, monkeypatch):
    """submit(*overrides): the exit code of a sweep over seeds 1 and 2 by two jobs; the runs are in tmp_path."""
    monkeypatch.setenv("JOBS", "2")

    def submit(*overrides: str) -> int:
        launcher = ["hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"]
        return run.main(["-m", *tiny, f"runs={tmp_path}", *launcher, "seed=1,2", "train.steps=4", *overrides])

    return submit


def summaries(root):
    return {p: p.stat().st_mtime_ns for p in root.glob("[!.]*/summary.json")}


def test_two_jobs_share_a_sweep_and_a_second_call_does_nothing(submit, tmp_path, capfd):
    assert submit() == 0
    first, said = summaries(tmp_path), capfd.readouterr().out
    assert len(first) == 2 and "2 runs done, 0 skipped, 0 failed" in said
    assert {json.loads((p.parent / "meta.json").read_text())["seed"] for p in first} == {1, 2}
    jobs = list((tmp_path / ".jobs").rglob("*_log.out"))
    assert submit() == 0
    assert "0 runs done, 2 skipped, 0 failed" in capfd.readouterr().out
    assert summaries(tmp_path) == first and list((tmp_path / ".jobs").rglob("*_log.out")) == jobs


def test_a_failure_is_named_once_and_stops_no_sibling(submit, tmp_path, capfd):
    """Whatever job meets it first: the other does not try it again."""
    assert submit("optim=sgd", "optim.clip=0", "optim.lr=0.1,1e30") == 1
    said = capfd.readouterr().out
    failures = [json.loads(p.read_text()) for p in tmp_path.glob("[!.]*/failed.json")]
    assert len(summaries(tmp_path)) == len(failures) == 2 and all(f["diverged"] for f in failures)
    assert "2 runs done, 0 skipped, 2 failed" in said and said.count("lower optim.lr") == 2
    assert not list(tmp_path.glob("*.old-*"))


def test_jobs_that_end_before_their_work_are_said(tiny, tmp_path, capsys):
    def launch(worker, jobs, folder):
        raise RuntimeError("no such partition")

    assert submit_jobs([*tiny, f"runs={tmp_path}", "seed=1,2"], launch, {"JOBS": "2"}) == 1
    said = capsys.readouterr().out
    assert "no such partition" in said and "2 failed" in said and said.count("was left by all jobs") == 2
