import logging
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torchvision.models import VisionTransformer, resnet18
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from backrank import spectra
from backrank.head import DenseHead, FactorisedHead

SPECTRAL = ("erank", "erank_sigma", "participation", "stable_rank", "sigma_1", "frobenius")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(n, m, seed=0, dtype=torch.float32):
    return torch.randn(n, m, generator=generator(seed), dtype=dtype)


def with_spectrum(s, n, m):
    """An n x m float64 matrix with the singular values s and random singular vectors."""
    U = torch.linalg.qr(draw(n, len(s), 1, torch.float64)).Q
    V = torch.linalg.qr(draw(m, len(s), 2, torch.float64)).Q
    return (U * s) @ V.T


def tiny_gpt2(**options):
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=40, n_positions=8, **options)
    config.bos_token_id = config.eos_token_id = None
    return config


@pytest.mark.parametrize("shape", [(64, 64), (40, 100), (100, 40)])
def test_singular_values_are_known_down_to_a_millionth_of_the_largest(shape):
    s = torch.logspace(0, -7, 40, dtype=torch.float64)
    error = (spectra.gram_spectrum(with_spectrum(s, *shape))[:40] / s - 1).abs()
    assert error[s > 1e-5].max() < 1e-6
    assert error[s > 1e-6].max() < 1e-4
    assert error.max() < 1e-2  # a float32 Gram matrix is off by a factor of hundreds here


def test_batches_keep_the_order_of_a_mixed_list():
    matrices = [
        draw(8, 20),
        draw(5, 5, 1),
        1e3 * draw(20, 8, 2),
        draw(20, 20),
        draw(4, 3, 3)[:, :, None].expand(4, 3, 2),
        draw(8, 8),
    ]
    for W, s in zip(matrices, spectra.gram_spectrum(matrices), strict=True):
        want = torch.linalg.svdvals(W.flatten(1).double())
        torch.testing.assert_close(s, want, rtol=1e-6, atol=1e-6)


def test_ranks_of_known_spectra():
    flat, single = torch.ones(16), torch.tensor([3.0, 0.0, 0.0])
    pair = torch.tensor([2.0, 1.0])
    p, q = np.array([4, 1]) / 5, np.array([2, 1]) / 3
    for rank, of_pair in (
        (spectra.effective_rank, math.exp(-(p * np.log(p)).sum())),
        (spectra.entropy_rank_sigma, math.exp(-(q * np.log(q)).sum())),
        (spectra.participation_ratio, 25 / 17),
        (spectra.stable_rank, 5 / 4),
    ):
        assert rank(flat) == pytest.approx(16)
        assert rank(single) == pytest.approx(1)
        assert rank(torch.zeros(4)) == rank(torch.zeros(0)) == 0.0
        assert rank(pair) == rank([2.0, 1.0]) == pytest.approx(of_pair)
        assert math.isnan(rank(torch.tensor([math.nan, 1.0])))
        for scale in (1e-20, 1e20, 1e-300, 1e300):
            assert rank(pair.double() * scale) == pytest.approx(of_pair, rel=1e-6)
    assert [spectra.tail_norm(pair, k) for k in range(3)] == [2.0, 1.0, 0.0]


# Edge cases (D12).
@pytest.mark.parametrize(
    ("W", "rank"),
    [(torch.zeros(8, 8), 0), (torch.diag(torch.tensor([1.0, 0, 0, 0])), 1), (torch.eye(16), 16), (draw(1, 9), 1)],
)
def test_rank_edge_cases(W, rank):
    row = spectra.spectrum_row("w", W)
    assert row["erank"] == row["erank_sigma"] == pytest.approx(rank, abs=1e-6)
    assert row["zero"] == (rank == 0) and row["nonfinite_entries"] == 0
    assert all(math.isfinite(row[key]) for key in SPECTRAL)
    assert row["shape"] == list(W.shape)


