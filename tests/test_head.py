import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from backrank import head

# (tokens, width, vocabulary, rows): one chunk, an uneven last chunk, more rows than tokens, a larger vocabulary.
SIZES = [(32, 8, 50, None), (33, 8, 50, 5), (7, 16, 300, 128), (300, 12, 1000, 128)]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(N, D, V, seed=0, dtype=torch.float32, spread=1.0):
    g = generator(seed)
    H, W = torch.randn(N, D, generator=g, dtype=dtype), spread * torch.randn(V, D, generator=g, dtype=dtype)
    y = torch.randint(V, (N,), generator=g)
    y[::4] = -100
    return H, W, y


def explicit(H, W, y, denominator):
    """Loss and both gradients from the float64 logit gradient, without autograd."""
    H, W = H.double(), W.double()
    Z, valid = H @ W.T, y != -100
    G = Z.softmax(1)
    G[valid, y[valid]] -= 1
    G[~valid] = 0
    loss = (Z.logsumexp(1)[valid] - Z[valid, y[valid]]).sum()
    return loss / denominator, G @ W / denominator, G.T @ H / denominator


def run(loss, H, W, y, denominator, **options):
    H, W = H.clone().requires_grad_(), W.clone().requires_grad_()
    value = loss(H, W, y, denominator, **options)
    return value.detach(), *torch.autograd.grad(value, (H, W))


def errors(got, want):
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


@pytest.mark.parametrize(("N", "D", "V", "rows"), SIZES)
def test_chunked_is_as_exact_as_the_plain_loss(N, D, V, rows):
    H, W, y = draw(N, D, V)
    want = explicit(H, W, y, 17.0)
    ours, plain = errors(run(head.chunked_loss, H, W, y, 17.0, rows=rows), want), errors(
        run(head.plain_loss, H, W, y, 17.0), want
    )  # fmt: skip
    assert all(a <= 2 * b + 2e-7 for a, b in zip(ours, plain, strict=True)), (ours, plain)
    wide = run(head.chunked_loss, H.double(), W.double(), y, torch.tensor(17.0), rows=rows)
    assert max(errors(wide, want)) < 1e-13


@pytest.mark.parametrize("name", sorted(head.LOSSES))
def test_every_loss_that_can_be_had_agrees(name):
    try:
        loss = head.resolve_loss(name)
    except ValueError as error:
        pytest.skip(str(error))
    if name == "liger" and not torch.cuda.is_available():
        pytest.skip("Liger's kernels need a GPU")
    H, W, y = draw(64, 16, 100)
    assert max(errors(run(loss, H, W, y, 48), explicit(H, W, y, 48))) < 1e-6


def test_gradients_by_finite_differences():
    H, W, y = draw(9, 4, 11, dtype=torch.float64)
    inputs = H.requires_grad_(), W.requires_grad_()
    assert torch.autograd.gradcheck(lambda h, w: head.chunked_loss(h, w, y, 5.0, rows=4), inputs)


