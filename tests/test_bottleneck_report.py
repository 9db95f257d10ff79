"""What the backward bottleneck's report derives from layer rows, against constructed curves."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from backrank.analysis.figures import Missing
from backrank.analysis.report import _module
from backrank.config import ROOT

paper = _module(ROOT / "experiments/backward_bottleneck/report.py")
STEPS = np.arange(0, 4001, 50)


def curve(start, end, duration):
    return start + (end - start) * np.minimum(1, STEPS / duration)


def results(curves, kind="weight"):
    """{(experiment, arm, seed): {layer: {column: values over STEPS}}} as a report's results."""
    frames = [
        pd.DataFrame({"id": f"{experiment}{arm}{seed}", "experiment": experiment, "arm": arm, "seed": seed,
                      "step": STEPS, "layer": layer, "kind": kind, "part": "block", **columns})
        for (experiment, arm, seed), layers in curves.items() for layer, columns in layers.items()
    ]  # fmt: skip
    return SimpleNamespace(layers=pd.concat(frames, ignore_index=True))


def test_when_a_value_has_fallen():
    values = pd.Series([10.0, 8.0, 2.0, 0.5, 1.0], [0, 10, 20, 40, 80])
    assert paper.falls_at(values, 0.5) == pytest.approx(10 + 10 * 2.5 / 6)  # 5.5, between 8 and 2
    assert paper.falls_at(values, 0.9) == pytest.approx(20 + 20 * 0.1 / 1.5)  # 1.9, the first time
    for stays in ([10.0, 5.0, 9.95], [10.0, 12.0, 14.0], [10.0, np.nan, np.nan]):
        assert np.isnan(paper.falls_at(pd.Series(stays), 0.5))


def test_when_a_value_reaches_a_share():
    values = pd.Series([10.0, 9.0, 5.0, 9.0], [0, 10, 20, 40])
    assert paper.reaches(values, 0.8) == pytest.approx(12.5) and np.isnan(paper.reaches(values, 0.4))


def test_layers_in_the_order_of_the_forward_pass():
    block = ["self_attention.in_proj_weight", "self_attention.out_proj.weight", "mlp.0.weight", "mlp.3.weight"]
    vit = [f"backbone.encoder.layers.encoder_layer_{i}.{leaf}" for i in range(12) for leaf in block] + ["head.weight"]
    resnet = ["backbone.conv1.weight", "backbone.layer1.0.conv1.weight", "backbone.layer2.0.conv1.weight"]
    for order in (vit, resnet):
        assert paper._by_depth(sorted(order)) == order


def test_shapes_compare_each_matrix_with_itself():
    def ends(first, last):
        return np.concatenate([np.full(len(STEPS) - 1, first), [last]])

    rows = {
        "a": {"exponent": ends(5, 3), "ks": ends(0.2, 0.1), "gap": 4.0, "gap_initial": 2.0, "gap_neighbours": 1.0},
        "b": {"exponent": ends(4, None), "ks": ends(0.2, 0.2), "gap": 1.0, "gap_initial": 1.0, "gap_neighbours": 1.0},
    }
    found = paper.shapes(results({("tail_dynamics", "sgd_4", 1): rows}, "shape")).iloc[0]
    assert (found["exponent_change"], found["ks_change"]) == pytest.approx((-2, -0.05))
    assert (found["gap_change"], found["gap_stands_out"]) == pytest.approx((np.log(2) / 2, np.log(4) / 2))


def test_the_last_layers_bound_stands_apart():
    rows = {
        f"h.{i}.mlp": {"tau": 1.0, "uniform": bound, "directional": 3.0} for i, bound in ((2, 2.0), (9, 0.5), (10, 0.9))
    }
    found = paper.bound_kept(results({("tail_dynamics", "sgd_4", 1): rows}, "tail_bound")).iloc[0]
    assert (found["broken_uniform"], found["broken_last_uniform"]) == (0.5, 1.0)
    assert (found["broken_directional"], found["ratio_uniform"]) == (0.0, 1.25)


