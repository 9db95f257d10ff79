"""The predictive study: features against dense algebra; text, conditions, table, regression, and rows in the report."""

import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from backrank.analysis import figures, predictive
from backrank.analysis.report import load, report
from backrank.analysis.runs import collect, read_table, without_other_data
from backrank.config import ROOT, ConfigError, Data, make
from backrank.data import text as text_module
from backrank.plan import Study
from backrank.probes import PROBES
from backrank.sweep import Sweep
from conftest import with_intervention

# The probe


@pytest.mark.parametrize("sequences", [8, 32], ids=["whole", "padded"])
@pytest.mark.parametrize(("chosen", "rank"), [
    ([], 8), (with_intervention(("low_rank_head", {"rank": 3})), 3),
    (with_intervention(("vocab_expansion", {"size": 48})), 8)], ids=["dense", "low_rank", "expanded"])  # fmt: skip
def test_features_against_an_explicit_projector_and_svd(trainer, chosen, rank, sequences):
    built = trainer("model.head_std=0.5", *chosen)
    built.fit()
    snapshot = built.snapshot(20, sequences)
    metrics, rows = make(PROBES["head_features"], {}).measure(snapshot)
    y = snapshot.y_BT.flatten().numpy()
    H = built.task.hidden(snapshot.x_BT).detach().double().numpy()[y >= 0]
    W, y = built.task.head.weight.detach().double().numpy(), y[y >= 0]
    Z = H @ W.T
    G = np.exp(Z - Z.max(1, keepdims=True))
    G /= G.sum(1, keepdims=True)
    at = np.arange(len(y))
    G[at, y] -= 1
    Q, s, _ = np.linalg.svd(W, full_matrices=False)
    kept = G @ Q[:, :rank] @ Q[:, :rank].T
    competitor = np.where(np.arange(len(W)) == y[:, None], -np.inf, G).argmax(1)
    energy = np.linalg.svd(G, compute_uv=False) ** 2 / np.linalg.norm(G) ** 2
    retained = np.linalg.norm(kept) / np.linalg.norm(G)
    cosine = (G * kept).sum() / np.linalg.norm(G) / np.linalg.norm(kept)
    want = {
        "retained_norm": retained, "angle": np.degrees(np.arccos(cosine)),
        "target_preservation": kept[at, y].sum() / G[at, y].sum(),
        "competitor_preservation": kept[at, competitor].sum() / G[at, competitor].sum(),
        "directions": next(k for k in range(1, len(energy) + 1) if energy[:k].sum() >= 0.7), "strength": energy[0],
        "cond": s[0] / s[rank - 1],
    }  # fmt: skip
    assert not rows and metrics == {f"features/{k}": pytest.approx(v, rel=1e-5) for k, v in want.items()}
    assert 0.1 < retained < 0.99 and want["directions"] > 1


# The second text


def test_source_code_is_deterministic_disjoint_and_capped(tmp_path):
    data = Data(name="stdlib-code", source="stdlib", part="code", cache=str(tmp_path))
    found = text_module.texts(data)
    assert text_module.extract_stdlib(Path(os.__file__).parent, "code") == found
    total = sum(map(len, found.values()))
    assert 3e6 < total <= text_module.CODE_BYTES + 1000
    assert all(0.04 < len(found[s]) / total < 0.08 for s in ("validation", "test"))
    lines = {s: {line for line in t.splitlines() if len(line) > 60} for s, t in found.items()}
    assert len(lines["train"] & lines["validation"]) < 0.1 * len(lines["validation"])
    assert b"def " in found["test"] and all(t.decode() for t in found.values())


def test_source_code_ignores_what_is_installed_beside_it(tmp_path):
    for name in ("json", "site-packages/json", "notstdlib", "json/tests"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "x.py").write_text(f"{Path(name).parts[0]} = 1\n")
    assert b"".join(text_module.extract_stdlib(tmp_path, "code").values()) == b"json = 1\n"


