import math

import numpy as np
import pytest
import torch

from backrank import spectra
from backrank.theory import bounds, spaces, tails
from backrank.theory.forgetting import forgetting

DEPTHS = [1, 2, 4, 8, 12, 24, 48]
# backward_bottleneck's own table: initial and final mean r_eff, r_out; compression in %, final r_eff / r_out.
PAGE = {
    "toy": (113.0, 68.7, 10.2, 39, 6.7),
    "resnet18": (188.9, 82.9, 2.4, 56.1, 34.5),
    "vit_s": (304.3, 60.8, 24.6, 80.0, 2.5),
    "gpt2_small": (617.7, 230.2, 282.7, 62.7, 0.81),
}
# The counted matrices of each run, as (shape, how many).
COUNTED = {
    "toy": [((512, 128), 1), ((128, 512), 1)],
    "resnet18": [
        ((64, 27), 1), ((64, 576), 4), ((128, 576), 1), ((128, 1152), 3), ((128, 64), 1), ((256, 1152), 1),
        ((256, 2304), 3), ((256, 128), 1), ((512, 2304), 1), ((512, 4608), 3), ((512, 256), 1), ((10, 512), 1),
    ],
    "vit_s": [((1152, 384), 12), ((384, 384), 12), ((1536, 384), 12), ((384, 1536), 12), ((100, 384), 1)],
    "gpt2_small": [((768, 2304), 12), ((768, 768), 12), ((768, 3072), 12), ((3072, 768), 12)],
}  # fmt: skip


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def cosine(peak, steps):
    return peak * 0.5 * (1 + np.cos(np.pi * np.arange(steps) / steps))


def stepped(M, tau, steps):
    """tau(0) ... tau(steps) by plain multiplication."""
    rows = [np.asarray(tau, dtype=float)]
    for _ in range(steps):
        rows.append(M @ rows[-1])
    return np.stack(rows)


def test_the_recursion_matrix_is_the_papers():
    assert tails.recursion_matrix(0.1, [9, 2, 3]).tolist() == [[0.9, 2, 3], [0, 0.9, 3], [0, 0, 0.9]]
    assert np.array_equal(tails.recursion_matrix(0.1, 2.0, 3), tails.recursion_matrix(0.1, [2.0] * 3))
    for layers in (1, 12):
        assert tails.spectral_radius(tails.recursion_matrix(0.01, 40.0, layers)) == 0.99  # "regardless of coupling"
    with pytest.raises(ValueError, match="upper triangular"):
        tails.spectral_radius(np.ones((2, 2)))
    for decay, coupling in ((0.0, 1.0), (1.0, 1.0), (0.1, -1.0), (0.1, math.nan)):
        with pytest.raises(ValueError):
            tails.recursion_matrix(decay, coupling, 3)


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(1, [688, 920, 1344, 2164, 2979, 5429, 10353]), (0.001, [688, 689, 690, 693, 695, 703, 719])],
)
def test_published_times_of_the_recursion(ratio, expected):
    assert [tails.tail_steps(0.01, ratio * 0.01, depth).steps for depth in DEPTHS] == expected


@pytest.mark.parametrize(
    ("decay", "coupling", "layers"),
    [
        (0.01, 0.01, 12),
        (0.01, 0.0, 3),
        (0.5, 0.3, 4),  # crosses while t is no larger than the depth allows
        (0.97, 0.001, 6),
        (0.01, 40.0, 21),  # a ratio of 4,000
        (0.02, np.random.default_rng(0).exponential(0.02, 9), None),
        (0.02, np.random.default_rng(1).pareto(0.7, 7) * 1e-3, None),
        (0.05, [0, 5, 0, 0, 1e-4, 3], None),
    ],
)
def test_bisection_on_the_closed_form_equals_plain_stepping(decay, coupling, layers):
    found = tails.tail_steps(decay, coupling, layers)
    M = tails.recursion_matrix(decay, coupling, layers)
    largest = stepped(M, np.ones(len(M)), 2 * found.steps).max(axis=1)
    assert np.array_equal(largest < 1e-3, np.arange(len(largest)) >= found.steps)  # one crossing, and there
    assert found.log10_peak == pytest.approx(math.log10(largest.max()), rel=1e-9, abs=1e-9)
    assert largest[found.peak_step] == pytest.approx(largest.max(), rel=1e-9)


