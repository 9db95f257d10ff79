"""Claims files: each verdict of each kind, at and beside its boundary, and errors that name file and claim."""

import copy
import math

import numpy as np
import pandas as pd
import pytest
import yaml

from backrank.analysis import stats
from backrank.analysis.claims import ClaimError, load_claims
from backrank.analysis.judge import COLUMNS, judge
from backrank.analysis.verdicts import Published, ordering_verdict, value_verdict
from backrank.analysis.verdicts import effect_verdict as effect
from backrank.analysis.verdicts import no_effect_verdict as no_effect
from backrank.config import ROOT

CLAIMS, PUBLISHED = ROOT / "experiments/causal_test/claims.yaml", ROOT / "experiments/published.csv"


def rows(arms, experiment="e", **columns):
    """runs.csv rows from arm -> losses of seeds 1, 2, ..."""
    base = {"experiment": experiment, "stage": "final", "status": "done", "stale": False, "data": "d", "data_hash": "h"}
    return pd.DataFrame([{"id": f"{arm}{seed}", "arm": arm, "seed": seed, "val_loss": loss, **base, **columns}
                         for arm, losses in arms.items() for seed, loss in enumerate(losses, 1)])  # fmt: skip


def one(tmp_path, runs, scale="paper", planned=None, head=None, **claim):
    """Judge a single claim of a file made for it."""
    claim = {"id": "c", "statement": "s", "source": "text", "experiment": "e", **claim}
    raw = {"paper": "p", "experiments": {"e": {"title": "E", "paper_seeds": [1, 2], "setup_note": "other set-up"}}}
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump(raw | (head or {}) | {"claims": [claim]}))
    (tmp_path / "published.csv").write_text(
        "paper,key,what,value,low,high,interval,n,unit,note\n"
        "p,mean,x,2.00,1.90,2.10,se,5,,\np,delta,x,0.10,0.05,0.15,ci95,5,,\np,bare,x,0.10,,,,5,,\np,rounded,x,0.67,,,,,,\n"
    )
    loaded = load_claims(tmp_path / "claims.yaml", tmp_path / "published.csv")
    table = judge(loaded, runs, scale, planned)
    assert list(table) == COLUMNS
    return table.iloc[0]


P = Published(0.10, 0.05, 0.15, "ci95", 5)
BARE = Published(0.10)
NAN = math.nan


@pytest.mark.parametrize(
    "low, high, published, verdict",
    [
        (0.01, 0.05, P, "reproduced"),  # touches the published interval
        (0.15, 0.30, P, "reproduced"),
        (0.01, 0.049, P, "same direction"),
        (0.16, 0.30, P, "same direction"),
        (0.00, 0.20, P, "underpowered"),  # 0 itself is not excluded
        (-0.05, 0.10, P, "underpowered"),
        (-0.05, 0.09, P, "differs"),  # holds 0 and not the published value
        (-0.20, -0.01, P, "differs"),  # the other side
        (NAN, NAN, P, "underpowered"),  # one seed
        (0.05, 0.10, BARE, "reproduced"),  # no published interval: must hold the value
        (0.05, 0.099, BARE, "same direction"),
        (-0.30, -0.01, Published(-0.1), "reproduced"),
    ],
)
def test_difference(low, high, published, verdict):
    assert effect(low, high, 0.0, published) == verdict


@pytest.mark.parametrize(
    "low, high, verdict",
    [(1.1, 3.2, "reproduced"), (1.1, 2.0, "same direction"), (0.9, 3.2, "underpowered"), (0.9, 2.0, "differs"),
     (0.2, 0.9, "differs"), (-math.inf, math.inf, "underpowered")],
)  # fmt: skip
def test_ratio_is_judged_against_one(low, high, verdict):
    assert effect(low, high, 1.0, Published(3.06)) == verdict


@pytest.mark.parametrize(
    "low, high, verdict",
    [(0.2, 0.3, "reproduced"), (-0.3, -0.2, "differs"), (-0.1, 0.3, "underpowered"), (-0.01, 0.01, "differs")],
)
def test_direction_alone(low, high, verdict):
    assert effect(low, high, 0.0, Published(), "above") == verdict


