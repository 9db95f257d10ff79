"""Reports end to end on synthetic rows: what is written, what is named, and what is never replaced."""

import json
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from backrank.analysis import figures, tables
from backrank.analysis.report import ReportError, report
from backrank.config import ROOT

PENALTY = {"ordinary": 0, "backward_r16": 0.06, "backward_r8": 0.08, "backward_r4": 0.2, "factorised_r16": 0.14,
           "factorised_r8": 0.18, "factorised_r4": 0.29}  # fmt: skip
UPDATES = {"full": 0, "projected": 0.6, "update_projected": 0.64, "frozen": 0.62}
ARMS = {
    "byte_heads": (2.25, PENALTY),
    "subword_heads": (5.97, {"ordinary": 0, "backward_r48": 0.06, "factorised_r48": 0.18}),
    "residual_usage": (2.26, {f"{o}_{u}": p for o in ("adamw", "sgd") for u, p in UPDATES.items()}),
    "vocab_expansion": (2.26, {"w32_256": 0, "w32_1024": 0.001, "w32_4096": 0, "w64_256": -0.03, "w64_4096": -0.029}),
}


def synthetic(seeds=range(1, 9), scale="paper", arms=ARMS, steps=5):
    """runs, layers and search tables of a study in which the paper is right, with a common error per seed."""
    rng = np.random.default_rng(0)
    runs, layers, search = [], [], []
    for experiment, (level, penalties) in arms.items():
        common = dict(zip(seeds, rng.normal(0, 0.02, len(seeds)), strict=True))
        for arm, penalty in penalties.items():
            kept = "projected" not in arm and "frozen" not in arm or arm == "adamw_projected"
            for seed in seeds:
                loss = level + penalty + common[seed] + rng.normal(0, 0.01)
                runs.append({
                    "id": f"{experiment[0]}{arm}{seed}", "paper": "causal_test", "experiment": experiment, "arm": arm,
                    "scale": scale, "seed": seed, "stage": "final", "searched": seed == 1, "status": "done",
                    "val_loss": loss, "val_loss_active": loss - 0.001, "lr": 0.01, "params": 2256384,
                    "data": "wikitext2", "data_hash": "abc", "stale": False, "device": "cpu", "threads": 1,
                    "torch": "2", "wall_s": 30.0, "core_s": 30.0, "head/lost": 0.94, "head/null_lost": 0.9354,
                    "head/kept_over_null": 0.93, "rotation/mean_cos": rng.uniform(0.5, 0.6) if kept else 1.0,
                    "rotation/min_cos": rng.uniform(0.02, 0.1) if kept else 1.0})  # fmt: skip
            grid = [0.003, 0.01, 0.02]
            search.append({"experiment": experiment, "arm": arm, "seed": 1, "split": "validation", "key": "optim.lr",
                           "grid": json.dumps(grid), "losses": "[2.4, 2.3, null]", "test_losses": "[2.4, 2.3, null]",
                           "choice": 0.01, "edge": arm == "backward_r4", "extended": 0, "runs": "[]"})  # fmt: skip
    for seed, step, depth in [(s, t, d) for s in seeds for t in range(0, 601, 600 // steps) for d in range(4)]:
        for matrix in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            layers.append({"id": "x", "experiment": "byte_heads", "arm": "ordinary", "seed": seed, "step": step,
                           "layer": f"backbone.h.{depth}.{matrix}.weight", "kind": "weight",
                           "erank": 28 - (4 - depth) * step / 600 + rng.normal(0, 0.05)})  # fmt: skip
    return pd.DataFrame(runs), pd.DataFrame(layers), pd.DataFrame(search)


def write(root, runs, layers=None, search=None, scale="paper"):
    out = root / "causal_test" / scale
    out.mkdir(parents=True, exist_ok=True)
    runs.to_csv(out / "runs.csv", index=False)
    if layers is not None:
        layers.to_parquet(out / "layers.parquet")
        search.to_csv(out / "search.csv", index=False)
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    root = tmp_path_factory.mktemp("results")
    runs, layers, search = synthetic()
    runs.loc[3, "stale"] = True
    out = write(root, runs, layers, search)
    report("causal_test", "paper", root, committed_data={"wikitext2": "zzz"})
    return out


def test_report_names_what_a_reader_must_know(whole):
    text = (whole / "report.md").read_text()
    assert text.startswith("---\npaper: causal_test\nscale: paper\nruns: 184\n---\n")
    assert "184 runs, 1.5 core hours; seeds 1-8; device cpu; torch 2." in text
    assert "wikitext2 (hash abc)" in text
    assert "**Other data**: wikitext2 has hash abc, the committed results have zzz." in text
    assert "older code (stale): byte_heads/ordinary seed 4 (`bordinary4`)" in text
    assert "Failed runs: none" in text
    assert "edge of their grid: byte_heads/backward_r4 optim.lr = 0.01" in text
    assert "not run: byte_bases, spamlang, auxiliary_routes, predictive, predictive_study, width_and_vocab" in text
    assert "0.02: diverged" in text and "This is the largest scale" in text
    assert not list(whole.glob(".report-*"))


def test_every_table_and_figure_says_scale_data_and_n(whole):
    for path in [*whole.glob("tables/*.md")]:
        if "claims_" not in path.name:
            assert "scale paper; data wikitext2; n = 8 seeds an arm; run ids in runs.csv" in path.read_text(), path
        assert path.with_suffix(".csv").exists()
    assert {p.stem for p in whole.glob("figures/*.png")} == {"penalties", "pairs", "residual", "rotation", "ranks"}
    assert len(list(whole.glob("figures/*.svg"))) == 5


def test_claims_csv_and_arms_table(whole):
    claims = pd.read_csv(whole / "claims.csv").set_index("id")
    assert claims.loc["byte.backward_r16.delta", "verdict"] == "reproduced"
    assert claims.loc["byte.pairs_same_sign", ["ours", "n", "ours_paper_n"]].tolist() == [24, 24, 15]
    assert claims.loc["mechanism.rotation.sgd_projected", "verdict"] == "by construction"
    assert claims.loc["routes.adaptive_oja", "verdict"] == "not run"
    assert claims.loc["subword.params", "verdict"] == "reproduced"
    arms = pd.read_csv(whole / "tables/byte_heads_val_loss.csv").set_index("arm")
    runs = pd.read_csv(whole / "runs.csv").query("experiment == 'byte_heads'").pivot(
        index="seed", columns="arm", values="val_loss")  # fmt: skip
    delta = runs["backward_r8"] - runs["ordinary"]
    assert arms.loc["backward_r8", "delta"] == pytest.approx(delta.mean())
    assert arms.loc["backward_r8", "paper_delta"] == pytest.approx(delta[:5].mean())
    assert arms.loc["backward_r8", ["n", "paper_n", "published", "published_delta"]].tolist() == [8, 5, 2.3333, 0.0804]
    assert "w64_256" in pd.read_csv(whole / "tables/vocab_expansion_val_loss.csv")["baseline"].tolist()


def test_an_incomplete_study_at_another_scale(tmp_path):
    runs, *_ = synthetic([1], "laptop", {k: ARMS[k] for k in ("byte_heads", "residual_usage")})
    runs = runs[~((runs["experiment"] == "residual_usage") & runs["arm"].str.startswith("sgd"))]
    runs.loc[1, "status"] = "failed"
    out = write(tmp_path, runs, scale="laptop")
    planned = {"byte_heads": {arm: [1, 2, 3] for arm in PENALTY}}
    text = report("causal_test", "laptop", tmp_path, planned=planned).read_text()
    assert "Failed runs: byte_heads/backward_r16 seed 1" in text
    assert "byte_heads: backward_r16, seeds 1-3" in text
    assert "Figure `penalties` not run: byte_heads/backward_r16 has no val_loss" in text
    assert "Figure `ranks` not run" in text and (out / "figures/residual.png").exists()
    assert "make reproduce-causal-test SCALE=paper" in text and "make plan-causal-test SCALE=cpu" in text
    claims = pd.read_csv(out / "claims.csv").set_index("id")
    assert claims.loc["byte.ordinary", "verdict"] == "needs the paper's scale"
    assert claims.loc["byte.backward_r8.delta", "verdict"] == "underpowered"
    assert "laptop scale" in claims.loc["byte.backward_r8.delta", "note"]
    assert claims.loc["page.residual.delta", "verdict"] == "adds up"


def test_fewer_runs_never_replace_more(tmp_path):
    few = {"byte_heads": (2.25, {"ordinary": 0})}
    out = write(tmp_path, synthetic([1, 2, 3], arms=few)[0])
    before = report("causal_test", "paper", tmp_path).read_text()
    write(tmp_path, synthetic([1, 2], arms=few)[0])
    with pytest.raises(ReportError, match="counts 3 runs and this one only 2.*FORCE=1"):
        report("causal_test", "paper", tmp_path)
    assert (out / "report.md").read_text() == before
    assert "runs: 2" in report("causal_test", "paper", tmp_path, force=True).read_text()
    with pytest.raises(ReportError, match="no run has finished"):
        report("causal_test", "smoke", tmp_path)


def test_a_report_that_fails_leaves_the_old_one(tmp_path):
    runs = synthetic([1, 2], arms={"byte_heads": (2.25, {"ordinary": 0})})[0]
    out = write(tmp_path, runs)
    before = report("causal_test", "paper", tmp_path).read_text()
    write(tmp_path, pd.concat([runs, runs]))
    with pytest.raises(ValueError, match="seed 1, 2 occurs more than once"):
        report("causal_test", "paper", tmp_path)
    assert (out / "report.md").read_text() == before and not list(out.glob(".report-*"))


def test_the_same_rows_give_the_same_files(tmp_path):
    runs = synthetic([1, 2], arms={"residual_usage": ARMS["residual_usage"]})[0]
    out = write(tmp_path, runs)

    def contents():
        report("causal_test", "paper", tmp_path)
        return {p.name: p.read_bytes() for p in out.rglob("*") if p.is_file()}

    assert contents() == contents()


def test_labels_are_spread():
    moved = figures.spread([0.0, 0.01, 0.02, 1.0], 0.1)
    assert np.all(np.diff(moved) >= 0.1 - 1e-12) and moved.mean() == pytest.approx(0.2575)


def test_order_of_arms():
    arms = ["backward_r16", "backward_r4", "backward_r8", "ordinary"]
    assert tables.order(arms, {"": "ordinary"}) == ["ordinary", "backward_r16", "backward_r8", "backward_r4"]
    arms = ["w64_256", "w32_4096", "w32_1024", "w32_256"]
    wanted = ["w32_256", "w32_1024", "w32_4096", "w64_256"]
    assert tables.order(arms, {"w32_": "w32_256", "w64_": "w64_256"}) == wanted
    assert tables.order(["sgd_a", "sgd_full", "adamw_a"], {"adamw_": "adamw_full", "sgd_": "sgd_full"}) == [
        "adamw_a", "sgd_full", "sgd_a"]  # fmt: skip


def test_markdown_escapes_bars():
    assert tables.markdown(pd.DataFrame({"a": ["x|y"]})).splitlines()[2] == "| x\\|y |"


def test_analysis_imports_no_torch():
    code = "import backrank.analysis.report, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