def test_scale_changes_no_rank():
    W = draw(12, 30)
    base = spectra.spectrum_row("w", W)
    for scale in (1e-20, 1e20, 1e-37):
        row = spectra.spectrum_row("w", W * scale)
        for key in ("erank", "erank_sigma", "participation", "stable_rank"):
            assert row[key] == pytest.approx(base[key], rel=1e-4)
        for key in ("sigma_1", "frobenius"):
            assert row[key] == pytest.approx(base[key] * scale, rel=1e-4)
    assert base["frobenius"] == pytest.approx(float(W.norm()), rel=1e-5)


# Non-finite weights (D13): never a finite rank, and no damage to the other layers.
def test_non_finite_weights_are_counted_and_have_no_rank():
    nan, inf = draw(64, 64), draw(64, 64, 1)
    nan[3, 5] = math.nan
    inf[:2, 7] = -math.inf
    rows = spectra.spectrum_rows({"a": nan, "b": draw(64, 64, 2), "c": inf})
    assert [(row["layer"], row["nonfinite_entries"]) for row in rows] == [("a", 1), ("b", 0), ("c", 2)]
    for row in rows[::2]:
        assert all(row[key] is None for key in SPECTRAL) and not row["zero"]
    assert rows[1] == spectra.spectrum_row("b", draw(64, 64, 2))
    assert spectra.gram_spectrum(nan).isnan().all()


# Half-precision weights (D14).
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weights_have_the_spectrum_of_their_rounded_values(dtype):
    W = draw(24, 40).to(dtype)
    got, want = spectra.spectrum_row("w", W), spectra.spectrum_row("w", W.float())
    exact = torch.linalg.svdvals(W.double())
    assert got == want
    torch.testing.assert_close(spectra.gram_spectrum(W), exact, rtol=1e-6, atol=0)


# Failing solvers (D15): `failures` calls raise, the rest work.
def failing(monkeypatch, name, failures):
    solver, calls = getattr(torch.linalg, name), []

    def flaky(*args, **kwargs):
        calls.append(args)
        if len(calls) <= failures:
            raise torch.linalg.LinAlgError("did not converge")
        return solver(*args, **kwargs)

    monkeypatch.setattr(torch.linalg, name, flaky)


@pytest.mark.parametrize(
    ("eigvalsh", "svdvals", "layers", "path"),
    [
        (1, 0, ["h.0.mlp"], "svdvals"),
        (9, 9, ["h.0.mlp"], "gesvd"),
        (1, 0, ["h.0.mlp", "h.1.mlp"], "eigvalsh alone"),
        (2, 0, ["h.0.mlp", "h.1.mlp"], "h.0.mlp: svdvals, h.1.mlp: eigvalsh alone"),
    ],
)
def test_a_failing_solver_is_replaced_and_named_once(monkeypatch, caplog, eigvalsh, svdvals, layers, path):
    weights = {name: draw(20, 30, i) for i, name in enumerate(layers)}
    want = spectra.spectrum_rows(weights)
    failing(monkeypatch, "eigvalsh", eigvalsh)
    failing(monkeypatch, "svdvals", svdvals)
    with caplog.at_level(logging.INFO):
        rows = spectra.spectrum_rows(weights)
    for got, row in zip(rows, want, strict=True):
        for key in SPECTRAL:
            assert got[key] == pytest.approx(row[key], rel=1e-5)
    (record,) = caplog.records
    assert path in record.getMessage() and all(name in record.getMessage() for name in layers)