@pytest.mark.parametrize(("source", "part"), [("stdlib", "doc"), ("text", "code")])
def test_a_part_that_a_source_has_not_is_refused(source, part, tmp_path):
    with pytest.raises(ConfigError, match=f"data.part={part}: is no part of source {source}"):
        text_module.texts(Data(name="x", source=source, part=part, path=str(tmp_path), cache=str(tmp_path)))


# The experiment


def test_37_conditions_without_a_search():
    plan = yaml.safe_load((ROOT / "configs/experiment/causal_test/predictive.yaml").read_text())
    assert len(plan["plan"]["arms"]) == 37 == len({tuple(sorted(o)) for o in plan["plan"]["arms"].values()})
    checkpoints = plan["train"]["steps"] // plan["every"]["eval"] * len(plan["plan"]["seeds"]) * 37
    assert checkpoints == 888 and plan["probe"]["head_features"]["every"] == plan["every"]["eval"]
    arms = ["text_ordinary_w16_lr30", "code_backward_r4", "code_ordinary_bpe512"]
    study = Study("causal_test/predictive", "laptop", arms=arms)
    assert [j.stage for j in study.progress({}.get).jobs] == ["final"] * 3
    configs = [study.config(arm)[0] for arm in arms]
    assert [(c.model.width, c.optim.lr) for c in configs] == [(16, 0.03), (32, 0.01), (32, 0.01)]
    assert [c.data.name for c in configs] == ["stdlib", "stdlib-code", "stdlib-code"]
    assert [(c.data.tokenizer, c.data.vocab_size) for c in configs] == [("bytes", 256)] * 2 + [("bpe", 512)]
    assert configs[1].intervention.backward_rank.rank == 4
    for cfg in configs:  # every checkpoint has features and the loss, on the text of the final evaluation
        assert cfg.every.eval == cfg.probe.head_features.every == cfg.train.steps // 8
        assert cfg.every.eval_tokens == cfg.data.eval_tokens


