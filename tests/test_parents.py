"""Runs that start from other runs: plans, weights, adapters, pruning."""

import math

import pytest
import torch

from backrank import data
from backrank.compose import compose_run
from backrank.config import ConfigError
from backrank.identity import run_id
from backrank.interventions.adapters import allocated
from backrank.optim import lr_at
from backrank.plan import Study
from backrank.rundir import RunDir
from backrank.studies.pruning import METHODS, cut
from backrank.sweep import Sweep

HASHES = {"text": "t", "tokenizer": "bytes"}
PLAN = ["+plan.arms={base:[],child:['optim.weight_decay=0.5']}", "+plan.parents={child:base}"]


@pytest.fixture
def no_data(monkeypatch):
    monkeypatch.setattr(data, "check", lambda _: None)
    monkeypatch.setattr(data, "content_hash", lambda _: HASHES)


def test_a_child_waits_for_its_parents_search_and_starts_from_the_run_of_its_own_seed(no_data):
    plan = Study(None, "smoke", [*PLAN, "+plan.search.arms={base:{grids:{optim.lr:[0.01,0.02,0.04]}}}"], seeds=[1, 2])
    first = plan.progress({}.get)
    assert {job.arm for job in first.jobs} == {"base"} and first.unnamed == 1 + 2
    losses = {j.id: {"validation": abs(j.settings[0][1] - 0.02), "test": 0.0} for j in first.jobs}
    second = plan.progress(losses.get)
    base = {j.seed: j.id for j in second.jobs if j.arm == "base" and dict(j.settings) == {"optim.lr": 0.02}}
    children = [j for j in second.jobs if j.arm == "child"]
    assert {j.seed: j.parent for j in children} == base and second.unnamed == 0
    assert len({j.id for j in second.jobs}) == len(second.jobs) == 4 + 2
    for job in children:
        cfg = compose_run(job.overrides)
        assert (run_id(cfg, HASHES), cfg.parent) == (job.id, job.parent)


def test_a_parent_is_run_though_only_the_child_is_asked_for_and_a_failed_one_blocks_it(no_data):
    plan = Study(None, "smoke", PLAN, arms=["child"], seeds=[3])
    parent, child = plan.progress({}.get).jobs
    assert (parent.arm, child.arm, child.parent) == ("base", "child", parent.id)
    assert plan.progress({}.get, lambda run: run == parent.id).blocked == ["child"]


@pytest.mark.parametrize("parents", ["{child:nobody}", "{nobody:base}", "{'*':base}"])
def test_parents_that_fit_nothing_are_refused(no_data, parents):
    with pytest.raises(ConfigError, match=r"plan\.parents"):
        Study(None, "smoke", [PLAN[0], f"+plan.parents={parents}"])


def test_a_sweep_runs_parents_first_also_where_their_committed_rows_count(tiny, tmp_path):
    study = Study(None, "smoke", [*tiny, "train.steps=3", "every.eval=0", f"runs={tmp_path}", *PLAN], seeds=[1])
    parent, child = study.progress({}.get).jobs
    committed = {parent.id: {"validation": 1.0, "test": 1.0}}
    sweep = Sweep([study], tmp_path, committed=committed, said=lambda _: None)
    assert sweep.run() == 0 and list(sweep.ran) == [parent.id, child.id]
    assert RunDir(tmp_path, child.id).read("meta.json")["parent"] == parent.id
    again = Sweep([study], tmp_path, committed=committed, said=lambda _: None)
    assert again.run() == 0 and not again.ran
    both = {**committed, child.id: {"validation": 1.0, "test": 1.0}}
    nothing = Sweep([study], tmp_path / "empty", committed=both, said=lambda _: None)
    assert nothing.run() == 0 and not nothing.ran  # what counts already needs no parent


def test_a_run_id_that_looks_like_a_number_stays_text():
    for run in ("12345e678901", "1e0000000000", "123456789012"):
        assert compose_run(["train.steps=1", "optim.lr=1", f"parent={run}"]).parent == run


def test_a_run_starts_from_its_parents_weights(train):
    parent = train("train.steps=6")
    start = train(f"parent={parent.folder.name}", "train.steps=1", "optim.lr=1e-30", "optim.weight_decay=0")
    assert all(torch.equal(start.weights[name], W) for name, W in parent.weights.items())
    assert start.summary["val/loss"] == parent.summary["val/loss"]
    assert start.folder.name != train("train.steps=1", "optim.lr=1e-30", "optim.weight_decay=0").folder.name


