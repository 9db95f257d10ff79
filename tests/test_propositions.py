"""lost_in_backprop: each function of its theory against an oracle, its study, and its claims file."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
import torch.nn.functional as F
import yaml

from backrank.analysis.claims import load_claims
from backrank.analysis.judge import judge
from backrank.analysis.report import _module
from backrank.compose import compose
from backrank.config import ROOT
from backrank.head import head_gradient_stats
from backrank.studies import propositions as study
from backrank.theory import propositions as p

REPORT = _module(ROOT / "experiments/lost_in_backprop/report.py")
CLAIMS = load_claims(ROOT / "experiments/lost_in_backprop/claims.yaml", ROOT / "experiments/published.csv")


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


# Top-1 with two dimensions


@pytest.mark.parametrize("vocab", [3, 17, 1000])
def test_two_dimensions_express_every_class(vocab):
    share, margin = p.top1(*p.circle(vocab), rows=64)
    assert share == 1 and margin == pytest.approx(1 - math.cos(2 * math.pi / vocab), rel=1e-6)
    assert p.top1(*p.parabola(vocab), rows=64) == (1, 0.5)


def test_top1_counts_what_fails():
    W = torch.tensor([[1.0, 0], [2.0, 0], [0, 1.0]])  # class 0 lies behind class 1
    assert p.top1(W, W) == (pytest.approx(2 / 3), -1)
    assert p.top1(torch.ones(4, 2), torch.ones(4, 2)) == (0, 0)  # a tie is no top-1
    for construct in (p.circle, p.parabola):
        with pytest.raises(ValueError, match="at least 3"):
            construct(2)
    with pytest.raises(ValueError, match="one state per class"):
        p.top1(W, W[:2])


def test_reachable_classes_are_those_that_some_direction_finds():
    W = normal(300, 2)
    angle = torch.linspace(0, 2 * math.pi, 20_000, dtype=torch.float64)
    found = (torch.stack([angle.cos(), angle.sin()], 1) @ W.T).argmax(1).unique()
    assert p.reachable_share(W) == pytest.approx(len(found) / 300)
    assert p.reachable_share(p.circle(50)[0]) == 1
    assert p.reachable_share(torch.tensor([[1.0, 1], [1, -1], [-1, 1], [-1, -1], [0, 0]])) == 4 / 5
    with pytest.raises(ValueError, match="two dimensions"):
        p.reachable_share(normal(9, 3))


# Updates


@pytest.mark.parametrize("seed", range(3))
def test_the_first_order_update_is_the_derivative_and_has_rank_2d(seed):
    (H, W), dH, dW = p.draw_states(12, 15, 3, generator(seed)), normal(12, 3, seed=9), normal(15, 3, seed=8)
    expected = ((H + dH) @ (W + dW).T - (H - dH) @ (W - dW).T) / 2  # exact: the second order is even
    torch.testing.assert_close(p.first_order_update(H, W, dH, dW), expected)
    whole = p.whole_update(H, W, dH, dW)
    torch.testing.assert_close(whole, (H + dH) @ (W + dW).T - H @ W.T)
    assert p.rank(expected) == p.rank(whole) == 6
    assert p.rank(p.first_order_update(H, W, 0 * dH, dW)) == 3
    with pytest.raises(ValueError, match="at least 1"):
        p.draw_states(3, 4, 0, generator())


def test_what_updates_leave_of_a_gradient():
    H, W = p.draw_states(9, 11, 2, generator(1))
    G = p.logit_gradient(H @ W.T, torch.arange(9))
    left = p.residuals(G, H, W)
    s = torch.linalg.svdvals(G).square()
    assert (left.energy, left.tail_d) == (pytest.approx(float(s.sum())), pytest.approx(float(s[2:].sum())))
    assert left.energy > left.step > left.given > left.best == pytest.approx(left.tail_2d)
    assert left.best < left.tail_d  # the summary's index fails
    # the best dH, dW by plain least squares
    units = torch.eye(40, dtype=torch.float64)
    A = torch.stack([p.first_order_update(H, W, e[:18].view(9, 2), e[18:].view(11, 2)).flatten() for e in units], 1)
    found = torch.linalg.lstsq(A, G.flatten(), driver="gelsd").solution
    assert left.given == pytest.approx(float((A @ found - G.flatten()).square().sum()))
    step = -p.first_order_update(H, W, -G @ W, -G.T @ H)
    lengths = torch.linspace(0, 2, 2001, dtype=torch.float64) * (step * G).sum() / step.square().sum()
    assert left.step == pytest.approx(min(float((G - x * step).square().sum()) for x in lengths))
    # a head that could be chosen reaches the floor, and none of many others is under it
    U, _, Vh = torch.linalg.svd(G)
    assert p.residuals(G, U[:, :2], Vh[2:4].T).given == pytest.approx(left.tail_2d)
    others = [p.residuals(G, *p.draw_states(9, 11, 2, generator(seed))).given for seed in range(20)]
    assert min(others) > left.tail_2d
    with pytest.raises(ValueError, match="do not fit"):
        p.residuals(G.T, H, W)


def test_the_gradient_is_autograds():
    Z, targets = normal(5, 7).requires_grad_(), torch.tensor([0, 6, 6, 2, 3])
    (expected,) = torch.autograd.grad(F.cross_entropy(Z, targets, reduction="sum"), Z)
    torch.testing.assert_close(p.logit_gradient(Z.detach(), targets), expected)


# Other heads


@pytest.mark.parametrize("kind", ["linear", "sigsoftmax", "mixture", "mlp"])
def test_a_head_has_a_jacobian_of_rank_d(kind):
    head, H, targets = p.draw_head(kind, 14, 3, generator()), normal(20, 3), torch.arange(20) % 14
    found = p.head_ranks(head, H, targets)
    assert found.jacobian == found.hidden == 3
    assert found.logits == 3 if kind == "linear" else found.logits > 3
    leaf = H.clone().requires_grad_()
    outputs = torch.stack([head(h) for h in leaf])
    (dH,) = torch.autograd.grad(F.cross_entropy(outputs, targets, reduction="sum"), leaf)
    J = torch.stack([torch.autograd.functional.jacobian(head, h) for h in H])
    G = p.logit_gradient(outputs.detach(), targets)
    torch.testing.assert_close(torch.einsum("nv,nvd->nd", G, J), dH)
    inside = torch.stack([Q @ (Q.T @ g) for Q, g in zip(torch.linalg.qr(J).Q, G, strict=True)])
    assert found.lost == pytest.approx(float((G - inside).norm() / G.norm()))
    if kind == "linear":
        assert found.lost == pytest.approx(p.passed(G, J[0]).lost)
    if kind == "mixture":
        torch.testing.assert_close(outputs.exp().sum(1), torch.ones(20).double())


def test_sigsoftmax_is_the_one_of_its_paper():
    linear, head = (p.draw_head(kind, 14, 3, generator()) for kind in ("linear", "sigsoftmax"))
    h = normal(3)
    torch.testing.assert_close(head(h).exp(), linear(h).exp() * linear(h).sigmoid())
    with pytest.raises(ValueError, match="'moe' is not known"):
        p.draw_head("moe", 14, 3, generator())


# The rank of a batch


def test_ranks_and_counts_of_a_batch():
    H, W = p.draw_states(6, 12, 2, generator())
    found = p.batch_rank(H, W, torch.tensor([0, 0, 3, 4, 5, 5]))
    assert (found.unique, found.tokens, found.rank) == (2, 4, 6)
    same = p.batch_rank(H[:1].expand(6, 2), W, torch.tensor([0, 0, 3, 4, 5, 5]))
    assert (same.unique, same.rank) == (2, 4)  # one context: its different next tokens are all there is
    s = torch.linalg.svdvals(p.logit_gradient(H @ W.T, torch.arange(6)))
    by_hand = next(k for k in range(1, 7) if s[:k].norm() >= 0.8 * s.norm())
    assert p.batch_rank(H, W, torch.arange(6), share=0.8).components == by_hand
    assert p.batch_rank(*p.draw_states(12, 12, 2, generator()), torch.arange(12)).rank == 11  # rows sum to zero


@pytest.mark.parametrize("kind", ["distinct", "repeated", "zipf"])
@pytest.mark.parametrize("spread", [0.01, 1.0, 30.0])
def test_contexts_with_their_own_next_token_bound_the_rank(kind, spread):
    for seed in range(3):
        H, W = p.draw_states(40, 64, 3, generator(seed), spread)
        found = p.batch_rank(H, W, p.draw_next(kind, 40, 64, generator(seed)))
        assert found.unique <= found.rank <= 40 and found.unique <= found.tokens


def test_next_tokens_as_they_are_asked_for():
    assert len(p.draw_next("distinct", 30, 32, generator()).unique()) == 30
    assert p.draw_next("repeated", 500, 64, generator()).unique().tolist() == list(range(8))
    counts = torch.bincount(p.draw_next("zipf", 20_000, 8, generator()), minlength=8)
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.15)
    with pytest.raises(ValueError, match="no distinct"):
        p.draw_next("distinct", 33, 32, generator())
    with pytest.raises(ValueError, match="'even' are not known"):
        p.draw_next("even", 3, 32, generator())


# The null model


def test_what_is_lost_of_a_gradient():
    W = torch.eye(5, 2, dtype=torch.float64) @ normal(2, 2)
    G = torch.tensor([[3.0, 0, 4, 0, 0]], dtype=torch.float64)
    assert p.passed(G, W) == pytest.approx((0.8, 0.6))
    assert p.passed(G[:, [0, 1, 3, 4, 3]], W) == pytest.approx((0, 1), abs=1e-7)
    assert p.passed(G[:, [1, 1, 0, 2, 1]], W) == pytest.approx((1, 0), abs=1e-7)
    with pytest.raises(ValueError, match="zero gradient"):
        p.passed(0 * G, W)


def test_both_ways_to_measure_and_the_identity():
    H, W = p.draw_states(50, 40, 6, generator())
    targets = torch.arange(50) % 40
    lost, cosine = p.passed(p.logit_gradient(H @ W.T, targets), W)
    stats = head_gradient_stats(H, W, targets)
    assert (stats["lost"], stats["cosine"]) == pytest.approx((lost, cosine), abs=1e-12)
    assert cosine == pytest.approx(p.cosine_of(lost), abs=1e-12)
    assert stats["kept_over_null"] == pytest.approx(p.kept_over_null(lost, 6, 40))
    assert (stats["null_lost"], stats["null_cosine"]) == pytest.approx((p.null_lost(6, 40), p.null_cosine(6, 40)))


def test_an_isotropic_gradient_loses_the_null():
    lost, cosine = p.passed(normal(2000, 64), normal(64, 16, seed=1))
    assert (lost, cosine) == pytest.approx((p.null_lost(16, 64), p.null_cosine(16, 64)), rel=0.01)


def test_nulls_of_the_pretrained_models():
    found = {name: (round(p.null_lost(*x), 4), round(p.null_cosine(*x), 3)) for name, x in p.MODELS.items()}
    assert found == {
        "gpt2": (0.9923, 0.124), "pythia_1b": (0.9794, 0.202), "llama32_1b": (0.9920, 0.126),
        "olmo2_1b": (0.9897, 0.143), "qwen3_06b": (0.9966, 0.082), "smollm2_135m": (0.9941, 0.108),
    }  # fmt: skip
    kept = [p.kept_over_null(lost, *p.MODELS["olmo2_1b"]) for lost in (0.9890, 0.9905)]
    assert kept == pytest.approx([1.07, 0.93], abs=0.005)
    assert [p.cosine_of(x) for x in (0.95, 0.99)] == pytest.approx([0.312, 0.141], abs=0.0005)


@pytest.mark.parametrize("width", [0, 65])
def test_a_null_needs_a_width_of_at_most_the_classes(width):
    for function in (p.null_lost, p.null_cosine, lambda d, v: p.kept_over_null(0.9, d, v)):
        with pytest.raises(ValueError, match="1..64"):
            function(width, 64)


@pytest.mark.parametrize("lost", [-0.1, 1.1, math.nan])
def test_a_lost_fraction_is_a_share(lost):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        p.cosine_of(lost)


# Arithmetic


def test_parameters_are_those_of_the_matrices():
    width, ffn, kv, vocab, head_rank = 8, 20, 4, 30, 3
    layer = [(width, width)] * 2 + [(kv, width)] * 2 + [(ffn, width)] * 2 + [(width, ffn)] + [(width,)] * 2
    blocks = sum(math.prod(shape) for shape in 5 * layer + [(width,)])
    assert p.llama_parameters(5, width, ffn, kv) == blocks
    assert p.llama_parameters(5, width, ffn, kv, vocab) == blocks + 2 * vocab * width
    narrow = p.llama_parameters(5, width, ffn, kv, vocab, head_rank)
    assert narrow == blocks + vocab * width + vocab * head_rank + head_rank * width
    assert [round(p.sweep_parameters(rank) / 1e9, 3) for rank in (32, 4096)] == [1.814, 2.030]
    assert round(p.llama_parameters(30, 576, 1536, 192) / 1e6, 1) == 106.2


def test_draws_and_coverage():
    draws = [p.draws_per_symbol(128 * 5000, 1024 * k) for k in (128, 64, 32, 16, 8)]
    assert draws == pytest.approx([4.88, 9.77, 19.5, 39.1, 78.1], rel=2e-3)
    seen = torch.randint(1000, (2000,), generator=generator()).unique()
    assert p.coverage(2.0) == pytest.approx(len(seen) / 1000, abs=0.02)
    assert (p.coverage(0), p.coverage(math.inf)) == (0, 1)


# The study and the claims


@pytest.fixture(scope="module")
def verdicts():
    """Every claim, judged on one draw of the study."""
    metrics = study.run(SimpleNamespace(seed=1), None, None).metrics
    assert all(math.isfinite(value) for value in metrics.values())
    row = {"id": "a", "experiment": "propositions", "arm": "drawn", "seed": 1, "stage": "final", "status": "done",
           "stale": False, "data": "d", "data_hash": "h"}  # fmt: skip
    groups = {}  # a table with the columns they name: pandas goes through all columns at each expression
    for claim in CLAIMS.claims:
        text = " ".join(str(x) for x in (claim.metric, claim.measured, claim.bound))
        named = re.findall("`([^`]+)`", text) if claim.experiment == "propositions" else []
        claims, columns = groups.setdefault(named[0].split("/")[0] if named else "", ([], set()))
        claims.append(claim)
        columns |= set(named)
    tables = [
        judge(replace(CLAIMS, claims=claims), pd.DataFrame([row | {name: metrics[name] for name in columns}]), "laptop")
        for claims, columns in groups.values()
    ]
    return pd.concat(table.astype(object) for table in tables).set_index("id")


def test_a_seed_is_a_draw():
    assert study.updates(generator(3)) == study.updates(generator(3)) != study.updates(generator(4))


def test_every_published_number_has_a_claim():
    assert {c.published_key for c in CLAIMS.claims} >= set(CLAIMS.published)
    assert all("{" not in c.id + c.statement for c in CLAIMS.claims)
    assert set(yaml.safe_load(CLAIMS.path.read_text())["headline"]) <= {c.id for c in CLAIMS.claims}


def test_every_claim_on_a_proposition_finds_its_metric(verdicts):
    mine = verdicts[verdicts["experiment"] == "propositions"]
    assert not mine["verdict"].eq("not run").any()
    kept = mine[mine["kind"] == "bound"]["verdict"]
    assert set(kept[kept == "broken"].index) == set(kept.filter(like="residual.summary_index").index)
    assert len(kept) > 40


def test_the_pages_own_numbers(verdicts):
    page = verdicts[verdicts["scale"] == "page"]["verdict"]
    assert set(page[page == "contradiction"].index) == {
        "sweep.summary_widths", "sweep.summary_reference", "downstream.summary_gap", "cosine.narrow_range",
        "null.range", "rank.close_to_v"}  # fmt: skip
    assert set(page[page == "consistent"].index) == {"cosine.range.identity", "null.olmo2_1b.holds"}
    assert set(page[page == "does not add up"].index) == {"sweep.summary_speedup"}
    assert set(page) == {"contradiction", "consistent", "does not add up", "adds up", "kept"}


def test_claims_ask_for_arms_that_are_built(verdicts):
    readme = (ROOT / "experiments/lost_in_backprop/README.md").read_text()
    derived = set(REPORT.DERIVED)
    for experiment in CLAIMS.experiments:
        assert f"`{experiment}`" in readme
        if experiment not in derived:
            asked = {arm for c in CLAIMS.claims if c.experiment == experiment for arm in c.names}
            plan = compose([f"experiment=lost_in_backprop/{experiment}", "scale=paper"]).plan
            assert asked <= set(plan.arms), experiment
