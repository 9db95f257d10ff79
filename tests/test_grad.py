import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from backrank import grad
from backrank.head import chunked_loss


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def rms(x, dim=None):
    return x.double().square().mean(dim).sqrt()


def mapped_product(basis):
    """A function of (x, W) with a non-linear body before and a linear head after the map."""

    def fn(x, W):
        return (grad.grad_map(torch.tanh(x), lambda g: grad.reduce_rank(g, basis)) @ W.T).square().mean()

    return fn


def gradients(fn, x, W):
    x, W = x.clone().requires_grad_(), W.clone().requires_grad_()
    value = fn(x, W)
    return value.detach(), *torch.autograd.grad(value, (x, W))


def test_forward_is_the_identity_and_maps_meet_the_gradient_in_reverse_order():
    x = draw(5, 3).requires_grad_()
    y = grad.grad_map(grad.grad_map(x, lambda g: g + 1), lambda g: g * 10)
    assert torch.equal(y, x)
    y.backward(torch.full_like(x, 2.0))
    assert torch.equal(x.grad, torch.full_like(x, 21.0))
    grad.grad_map(x, lambda g: -g).backward(torch.ones_like(x))  # accumulates
    assert torch.equal(x.grad, torch.full_like(x, 20.0))


def test_the_result_is_cast_to_the_gradients_dtype():
    x = draw(4, 4).bfloat16().requires_grad_()
    grad.grad_map(x, lambda g: g.double() / 3).sum().backward()
    assert x.grad.dtype == torch.bfloat16
    assert torch.equal(x.grad, torch.full((4, 4), 1 / 3).bfloat16())


