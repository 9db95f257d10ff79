"""Auxiliary routes against dense G, plain SVDs and finite differences, on a model of width 8 and vocabulary 32."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from backrank.interventions.routes import frequent_directions, oja
from conftest import CHOSEN, with_intervention

ROUTES = [p for p in CHOSEN if p.values[0] in ("feedback_route", "intermediate_loss", "meta_route")]
every_route = pytest.mark.parametrize(("name", "settings"), ROUTES)
SCALE = 0.5


def feedback(matrix="random", **settings):
    return with_intervention(("feedback_route", {"scale": SCALE, "matrix": matrix, "rank": 3} | settings))


def dense(task, hidden):
    """G = softmax - onehot and W, float64, and the function of targets that gives G."""
    W = task.head.weight.detach().double()
    P = torch.softmax(hidden.detach().double() @ W.T, 1)
    return lambda y: P - F.one_hot(y.flatten(), len(W)), W


def forward(built, step=0):
    """Loss, states after the blocks (B x T x D, with the graph of what follows), hidden states, targets."""
    kept = []
    hooks = [block.register_forward_hook(lambda *a: kept.append(a[2])) for block in built.task.backbone.model.h]
    x, y = built.batch_at(step)
    hidden = built.task.hidden(x)
    states, _ = [s[0] if isinstance(s, tuple) else s for s in kept], kept.clear()
    loss = built.task(x, y, y.numel())
    again = [s[0] if isinstance(s, tuple) else s for s in kept]
    for hook in hooks:
        hook.remove()
    return loss, again, states, hidden, y


def unit(a):
    return a / a.norm()


def overlap(a_kV, b_kV):
    """Mean squared cosine of the principal angles between two row spaces, 1 if they are the same."""
    a, b = (torch.linalg.qr(m.double().T).Q for m in (a_kV, b_kV))
    return float((a.T @ b).square().sum() / a.shape[1])


# --------------------------------------------------------------------------------------------- what a route sends


@pytest.mark.parametrize("depths", [[], [1], [2], [1, 2]])
@pytest.mark.parametrize("matrix", ["random", "residual", "oja", "frequent_directions"])
def test_the_gradient_at_every_state_against_dense_matrices(trainer, matrix, depths):
    arm = trainer("train.steps=3", *feedback(matrix, depths=depths))
    arm.fit()  # so that the adaptive ones have something to carry
    arm.task.double()
    [route] = arm.task.interventions
    loss, states, free, hidden, y = forward(arm)
    got = torch.autograd.grad(loss, states)

    residual, W = dense(arm.task, hidden)
    G = residual(y)
    B = route.state["returns"].double()
    assert B.shape == (max(1, len(depths)), 32, 8) and all(abs(b.std() - 1) < 0.2 for b in B)
    if matrix == "residual":
        Q = torch.linalg.qr(W).Q
        B = B - Q @ (Q.T @ B)
    elif matrix != "random":
        U = torch.linalg.svd(route.state["tracked"].double(), full_matrices=False)[2][:3]
        B = U.T @ (U @ B)
    sent = [G @ b for b in B]
    sent = [r * (SCALE * (G @ W).norm() / r.norm()) / y.numel() for r in sent]
    at = dict(zip(depths or [2], sent, strict=True))
    none = torch.zeros(len(hidden), 8, dtype=torch.float64)
    last = G @ W / y.numel() + at.get(2, none)
    want = list(torch.autograd.grad(hidden, free, last))  # what arrives from above
    want[0] = want[0] + at.get(1, none).view_as(want[0])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6 * float(b.abs().max()))
    for r in sent:
        assert float(r.norm() / (G @ W / y.numel()).norm()) == pytest.approx(SCALE)


def test_an_intermediate_loss_against_an_explicit_one(trainer):
    ordinary = trainer()
    arm = trainer(*with_intervention(("intermediate_loss", {"scale": SCALE, "depths": [1]})))
    for built in (ordinary, arm):
        built.task.double()
    (loss, states, *_), (want, plain, _, _, y) = forward(arm), forward(ordinary)
    assert torch.equal(loss, want)
    h = plain[0].detach().requires_grad_()
    centred = h - h.mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    logits = (normed @ ordinary.task.head.weight.detach().T).flatten(0, 1)
    extra = torch.autograd.grad(SCALE * F.cross_entropy(logits, y.flatten()), h)[0]
    got, base = torch.autograd.grad(loss, states[0])[0], torch.autograd.grad(want, plain[0])[0]
    torch.testing.assert_close(got, base + extra, rtol=1e-6, atol=1e-10)
    assert extra.norm() > 0.1 * base.norm()


@every_route
def test_loss_and_head_gradient_are_the_ordinary_ones_and_the_backbones_is_not(trainer, name, settings):
    ordinary, arm = trainer(), trainer("train.steps=6", *with_intervention((name, settings)))
    arm.fit()
    ordinary.task.load_state_dict(arm.task.state_dict())
    x, y = ordinary.batch_at(7)
    losses = [built.task(x, y, y.numel()) for built in (ordinary, arm)]
    assert torch.equal(*losses)
    for built, loss in zip((ordinary, arm), losses, strict=True):
        built.task.zero_grad()
        loss.backward()
    assert torch.equal(arm.task.head.weight.grad, ordinary.task.head.weight.grad)
    got, want = (built.task.backbone.embedding.weight.grad for built in (arm, ordinary))
    assert (got - want).norm() > 0.05 * want.norm()


@every_route
def test_a_zero_gradient_stays_zero(trainer, name, settings):
    built = trainer("train.steps=6", *with_intervention((name, settings)))
    built.fit()
    x, y = built.batch_at(0)
    built.task(x, torch.full_like(y, -100), 1).backward()
    for intervention in built.task.interventions:
        intervention.before_update(built.task.head)
        assert all(t.isfinite().all() for t in intervention.state.values())
    assert all(not p.grad.any() for p in built.task.parameters())


def test_the_residual_matrix_carries_nothing_of_the_column_space(trainer):
    built = trainer("model.head_std=0.5", *feedback("residual"))
    [route] = built.task.interventions
    W = built.task.head.weight.detach()
    [M], [B] = route.matrices(W), route.state["returns"]
    assert (W.double().T @ M.double()).norm() < 1e-6 * W.norm() * M.norm()
    inside = B.double() - M.double()
    assert torch.linalg.matrix_rank(torch.cat([W.double(), inside], 1), rtol=1e-5) == 8
    assert 0.1 < float(inside.norm() / B.norm()) < 0.9  # neither part is trivial


# -------------------------------------------------------------------------------------------------- what is tracked


def stream(top_kV, steps, generator, noise=0.3):
    """Batches of 40 rows: k directions of falling strength under noise."""
    strength = torch.linspace(3, 2, len(top_kV), dtype=torch.float64)
    for _ in range(steps):
        weights = torch.randn(40, len(top_kV), generator=generator, dtype=torch.float64) * strength
        yield weights @ top_kV + noise * torch.randn(40, top_kV.shape[1], generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", ["oja", "frequent_directions"])
def test_the_top_directions_of_a_stream_are_found_and_followed(kind):
    draws = torch.Generator().manual_seed(0)
    first, second = (torch.linalg.qr(torch.randn(50, 3, generator=draws, dtype=torch.float64)).Q.T for _ in range(2))
    tracked = {"oja": torch.linalg.qr(torch.randn(50, 3, generator=draws, dtype=torch.float64)).Q.T,
               "frequent_directions": torch.zeros(6, 50, dtype=torch.float64)}[kind]  # fmt: skip
    for planted in (first, second):
        seen = []
        for G in stream(planted, 60, draws):
            seen.append(G)
            if kind == "oja":
                tracked = oja(tracked, (tracked @ G.T) @ G, 0.2)
            else:
                tracked = frequent_directions(tracked * 0.8**0.5, G)
        truth = torch.linalg.svd(torch.cat(seen), full_matrices=False)[2][:3]
        assert overlap(truth, planted) > 0.99
        assert overlap(tracked[:3], truth) > 0.99
    gram = tracked @ tracked.T
    torch.testing.assert_close(gram, torch.diag(gram.diagonal()), rtol=0, atol=1e-9 * float(gram.max()))
    if kind == "oja":
        torch.testing.assert_close(gram.diagonal(), torch.ones(3, dtype=torch.float64))
    else:
        assert (gram.diagonal().diff() <= 0).all()


def test_a_sketch_keeps_the_bound_of_frequent_directions():
    """0 <= A^T A - S^T S <= |A - A_k|_F^2 / (l + 1 - k), for every k up to the l rows of the sketch."""
    draws = torch.Generator().manual_seed(1)
    A = torch.cat(list(stream(torch.eye(30, dtype=torch.float64)[:4], 10, draws, noise=1.0)))
    S = torch.zeros(8, 30, dtype=torch.float64)
    for rows in (A, A[:12]):  # more rows than columns, and fewer
        values = torch.linalg.svdvals(rows).square()
        got = frequent_directions(S, rows).square().sum(1)
        torch.testing.assert_close(got, values[:8] - values[8])
    for rows in A.split(37):
        S = frequent_directions(S, rows)
    errors = torch.linalg.eigvalsh(A.T @ A - S.T @ S)
    tail = torch.linalg.svdvals(A).square().flip(0).cumsum(0).flip(0)
    assert errors[0] > -1e-9 * tail[0]
    assert errors[-1] <= min(tail[k] / (9 - k) for k in range(9))


@pytest.mark.parametrize("matrix", ["oja", "frequent_directions"])
def test_in_a_run_the_tracked_directions_are_those_of_its_logit_gradients(trainer, matrix):
    """A model that stands still: after 60 steps the k directions hold as much of G as its k singular ones, nearly."""
    built = trainer("optim.lr=1e-12", "train.steps=60", *feedback(matrix, memory=2))
    batch = built.batch_at(0)
    built.batch_at = lambda i: batch
    [route] = built.task.interventions
    start = route.state["tracked"].clone()
    built.fit()
    residual, _ = dense(built.task, built.task.hidden(batch[0]))
    G = residual(batch[1])
    U = torch.linalg.qr(route.state["tracked"][:3].double().T).Q
    best = float(torch.linalg.svdvals(G)[:3].square().sum())
    assert float((G @ U).square().sum()) > 0.97 * best
    assert not torch.equal(route.state["tracked"], start)


@pytest.mark.parametrize("matrix", ["oja", "frequent_directions"])
def test_a_step_of_tracking_counts_when_the_update_comes_and_forgets_by_its_memory(trainer, matrix):
    built = trainer("train.steps=3", *feedback(matrix, memory=4))
    built.fit()
    [route] = built.task.interventions
    x, y = built.batch_at(5)
    residual, _ = dense(built.task, built.task.hidden(x))
    G, before = residual(y).float(), route.state["tracked"].clone()
    for _ in range(2):  # the second forward pass, as an abandoned one, starts where the first did
        built.task(x, y, y.numel())
        assert torch.equal(route.state["tracked"], before)
    route.before_update(built.task.head)
    if matrix == "oja":
        want = oja(before, (before @ G.T) @ G, 0.25)
    else:
        want = frequent_directions(before * 0.75**0.5, G)
    got = route.state["tracked"]
    torch.testing.assert_close(got.T @ got, want.T @ want, rtol=1e-4, atol=1e-4 * float(want.square().max()))


# --------------------------------------------------------------------------------------------------------- state


@every_route
def test_what_a_probe_sends_through_the_sites_leaves_no_trace(trainer, name, settings):
    chosen = with_intervention((name, settings))
    probes = ["probe=[gradient_spectrum]", "probe.gradient_spectrum.every=1"]
    watched = trainer(*chosen, *probes, "probe.gradient_spectrum.through_sites=true")
    alone = trainer(*chosen)
    watched.fit()
    alone.fit()
    assert watched.recorder.losses() == alone.recorder.losses()
    for a, b in zip(watched.task.interventions, alone.task.interventions, strict=True):
        assert all(torch.equal(a.state[key], b.state[key]) for key in b.state)


@every_route
def test_the_state_of_a_resumed_run_is_that_of_a_whole_one(trainer, name, settings):
    whole, cut, again = (trainer(*with_intervention((name, settings))) for _ in range(3))
    cut.steps = 11
    for built in (whole, cut):
        built.fit()
    cut.checkpoint()
    again.restore(copy.deepcopy(cut.recorder.saved[-1]))
    again.fit()
    moved = False
    for a, b, c in zip(again.task.interventions, whole.task.interventions, cut.task.interventions, strict=True):
        assert a.state.keys() == b.state.keys()
        assert all(torch.equal(a.state[key], b.state[key]) for key in b.state)
        moved |= any(not torch.equal(c.state[key], b.state[key]) for key in b.state)
    assert moved == (name == "meta_route" or "memory" in settings or settings.get("matrix") == "frequent_directions")
    assert all(torch.equal(w, whole.task.state_dict()[n]) for n, w in again.task.state_dict().items())


def test_matrices_differ_between_seeds_and_states_and_draw_from_no_global_generator(trainer):
    before = torch.get_rng_state()
    one, two = (trainer(f"seed={s}", *feedback(depths=[1, 2])).task.interventions[0].state["returns"] for s in (1, 2))
    again = trainer(*feedback(depths=[1, 2])).task.interventions[0].state["returns"]
    assert torch.equal(one, again) and not torch.equal(one, two) and not torch.equal(one[0], one[1])
    built = trainer(*with_intervention(("meta_route", {"scale": SCALE, "every": 1})))
    after = torch.get_rng_state()
    built.fit()
    assert torch.equal(torch.get_rng_state(), after)
    torch.set_rng_state(before)


# ---------------------------------------------------------------------------------------------------- meta-learning


def explicit_loss_after_a_step(task, route, mixing, a, b):
    """Loss on batch b after one plain gradient step on batch a with the route's gradient at the hidden states."""
    (x, y), trial = a, copy.deepcopy(task)
    trial.zero_grad()
    hidden = trial.hidden(x)
    residual, W = dense(trial, hidden)
    G = residual(y)
    R = G @ route.state["directions"].double() @ mixing
    R = R * (route.scale * (G @ W).norm() / R.norm())
    ordinary = F.cross_entropy(hidden @ trial.head.weight.T, y.flatten())
    ordinary.backward(retain_graph=True)
    hidden.backward(R / y.numel())
    with torch.no_grad():
        for p in trial.parameters():
            p -= route.inner_lr * p.grad
        x, y = b
        return float(F.cross_entropy(trial.hidden(x) @ trial.head.weight.T, y.flatten()))