def test_a_parent_that_is_not_there_or_does_not_fit_is_one_clear_error(train, capsys):
    assert train("parent=0123456789ab").code == 2
    assert "parent=0123456789ab: is no finished run" in capsys.readouterr().err
    parent = train("train.steps=1").folder
    wide = train(f"parent={parent.name}", "model.width=16")
    assert wide.code == 2 and not wide.folder.exists()
    assert f"parent={parent.name}: has another shape" in capsys.readouterr().err
    assert train(*PLAN, "arm=child").code == 2
    assert "starts from a run of arm base" in capsys.readouterr().err
    pruned = train("study=pruning")
    assert pruned.code == 2 and not pruned.folder.exists()
    assert "parent=None: is the run that study=pruning cuts" in capsys.readouterr().err


def test_a_cooldown_is_constant_then_falls_in_a_line_and_shares_every_step_before_it(config, trainer):
    wsd = ("optim.schedule=wsd", "optim.cooldown=4", "optim.warmup=2", "optim.lr=0.1", "optim.final=0.2")
    cfg = config(*wsd, "train.steps=10")
    rates = [lr_at(step, 10, cfg.optim) for step in range(10)]
    assert rates == pytest.approx([0.05, *[0.1] * 5, 0.08, 0.06, 0.04, 0.02])
    runs = [trainer(*wsd, f"train.steps={steps}") for steps in (10, 14)]
    for run in runs:
        run.fit()
    short, long = (run.recorder.losses() for run in runs)
    assert short[:7] == long[:7] and short[7:] != long[7:10]  # the loss of a step is that before its update


WSD = ("optim.schedule=wsd", "optim.warmup=2", "every.checkpoint=5", "probe=[weight_spectrum]")


def test_a_cooldown_branches_from_the_trunk_and_gives_the_bits_of_a_run_from_scratch(train):
    """Three lengths, each from what the one before left in front of its cool-down; the last of them alone as oracle."""
    lengths = [("train.steps=12", "optim.cooldown=3"), ("train.steps=16", "optim.cooldown=5"),
               ("train.steps=22", "optim.cooldown=4", "optim.final=0")]  # fmt: skip
    for n, length in enumerate(lengths):
        branched, alone = train(*WSD, *length), train(*WSD, *length, runs=f"alone{n}")
        said = (branched.folder / "log.txt").read_text()
        assert ("branching from a trunk at step" in said) == (n > 0)
        assert all(torch.equal(v, branched.weights[k]) for k, v in alone.weights.items())
        rows = [
            [{k: v for k, v in row.items() if k != "time/step_ms"} for row in ran.rows] for ran in (branched, alone)
        ]
        assert rows[0] == rows[1] and branched.layers == alone.layers
    (trunk,) = (branched.folder.parent / ".trunks").iterdir()
    assert [p.name for p in trunk.iterdir()] == ["15"]  # one state a trunk: the latest in front of a cool-down


def test_other_settings_or_a_damaged_state_are_no_trunk(train):
    train(*WSD, "train.steps=12", "optim.cooldown=3")
    for other in ("optim.lr=2e-3", "seed=2", "probe=[]"):
        ran = train(*WSD, "train.steps=16", "optim.cooldown=3", other)
        assert ran.code == 0 and "branching" not in (ran.folder / "log.txt").read_text()
    for state in (ran.folder.parent / ".trunks").glob("*/*/checkpoint.pt"):
        state.write_bytes(b"cut")
    ran = train(*WSD, "train.steps=20", "optim.cooldown=3")
    assert ran.code == 0 and "branching" not in (ran.folder / "log.txt").read_text()


def test_a_sweep_runs_the_cooldowns_of_a_trunk_one_after_another(tiny, tmp_path):
    from backrank.plan import Study
    from backrank.sweep import Sweep

    arms = "plan.arms={b:['train.steps=16'],a:['train.steps=12'],c:['train.steps=16','optim.lr=2e-3'],d:[]}"
    common = [*(o for o in tiny if "steps" not in o), *WSD, "optim.cooldown=3", f"+{arms}", f"runs={tmp_path}"]
    study = Study(None, "laptop", [*common, "plan.only=[a,b,c]"], seeds=[1])
    assert study.arms == ["b", "a", "c"]
    sweep, taken, kept = Sweep([study], tmp_path), [], []
    while found := sweep.next_job():
        taken.append(found[1].arm)
        kept.append(found[1])
        sweep.running.add(found[1].id)
    assert taken == ["a", "c"]  # b goes on from a
    assert [bool(job.trunk) for job in kept] == [True, False]  # which alone has to leave a trunk
    sweep.failed = {job.id: (job, "") for job in study.progress(lambda _: None).jobs if job.arm == "a"}
    sweep.running.clear()
    assert sweep.next_job()[1].arm == "b"  # or from nothing
    assert Sweep([Study(None, "laptop", [*common, "plan.only=[a,b]"], seeds=[1])], tmp_path).run() == 0
    logs = [p.read_text() for p in tmp_path.glob("*/log.txt")]
    assert sum("branching from a trunk" in log for log in logs) == 1
    assert not list((tmp_path / ".trunks").iterdir())  # none is left once the longest has run