def test_log_tails_equal_plain_stepping_in_every_layer():
    rng = np.random.default_rng(2)
    M, tau = tails.recursion_matrix(0.03, rng.exponential(0.1, 6)), rng.exponential(1.0, 6)
    times = [0, 1, 2, 5, 6, 100, 1500]
    assert np.exp(tails.log_tails(M, times, tau)) == pytest.approx(stepped(M, tau, 1500)[times], rel=1e-9)
    arbitrary = np.triu(rng.exponential(0.1, (5, 5)), 1) + 0.9 * np.eye(5)  # couplings that differ by row too
    expected = np.linalg.matrix_power(arbitrary, 37) @ np.ones(5)
    assert np.exp(tails.log_tails(arbitrary, 37))[0] == pytest.approx(expected, rel=1e-9)
    with pytest.raises(ValueError, match="one positive decay"):
        tails.log_tails(np.diag([0.9, 0.8]), 1)


def test_the_pages_own_coupling_is_vacuous():
    decay, coupling = 0.1 * 5e-4, 2 * 0.1  # mu lambda and 2 mu C c, C c = 1: a ratio of 4,000
    found = tails.tail_steps(decay, coupling, 21)
    assert found.steps / tails.forget_steps(decay) == pytest.approx(34.8, abs=0.05)
    assert found.log10_peak == pytest.approx(71, abs=0.05)
    deep = tails.tail_steps(decay, coupling * 4e4, 100)
    assert 500 < deep.log10_peak < math.inf  # beyond float64's own range


def test_the_pages_explorer():
    assert round(tails.forget_steps(0.01)) == 692
    assert round(tails.converge_steps(0.01)) == 3459
    # The recursion itself: (1 - mu lambda)^t in a single layer, and below the explorer's factor at depth 12, ratio 1.
    assert tails.tail_steps(0.01, 0.01, 1).steps == math.ceil(math.log(1e-3) / math.log(0.99))
    assert tails.tail_steps(0.01, 0.01, 12).steps < tails.converge_steps(0.01)


@pytest.mark.parametrize(("ratio", "low", "high"), [(1, 0.9, 1.0), (0.001, 0.0, 0.1), (1000, 0.9, 1.1)])
def test_depth_costs_linear_time_not_logarithmic(ratio, low, high):
    depths = [12, 24, 48, 96]
    found = tails.growth(depths, [tails.tail_steps(0.01, ratio * 0.01, depth).steps for depth in depths])
    assert low < found.exponent < high
    assert found.better == "linear"
    assert found.r2_linear > 0.999 > found.r2_log


def test_growth_knows_both_laws():
    L = np.array(DEPTHS[1:])
    assert tails.growth(L, 5 * L) == pytest.approx((1, 1, tails.growth(L, L).r2_log, "linear"))
    log = tails.growth(L, 7 + 3 * np.log(L))
    assert (log.better, log.r2_log) == ("log", pytest.approx(1))
    with pytest.raises(ValueError, match="three"):
        tails.growth([1, 2], [1, 2])


def test_bound_and_the_improvement_that_the_page_misprints():
    gap, naive = bounds.gap_bound(165, 1000, 50_000), bounds.gap_bound(2e6, 1000, 50_000)
    assert (round(gap, 3), round(naive, 2)) == (0.151, 16.62)
    assert naive / gap == pytest.approx(110, abs=0.5)
    assert math.sqrt(2e6 / 320) == pytest.approx(79.06, abs=0.005)
    # The page's 165 is not its r* r_A = 160, to which its threshold of 1,105 belongs.
    assert round(bounds.nonvacuous_samples(5 * 32, 1000)) == 1105
    assert round(bounds.gap_bound(5 * 32, 1000, 50_000), 3) == 0.149
    assert bounds.gap_bound(160, 1000, bounds.nonvacuous_samples(160, 1000, 3.0, 0.5), 3.0) == pytest.approx(0.5)
    assert bounds.gap_bound(160, 1000, 4 * 50_000) == pytest.approx(bounds.gap_bound(160, 1000, 50_000) / 2)