def test_forgetting_takes_the_least_decay_that_forgets_three_nats():
    budget = {"wd_0": 0.0, "wd_1": 2.9, "wd_3": 3.1, "wd_9": 9.0}
    runs = pd.DataFrame(
        [
            {
                "experiment": "toy_shift",
                "arm": arm,
                "seed": 1,
                "id": arm,
                "forgetting/budget": nats,
                "rank/weight_mean": 50 - nats,
                "rank/weight_mean@0": 50.0,
            }
            for arm, nats in budget.items()
        ]
    )
    table = paper.forgetting(SimpleNamespace(runs=runs)).set_index("arm")
    assert table["id"].to_dict() == {"toy_shift.wd_0": "wd_0", "toy_shift.forgets": "wd_3"}
    assert table.loc["toy_shift.forgets", "compression"] == pytest.approx(6.2)
    with pytest.raises(Missing):
        paper.forgetting(SimpleNamespace(runs=runs.iloc[:0]))


def test_a_slope_needs_three_points():
    assert paper.slope([0, 1, 2, 3], [1, 3, np.nan, 7]) == pytest.approx(2)
    assert np.isnan(paper.slope([0, 1, 2], [1, np.nan, 3]))


def test_layers_that_fall_from_the_output_backward():
    half = {"h.0.mlp": 2000, "h.2.mlp": 1600, "h.10.mlp": 1200, "head.weight": 800}  # by number, not by letter
    falling = {layer: {"erank": curve(60, 20, 2 * time)} for layer, time in half.items()}
    r = results({("tail_dynamics", "sgd_4", seed): falling for seed in (1, 2)})
    table = paper.layers(r)
    assert table["arm"].tolist() == ["tail_dynamics.sgd_4"] * 2 and table["seed"].tolist() == [1, 2]
    assert table["half_time_slope"].tolist() == pytest.approx([-0.3] * 2)  # of 4,000 steps, from input to output
    assert table["kept_slope"].tolist() == pytest.approx([0] * 2, abs=1e-9)
    with pytest.raises(Missing):
        paper.coupling_over_training(r)


def test_couplings_are_products_of_the_mean_and_the_largest():
    ramp = STEPS / 4000
    rows = {"a": {"c_data": 1 + ramp, "uniform": 10.0, "directional": 1.0},
            "b": {"c_data": 3 + ramp, "uniform": 5 + 10 * ramp, "directional": 2 - ramp}}  # fmt: skip
    table = paper.coupling_over_training(results({("toy_shift", "wd_1e-1", 1): rows}, "coupling"))
    found = table.iloc[0]
    assert found["arm"] == "toy_shift.wd_1e-1"
    products = (2 + ramp) * np.maximum(2 - ramp, 1)
    assert found["uniform_most"] == pytest.approx(3 * 15)
    assert (found["directional_least"], found["directional_most"]) == pytest.approx((products.min(), products.max()))


def test_exponents_in_depth():
    r = results({
        ("depth", f"depth_{x}x", seed): {f"h.{i}": {"erank": curve(48, 24 / x, 500 * x)} for i in range(3)}
        for x in (1, 2, 4, 8) for seed in (1, 2)
    })  # fmt: skip
    table = paper.depth_scaling(r)
    lacking = r.layers[r.layers["id"] != "depthdepth_8x2"]  # seed 2 has no slope over other depths than seed 1's
    lacking = paper.depth_scaling(SimpleNamespace(layers=lacking))
    assert lacking[lacking["arm"] == "slopes"]["seed"].tolist() == [1]
    slopes = table[table["arm"] == "slopes"]
    x = np.array([1, 2, 4, 8])
    fifth = 500 * x * 0.2 * 48 / (48 - 24 / x)  # in a line from 48 to 24 / x
    assert slopes["time_exponent"].tolist() == pytest.approx([np.polyfit(np.log(x), np.log(fifth), 1)[0]] * 2)
    assert slopes["factor_exponent"].tolist() == pytest.approx([1, 1])
    assert slopes["id"].iloc[0].split() == [f"depthdepth_{x}x1" for x in (1, 2, 4, 8)]
    runs = table[table["arm"] != "slopes"]
    assert runs["time_20"].tolist() == pytest.approx(np.repeat(fifth, 2))
    assert runs["product"].tolist() == pytest.approx([3 * np.log(2 * x) for x in (1, 1, 2, 2, 4, 4, 8, 8)])