def test_ignored_targets_give_no_loss_and_no_gradient():
    H, W, y = draw(32, 8, 50)
    loss, dH, dW = run(head.chunked_loss, H, W, y, 24, rows=10)
    assert dH[::4].eq(0).all() and dH[1::4].ne(0).any(1).all()
    keep = y != -100
    for a, b in zip((loss, dH[keep], dW), run(head.chunked_loss, H[keep], W, y[keep], 24), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    for out in run(head.chunked_loss, H, W, torch.full_like(y, -100), 24):
        assert torch.equal(out, torch.zeros_like(out))
    assert run(head.chunked_loss, H[:0], W, y[:0], 1)[1].shape == (0, 8)


def test_accumulated_parts_with_uneven_labels_equal_one_batch():
    H, W, y = draw(32, 8, 50)
    y[:8] = -100  # the first of four parts has no label at all
    y[9:14] = -100
    count = (y != -100).sum()
    whole = run(head.chunked_loss, H, W, y, count)
    parts = [run(head.chunked_loss, H[i : i + 8], W, y[i : i + 8], count) for i in range(0, 32, 8)]
    losses, dHs, dWs = zip(*parts, strict=True)
    for a, b in zip((sum(losses), torch.cat(dHs), sum(dWs)), whole, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_frozen_inputs_cost_nothing(monkeypatch):
    asked = []
    compute = head._loss_and_gradients

    def recording(*args):
        asked.append(args[-2:])
        return compute(*args)

    monkeypatch.setattr(head, "_loss_and_gradients", recording)
    H, W, y = draw(32, 8, 50)
    want = run(head.chunked_loss, H, W, y, 24)
    frozen = H.clone().requires_grad_()
    head.chunked_loss(frozen, W, y, 24).backward()
    assert torch.equal(frozen.grad, want[1])
    weight = W.clone().requires_grad_()
    head.chunked_loss(H, weight, y, 24).backward()
    assert torch.equal(weight.grad, want[2])
    with torch.no_grad():
        assert torch.equal(head.chunked_loss(frozen, weight, y, 24), want[0])
    assert asked == [(True, True), (True, False), (False, True), (False, False)]


def test_learned_tokens_and_large_logits():
    H, W, y = draw(40, 8, 50)
    y[y == -100] = 3
    W = F.normalize(W, dim=1) * 25
    H = F.normalize(W[y], dim=1)  # every token nearly certain: the residual is a small difference
    want = explicit(H, W, y, 1)
    ours, plain = errors(run(head.chunked_loss, H, W, y, 1), want), errors(run(head.plain_loss, H, W, y, 1), want)
    assert all(a <= b and a < 3e-6 for a, b in zip(ours, plain, strict=True)), (ours, plain)
    far = errors(run(head.chunked_loss, -40 * H, W, y, 1), explicit(-40 * H, W, y, 1))  # p underflows, loss does not
    assert max(far) < 1e-5


def test_autocast_and_half_parameters():
    H, W, y = draw(300, 32, 500, spread=0.2)
    want = explicit(H, W, y, 225)
    with torch.autocast("cpu", torch.bfloat16):
        got, plain = run(head.chunked_loss, H, W, y, 225, rows=64), run(head.plain_loss, H, W, y, 225)
    assert [t.dtype for t in got] == [torch.float32] * 3
    assert all(a <= 1.2 * b + 1e-4 for a, b in zip(errors(got, want), errors(plain, want), strict=True))
    assert errors(got, want)[1] > 1e-4  # the products did run in bf16
    half = run(head.chunked_loss, H.bfloat16(), W.bfloat16(), y, 225, rows=64)
    assert [t.dtype for t in half] == [torch.float32, torch.bfloat16, torch.bfloat16]
    assert max(errors(half, explicit(H.bfloat16(), W.bfloat16(), y, 225))) < 1e-2
    with torch.autocast("cpu", torch.bfloat16):
        weight = W.clone().requires_grad_()
        mixed = H.bfloat16().requires_grad_()
        head.chunked_loss(mixed, weight, y, 225).backward()
    assert (mixed.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_whole(backend):
    H, W, y = draw(33, 8, 50)
    torch._dynamo.reset()
    compiled = torch.compile(lambda *args: head.chunked_loss(*args, rows=10), fullgraph=True, backend=backend)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, want = run(compiled, H, W, y, 24.0), run(head.chunked_loss, H, W, y, 24.0, rows=10)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_a_second_derivative_is_refused():
    H, W, y = draw(8, 4, 10)
    H.requires_grad_()
    with pytest.raises(RuntimeError, match="plain_loss"):
        torch.autograd.grad(head.chunked_loss(H, W, y, 1), H, create_graph=True)
    (g,) = torch.autograd.grad(head.plain_loss(H, W, y, 1), H, create_graph=True)
    assert torch.autograd.grad(g.square().sum(), H)[0].ne(0).any()


def test_a_loss_that_cannot_be_had_names_key_value_and_remedy(monkeypatch):
    monkeypatch.setattr(head, "find_spec", lambda _: None)
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    for name, remedy in (("liger", "pip install"), ("torch", "newer torch"), ("chunky", "chunked, plain")):
        with pytest.raises(ValueError, match=f"train.loss='{name}'.*{remedy}"):
            head.resolve_loss(name)


def test_residual_chunks_are_the_logit_gradient():
    H, W, y = draw(33, 8, 50)
    chunks = list(head.residual_chunks(H.requires_grad_(), W, y, rows=10))
    assert [(c.start, c.stop) for c, _ in chunks] == [(0, 10), (10, 20), (20, 30), (30, 33)]
    G = torch.cat([r for _, r in chunks])
    Z = (H @ W.T).detach().requires_grad_()
    F.cross_entropy(Z, y, reduction="sum").backward()
    torch.testing.assert_close(G, Z.grad, rtol=1e-5, atol=1e-6)
    assert not G.requires_grad and G[::4].eq(0).all()
    assert {r.dtype for _, r in head.residual_chunks(H.double(), W.double(), y)} == {torch.float64}
    assert {r.dtype for _, r in head.residual_chunks(H.bfloat16(), W.bfloat16(), y)} == {torch.float32}


@pytest.mark.parametrize("rank", [12, 5])
def test_lost_fraction_equals_an_explicit_projection(rank):
    H, W, y = draw(60, 12, 90, dtype=torch.float64)
    if rank < 12:
        W = W[:, :rank] @ torch.randn(rank, 12, generator=generator(3), dtype=torch.float64)
    G = torch.cat([r for _, r in head.residual_chunks(H, W, y)])
    U, s, _ = torch.linalg.svd(W, full_matrices=False)
    U, s = U[:, :rank], s[:rank]
    outside = G - G @ U @ U.T
    keep = y != -100
    stats = head.head_gradient_stats(H, W, y, rows=16)
    lost = float(outside.norm() / G.norm())
    assert stats["lost"] == pytest.approx(lost, abs=1e-9)
    assert stats["lost_token_mean"] == pytest.approx(
        float((outside.norm(dim=1) / G.norm(dim=1))[keep].mean()), abs=1e-9
    )
    assert stats["cosine"] == pytest.approx(
        float((G * (G @ U @ U.T)).sum() / G.norm() / (G @ U @ U.T).norm()), abs=1e-9
    )
    assert stats["rank"] == rank and stats["cond"] == pytest.approx(float(s[0] / s[-1]), rel=1e-9)
    assert stats["null_lost"] == pytest.approx(math.sqrt(1 - rank / 90))
    assert stats["null_cosine"] == pytest.approx(math.sqrt(rank / 90))
    assert stats["kept_over_null"] == pytest.approx((1 - lost**2) * 90 / rank)
    assert stats["tokens"] == 45


def test_rank_and_lost_fraction_of_float32_factors():
    H, _, y = draw(60, 12, 90)
    factorised = head.FactorisedHead.create(90, 12, 5, generator(1))
    W = factorised.weight.detach()
    assert head.head_gradient_stats(H, W, y)["rank"] == 5
    # a wider basis of the same column space loses exactly as much
    dense = head.head_gradient_stats(H.double(), W.double(), y)
    padded = torch.cat([H, torch.zeros(60, 3)], 1), torch.cat([W, W[:, :3]], 1)
    assert head.head_gradient_stats(*padded, y)["lost"] == pytest.approx(dense["lost"], abs=1e-5)


def test_statistics_without_meaning_are_none():
    H, W, y = draw(20, 4, 30)
    none = head.head_gradient_stats(H, W, torch.full_like(y, -100))
    assert none["lost"] is none["cosine"] is none["kept_over_null"] is None and none["tokens"] == 0
    zero = head.head_gradient_stats(H, torch.zeros(30, 4), y)
    assert zero["rank"] == 0 and zero["lost"] is None and zero["cond"] is None
    H[3] = float("nan")
    assert head.head_gradient_stats(H, W, y)["lost"] is None
    square = head.head_gradient_stats(*draw(20, 30, 30))  # a square head of full rank loses nothing
    assert square["lost"] < 1e-6 and square["kept_over_null"] == pytest.approx(1)


def test_heads_start_with_the_same_element_variance_and_follow_their_generator():
    dense = head.DenseHead.create(4096, 64, generator(1))
    factorised = head.FactorisedHead.create(4096, 64, 16, generator(1))
    for module in (dense, factorised):
        W = module.weight.detach()
        assert W.shape == (4096, 64) and (module.vocab, module.active) == (4096, 4096)
        assert float(W.std()) == pytest.approx(0.02, rel=0.08)
        twin = type(module).create(4096, 64, *([16] if module is factorised else []), generator(1))
        assert torch.equal(twin.weight, W)
    assert [tuple(p.shape) for p in factorised.parameters()] == [(4096, 16), (16, 64)]
    H = torch.randn(3, 64, generator=generator(2))
    torch.testing.assert_close(factorised(H), H @ factorised.weight.T)


def test_every_head_trains_through_its_weight():
    H, W, y = draw(32, 8, 50)
    for module in (
        head.DenseHead(W),
        head.FactorisedHead.create(50, 8, 3, generator()),
        head.FrozenColumnHead.from_weight(W),
    ):
        head.chunked_loss(H, module.weight, y, 24).backward()
        got = [p.grad for p in module.parameters()]
        module.zero_grad()
        head.plain_loss(H, module.weight, y, 24).backward()
        for a, p in zip(got, module.parameters(), strict=True):
            torch.testing.assert_close(a, p.grad, rtol=1e-4, atol=1e-6)
            assert a.ne(0).any()


def test_a_tied_head_holds_the_embeddings_own_parameter():
    embedding = nn.Embedding(50, 8)
    tied = head.DenseHead(embedding.weight)
    assert tied.weight is embedding.weight
    assert len(list(nn.ModuleList([embedding, tied]).parameters())) == 1


def test_expansion_appends_rows_and_keeps_the_common_ones():
    g = generator(4)
    dense = head.DenseHead.create(50, 8, g)
    wide = dense.expand(14, g)
    assert (wide.vocab, wide.active) == (64, 50)
    assert torch.equal(wide.weight[:50], dense.weight) and wide.weight is not dense.weight
    extra = wide.weight.detach()[50:]
    assert extra.ne(0).all() and float(extra.std()) == pytest.approx(0.02, rel=0.3)
    assert (wide.expand(6, g).vocab, wide.expand(6, g).active) == (70, 50)


def test_the_frozen_column_head_starts_at_the_dense_one_and_stays_in_its_column_space():
    frozen = head.FrozenColumnHead.create(50, 8, generator(1))
    W0 = head.DenseHead.create(50, 8, generator(1)).weight.detach()
    torch.testing.assert_close(frozen.weight, W0, rtol=1e-4, atol=1e-7)
    assert [name for name, _ in frozen.named_parameters()] == ["A"]
    H, _, y = draw(32, 8, 50)
    for _ in range(3):
        head.chunked_loss(H, frozen.weight, y, 24).backward()
        with torch.no_grad():
            frozen.A -= frozen.A.grad
    moved = frozen.weight.detach() - W0
    U = torch.linalg.qr(W0.double()).Q
    assert moved.norm() > 0.1 * W0.norm()
    assert (moved - U @ (U.T @ moved.double())).norm() < 1e-5 * moved.norm()
    with pytest.raises(ValueError, match="vocab >= width"):
        head.FrozenColumnHead.from_weight(torch.zeros(4, 8))


def test_a_head_that_is_no_product_has_the_loss_of_its_own_logits(trainer):
    """A tempered head: training and evaluation take its forward, and the gradients are those of its logits."""
    import torch.nn.functional as F

    from backrank.head import DenseHead

    class Tanh(DenseHead):
        linear = False

        def forward(self, hidden):
            return 3 * torch.tanh(super().forward(hidden))

    built = trainer("train.steps=3")
    built.task.head = head = Tanh(built.task.head.weight)
    x, y = built.batch_at(0)
    got = built.task(x, y, y.numel())
    want = F.cross_entropy(head(built.task.hidden(x)), y.flatten())
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(loss, list(head.parameters())) for loss in (got, want)), strict=True):
        torch.testing.assert_close(a, b)
    assert built.task.evaluate([(x, y)])["loss"] == pytest.approx(want.item(), rel=1e-6)