@pytest.mark.parametrize(
    "low, high, margin, verdict",
    [(-0.02, 0.02, 0.02, "reproduced"), (0.01, 0.015, 0.02, "reproduced"), (0.01, 0.021, 0.02, "differs"),
     (-0.01, 0.03, 0.02, "underpowered"), (NAN, NAN, 0.02, "underpowered"), (0.3, 0.5, [-0.02, None], "reproduced"),
     (-0.5, -0.3, [-0.02, None], "differs"), (-0.03, 0.2, [-0.02, None], "underpowered")],
)  # fmt: skip
def test_no_effect(low, high, margin, verdict):
    assert no_effect(low, high, 0.0, margin) == verdict


def test_ordering():
    up, flat, down = stats.estimate([0.1, 0.11]), stats.estimate([0.1, -0.05]), stats.estimate([-0.1, -0.2])
    assert ordering_verdict([up, stats.Estimate(0.2, 0.01, 5)]) == "reproduced"
    assert ordering_verdict([up, flat]) == "same direction"
    assert ordering_verdict([up, down]) == "underpowered"  # two seeds say nothing
    assert ordering_verdict([up, stats.Estimate(-0.2, 0.01, 5)]) == "differs"
    assert ordering_verdict([up, stats.estimate([0.0, 0.0, -1e-17])]) == "differs"  # no step at all
    assert ordering_verdict([stats.estimate([-0.1])]) == "underpowered"
    assert ordering_verdict([stats.estimate([0.1])]) == "same direction"


def test_value():
    published = Published(2.0, 1.9, 2.1, "se", 5)
    assert value_verdict(stats.Estimate(2.2, 0.1, 5), published, None)[0] == "reproduced"
    assert value_verdict(stats.Estimate(2.5, 0.1, 5), published, None)[0] == "differs"
    assert value_verdict(stats.estimate([2.5]), published, None)[0] == "reproduced"  # one more draw, sd 0.22
    assert value_verdict(stats.estimate([3.0]), published, None)[0] == "differs"
    assert value_verdict(stats.estimate([2.05]), Published(2.0), 0.05)[0] == "reproduced"
    assert value_verdict(stats.estimate([2.051]), Published(2.0), 0.05)[0] == "differs"
    inside = Published(low=0.95, high=0.99, interval="range")
    assert value_verdict(stats.estimate([0.99]), inside, None)[0] == "reproduced"
    assert value_verdict(stats.estimate([0.991]), inside, None)[0] == "differs"


LOSSES = {"o": [2.0, 2.2, 1.9, 2.1], "b": [2.1, 2.31, 2.0, 2.19], "f": [2.31, 2.5, 2.2, 2.41]}


def test_value_row_has_both_standard_errors_and_the_papers_seeds(tmp_path):
    row = one(tmp_path, rows(LOSSES), kind="value", arm="o", published_key="mean")
    assert row["verdict"] == "reproduced" and row["n"] == 4 and row["ours"] == pytest.approx(2.05)
    assert row["paper_n"] == 2 and row["ours_paper_n"] == pytest.approx(2.1) and row["paper_n_low"] < 2.1
    assert "ours - published +0.0500 [" in row["note"]
    assert (row["published"], row["published_low"], row["published_interval"]) == (2.0, 1.9, "se")
    assert row["runs"] == "o1 o2 o3 o4" and row["data"] == "d" and row["scale"] == "paper"
    differs = one(tmp_path, rows({"o": [3.0, 3.01]}), kind="value", arm="o", published_key="mean")
    assert differs["verdict"] == "differs" and "set-up: other set-up" in differs["note"]


def test_difference_row(tmp_path):
    row = one(tmp_path, rows(LOSSES), kind="difference", arm="b", minus="o", published_key="delta")
    oracle = stats.estimate(np.subtract(LOSSES["b"], LOSSES["o"]))
    assert (row["ours"], row["low"], row["high"]) == pytest.approx((oracle.mean, oracle.low, oracle.high))
    assert row["verdict"] == "reproduced"
    row = one(tmp_path, rows(LOSSES), kind="difference", arm="b", minus="o", direction="above", drop_seeds=[1])
    assert row["n"] == 3 and "b1" not in row["runs"] and row["paper_n"] == 1
    row = one(tmp_path, rows(LOSSES), kind="difference", arm="o", minus=2.5, direction="below")
    assert row["verdict"] == "reproduced" and row["ours"] == pytest.approx(2.05)  # the arm, not what it is below 2.5
    assert row["high"] < 2.5
    row = one(tmp_path, rows(LOSSES), kind="no_effect", arm="o", minus=2.0, margin=0.5, published={"value": 0.5})
    assert row["published"] == 2.5 and row["verdict"] == "reproduced"