@pytest.mark.parametrize("run", PAGE)
def test_the_pages_table(run):
    init, final, r_out, compressed, ratio = PAGE[run]
    assert 100 * bounds.compression(init, final) == pytest.approx(compressed, abs=0.5 if run == "toy" else 0.05)
    assert bounds.over_rout(final, r_out) == pytest.approx(ratio, abs=0.005 if ratio < 1 else 0.05)
    shapes = [shape for shape, count in COUNTED[run] for _ in range(count)]
    assert bounds.init_erank(shapes) == pytest.approx(init, rel=1e-3)  # 0.04 % above at worst


def test_the_effect_without_decay():
    assert round(100 * bounds.share_without_decay(23, 56)) == 41


def test_init_erank_of_a_drawn_matrix():
    drawn = spectra.effective_rank(spectra.gram_spectrum(torch.randn(128, 512, generator=generator())))
    assert bounds.init_erank([(128, 512)]) == pytest.approx(drawn, rel=0.003)


def test_forgetting_budgets_of_the_page():
    rates = cosine(0.1, 100 * 391)
    plain, heavy = forgetting(rates, 5e-4), forgetting(rates, 5e-4, 0.9)
    assert (round(plain.nats, 2), round(plain.approx_nats, 2)) == (0.98, 0.98)
    assert (round(heavy.nats, 1), round(heavy.approx_nats, 1)) == (9.8, 9.8)
    vit = [forgetting(cosine(lr, 100 * steps), 0.05) for lr, steps in ((5e-4, 196), (1e-3, 391))]
    assert [round(100 * x.factor) for x in vit] == [78, 38]


@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.1), (0.5, 0.1), (0.9, 0.1), (0.9, 2.0)])
def test_the_factor_is_what_torch_leaves_without_a_data_gradient(momentum, decay):
    rates = cosine(0.1, 60)
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
    if momentum:
        optimiser = torch.optim.SGD([weight], lr=1, momentum=momentum, weight_decay=decay)
    else:
        optimiser = torch.optim.AdamW([weight], lr=1, weight_decay=decay)
    for lr in rates.tolist():
        optimiser.param_groups[0]["lr"] = lr
        weight.grad = torch.zeros_like(weight)
        optimiser.step()
    found = forgetting(rates, decay, momentum)
    assert found.factor == pytest.approx(float(weight.detach()), rel=1e-12)
    assert found.nats == pytest.approx(-math.log(abs(found.factor)))
    assert momentum or found.factor == pytest.approx(math.prod(1 - decay * rates))


def test_forgetting_neither_underflows_nor_depends_on_the_rescaling():
    once, twice = forgetting([0.1] * 4000, 1.0, 0.5), forgetting([0.1] * 8000, 1.0, 0.5)
    assert twice.factor == 0.0  # past float64
    assert twice.nats - once.nats == pytest.approx(
        -4000 * math.log(math.sqrt(0.5)), rel=0.01
    )  # |root| of x^2 - 1.4 x + 0.5
    assert forgetting([], 1.0, 0.9) == (1.0, 0.0, 0.0)
    assert forgetting([1.0], 1.0) == (0.0, math.inf, 1.0)
    with pytest.raises(ValueError, match="momentum"):
        forgetting([0.1], 1.0, 1.0)


def test_a_product_of_low_rank_blocks_keeps_full_rank():
    found = []
    for seed in range(5):
        blocks = spaces.random_jacobians(12, 128, 10, 0.5, generator(seed))
        assert [spaces.ranks(J)[0] for J in blocks] == [10] * 12
        assert float(torch.linalg.matrix_norm(blocks[0], 2)) == pytest.approx(0.5)
        rank, erank = spaces.ranks(spaces.backward_product(blocks))
        assert rank == 128
        found.append(erank)
    assert np.mean(found) == pytest.approx(112.5, abs=1)
    assert spaces.ranks(spaces.backward_product([torch.zeros(9, 9)])) == (9, pytest.approx(9))


def test_the_backward_product_is_the_jacobian_of_the_blocks():
    J1, J2, J3 = spaces.random_jacobians(3, 6, 2, 0.7, generator())
    jacobian = torch.autograd.functional.jacobian(
        lambda x: [x := x + J @ x for J in (J1, J2, J3)][-1], torch.zeros(6).double()
    )
    torch.testing.assert_close(spaces.backward_product([J1, J2, J3]), jacobian)


