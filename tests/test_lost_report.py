"""What the report of lost_in_backprop derives: tokens to a loss, scaling laws, rates that converge."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from backrank.analysis.figures import Missing
from backrank.analysis.report import _module
from backrank.config import ROOT

REPORT = _module(ROOT / "experiments/lost_in_backprop/report.py")


def results(runs, curves=()):
    frame = pd.DataFrame(runs)

    def values(experiment, arm, metric="val_loss"):
        rows = frame[(frame["experiment"] == experiment) & (frame["arm"] == arm)].set_index("seed")
        if rows.empty:
            raise Missing(arm)
        return rows[metric]

    return SimpleNamespace(runs=frame, table=frame, curves=pd.DataFrame(curves), values=values)


def test_tokens_to_a_loss_are_read_between_the_points():
    rows = pd.DataFrame({"tokens": [0, 100, 200, 300], "loss": [8.0, 6.0, 5.0, 5.5]})
    assert [REPORT.tokens_to(rows, loss) for loss in (9.0, 7.0, 6.0, 5.25, 5.0)] == [0, 50, 100, 175, 200]
    assert np.isinf(REPORT.tokens_to(rows, 4.9))  # a speed-up of nothing, rather than a seed left out


def test_the_speedup_is_the_whole_training_over_the_tokens_to_the_other_s_final_loss():
    """Losses 8 - share * step / 100: a head with twice the slope needs half the tokens."""
    slopes = {"full": 4.0, "narrow_2": 3.0, "narrow_32": 1.0, "dense": 5.0, "backward_32": 2.5}
    runs = [{"experiment": "head_sweep", "arm": arm, "seed": seed, "id": f"{arm}{seed}", "step_tokens": 64,
             "val_loss": 8 - slope} for arm, slope in slopes.items() for seed in (1, 2)]  # fmt: skip
    curves = [{"experiment": "head_sweep", "arm": r["arm"], "seed": r["seed"], "id": r["id"], "step": step,
               "loss": 8 - slopes[r["arm"]] * step / 100} for r in runs for step in range(0, 101, 10)]  # fmt: skip
    found = REPORT.sweep_tokens(results(runs, curves)).set_index(["arm", "seed"])
    assert len(found) == 10
    for arm, slope in slopes.items():
        assert found.loc[(arm, 2), "speedup"] == pytest.approx(slope)
        assert found.loc[(arm, 2), "tokens"] == pytest.approx(6400 / slope)
        whole = slopes["dense" if arm in ("dense", "backward_32") else "full"]
        assert found.loc[(arm, 2), "whole_speedup"] == pytest.approx(whole / slope)
    assert set(found.loc[("full", 1), "id"].split()) == {"full1", "narrow_321"}


@pytest.mark.parametrize("depends", [True, False])
def test_a_law_with_d_predicts_better_only_where_the_loss_depends_on_it(depends):
    rng = np.random.default_rng(0)
    runs = []
    for width in (32, 64, 128):
        for d in (4, 8, 16, 32):
            for steps in (100, 200, 400):
                params = 12.0 * 4 * width**2 + 1024 * width + d * (1024 + width)
                loss = 2 + 40 * params**-0.3 + 30 * (steps * 512) ** -0.35 + (2.0 * d**-0.6 if depends else 0)
                runs.append({"experiment": "scaling", "arm": f"w{width}_d{d}_{steps}", "seed": 1, "id": "x",
                             "steps": steps, "step_tokens": 512, "params": params,
                             "val_loss": loss + 0.003 * rng.standard_normal()})  # fmt: skip
    found = REPORT.scaling(results(runs)).iloc[0]
    if depends:
        assert found["error_with_d"] < 0.02 < 0.1 < found["error_without_d"]
        assert found["error_width_and_d"] < 0.05 < 0.1 < found["error_width"]
    else:
        assert found["error_without_d"] < 0.02 and found["error_with_d"] > 0.8 * found["error_without_d"]


def test_rates_converge_at_99_percent_of_what_was_drawn():
    runs = [{"experiment": "spamlang", "arm": "v_131072", "seed": 1, "searched": True, "id": f"r{i}", "lr": 10.0**-i,
             "val_accuracy": accuracy, "data/coverage": 0.9, "data/unique": 90} for i, accuracy in
            enumerate((0.895, 0.88, np.nan))]  # fmt: skip
    runs.append({**runs[0], "seed": 2, "searched": False})
    found = REPORT.rates(results(runs)).iloc[0]
    assert (found["converged"], found["tried"], found["best_accuracy"]) == (1, 3, 0.895)
