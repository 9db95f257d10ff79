"""Rechecks: rows of older code count again where a run of their arm comes out equal to the last bit, only there."""

import shutil

import pandas as pd
import pytest
import torch

from backrank import build, data, reproduce, rundir
from backrank import recheck as recheck_module
from backrank.analysis.runs import collect, committed_losses, read_table
from backrank.plan import Study

ARMS = ["ordinary", "backward_r4"]


def study(tiny, extra=()):
    return Study("causal_test/byte_heads", "smoke", [*tiny, "probe=[]", "optim.lr=0.02", *extra], ARMS, [1, 2])


@pytest.fixture(scope="module")
def whole(tiny, tmp_path_factory):
    """Runs and rows of two arms and seeds."""
    root = tmp_path_factory.mktemp("recheck")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BACKRANK_RUNS", str(root / "runs"))
        assert reproduce.execute([study(tiny)], {"JOBS": "1"}) == 0
        collect([study(tiny)], root / "runs", root / "results/causal_test/smoke")
    return root


class Recheck:
    """A copy of these rows, without the runs, that the commands of `reproduce` see."""

    def __init__(self, whole, tiny, tmp_path, monkeypatch, capsys):
        self.patch, self.capsys, self.runs = monkeypatch, capsys, whole / "runs"
        self.folder = tmp_path / "results/causal_test/smoke"
        shutil.copytree(whole / "results", tmp_path / "results")
        for name, value in {"SCALE": "smoke", "JOBS": "1", "RESULTS": tmp_path / "results", "HF_HUB_OFFLINE": 1,
                            "BACKRANK_RUNS": tmp_path / "none"}.items():  # fmt: skip
            monkeypatch.setenv(name, str(value))
        for name in ("ONLY", "SEEDS", "DEVICE", "FORCE", "REUSE", "LOGGER"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(reproduce.Settings, "studies", lambda self, _: [study(tiny, self.extra)])
        self.numeric, self.write = rundir.NUMERIC, reproduce.report
        monkeypatch.setattr(reproduce, "report", self.collect)  # which is what a report begins with

    def collect(self, paper, settings, *_):
        studies = settings.studies(paper)
        collect(studies, reproduce.runs_root(studies), self.folder)
        return 0

    def change(self, *modules):
        """Another code hash, as if these modules decided numbers too."""
        self.patch.setattr(rundir, "NUMERIC", (*self.numeric, *modules))

    def __call__(self, command="recheck"):
        self.code = reproduce.main([command, "causal_test"])
        self.out, self.err = self.capsys.readouterr()
        return self.code

    @property
    def rows(self):
        return read_table(self.folder / "runs.csv")

    @property
    def evidence(self):
        return pd.read_csv(self.folder / "same_code.csv", dtype=str)

    @property
    def report(self):
        return (self.folder / "report.md").read_text()


@pytest.fixture
def recheck(whole, tiny, tmp_path, monkeypatch, capsys):
    return Recheck(whole, tiny, tmp_path, monkeypatch, capsys)


def disturb(monkeypatch, arm):
    real = build.build

    def other(cfg, *rest):
        trainer, record = real(cfg, *rest)
        if cfg.arm == arm:
            with torch.no_grad():
                trainer.task.head.weight.mul_(1 + 1e-6)
        return trainer, record

    monkeypatch.setattr(build, "build", other)


def test_rows_count_again_over_two_changes_of_the_code(recheck, whole):
    before = recheck.rows.drop(columns="rechecked")
    first = before["code_hash"].groupby(before["arm"]).first()
    recheck.change("plugins")
    recheck.collect("causal_test", reproduce.Settings())
    assert recheck.rows["stale"].all()
    recheck.patch.setattr(reproduce, "report", recheck.write)
    assert recheck() == 0, recheck.err
    assert "recheck: 2 of 2 arms gave the same numbers" in recheck.out
    same = recheck.evidence
    assert ",".join(same.columns) == "experiment,arm,old,new,id,seed,ran,val_loss,git_sha,date,verdict"
    assert list(same["arm"]) == sorted(ARMS) and set(same["verdict"]) == {"same"} and set(same["seed"]) == {"1"}
    assert list(same["old"]) == [first[arm] for arm in same["arm"]] and not set(same["new"]) & set(first)
    chosen = before[(before["stage"] == "final") & before["searched"]].set_index("arm")
    for row in same.to_dict("records"):
        assert (row["id"], float(row["val_loss"])) == (chosen.loc[row["arm"], "id"], chosen.loc[row["arm"], "val_loss"])
    assert not recheck.rows["stale"].any() and recheck.rows["rechecked"].all()
    assert "(stale): none" in recheck.report and f"{len(before)} runs of older code count by recheck" in recheck.report
    pd.testing.assert_frame_equal(recheck.rows[before.columns], before)  # the rows are what they were

    evidence = (recheck.folder / "same_code.csv").read_bytes()
    recheck.patch.setattr(reproduce, "report", recheck.collect)
    assert recheck() == 0 and "recheck: nothing is stale" in recheck.out and "running" not in recheck.out
    assert (recheck.folder / "same_code.csv").read_bytes() == evidence

    recheck.change("plugins", "plan")
    rows = recheck.rows
    rows.loc[rows["seed"] == 2, "code_hash"] = rows["arm"].map(same.set_index("arm")["new"])  # made in between
    rows.to_csv(recheck.folder / "runs.csv", index=False)
    assert recheck() == 0 and "2 of 2" in recheck.out  # what a chain connects needs one run
    assert len(recheck.evidence) == 4 and not recheck.rows["stale"].any() and recheck.rows["rechecked"].all()
    assert len(rundir.same_code(recheck.folder, "byte_heads", "ordinary", first["ordinary"])) == 3


def test_one_that_was_stopped_goes_on(recheck):
    real, built = build.build, []

    def stop(cfg, *rest):
        if built:
            raise KeyboardInterrupt
        built.append(cfg.arm)
        return real(cfg, *rest)

    recheck.change("plugins")
    recheck.patch.setattr(build, "build", stop)
    assert recheck() == 130 and list(recheck.evidence["arm"]) == built
    recheck.patch.setattr(build, "build", real)
    assert recheck() == 0 and "1 of 1 arms" in recheck.out and sorted(recheck.evidence["arm"]) == sorted(ARMS)


def test_a_change_of_numbers_is_found_and_its_arm_stays_stale(recheck):
    recheck.change("plugins")
    disturb(recheck.patch, "backward_r4")
    assert recheck() == 1
    assert "byte_heads backward_r4 seed 1" in recheck.out and "BLAS" in recheck.out and "1 of 2 arms" in recheck.out
    line = next(line for line in recheck.out.splitlines() if "DIFFERENT" in line)
    verdict = recheck.evidence.set_index("arm")["verdict"]
    assert verdict["ordinary"] == "same" and " -> " in verdict["backward_r4"] and line.endswith(verdict["backward_r4"])
    rows = recheck.rows
    assert set(rows[rows["stale"]]["arm"]) == {"backward_r4"} == set(rows[~rows["rechecked"]]["arm"])
    assert set(committed_losses(recheck.folder, fresh=True)) == set(rows[~rows["stale"]]["id"])  # REUSE=1 FRESH=1
    recheck.patch.setattr(build, "build", lambda *_: (_ for _ in ()).throw(RuntimeError("no luck")))
    assert recheck() == 1 and "no luck" in recheck.out and "0 of 1 arms" in recheck.out
    assert recheck.rows["stale"].sum() == rows["stale"].sum()


def test_local_runs_of_older_code_ask_the_same_evidence(recheck, tmp_path):
    shutil.copytree(recheck.runs, tmp_path / "none")
    recheck.change("plugins")

    def stale():
        assert recheck("status") == 0
        row = next(line for line in recheck.out.splitlines() if "byte_heads" in line).split("│")
        return row[2].strip(), row[-2].strip()

    finished, count = stale()
    assert finished == count != "0"
    assert recheck() == 0 and stale() == (finished, "0")
    recheck.patch.setenv("FRESH", "1")  # reruns what is stale, so nothing now
    recheck.patch.setattr(build, "build", lambda *_: pytest.fail("it counts"))
    assert recheck("run") == 0 and not recheck.rows["stale"].any()


def test_rows_that_are_not_there_or_not_planned_any_more(recheck):
    recheck.change("plugins")
    rows = recheck.rows
    rows[rows["arm"] == "ordinary"].assign(id="0" * 12).to_csv(recheck.folder / "runs.csv", index=False)
    recheck.patch.setenv("FORCE", "1")
    assert recheck() == 1 and "byte_heads ordinary: its plan has other runs now" in recheck.out
    (recheck.folder / "runs.csv").unlink()
    assert recheck() == 2 and recheck.err.count("\n") == 1
    assert "has no finished runs of byte_heads to recheck. make reproduce-causal-test" in recheck.err


def test_arms_that_differ_in_numbers_alone_are_one_case(monkeypatch):
    monkeypatch.setattr(data, "check", lambda _: None)
    monkeypatch.setattr(data, "content_hash", lambda _: {"text": "t", "tokenizer": "bytes"})
    heads = Study("causal_test/byte_heads", "smoke")

    def of(arm, code="old"):
        return recheck_module.case(heads, {"arm": arm, "code_hash": code})

    assert of("backward_r8") == of("backward_r4") != of("factorised_r4")
    cells = Study("causal_test/width_and_vocab", "smoke")
    wide, narrow = (recheck_module.case(cells, {"arm": arm, "code_hash": "old"}) for arm in list(cells.arms)[::3][:2])
    assert wide != narrow  # another width or vocabulary is another case
    assert len({of("ordinary"), of("ordinary", "older"), of("backward_r4")}) == 3