# The table


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Three conditions run at the smoke scale: (study, runs root)."""
    root = tmp_path_factory.mktemp("predictive") / "runs"
    arms = ["text_ordinary_w16", "text_backward_r4", "code_ordinary_classes1024"]
    study = Study("causal_test/predictive", "smoke", [f"runs={root}"], arms=arms)
    assert Sweep([study], root, said=lambda _: None).run() == 0
    return study, root


def test_table_of_checkpoints_and_losses(ran, tmp_path):
    study, root = ran
    collect([study], root, tmp_path)
    table, runs = read_table(tmp_path / "features.csv"), read_table(tmp_path / "runs.csv").set_index("arm")
    assert table.groupby("arm")["step"].apply(list).to_dict() == {arm: [2, 4] for arm in study.arms}
    assert (table["progress"] == table["step"] / 4).all()
    for arm, rows in table.groupby("arm"):
        first, last = rows.to_dict("records")
        final = pytest.approx(runs.loc[arm, "val_loss"])
        assert first["next_loss"] == first["final_loss"] == last["loss"] == last["final_loss"] == final
        assert np.isnan(last["next_loss"]) and first["loss"] > last["loss"]
        for name in ("retained_norm", "directions", "cond"):
            assert last[name] == pytest.approx(runs.loc[arm, f"features/{name}"])
    settings = table.groupby("arm")[["method", "width", "vocab", "rank", "lr", "data"]].first()
    assert settings.loc["text_ordinary_w16"].tolist() == ["ordinary", 16, 256, 16, 0.01, "stdlib"]
    assert settings.loc["text_backward_r4"].tolist() == ["backward_rank", 32, 256, 4, 0.01, "stdlib"]
    assert settings.loc["code_ordinary_classes1024"].tolist() == ["ordinary", 32, 1024, 32, 0.01, "stdlib-code"]


def test_rows_that_are_only_committed_stay(ran, tmp_path):
    study, root = ran
    collect([study], root, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    collect([study], tmp_path / "nothing", tmp_path)  # another machine, without the folders
    one = Study("causal_test/predictive", "smoke", [f"runs={root}"], arms=study.arms[1:])
    collect([one], root, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_experiment_may_have_several_data_sets(tmp_path):
    pairs = [("two", "a"), ("two", "b"), ("two", "c"), ("one", "c"), ("other", "z")]
    old = pd.DataFrame(pairs, columns=["experiment", "data_hash"]).assign(status="done", stage="final")
    kept = without_other_data(old, {"two": ({"a", "b"}, 9), "one": ({"c"}, 9)}, tmp_path, force=False)
    assert kept.index.tolist() == [0, 1, 3, 4]
    with pytest.raises(ConfigError, match="holds 1 runs of two on data c; this plan has 0 on data a, b"):
        without_other_data(old, {"two": ({"a", "b"}, 0)}, tmp_path, force=False)


# The regression


def synthetic(conditions=8, seeds=(1, 2), steps=range(1, 7)):
    """Losses whose next fall nothing but retained_norm shows."""
    rng, rows, n = np.random.default_rng(1), [], len(steps)
    for c, seed in [(c, s) for c in range(conditions) for s in seeds]:
        falls = [*rng.uniform(0.1, 0.6, n - 1), 0.0]
        losses = 3 + np.cumsum(falls[::-1])[::-1]
        for i, step in enumerate(steps):
            rows.append({
                "id": f"run{c}.{seed}", "experiment": "predictive", "arm": f"c{c}", "seed": seed,
                "data": ("text", "code")[c % 2], "method": ("ordinary", "backward_rank")[c % 3 == 0],
                "lr": (0.003, 0.01)[c // 2 % 2], "width": 32, "vocab": 256, "rank": 32, "step": step,
                "progress": step / n, "loss": losses[i], "next_loss": losses[i + 1] if i + 1 < n else np.nan,
                "final_loss": losses[-1], "retained_norm": 1 - falls[i] + 0.01 * rng.normal(),
                **{name: rng.uniform(1, 2) for name in predictive.GRADIENT[1:]},
            })  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture(scope="module")
def study():
    return predictive.leave_one_out(synthetic())


def test_a_feature_that_knows_the_next_loss_helps_and_others_do_not(study):
    changes = study.groupby("arm")["error_change_next"].mean()
    assert changes["retained_norm"] < -50 and changes["all"] < -50
    assert changes.drop(["retained_norm", "all", "base"]).abs().max() < 25
    forest = study.groupby("arm")["forest_error_change_next"].mean()
    assert forest["retained_norm"] < -30 < forest["noise"] and np.isnan(forest["angle"])
    assert study["arm"].unique().tolist() == ["base", *predictive.CANDIDATES]
    assert study.groupby("arm")["seed"].apply(list).map(lambda s: s == list(range(1, 9))).all()
    assert study.loc[1, ["id", "condition"]].tolist() == ["run1.1 run1.2", "c1"]


def test_a_left_out_conditions_error_is_that_of_a_ridge_regression_on_the_others(monkeypatch):
    monkeypatch.setattr(predictive, "PENALTIES", [10.0])
    monkeypatch.setattr(predictive, "FOREST", ())
    table = synthetic(5)
    found = predictive.leave_one_out(table).set_index(["arm", "condition"])["error_final"]
    cases = table.dropna()
    X = np.column_stack([cases[["loss", "progress"]], np.log(cases[["lr", "width"]]), cases["retained_norm"],
                         cases["data"] == "code", cases["data"] == "text",
                         cases["method"] == "ordinary", cases["method"] == "backward_rank"]).astype(float)  # fmt: skip
    y, left = (cases["final_loss"] - cases["loss"]).to_numpy(), (cases["arm"] == "c3").to_numpy()
    scale = X[~left].std(0)
    X = (X - X[~left].mean(0)) / np.where(scale > 1e-12, scale, 1)
    A = X[~left]
    weights = np.linalg.solve(A.T @ A + 10 * np.eye(X.shape[1]), A.T @ (y[~left] - y[~left].mean()))
    want = np.abs(X[left] @ weights + y[~left].mean() - y[left]).mean()
    assert found["retained_norm", "c3"] == pytest.approx(want, abs=2e-6)


def test_the_study_depends_on_neither_the_order_of_rows_nor_the_call():
    table = synthetic(4, steps=range(1, 4))
    first = predictive.leave_one_out(table)
    pd.testing.assert_frame_equal(first, predictive.leave_one_out(table.sample(frac=1, random_state=0)))


@pytest.mark.parametrize("table", [pd.DataFrame(), synthetic(3)], ids=["nothing", "three conditions"])
def test_too_few_conditions_are_no_study(table):
    with pytest.raises(figures.Missing, match="4 conditions"):
        predictive.leave_one_out(table)


# Derived rows in the report


@pytest.fixture
def folder(tmp_path):
    """Results of eight conditions: rows of runs and their features."""
    features = synthetic()
    runs = features.groupby(["id", "arm", "seed", "data", "lr"], as_index=False)["final_loss"].last()
    runs = runs.rename(columns={"final_loss": "val_loss"}).assign(
        paper="causal_test", experiment="predictive", scale="paper", stage="final", status="done", searched=False,
        stale=runs["id"] == "run2.1", data_hash=runs["data"].str[0], threads=1, wall_s=9.0, core_s=9.0, device="cpu",
        torch="2", params=1)  # fmt: skip
    out = tmp_path / "causal_test" / "paper"
    out.mkdir(parents=True)
    runs.to_csv(out / "runs.csv", index=False)
    features.to_csv(out / "features.csv", index=False)
    return out


def test_derived_rows_are_judged_and_shown_and_are_no_runs(folder):
    rows = (folder / "runs.csv").read_bytes()
    planned = {"predictive": {f"c{i}": [1, 2] for i in range(8)}}
    text = report("causal_test", "paper", folder.parents[1], planned=planned).read_text()
    assert (folder / "runs.csv").read_bytes() == rows and "runs: 16\n" in text and "- 16 runs, " in text
    claims = read_table(folder / "claims.csv").set_index("id")
    claim = claims.loc["predictive.next"]
    assert (claim["n"], claim["verdict"], claim["data"]) == (8, "differs", "code, text")
    assert claim["ours"] < -50 and len(claim["runs"].split()) == 16
    assert "planned" not in claim["note"] and "1 runs of older code" in claim["note"]
    assert claims.loc["predictive.noise.next", "n"] == 8 == claims.loc["predictive.forest.final", "n"]
    assert "n = 8 left-out conditions an arm" in text and "n = 2 seeds an arm" in text and "seeds 1-2;" in text
    assert "Planned and not done: none" in text
    assert "predictive" not in next(line for line in text.splitlines() if "Experiments not run" in line)
    shown = pd.read_csv(folder / "tables/predictive_study.csv").set_index(["arm", "metric"])
    assert shown.loc[("retained_norm", "error_change_next"), "mean"] == pytest.approx(claim["ours"])
    assert ("base", "error_change_next") not in shown.index and ("base", "error_next") in shown.index
    assert (folder / "figures/predictive.png").stat().st_size > 5000


def test_without_features_the_study_is_not_run(folder):
    (folder / "features.csv").unlink()
    results = load("causal_test", "paper", folder)
    assert len(results.runs) == 16
    verdicts = results.verdicts.set_index("id")["verdict"]
    assert verdicts["predictive.final"] == verdicts["predictive.forest.next"] == "not run"
    assert "Figure `predictive` not run" in report("causal_test", "paper", folder.parents[1]).read_text()