def test_ranks_and_shares_of_known_matrices():
    s = torch.tensor([1, 1e-5, 1e-7, 0], dtype=torch.float64)
    assert spaces.ranks(torch.diag(s))[0] == 2
    assert spaces.ranks(torch.zeros(3, 4)) == (0, 0.0)
    basis = torch.eye(4, 2, dtype=torch.float64)
    X = torch.tensor([[3.0, 0], [0, 0], [0, 4.0], [0, 0]], dtype=torch.float64)
    assert spaces.outside_share(X, basis) == pytest.approx(16 / 25)
    assert spaces.outside_share(0 * X, basis) == 0.0


def test_the_relu_mask_leaves_the_heads_column_space():
    draws = [spaces.draw_two_layer(2048, 32, 1000, 5, generator(seed)) for seed in range(4)]
    found = [spaces.two_layer(*draw) for draw in draws]
    assert {x.delta_rank for x in found} == {1000}
    assert np.mean([x.delta_erank for x in found]) == pytest.approx(83.5, abs=1)
    # The paper's 54 % is one draw: 32 of ours have mean 0.495, standard deviation 0.028.
    assert np.mean([x.outside for x in found]) == pytest.approx(0.5, abs=0.04)
    assert [x.outside for x in found] == pytest.approx([0.54] * 4, abs=3 * 0.028)
    product, smaller = bounds.rank_limits(found[0].r_star, found[0].r_a)
    assert (product, smaller) == (160, 5)
    for x in found:
        assert smaller < x.g1_erank < x.g1_rank <= x.r_a <= product  # the product holds, and says nothing
        assert x.g2_rank <= 5
    straight = spaces.two_layer(*draws[0], mask=False)
    assert straight.outside < 1e-20
    assert straight.delta_rank == straight.g1_rank == smaller


def test_errors_of_the_network_itself_correlate_with_its_inputs():
    found = spaces.two_layer(*spaces.draw_two_layer(512, 16, 128, 5, generator(), softmax=True))
    assert found.r_star == found.g2_rank == 4  # softmax - onehot sums to zero
    assert 0.05 < found.outside < 0.45


def test_units_that_are_off_pass_nothing():
    X, W1, W2, e = spaces.draw_two_layer(30, 4, 10, 3, generator())
    found = spaces.two_layer(X.abs(), -W1.abs(), W2, e)
    assert found[:7] == (0,) * 7
    assert (found.r_star, found.r_a) == (3, 4)


@pytest.mark.parametrize("batch", [3, 40])
def test_two_layer_gradients_are_autograds(batch):
    X, W1, W2, e = spaces.draw_two_layer(batch, 6, 20, 5, generator(7))
    W1, W2 = (torch.nn.Parameter(W) for W in (W1, W2))
    (((X @ W1.T).relu() @ W2.T) * e).sum().backward()
    found = spaces.two_layer(X, W1.detach(), W2.detach(), e)
    Q = torch.linalg.qr(W2.detach().T).Q
    inside = (Q.T @ W1.grad).square().sum() / W1.grad.square().sum()
    assert found.outside == pytest.approx(1 - float(inside), abs=1e-12)
    assert (found.g1_rank, found.g1_erank) == spaces.ranks(W1.grad)
    assert found.g2_rank == spaces.ranks(W2.grad)[0] == min(batch, 5)


def test_adam_leaves_the_gradients_column_space():
    found = [spaces.adam_containment(128, 128, 5, 1000, generator(seed)) for seed in range(3)]
    assert all(x.rank >= 127 for x in found)
    assert np.mean([x.outside for x in found]) == pytest.approx(0.077, abs=0.015)
    assert np.mean([x.erank for x in found]) == pytest.approx(4.9, abs=0.1)


def test_adam_keeps_what_a_scale_by_element_keeps():
    signs = torch.sign(torch.randn(2, 30, generator=generator(), dtype=torch.float64))
    G = torch.outer(signs[0], signs[1])
    total = spaces.adam_sum([G, 3 * G])
    assert spaces.ranks(total)[0] == 1
    assert spaces.outside_share(total, signs[0][:, None]) < 1e-20
    G = torch.randn(8, 9, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(spaces.adam_sum([G]), G.sign(), rtol=1e-5, atol=0)  # of the gradients' own sign