@pytest.mark.parametrize("chosen", [[], ["model.tied=true"]], ids=["untied", "tied"])
def test_the_meta_gradient_against_finite_differences(trainer, chosen):
    built = trainer("model.head_std=0.3", *chosen, *with_intervention(
        ("meta_route", {"scale": SCALE, "rank": 3, "inner_lr": 0.5})))  # fmt: skip
    built.task.double()
    [route] = built.task.interventions
    route.state["mixing"] = mixing = route.state["mixing"].double()
    asked, fresh = [], route.fresh
    route.fresh = lambda i: asked.append(i) or fresh(i)
    got = route.meta_gradient(3)
    assert asked == [6, 7] and got.shape == (3, 8)
    batches = fresh(6), fresh(7)
    assert not any(torch.equal(batches[0][0], built.batch_at(i)[0]) for i in range(13))
    want = torch.zeros_like(mixing)
    for i, j in np.ndindex(3, 8):
        ends = []
        for sign in (1, -1):
            moved = mixing.clone()
            moved[i, j] += sign * 1e-4
            ends.append(explicit_loss_after_a_step(built.task, route, moved, *batches))
        want[i, j] = (ends[0] - ends[1]) / 2e-4
    assert (got - want).norm() < 1e-5 * want.norm()
    assert abs((got * mixing).sum()) < 1e-6 * got.norm() * mixing.norm()  # the route's size is not learned


def test_the_mixing_moves_by_its_rate_when_it_is_due_and_only_then(trainer):
    built = trainer(*with_intervention(("meta_route", {"scale": SCALE, "rank": 3, "every": 4, "meta_lr": 0.25})))
    [route] = built.task.interventions
    begin, moves = route.begin_step, {}

    def spy(step, head):
        before, weights = route.state["mixing"].clone(), copy.deepcopy(built.task.state_dict())
        gradient = route.meta_gradient(step // 4)
        begin(step, head)
        moved = route.state["mixing"] - before
        assert all(torch.equal(w, weights[name]) for name, w in built.task.state_dict().items())
        assert all(p.grad is None for p in built.task.parameters())
        if moved.any():
            moves[step] = float(moved.norm() / before.norm())
            torch.testing.assert_close(unit(moved), -unit(gradient), rtol=1e-3, atol=1e-5)

    route.begin_step = spy
    built.fit()
    assert moves == {step: pytest.approx(0.25, rel=1e-4) for step in (4, 8, 12, 16)}