def test_each_side_of_a_contrast_may_have_a_baseline_of_its_own(tmp_path):
    arms = {"arm": "f", "baseline": "o", "other_baseline": "x"}
    runs = rows(LOSSES | {"x": [2.0, 2.2, 1.95, 2.0]})
    own, other = (np.subtract(LOSSES[a], b) for a, b in (("f", LOSSES["o"]), ("b", [2.0, 2.2, 1.95, 2.0])))
    row, oracle = (
        one(tmp_path, runs, kind="difference", minus="b", direction="above", **arms),
        stats.estimate(own - other),
    )
    assert (row["ours"], row["low"], row["high"]) == pytest.approx((oracle.mean, oracle.low, oracle.high))
    assert "x1" in row["runs"] and row["verdict"] == "reproduced"
    ratio = one(tmp_path, runs, kind="ratio", over="b", direction="above", **arms)
    assert ratio["ours"] == pytest.approx(own.mean() / other.mean())


def test_ratio_row(tmp_path):
    row = one(tmp_path, rows(LOSSES), kind="ratio", arm="f", over="b", baseline="o", published={"value": "3.06"})
    assert row["ours"] == pytest.approx(3.05) and row["low"] < 3.05 < row["high"] and row["verdict"] == "reproduced"


def test_no_effect_ordering_and_statistics_rows(tmp_path):
    runs = rows(LOSSES)
    assert one(tmp_path, runs, kind="no_effect", arm="b", minus="o")["verdict"] == "differs"
    assert one(tmp_path, runs, kind="no_effect", arm="b", minus="o", margin=0.2)["verdict"] == "reproduced"
    same = one(tmp_path, runs, kind="no_effect", arm="f", over="f", baseline="o")
    assert same["verdict"] == "reproduced" and same["ours"] == pytest.approx(1)
    assert one(tmp_path, runs, kind="ordering", arms=["o", "b", "f"])["verdict"] == "reproduced"
    assert one(tmp_path, runs, kind="ordering", arms=["f", "o"])["verdict"] == "differs"
    four = {"kind": "ordering", "arms": ["o", "x", "b", "f"]}  # a scale that plans three of them orders these
    planned = {"e": {arm: [1, 2, 3] for arm in ("o", "b", "f")}}
    ordered = one(tmp_path, runs, planned=planned, **four)
    assert ordered["verdict"] == "reproduced" and "here of o, b, f" in ordered["note"]
    assert one(tmp_path, runs, **four)["verdict"] == "reproduced"
    # an arm that is planned and lacks is no smaller scale
    assert one(tmp_path, runs, planned={"e": planned["e"] | {"x": [1]}}, **four)["verdict"] == "not run"
    d_z = {"kind": "value", "arm": "b", "minus": "o", "stat": "d_z"}
    assert one(tmp_path, runs, tolerance="sampling", published={"value": 9, "n": 5}, **d_z)["verdict"] == "reproduced"
    assert one(tmp_path, runs, tolerance=0.5, published={"value": 9, "n": 5}, **d_z)["verdict"] == "differs"
    sd = one(tmp_path, runs, kind="value", arm="o", stat="sd", tolerance="sampling", published={"value": 2, "n": 5})
    assert sd["verdict"] == "differs" and sd["ours"] == pytest.approx(np.std(LOSSES["o"], ddof=1))