# The layer list (D16).
BLOCK = [f"h.{i}.{m}.weight" for i in (0, 1) for m in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        lambda m: torch.compile(m, backend="eager"),
        Wrapper,
        lambda m: Wrapper(torch.compile(Wrapper(m), backend="eager")),
    ],
)
def test_gpt2_has_eight_block_matrices_under_any_wrapper(wrap):
    model = GPT2LMHeadModel(tiny_gpt2())
    model.transformer.h[1] = torch.compile(model.transformer.h[1], backend="eager")
    wrapped = wrap(model)
    blocks, others = spectra.block_matrices(wrapped), spectra.other_matrices(wrapped)
    assert sorted(blocks) == sorted(f"transformer.{name}" for name in BLOCK)
    assert blocks["transformer.h.0.attn.c_attn.weight"].shape == (16, 48)
    assert sorted(others) == ["transformer.wpe.weight", "transformer.wte.weight"]  # the tied head once


def test_heads_are_told_from_embeddings_tied_or_not():
    def kinds(model):
        return {name: kind for name, (_, kind) in spectra.matrix_parameters(model).items() if kind != "block"}

    untied = GPT2LMHeadModel(tiny_gpt2(tie_word_embeddings=False))
    assert kinds(untied)["lm_head.weight"] == "head" and len(kinds(untied)) == 3
    backbone = GPT2Model(tiny_gpt2())
    tied = nn.ModuleDict({"head": DenseHead(backbone.wte.weight), "backbone": backbone})  # head met first
    assert kinds(tied) == {"backbone.wte.weight": "embedding", "backbone.wpe.weight": "embedding"}
    factorised = nn.ModuleDict({"backbone": backbone, "head": FactorisedHead.create(40, 16, 4, generator())})
    assert {name for name, kind in kinds(factorised).items() if kind == "head"} == {"head.A", "head.B"}
    assert sorted(spectra.block_matrices(factorised)) == sorted(f"backbone.{name}" for name in BLOCK)


def test_no_matrix_of_an_arbitrary_module_is_left_out():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MultiheadAttention(8, 2), nn.Bilinear(2, 3, 4))
    blocks = spectra.block_matrices(model)
    assert {name: tuple(W.shape) for name, W in blocks.items()} == {
        "0.weight": (8, 27),
        "2.in_proj_weight": (24, 8),
        "2.out_proj.weight": (8, 8),
        "3.weight": (4, 6),
    }
    assert not any(W.requires_grad for W in blocks.values()) and spectra.other_matrices(model) == {}
    clash = nn.ModuleDict({"x": nn.Linear(2, 2), "module": nn.ModuleDict({"x": nn.Linear(2, 2)})})
    with pytest.raises(ValueError, match="share a name"):
        spectra.block_matrices(clash)


def test_vision_models_have_the_papers_layer_lists():
    vit = VisionTransformer(8, 4, num_layers=2, num_heads=2, hidden_dim=8, mlp_dim=16, num_classes=5)
    assert len(spectra.block_matrices(vit)) == 2 * 4 + 1
    assert list(spectra.other_matrices(vit)) == ["class_token", "conv_proj.weight", "encoder.pos_embedding"]
    assert len(spectra.block_matrices(resnet18(num_classes=10))) == 21


# The published initial ranks (D11). The vocabulary is cut, since embeddings are not counted.
def test_gpt2_small_starts_at_the_published_rank():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=8)
    config.bos_token_id = config.eos_token_id = None
    rows = spectra.spectrum_rows(spectra.block_matrices(GPT2Model(config)))
    assert len(rows) == 48
    mean = {key: sum(row[key] for row in rows) / 48 for key in SPECTRAL}
    assert mean["erank"] == pytest.approx(617.7, abs=0.3)
    assert mean["erank_sigma"] == pytest.approx(708.6, abs=1)
    assert mean["participation"] == pytest.approx(546.8, abs=1)
    assert mean["stable_rank"] == pytest.approx(297.6, abs=2)


@pytest.mark.parametrize("shape", [(128, 512), (512, 128), (300, 300)])
def test_random_matrices_follow_the_closed_form(shape):
    s = spectra.gram_spectrum(draw(*shape))
    assert spectra.effective_rank(s) == pytest.approx(spectra.marchenko_pastur_erank(*shape), rel=5e-3)