@pytest.mark.parametrize("bad", ["optim.schedule=wsd", "optim.cooldown=3", "+optim={schedule:wsd,cooldown:99}"])
def test_a_cooldown_without_its_schedule_or_longer_than_the_run_is_refused(config, bad):
    with pytest.raises(ConfigError, match=r"optim\.cooldown"):
        config(bad)


@pytest.mark.parametrize("shares", [[1.0, 1.0, 1.0, 1.0], [50.0, 20.0, 5.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
def test_adapters_of_every_allocation_have_the_budget_of_the_uniform_rank(shares):
    shapes, rank = [(64, 192), (64, 64), (256, 64), (64, 256)], 4
    ranks, budget = allocated(shapes, shares, rank), rank * sum(map(sum, shapes))
    spent = sum(k * (n + m) for k, (n, m) in zip(ranks, shapes, strict=True))
    cheapest = min(n + m for (n, m), share in zip(shapes, shares, strict=True) if share)
    assert budget - cheapest < spent <= budget
    if len(set(shares)) == 1:
        assert ranks == [rank] * 4
    order = sorted(range(4), key=lambda i: -shares[i])
    assert all(ranks[a] >= ranks[b] for a, b in zip(order, order[1:], strict=False))
    assert not any(k for k, share in zip(ranks, shares, strict=True) if share == 0)


def test_adapters_cap_at_full_rank_and_give_the_rest_to_others():
    assert allocated([(4, 4), (100, 100)], [1.0, 1.0], 10) == [4, 10]


@pytest.mark.parametrize("allocate", ["uniform", "early", "late", "erank"])
def test_adapters_train_the_chosen_matrices_and_nothing_else(train, trainer, allocate):
    chosen = ["intervention=[adapters]", "intervention.adapters.rank=2", f"intervention.adapters.allocate={allocate}"]
    parent = train("train.steps=3")
    child = train(f"parent={parent.folder.name}", "train.steps=4", *chosen)
    ranks = trainer(*chosen).task.interventions[0].ranks if allocate != "erank" else None
    moved = set()
    for name, before in parent.weights.items():
        path, _, leaf = name.rpartition(".")
        plus = f"{path}.parametrizations.{leaf}"
        if f"{plus}.original" not in child.weights:
            assert torch.equal(child.weights[name], before)
            continue
        assert torch.equal(child.weights[f"{plus}.original"], before)
        assert child.weights[f"{plus}.0.B"].abs().max() > 0
        moved.add(name)
    if ranks:
        assert moved == {name for name, k in ranks.items() if k}
        assert (len(moved) < len(ranks)) == (allocate in ("early", "late"))


def test_cuts_keep_what_they_say():
    draws = torch.Generator().manual_seed(0)
    W = torch.randn(6, 10, generator=draws)
    U, s, Vh = torch.linalg.svd(W.double(), full_matrices=False)
    rank = round(0.5 * 60 / 16)
    best = (U[:, :rank] * s[:rank]) @ Vh[:rank]
    torch.testing.assert_close(cut(W, 0.5, "rank", (U, False)), best.float())
    torch.testing.assert_close(cut(W, 0.5, "range", (U, False)), best.float())  # its own directions are the best
    torch.testing.assert_close(cut(W.T.contiguous(), 0.5, "range", (U, True)), best.float().T)
    kept = cut(W, 0.5, "magnitude", (U, False))
    assert (kept != 0).sum() == 30 and kept[kept != 0].abs().min() >= W[kept == 0].abs().max()
    filters = W.reshape(6, 5, 2, 1)
    assert cut(filters, 0.5, "rank", (U, False)).shape == filters.shape
    least = cut(W, 0.01, "rank", (U, False))
    assert torch.linalg.matrix_rank(least) == 1  # never nothing


def test_pruning_measures_its_parent_and_changes_nothing(train):
    parent = train("train.steps=6")
    study = train(f"parent={parent.folder.name}", "train.steps=6", "study=pruning")
    assert study.code == 0, study.summary
    found = study.summary
    assert found["prune/accuracy"] == parent.summary["test/accuracy"]
    assert found["prune/loss"] == parent.summary["test/loss"]
    for method in METHODS:
        assert 0 <= found[f"prune/{method}_mean"] <= 1 and math.isfinite(found[f"prune/{method}_5"])
    assert study.read("meta.json")["parents"] == [parent.folder.name]