def test_a_second_derivative_through_the_map_is_refused():
    x = draw(3, 3).requires_grad_()
    (g,) = torch.autograd.grad(grad.grad_map(x, lambda g: 2 * g).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        g.sum().backward()


def test_checkpointing_and_plain_backward_agree():
    x, W, basis = draw(16, 8), draw(20, 8, seed=1), grad.random_basis(8, 3, torch.Generator().manual_seed(2))
    fn = mapped_product(basis)
    plain = gradients(fn, x, W)
    recomputed = gradients(lambda x, W: checkpoint(fn, x, W, use_reentrant=False), x, W)
    unmapped = gradients(lambda x, W: (torch.tanh(x) @ W.T).square().mean(), x, W)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert torch.equal(plain[2], unmapped[2]) and not torch.allclose(plain[1], unmapped[1])


@pytest.mark.parametrize("autocast", [False, True])
def test_compiled_graphs_see_a_basis_updated_in_place(autocast):
    x, W = draw(16, 8), draw(20, 8, seed=1)
    basis = grad.random_basis(8, 3, torch.Generator().manual_seed(2))
    fn = mapped_product(basis)
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    seen = []
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        for seed in (3, 4):
            basis.copy_(grad.random_basis(8, 3, torch.Generator().manual_seed(seed)))
            eager, graph = gradients(fn, x, W), gradients(compiled, x, W)
            for a, b in zip(eager, graph, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
            seen.append(graph[1])
    assert not torch.allclose(*seen)


# Rank-reduced backward pass (D17): batch 32, width 8, vocabulary 50.
@pytest.mark.parametrize("basis", ["head", "gradient", "random"])
def test_rank_k_backward_leaves_the_forward_and_the_head_alone(basis):
    H, W, y = draw(32, 8), draw(50, 8, seed=1), torch.arange(32)

    def reduced(rank):
        def fn(g):
            V = {
                "head": lambda: grad.head_basis(W, rank),
                "gradient": lambda: grad.gradient_basis(g, rank),
                "random": lambda: grad.random_basis(8, rank, torch.Generator().manual_seed(5)),
            }[basis]()
            return grad.reduce_rank(g, V)

        return gradients(lambda h, w: chunked_loss(grad.grad_map(h, fn), w, y, 32.0), H, W)

    baseline = gradients(lambda h, w: chunked_loss(h, w, y, 32.0), H, W)
    for rank in (8, 4):
        loss, dH, dW = reduced(rank)
        assert torch.equal(loss, baseline[0]) and torch.equal(dW, baseline[2])
        assert torch.linalg.matrix_rank(dH, rtol=1e-5) == rank
        assert abs(rms(dH) / rms(baseline[1]) - 1) < 1e-5
    full = reduced(8)[1]
    assert (full - baseline[1]).norm() <= 1e-6 * baseline[1].norm()
    assert (dH - baseline[1]).norm() > 0.1 * baseline[1].norm()


@pytest.mark.parametrize("mode", ["tensor", "token", "none"])
def test_zero_in_zero_out(mode):
    V = grad.random_basis(8, 4, torch.Generator().manual_seed(0))
    assert torch.equal(grad.reduce_rank(torch.zeros(32, 8), V, mode), torch.zeros(32, 8))
    V = grad.gradient_basis(torch.zeros(32, 8), 4)
    assert torch.equal(grad.reduce_rank(torch.zeros(32, 8), V, mode), torch.zeros(32, 8))


@pytest.mark.parametrize("mode", ["tensor", "token", "none"])
def test_fewer_tokens_than_the_rank_lose_nothing(mode):
    g = draw(3, 8)
    out = grad.reduce_rank(g, grad.gradient_basis(g, 4), mode)
    torch.testing.assert_close(out, g, rtol=1e-5, atol=1e-6)


def test_rms_granularity():
    g, V = draw(32, 8) * torch.logspace(-3, 3, 32)[:, None], grad.random_basis(8, 2, torch.Generator().manual_seed(0))
    token, none = grad.reduce_rank(g, V, "token"), grad.reduce_rank(g, V, "none")
    torch.testing.assert_close(rms(token, -1), rms(g, -1), rtol=1e-5, atol=0)
    assert (rms(none, -1) < rms(g, -1)).all()
    torch.testing.assert_close(none @ V, g @ V, rtol=1e-5, atol=1e-5)  # unscaled: the kept part is unchanged
    with pytest.raises(ValueError, match="rms"):
        grad.reduce_rank(g, V, "row")


def test_a_token_orthogonal_to_the_basis_becomes_zero_not_amplified_noise():
    V = grad.random_basis(8, 4, torch.Generator().manual_seed(0))
    g = draw(32, 8)
    outside = g - (g.double() @ V.double() @ V.double().T).float()
    kept = grad.reduce_rank(torch.cat([V.T, V.T * 1e-30]), V, "token")
    assert (grad.reduce_rank(outside, V, "token").norm(dim=1) < 1e-5 * outside.norm(dim=1)).sum() >= 16
    torch.testing.assert_close(kept, torch.cat([V.T, V.T * 1e-30]), rtol=1e-4, atol=1e-36)


def test_scale_does_not_matter_and_non_finite_gradients_stay_so():
    g, V = draw(32, 8), grad.random_basis(8, 4, torch.Generator().manual_seed(0))
    reference = grad.reduce_rank(g, V)
    for scale in (1e-30, 1e25):
        torch.testing.assert_close(grad.reduce_rank(g * scale, V) / scale, reference, rtol=1e-4, atol=1e-5)
    for bad in (float("nan"), float("inf")):
        g[3, 2] = bad
        assert not grad.reduce_rank(g, grad.gradient_basis(g, 4)).isfinite().all()


def test_split_over_processes_the_norms_are_summed_first():
    g, V = draw(32, 8), grad.random_basis(8, 4, torch.Generator().manual_seed(0))
    squares = []
    parts = g.split([20, 12])
    for part in parts:
        grad.reduce_rank(part, V, all_reduce=lambda s: squares.append(s) or s)
    whole = torch.cat([grad.reduce_rank(part, V, all_reduce=lambda _: sum(squares)) for part in parts])
    torch.testing.assert_close(whole, grad.reduce_rank(g, V), rtol=1e-6, atol=1e-7)


def test_head_basis_gives_the_best_approximation():
    W = draw(50, 8) * torch.logspace(0, -3, 8)
    s = torch.linalg.svdvals(W.double())
    for rank in (1, 4, 7):
        V = grad.head_basis(W, rank).double()
        assert V.shape == (8, rank)
        assert abs(V[:, 0] @ grad.head_basis(W, 1).double()[:, 0]) > 0.999  # largest first
        assert torch.linalg.matrix_norm(W.double() - W.double() @ V @ V.T, 2) == pytest.approx(float(s[rank]), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_bases_are_orthonormal_in_the_callers_dtype_but_at_least_float32(dtype):
    W = draw(50, 8).to(dtype)
    want = torch.promote_types(dtype, torch.float32)
    for V in (grad.head_basis(W, 5), grad.gradient_basis(W, 5), grad.random_basis(8, 5, torch.Generator()).to(want)):
        assert V.dtype == want
        torch.testing.assert_close(V.T @ V, torch.eye(5, dtype=want), rtol=0, atol=1e-6)


def test_random_basis_follows_its_generator_and_ranks_are_checked():
    a, b, c = (grad.random_basis(8, 3, torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    for call in (lambda r: grad.random_basis(8, r, torch.Generator()), lambda r: grad.head_basis(draw(50, 8), r)):
        for rank in (0, 9):
            with pytest.raises(ValueError, match="rank must lie in 1..8"):
                call(rank)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-9)])
@pytest.mark.parametrize("condition", [1e0, 1e3])
def test_column_project_against_qr(dtype, tolerance, condition):
    W = (draw(200, 16) * torch.logspace(0, -torch.tensor(condition).log10().item(), 16)).to(dtype)
    X = draw(200, 16, seed=1).to(dtype)
    Q = torch.linalg.qr(W.double()).Q
    want = Q @ (Q.T @ X.double())
    got = grad.column_project(W, X)
    assert got.dtype == dtype
    assert (got.double() - want).norm() <= tolerance * want.norm()


def test_column_project_of_rank_deficient_heads():
    A, B, X = draw(200, 5), draw(5, 16, seed=1), draw(200, 16, seed=2)
    Q = torch.linalg.qr(A.double()).Q
    want = Q @ (Q.T @ X.double())
    got = grad.column_project(A @ B, X)
    assert (got.double() - want).norm() <= 1e-5 * want.norm()
    assert torch.equal(grad.column_project(torch.zeros(200, 16), X), torch.zeros(200, 16))
    M = draw(16, 16, seed=3)
    torch.testing.assert_close(grad.column_project(A @ B, A @ B @ M), A @ B @ M, rtol=1e-4, atol=1e-4)


def test_rank_reduction_by_the_heads_own_space_is_exact_for_a_factorised_head():
    A, B, H, y = draw(50, 3), draw(3, 8, seed=1), draw(32, 8, seed=2), torch.arange(32)
    W = A @ B
    exact = gradients(lambda h, w: F.cross_entropy(h @ w.T, y), H, W)[1]
    torch.testing.assert_close(grad.reduce_rank(exact, grad.head_basis(W, 3)), exact, rtol=1e-4, atol=1e-7)