# ------------------------------------------------------------------------------------------------- shape of a spectrum


def pareto(count, alpha, seed=0):
    """Singular values whose squares follow x^-alpha above 1: the inverse of the distribution on uniform draws."""
    uniform = torch.rand(count, generator=generator(seed), dtype=torch.float64)
    return (1 - uniform) ** (-0.5 / (alpha - 1))


def plain_tail_exponent(s):
    """Clauset's recipe, value by value, by scipy's Kolmogorov-Smirnov test."""
    x = np.sort(np.asarray(s) ** 2)
    found = []
    for low in x[: len(x) - spectra.LEAST_TAIL + 1]:
        tail = x[x >= low]
        alpha = 1 + len(tail) / np.log(tail / low).sum()
        distance = stats.kstest(tail, lambda v, low=low, alpha=alpha: 1 - (v / low) ** (1 - alpha)).statistic
        found.append((distance, alpha, len(tail)))
    distance, alpha, count = min(found)
    return alpha, count, distance


@pytest.mark.parametrize("alpha", [2.0, 3.0, 5.0])
def test_the_exponent_of_a_drawn_power_law(alpha):
    fits = [spectra.tail_exponent(pareto(800, alpha, seed)) for seed in range(8)]
    mean = sum(fit[0] for fit in fits) / 8
    assert mean == pytest.approx(alpha, abs=4 * (alpha - 1) / (8 * 500) ** 0.5)  # k of about 500
    assert all(distance < 0.05 for _, _, distance in fits)


def test_the_fit_is_the_papers_recipe():
    bulk = torch.rand(60, generator=generator(1), dtype=torch.float64)
    for s in (pareto(100, 3.0), torch.cat([pareto(40, 2.5), bulk]), spectra.gram_spectrum(draw(50, 80))):
        fit = spectra.tail_exponent(s)
        assert fit == pytest.approx(plain_tail_exponent(s), rel=1e-9)
        for factor in (1e-9, 1e9):
            assert spectra.tail_exponent(factor * s) == pytest.approx(fit, rel=1e-9)


@pytest.mark.parametrize("shape", [(128, 128), (128, 512), (384, 384)])
def test_a_random_matrix_has_no_heavy_tail(shape):
    _, _, distance = spectra.tail_exponent(spectra.gram_spectrum(draw(*shape)))
    assert distance > 0.08
    law = pareto(shape[0], 3.0)
    assert spectra.tail_exponent(law)[2] < distance


def test_a_spectrum_without_a_tail_has_no_exponent():
    for s in (torch.zeros(40), torch.ones(40), torch.full((40,), math.nan), pareto(9, 2.0), torch.zeros(0)):
        assert spectra.tail_exponent(s) is None
    noise = torch.cat([pareto(30, 3.0), torch.full((50,), 1e-9)])
    assert spectra.tail_exponent(noise) == spectra.tail_exponent(noise[:30])


def test_gap_ratios():
    s = 0.5 ** torch.arange(10, dtype=torch.float64)
    assert spectra.gap_ratio(s, 4) == pytest.approx((2.0, 2.0))
    s[4:] /= 8  # a gap behind the fourth
    gap, neighbours = spectra.gap_ratio(s, 4)
    assert (gap, neighbours) == pytest.approx((16.0, 2.0 * 8 ** (1 / 7)))  # ratios 2 to 8
    assert spectra.gap_ratio(s, 9) == pytest.approx((2.0, 2.0)) and spectra.gap_ratio(s, 1) == pytest.approx((2.0, 2.0))
    for r in (0, 10, 11):
        assert spectra.gap_ratio(s, r) == (None, None)
    s[9] = 1e-12
    floor = 1e-6  # what is noise counts as that: the gap in front of it is the largest of all
    assert spectra.gap_ratio(s, 9) == pytest.approx((float(s[8]) / floor, (float(s[4]) / floor) ** 0.2))