def test_bounds_over_runs(tmp_path):
    runs = rows(LOSSES, lost=0.9)
    row = one(tmp_path, runs, kind="bound", pairs=[["o", "b"], ["b", "f"]])
    assert (row["verdict"], row["ours"], row["n"], row["ours_paper_n"]) == ("kept", 8, 8, 4)
    runs.loc[0, "val_loss"] = 2.1001
    row = one(tmp_path, runs, kind="bound", pairs=[["o", "b"]])
    assert row["verdict"] == "broken" and "3 of 4 cases kept" in row["note"]
    row = one(tmp_path, runs, kind="bound", arm=["o", "b"], measured="lost", bound=1, vacuous="a share is at most 1")
    assert row["verdict"] == "kept" and row["n"] == 8 and "tests nothing" in row["note"]


def page(tmp_path, **claim):
    return one(tmp_path, rows(LOSSES), scale="laptop", experiment=None, **claim)


def test_calculation_at_the_printed_digits(tmp_path):
    add = {"kind": "calculation", "inputs": {"a": 2, "b": 3}, "expression": "a / b"}
    assert page(tmp_path, equals="rounded", **add)["verdict"] == "adds up"
    assert page(tmp_path, equals="0.66", **add)["verdict"] == "does not add up"
    assert page(tmp_path, equals="0.667", **add)["verdict"] == "adds up"
    assert page(tmp_path, equals=0.667, **add)["verdict"] == "does not add up"  # a plain number is exact
    # 0.10 stands for 0.095 to 0.105, so that 0.21 may be twice what was printed, and 0.22 not.
    twice = {"kind": "calculation", "inputs": {"a": "delta"}, "expression": "2 * a"}
    row = page(tmp_path, equals="0.21", **twice)
    assert row["verdict"] == "adds up" and row["scale"] == "page"
    assert (row["low"], row["high"]) == pytest.approx((0.19, 0.21))
    assert page(tmp_path, equals="0.22", **twice)["verdict"] == "does not add up"


def test_contradiction_and_published_bound(tmp_path):
    ratio = {"kind": "contradiction", "inputs": {"x": ["delta", "delta:high"]}, "expression": "x"}
    row = page(tmp_path, stated=[0.2, 0.4], **ratio)
    assert row["verdict"] == "contradiction" and "0.1, 0.15 against 0.2 to 0.4: 2 of 2 outside" in row["note"]
    assert page(tmp_path, stated=["delta:low", "delta:high"], **ratio)["verdict"] == "consistent"
    bound = {"kind": "bound", "inputs": {"x": ["delta", "mean"], "n": "delta:n"}, "measured": "x * n"}
    assert page(tmp_path, bound="n", **bound)["verdict"] == "broken"
    assert page(tmp_path, bound="20 * x", **bound)["verdict"] == "kept"


def test_not_run_and_other_scales(tmp_path):
    delta = {"kind": "difference", "arm": "b", "minus": "o", "published_key": "delta"}
    assert one(tmp_path, rows({"x": [1.0]}), **delta)["verdict"] == "not run"
    row = one(tmp_path, rows({"b": [1.0]}), **delta)
    assert row["verdict"] == "not run" and "no runs of o" in row["note"]
    assert one(tmp_path, rows(LOSSES), metric="head/lost", **delta)["verdict"] == "not run"
    row = one(tmp_path, rows(LOSSES), scale="laptop", **delta)
    assert row["verdict"] == "reproduced" and "judged at the laptop scale (d), not the paper's" in row["note"]
    value = {"kind": "value", "arm": "o", "published_key": "mean"}
    row = one(tmp_path, rows(LOSSES), scale="laptop", **value)
    assert row["verdict"] == "needs the paper's scale" and pd.isna(row["ours"])
    assert one(tmp_path, rows(LOSSES), scale="laptop", scales="any", **value)["verdict"] == "reproduced"
    runs = rows(LOSSES)
    runs["stage"] = "search"
    assert one(tmp_path, runs, **delta)["verdict"] == "not run"


