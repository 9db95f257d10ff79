"""Probes only read, and what they read equals an explicit computation on the same batch."""

import numpy as np
import pytest
import torch
from scipy.linalg import subspace_angles

from backrank.config import make
from backrank.data import load
from backrank.probes import PROBES
from backrank.probes.head import principal_cosines
from backrank.probes.spectra import uniform_error_spectrum
from conftest import every_intervention, with_intervention

FOR_GPT2 = [name for name, cls in PROBES.items() if not cls.kinds or "gpt2" in cls.kinds]
EVERY_PROBE = [f"probe=[{','.join(FOR_GPT2)}]", *(f"probe.{name}.every=1" for name in FOR_GPT2)]
OTHERS = {"two_layer": ["data=digits", "model.kind=two_layer", "model.layers=1", "model.width=276"]}


def measure(built, name, step=5, sequences=8, **settings):
    """What a probe makes of a trainer's model at a step."""
    return make(PROBES[name], settings).measure(built.snapshot(step, sequences))


def numbers(built, sequences=8):
    """Logit gradient G (supervised tokens x V) and W of the probes' batch in float64, and the targets."""
    snapshot = built.snapshot(5, sequences)
    y = snapshot.y_BT.flatten().numpy()
    H = built.task.hidden(snapshot.x_BT).detach().double().numpy()[y >= 0]
    W = built.task.head.weight.detach().double().numpy()
    y = y[y >= 0]
    Z = H @ W.T
    P = np.exp(Z - Z.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    P[np.arange(len(y)), y] -= 1
    return P, W, y


def erank(matrix):
    p = np.linalg.svd(matrix, compute_uv=False) ** 2
    p = p[p > 0] / p.sum()
    return np.exp(-(p * np.log(p)).sum())


# ----------------------------------------------------------------------------------------------------------- passive


@pytest.mark.parametrize("chosen", [
    (), ("model.tied=true", "train.checkpointing=true"), ("train.amp=bf16",),
    with_intervention(("backward_rank", {"rank": 3, "basis": "random", "refresh_every": 3}), ("head_residual", {})),
], ids=["ordinary", "tied", "bf16", "interventions"])  # fmt: skip
def test_training_with_every_probe_at_every_step_is_the_same_to_the_last_bit(train, chosen):
    without = train(*chosen, runs="without")
    watched = train(*chosen, *EVERY_PROBE, "probe.gradient_spectrum.through_sites=true", "every.eval=1", runs="watched")
    assert (without.code, watched.code) == (0, 0) and without.folder.name == watched.folder.name
    assert len(watched.layers) > 21 * 8 and not without.layers
    for name in ("train/loss", "optim/grad_norm", "val/loss", "test/loss"):
        assert watched.series(name) == without.series(name)
    assert watched.weights.keys() == without.weights.keys()
    assert all(torch.equal(watched.weights[name], w) for name, w in without.weights.items())


@pytest.mark.parametrize("through_sites", [False, True])
@pytest.mark.parametrize("name", PROBES)
def test_probes_touch_neither_grad_nor_weights_nor_generators(trainer, name, through_sites):
    kind = [] if name in FOR_GPT2 else OTHERS[PROBES[name].kinds[0]]
    built = trainer(*kind, *with_intervention(("backward_rank", {"rank": 3, "basis": "random"})))
    grads = {n: torch.full_like(p, 7.0) for n, p in built.task.named_parameters()}
    for n, p in built.task.named_parameters():
        p.grad = grads[n]
    weights = {n: w.clone() for n, w in built.task.state_dict().items()}
    state = {n: t.clone() for n, t in built.task.interventions[0].state.items()}
    rng = torch.get_rng_state()
    settings = {"through_sites": True} if through_sites and name == "gradient_spectrum" else {}
    probe = make(PROBES[name], settings)
    probe.prepare(built.cfg, built.task)
    for step in (0, 5):
        metrics, rows = probe.measure(built.snapshot(step, 8))
        assert metrics and all(np.isfinite(v) for v in metrics.values())
        assert all(row["layer"] and row["kind"] for row in rows)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(p.grad is grads[n] and (p.grad == 7).all() for n, p in built.task.named_parameters())
    assert all(torch.equal(w, weights[n]) for n, w in built.task.state_dict().items())
    assert all(torch.equal(t, state[n]) for n, t in built.task.interventions[0].state.items())
    assert built.task.training


def test_the_batch_is_fixed_and_held_out(trainer):
    built = trainer()
    first, again = built.snapshot(0, 8), built.snapshot(15, 8)
    assert torch.equal(first.x_BT, again.x_BT) and first.x_BT.shape == (8, 16)
    assert torch.equal(first.x_BT.flatten()[1:], first.y_BT.flatten()[:-1])
    assert torch.equal(built.snapshot(0, 2).x_BT, first.x_BT[:2])
    held_out = load(built.cfg.data).validation[: 8 * 16]
    assert first.x_BT.flatten().tolist() == held_out.tolist()


# ----------------------------------------------------------------------------------------------------------- spectra

MODULES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
BLOCK = [f"backbone.model.h.{i}.{m}.weight" for i in (0, 1) for m in MODULES]
EMBEDDINGS = ["backbone.model.wte.weight", "backbone.model.wpe.weight"]


@pytest.mark.parametrize(("chosen", "head"), [
    ([], ["head.weight"]),
    (["model.tied=true"], []),
    (with_intervention(("low_rank_head", {"rank": 3})), ["head.A", "head.B", "head.weight"]),
    (with_intervention(("frozen_column_space", {})), ["head.A", "head.weight"]),
], ids=["dense", "tied", "low_rank", "frozen"])  # fmt: skip
def test_weight_spectra_of_every_matrix_against_numpy(trainer, chosen, head):
    built = trainer(*chosen)
    metrics, rows = measure(built, "weight_spectrum")
    assert [row["layer"] for row in rows if row["part"] == "block"] == BLOCK
    assert [row["layer"] for row in rows if row["part"] == "other"] == EMBEDDINGS + head
    for row in rows:
        *path, leaf = row["layer"].split(".")
        W = getattr(built.task.get_submodule(".".join(path)), leaf).detach().double().numpy()
        assert row["erank"] == pytest.approx(erank(W), rel=1e-6) == metrics[f"rank/{row['layer']}/erank"]
        assert row["sigma_1"] == pytest.approx(np.linalg.norm(W, 2), rel=1e-6)
    mean = np.mean([row["erank"] for row in rows if row["part"] == "block"])
    assert metrics["rank/weight_mean"] == pytest.approx(mean, rel=1e-12)
    if "head.B" in head:
        assert next(row for row in rows if row["layer"] == "head.weight")["erank"] < 3.001


def test_gradient_spectra_against_numpy(trainer):
    built = trainer()
    metrics, rows = measure(built, "gradient_spectrum")
    x, y = built.snapshot(5, 8).x_BT, built.snapshot(5, 8).y_BT
    loss = torch.nn.functional.cross_entropy(built.task.hidden(x) @ built.task.head.weight.T, y.flatten())
    loss.backward()
    assert [row["layer"] for row in rows] == [*BLOCK, *EMBEDDINGS, "head.weight"]
    for row in rows:
        G = built.task.get_parameter(row["layer"]).grad.double().numpy()
        assert row["erank"] == pytest.approx(erank(G), rel=1e-4)
        assert row["frobenius"] == pytest.approx(np.linalg.norm(G), rel=1e-5)


@every_intervention
def test_through_sites_measures_the_gradient_that_training_uses(trainer, name, settings):
    built = trainer(*with_intervention((name, settings)))
    for intervention in built.task.interventions:
        intervention.begin_step(0, built.task.head)
    past = measure(built, "gradient_spectrum", sequences=4)[1]
    through = measure(built, "gradient_spectrum", sequences=4, through_sites=True)[1]
    snapshot = built.snapshot(5, 4)
    built.task(snapshot.x_BT, snapshot.y_BT, snapshot.y_BT.numel()).backward()
    for row in through:
        G = built.task.get_parameter(row["layer"]).grad.double().numpy()
        assert row["frobenius"] == pytest.approx(np.linalg.norm(G), rel=1e-5)
        assert row["erank"] == (pytest.approx(erank(G), rel=1e-4) if G.any() else 0)
    pairs = zip(past, through, strict=True)
    changed = {a["layer"] for a, b in pairs if b["erank"] != pytest.approx(a["erank"], rel=1e-3)}
    if settings.get("matrix") == "frequent_directions":  # a sketch is empty before the first update
        assert not changed
    elif name in ("backward_rank", "feedback_route", "intermediate_loss", "meta_route"):  # the backbone, not the head
        assert set(BLOCK) & changed and "head.weight" not in changed
    elif name == "head_residual" and settings.get("at") != "update":
        assert changed == {"head.weight"}
    else:
        assert not changed


def test_the_gradient_of_the_last_block_has_the_rank_of_what_reaches_it(trainer):
    """Behind mlp.c_proj of the last block comes the final norm alone: with the identity in its place, the rows of each
    token's gradient lie in the span of the basis."""
    built = trainer("model.layers=1", *with_intervention(("backward_rank", {"rank": 2})))
    built.task.backbone.model.ln_f = torch.nn.Identity()
    built.task.interventions[0].begin_step(0, built.task.head)
    for through_sites, rank in ((True, 2), (False, 8)):
        gradients = built.snapshot(5, 8).gradients(through_sites)
        G = gradients["backbone.model.h.0.mlp.c_proj.weight"].double()
        assert torch.linalg.matrix_rank(G, rtol=1e-5) == rank


def test_through_sites_at_the_initial_state_is_not_zero(train):
    ran = train("probe=[gradient_spectrum]", "probe.gradient_spectrum.through_sites=true", "train.steps=1",
                *with_intervention(("backward_rank", {"rank": 3})))  # fmt: skip
    assert not any(row["zero"] for row in ran.layers if row["part"] == "block")


# -------------------------------------------------------------------------------------------------------------- head


@pytest.mark.parametrize("chosen", [[], ["model.tied=true"], with_intervention(("vocab_expansion", {"size": 48}))])
def test_head_gradient_against_an_explicit_projection(trainer, chosen):
    built = trainer("model.head_std=0.5", *chosen)
    built.fit()
    metrics, _ = measure(built, "head_gradient")
    G, W, _ = numbers(built)
    Q = np.linalg.qr(W)[0]
    kept, total = np.linalg.norm(G @ Q), np.linalg.norm(G)
    s = np.linalg.svd(W, compute_uv=False)
    want = {
        "lost": np.linalg.norm(G - G @ Q @ Q.T) / total, "cosine": kept / total,
        "lost_token_mean": np.mean(np.linalg.norm(G - G @ Q @ Q.T, axis=1) / np.linalg.norm(G, axis=1)),
        "null_lost": np.sqrt(1 - 8 / len(W)), "null_cosine": np.sqrt(8 / len(W)),
        "kept_over_null": (kept / total) ** 2 / (8 / len(W)), "rank": 8, "cond": s[0] / s[-1], "tokens": len(G),
    }  # fmt: skip
    assert metrics == {f"head/{name}": pytest.approx(value, rel=1e-5) for name, value in want.items()}
    assert 0.1 < want["lost"] < 0.99


def test_head_gradient_of_a_low_rank_head(trainer):
    built = trainer(*with_intervention(("low_rank_head", {"rank": 3})))
    G, W, _ = numbers(built)
    Q = np.linalg.svd(W)[0][:, :3]
    metrics, _ = measure(built, "head_gradient")
    assert metrics["head/rank"] == 3
    assert metrics["head/lost"] == pytest.approx(np.linalg.norm(G - G @ Q @ Q.T) / np.linalg.norm(G), rel=1e-5)


@pytest.mark.parametrize("sequences", [8, 32], ids=["whole", "padded"])  # the split has 299 targets, fewer than 32 x 16
def test_output_error_and_its_null_against_an_svd(trainer, sequences):
    built = trainer("model.head_std=0.5")
    metrics, _ = measure(built, "output_error", sequences=sequences)
    G, W, y = numbers(built, sequences)
    null = np.full_like(G, 1 / len(W))
    null[np.arange(len(y)), y] -= 1
    assert metrics["output/errors"] == len(G) == min(sequences * 16, 299)
    assert metrics["output/r_out"] == pytest.approx(erank(G), rel=1e-5)
    assert metrics["output/r_out_null"] == pytest.approx(erank(null), rel=1e-8)


def test_gradients_of_a_padded_batch_are_those_of_the_mean_loss(trainer):
    built = trainer()
    snapshot = built.snapshot(5, 32)
    assert (snapshot.targets_N == -100).any()
    logits = built.task.hidden(snapshot.x_BT) @ built.task.head.weight.T
    torch.nn.functional.cross_entropy(logits, snapshot.targets_N).backward()
    for name, g in snapshot.gradients().items():
        torch.testing.assert_close(g, built.task.get_parameter(name).grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("classes", [1, 5, 32])
def test_the_nulls_closed_form_against_the_explicit_matrix(classes):
    y = torch.randint(classes, (100,), generator=torch.Generator().manual_seed(classes))
    E = np.full((100, 32), 1 / 32)
    E[np.arange(100), y.numpy()] -= 1
    want, got = np.linalg.svd(E, compute_uv=False), uniform_error_spectrum(y, 32).numpy()
    np.testing.assert_allclose(got[: len(want)], want[: len(got)], atol=1e-6)
    assert np.abs(want[len(got) :]).max(initial=0) < 1e-12


def draw(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_principal_cosines_against_scipy():
    A, B = draw(40, 8, seed=1), draw(40, 8, seed=2)
    near = A + 1e-3 * B
    for first, second in ((A, B), (A, near), (A, A @ draw(8, 8, seed=3)), (A[:, :3] @ B[:3, :8], B)):
        rank = np.linalg.matrix_rank(first.numpy())
        basis = np.linalg.svd(first.numpy())[0][:, :rank]
        want = np.sort(np.cos(subspace_angles(basis, second.numpy())))[::-1]
        got = principal_cosines(first, second)
        assert len(got) == rank
        np.testing.assert_allclose(got, want, atol=1e-10)


def test_feedback_rotation_follows_the_columns_from_the_first_state(train):
    ran = train("probe=[feedback_rotation]", "probe.feedback_rotation.every=10", "optim.lr=0.05")
    mean, least = ran.series("rotation/mean_cos"), ran.series("rotation/min_cos")
    assert list(mean) == [0, 10, 20] and mean[0] == pytest.approx(1, abs=1e-12) == least[0]
    first = train("train.steps=1", "optim.lr=1e-30", "optim.weight_decay=0", runs="start").weights["head.weight"]
    want = np.cos(subspace_angles(first.double().numpy(), ran.weights["head.weight"].double().numpy()))
    assert (mean[20], least[20]) == (pytest.approx(want.mean(), abs=1e-9), pytest.approx(want.min(), abs=1e-9))
    assert mean[20] < mean[10] < 0.999


@pytest.mark.parametrize(("name", "settings", "optim"), [
    ("frozen_column_space", {}, "adamw"), ("frozen_column_space", {}, "sgd"),
    ("head_residual", {"at": "gradient"}, "sgd"), ("head_residual", {"at": "update"}, "adamw")])  # fmt: skip
def test_a_head_confined_to_its_columns_does_not_rotate(train, name, settings, optim):
    ran = train(f"optim={optim}", "optim.lr=0.05", "probe=[feedback_rotation]", "probe.feedback_rotation.every=5",
                *with_intervention((name, settings)))  # fmt: skip
    assert all(value == pytest.approx(1, abs=1e-6) for value in ran.series("rotation/min_cos").values())
    start = train("train.steps=1", "optim.lr=1e-30", "optim.weight_decay=0", runs="start").weights["head.weight"]
    end = ran.weights["head.weight"] if "head.weight" in ran.weights else ran.weights["head.Q"] @ ran.weights["head.A"]
    assert (end - start).norm() > 0.1 * start.norm()  # it did move


def test_under_adam_a_projected_gradient_does_not_keep_the_columns(train):
    ran = train("optim.lr=0.05", "probe=[feedback_rotation]", *with_intervention(("head_residual", {"at": "gradient"})))
    assert ran.series("rotation/min_cos")[20] < 0.99


def test_a_head_without_a_column_space_has_no_angles(trainer):
    built = trainer()
    probe = make(PROBES["feedback_rotation"], {})
    probe.measure(built.snapshot(0, 8))
    for value in (0.0, float("nan")):
        built.task.head.weight.data.fill_(value)
        metrics, rows = probe.measure(built.snapshot(5, 8))
        assert all(np.isnan(v) for v in metrics.values()) and not rows


def test_a_probe_is_due_at_both_ends_and_at_its_cadence():
    probe = make(PROBES["weight_spectrum"], {"every": 4})
    assert [step for step in range(11) if probe.due(step, 10)] == [0, 4, 8, 10]
    assert [step for step in range(11) if make(PROBES["weight_spectrum"], {"every": 0}).due(step, 10)] == [0, 10]