def test_seeds_are_never_dropped_silently(tmp_path):
    runs = rows({**LOSSES, "b": LOSSES["b"][:3]})
    delta = {"kind": "difference", "arm": "b", "minus": "o", "published_key": "delta"}
    with pytest.raises(ClaimError, match=r"claims.yaml: claim c: arm b: seed 4 is missing"):
        one(tmp_path, runs, **delta)
    row = one(tmp_path, runs, complete=False, **delta)
    assert row["n"] == 3 and "3 of 4 planned seeds" in row["note"]
    planned = {"e": {"o": list(range(1, 21)), "b": list(range(1, 21))}}
    assert "3 of 20 planned seeds" in one(tmp_path, runs, planned=planned, complete=False, **delta)["note"]
    runs.loc[1, "val_loss"] = math.inf
    row = one(tmp_path, runs, complete=False, **delta)
    assert row["n"] == 2 and "o: no finite val_loss at seed 2" in row["note"]
    failed = rows(LOSSES)
    failed.loc[3, "status"] = "failed"
    assert "3 of 4 planned seeds" in one(tmp_path, failed, complete=False, **delta)["note"]
    with pytest.raises(ClaimError, match="claim c: arm o: seed 1 occurs more than once"):
        one(tmp_path, pd.concat([failed, failed.head(1)]), complete=False, **delta)
    failed.loc[4, "data_hash"] = "other"
    with pytest.raises(ClaimError, match="arms on different data"):
        one(tmp_path, failed, complete=False, **delta)
    stale = rows(LOSSES)
    stale.loc[0, "stale"] = True
    assert "1 runs of older code" in one(tmp_path, stale, **delta)["note"]


GOOD = {"id": "c", "statement": "s", "source": "t", "kind": "difference", "experiment": "e", "arm": "a", "minus": "b",
        "direction": "above"}  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        ({"kind": "guess"}, "unknown kind guess"),
        ({"minus": None}, "field minus is missing for kind difference"),
        ({"direction": None}, "field published_key or published or direction is missing"),
        ({"statement": None}, "field statement is missing"),
        ({"published_key": "nowhere"}, "published_key nowhere is not in published.csv"),
        ({"published": {"value": 0}}, "the kind is no_effect"),
        ({"colour": 1}, "unknown field colour"),
        ({"experiment": "other"}, "experiment other is not listed"),
        ({"direction": "left"}, "direction must be"),
        ({"kind": "value", "published_key": "bare"}, "field tolerance is missing"),
        ({"kind": "calculation", "inputs": {"a": "delta:"}, "expression": "a", "equals": "x"}, "neither a number nor"),
        ({"kind": "calculation", "inputs": {"a": "bare:low"}, "expression": "a", "equals": 1}, "neither a number nor"),
    ],
)
def test_errors_name_file_claim_and_problem(tmp_path, change, message):
    claim = {k: v for k, v in (copy.deepcopy(GOOD) | change).items() if v is not None}
    claim.setdefault("statement", "")
    with pytest.raises(ClaimError, match=rf"claims.yaml: claim c: .*{message}"):
        one(tmp_path, rows(LOSSES), **claim)


def test_causal_test_covers_every_published_number():
    claims = load_claims(CLAIMS, PUBLISHED)
    assert {c.published_key for c in claims.claims} >= set(claims.published)
    assert len({c.id for c in claims.claims}) == len(claims.claims)
    assert all("{" not in c.id + c.statement for c in claims.claims)


def test_causal_test_own_arithmetic():
    """What the page's own figures say, before any run: all of it adds up but for three statements."""
    claims = load_claims(CLAIMS, PUBLISHED)
    table = judge(claims, rows({"x": [1.0]}), "paper").set_index("id")["verdict"]
    assert set(table[table.index.str.startswith("page.")]) == {"adds up", "kept", "contradiction"}
    assert set(table[table == "contradiction"].index) == {
        "ratio.nearly_three", "page.backward_interval_without_seed1", "spamlang.learned_perfectly"}  # fmt: skip
    assert not (table == "does not add up").any() and table["spamlang.coverage"] == "kept"


def test_causal_test_arms_are_those_of_the_configs():
    """A claim on a misspelt arm would stay `not run` for ever."""
    claims = load_claims(CLAIMS, PUBLISHED)
    for experiment in claims.experiments:
        path = ROOT / f"configs/experiment/causal_test/{experiment}.yaml"
        if path.exists():
            arms = set(yaml.safe_load(path.read_text())["plan"]["arms"])
            asked = {arm for c in claims.claims if c.experiment == experiment for arm in c.names}
            assert asked - arms <= {"backward_r32"}, experiment
