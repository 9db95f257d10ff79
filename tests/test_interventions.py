"""Every intervention by what its class declares, on a model of width 8 and vocabulary 32."""

import copy
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from backrank.build import build_task
from backrank.config import ConfigError
from backrank.grad import grad_map
from backrank.identity import run_id
from backrank.interventions import INTERVENTIONS, Intervention
from conftest import CHOSEN, every_intervention, with_intervention

WIDTH = 8
# Adam turns a gradient that is zero but for rounding (a key's bias) into a whole step; this eps keeps it rounding.
STEADY = ("optim=adamw", "optim.eps=1e-4")


def site_gradients(trainer, step=0):
    """The loss of a step's batch, the gradient that reaches the backbone, and those of the head's parameters."""
    task, (x, y) = trainer.task, trainer.batch_at(step)
    hidden = task.hidden(x).detach().requires_grad_()

    def shared(x, taps=None):
        (taps or {}).update(dict.fromkeys(taps or {}, hidden))  # every tapped state is that one
        return hidden

    task.hidden = shared
    for intervention in task.interventions:
        intervention.begin_step(step, task.head)
    loss = task(x, y, (y >= 0).sum())
    gradients = torch.autograd.grad(loss, [hidden, *(p for p in task.head.parameters() if p.requires_grad)])
    del task.hidden
    return loss.detach(), *gradients


def all_gradients(trainer, step=0):
    """Name -> gradient of a step, as the optimiser would meet it."""
    for intervention in trainer.task.interventions:
        intervention.begin_step(step, trainer.task.head)
    x, y = trainer.batch_at(step)
    trainer.task.zero_grad()
    trainer.forward(x, y, (y >= 0).sum()).backward()
    return {name: p.grad.clone() for name, p in trainer.task.named_parameters() if p.requires_grad}


def assert_close(got, want, tolerance=1e-6):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def inside(weight, x):
    """The part of x in the column space of the weight, by an explicit QR in float64."""
    Q = np.linalg.qr(weight.detach().double().numpy())[0]
    return torch.from_numpy(Q @ (Q.T @ x.detach().double().numpy()))


def relative(a, b):
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())


# ------------------------------------------------------------------------------------------- what the classes declare


@pytest.mark.parametrize("optim", [STEADY, ("optim=sgd",)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("name", [name for name, cls in INTERVENTIONS.items() if cls.neutral is not None])
def test_neutral_settings_are_ordinary_backpropagation(trainer, name, optim):
    ordinary = trainer("train.steps=8", *optim)
    neutral = trainer("train.steps=8", *optim, *with_intervention((name, INTERVENTIONS[name].neutral)))
    start = copy.deepcopy(ordinary.task.state_dict())
    ordinary.fit()
    neutral.fit()
    assert_close(neutral.task.state_dict(), ordinary.task.state_dict())
    assert (ordinary.task.head.weight - start["head.weight"]).abs().max() > 1e-3


@every_intervention
def test_the_first_loss_is_the_ordinary_one_where_declared(trainer, name, settings):
    ordinary, arm = trainer(), trainer(*with_intervention((name, settings)))
    want, got = site_gradients(ordinary)[0], site_gradients(arm)[0]
    assert torch.equal(got, want) or not INTERVENTIONS[name].keeps_forward
    assert torch.allclose(got, want, atol=0.5)


@every_intervention
def test_every_intervention_changes_the_training_unless_it_is_neutral(trainer, name, settings):
    ordinary, arm = trainer("train.steps=3"), trainer("train.steps=3", *with_intervention((name, settings)))
    ordinary.fit()
    arm.fit()
    want = dict(ordinary.task.named_parameters())
    moved = [
        n
        for n, p in arm.task.named_parameters()
        if n not in want or p.shape != want[n].shape or relative(p, want[n]) > 1e-3
    ]
    assert moved


# ----------------------------------------------------------------------------------------------- backward_rank (D17)


@pytest.mark.parametrize("basis", ["head", "gradient", "random"])
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_leaves_loss_and_head_gradient_alone(trainer, basis, tied):
    tied = f"model.tied={tied}"
    loss, dH, dW = site_gradients(trainer(tied))
    for rank in range(1, WIDTH + 1):
        arm = trainer(tied, *with_intervention(("backward_rank", {"rank": rank, "basis": basis})))
        got_loss, got_dH, got_dW = site_gradients(arm)
        assert torch.equal(got_loss, loss) and torch.equal(got_dW, dW)
        assert torch.linalg.matrix_rank(got_dH.double(), rtol=1e-5) == rank
        assert float(got_dH.double().norm() / dH.double().norm()) == pytest.approx(1, abs=1e-5)
    assert relative(got_dH, dH) < 1e-6


@pytest.mark.parametrize("rms", ["tensor", "token", "none"])
@pytest.mark.parametrize("basis", ["head", "gradient"])
def test_the_hidden_gradient_against_an_explicit_svd(trainer, basis, rms):
    ordinary = trainer()
    dH = site_gradients(ordinary)[1].double().numpy()
    source = {"head": ordinary.task.head.weight.detach().double().numpy(), "gradient": dH}[basis]
    V = np.linalg.svd(source)[2][:3].T
    want = dH @ V @ V.T
    if rms == "tensor":
        want *= np.linalg.norm(dH) / np.linalg.norm(want)
    elif rms == "token":
        want *= np.linalg.norm(dH, axis=1, keepdims=True) / np.linalg.norm(want, axis=1, keepdims=True)
    arm = trainer(*with_intervention(("backward_rank", {"rank": 3, "basis": basis, "rms": rms})))
    got = site_gradients(arm)[1]
    assert relative(got, torch.from_numpy(want)) < 1e-5


@pytest.mark.parametrize(("basis", "refresh", "changes"), [
    ("head", None, list(range(8))), ("head", 3, [0, 3, 6]), ("random", None, [0]), ("random", 3, [0, 3, 6]),
])  # fmt: skip
def test_bases_change_when_they_should_and_only_then(trainer, basis, refresh, changes):
    arm = trainer("train.steps=8", "optim.lr=0.1", *with_intervention(
        ("backward_rank", {"rank": 3, "basis": basis, "refresh_every": refresh})))  # fmt: skip
    [intervention] = arm.task.interventions
    begin, seen, weights = intervention.begin_step, [], []

    def spy(step, head):
        weights.append(head.weight.detach().clone())
        begin(step, head)
        seen.append(intervention.state["basis"].clone())

    intervention.begin_step = spy
    arm.fit()
    for V in seen:
        torch.testing.assert_close(V.T @ V, torch.eye(3), rtol=0, atol=1e-6)
    assert [i for i in range(8) if i == 0 or not torch.equal(seen[i], seen[i - 1])] == changes
    if basis == "head":
        for i in changes:
            V = np.linalg.svd(weights[i].double().numpy())[2][:3].T
            np.testing.assert_allclose(seen[i].double() @ seen[i].double().T, V @ V.T, atol=1e-5)


# ------------------------------------------------------------------------------------------------------------- order


@dataclass
class AddOne(Intervention):
    def hidden(self, hidden_ND):
        return grad_map(hidden_ND, lambda g: g + 1)

    weight = hidden


@dataclass
class Double(Intervention):
    def hidden(self, hidden_ND):
        return grad_map(hidden_ND, lambda g: g * 2)

    weight = hidden


def test_the_gradient_meets_the_maps_in_the_order_of_the_config(trainer, config, monkeypatch):
    monkeypatch.setitem(INTERVENTIONS, "add_one", AddOne)
    monkeypatch.setitem(INTERVENTIONS, "double", Double)
    plain = trainer()
    _, dH, dW = site_gradients(plain)
    ids = set()
    for order, fn in ((("add_one", "double"), lambda g: (g + 1) * 2), (("double", "add_one"), lambda g: g * 2 + 1)):
        cfg = config()
        for name in order:
            OmegaConf.update(cfg, f"intervention.{name}", {}, force_add=True)
        plain.task = build_task(cfg)[0]
        _, got_dH, got_dW = site_gradients(plain)
        torch.testing.assert_close(got_dH, fn(dH), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(got_dW, fn(dW), rtol=1e-6, atol=1e-7)
        ids.add(run_id(cfg, {}))
    assert len(ids) == 2


def test_evaluation_passes_through_no_site(trainer):
    arm = trainer(*with_intervention(("backward_rank", {"rank": 3}), ("head_residual", {})))
    arm.task.interventions = [AddOne()]
    arm.task.interventions[0].hidden = arm.task.interventions[0].weight = None  # calling it would raise
    x, y = arm.batch_at(0)
    assert arm.task.evaluate([(x, y)])["tokens"] == y.numel()


# ------------------------------------------------------------------------------------------------------------- heads


def test_head_residual_splits_the_exact_gradient(trainer):
    plain = trainer()
    _, dH, dW = site_gradients(plain)
    _, got_dH, removed = site_gradients(trainer(*with_intervention(("head_residual", {}))))
    _, _, kept = site_gradients(trainer(*with_intervention(("head_residual", {"keep": True}))))
    assert torch.equal(got_dH, dH)
    assert relative(removed + kept, dW) < 1e-6
    weight = plain.task.head.weight
    assert relative(removed, inside(weight, dW)) < 1e-5
    assert inside(weight, kept).norm() < 1e-5 * kept.double().norm()
    assert 0.1 < float(kept.norm() / dW.norm()) < 1  # neither part is trivial
    _, _, matched = site_gradients(trainer(*with_intervention(("head_residual", {"match": True}))))
    assert relative(matched, removed * (dW.norm() / removed.norm())) < 1e-5


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@pytest.mark.parametrize("keep", [False, True])
def test_head_residual_at_the_update_keeps_the_ordinary_steps_norm(trainer, optim, keep):
    arm = trainer(f"optim={optim}", *with_intervention(("head_residual", {"at": "update", "keep": keep})))
    weight, step, ordinary, states = arm.task.head.weight, arm.optimiser.step, [], []

    def spy():
        states.append(weight.detach().clone())
        step()
        ordinary.append(weight.detach() - states[-1])

    arm.optimiser.step = spy
    arm.fit()
    states.append(weight.detach().clone())
    assert len(ordinary) == 20
    for before, after, wanted in zip(states, states[1:], ordinary, strict=False):
        applied = (after - before).double()
        part = inside(before, wanted)
        part = wanted.double() - part if keep else part
        assert float(applied.norm() / wanted.double().norm()) == pytest.approx(1, abs=1e-4)
        assert relative(applied, part * (wanted.double().norm() / part.norm())) < 1e-4
        outside = inside(before, applied) if keep else applied - inside(before, applied)
        assert outside.norm() < 1e-4 * applied.norm()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_under_plain_sgd_the_frozen_column_space_is_residual_removal(trainer, momentum):
    sgd = ("optim=sgd", "optim.clip=0", f"optim.momentum={momentum}", "optim.lr=0.5")
    frozen = trainer(*sgd, *with_intervention(("frozen_column_space", {})))
    removed = trainer(*sgd, *with_intervention(("head_residual", {"at": "gradient"})))
    ordinary = trainer(*sgd)
    start = ordinary.task.head.weight.detach().clone()
    for arm in (frozen, removed, ordinary):
        arm.fit()
    torch.testing.assert_close(frozen.task.head.weight, removed.task.head.weight, rtol=0, atol=1e-5)
    assert_close(frozen.task.backbone.state_dict(), removed.task.backbone.state_dict(), 1e-5)
    assert relative(frozen.task.head.weight, start) > 0.1
    assert relative(ordinary.task.head.weight, frozen.task.head.weight) > 0.1


def test_low_rank_heads_have_that_rank_and_expanded_ones_never_a_target(trainer):
    low = trainer(*with_intervention(("low_rank_head", {"rank": 3})))
    low.fit()
    assert torch.linalg.matrix_rank(low.task.head.weight.double(), rtol=1e-5) == 3
    wide = trainer(*with_intervention(("vocab_expansion", {"size": 48})))
    assert torch.equal(wide.task.head.weight[:32], trainer().task.head.weight)
    larger = trainer(*with_intervention(("vocab_expansion", {"size": 64})))
    assert torch.equal(larger.task.head.weight[:48], wide.task.head.weight)
    x, y = wide.batch_at(0)
    logits = (wide.task.hidden(x) @ wide.task.head.weight.T).detach().double()
    want = [-(z.log_softmax(-1).gather(1, y.flatten()[:, None])).mean() for z in (logits, logits[:, :32])]
    got = wide.task.evaluate([(x, y)])
    assert (got["loss"], got["loss_active"]) == pytest.approx([float(v) for v in want], abs=1e-6)


# -------------------------------------------------------------------------------------------------------- tied heads

TIED = [p for p in CHOSEN if INTERVENTIONS[p.values[0]].accepts_tied and p.values[1].get("at") != "update"]
NOT_TIED = [p for p in CHOSEN if p not in TIED]


# adapters train no embedding
@pytest.mark.parametrize(("name", "settings"), [p for p in TIED if p.values[0] != "adapters"])
def test_a_tied_gradient_is_the_embeddings_own_plus_the_heads(trainer, name, settings):
    """Against an untied model of the same weights, so the weight site leaves the embedding's own gradient alone."""
    chosen = with_intervention((name, settings))
    tied, twin, plain = trainer("model.tied=true", *chosen), trainer(*chosen), trainer()
    embedding = "backbone.model.wte.weight"
    for other in (twin, plain):
        other.task.backbone.load_state_dict(tied.task.backbone.state_dict())
        other.task.head.load_state_dict({"weight": tied.task.head.weight})
    for ours, other in zip(tied.task.interventions, twin.task.interventions, strict=True):
        other.state = copy.deepcopy(ours.state)
    got, parts, ordinary = all_gradients(tied), all_gradients(twin), all_gradients(plain)
    head = parts.pop("head.weight")
    assert relative(got.pop(embedding), parts[embedding] + head) < 1e-6
    assert_close(got, {n: g for n, g in parts.items() if n != embedding})
    if name == "head_residual":
        assert torch.equal(parts[embedding], ordinary[embedding])
        want = inside(tied.task.head.weight, ordinary["head.weight"])
        if settings.get("match"):
            want *= ordinary["head.weight"].norm() / want.norm()
        assert relative(head, want) < 1e-5
    tied.fit()
    assert len(list(tied.task.head.parameters())) == 1 and tied.task.head.weight is tied.task.backbone.embedding.weight
    losses = tied.recorder.losses()
    assert sum(losses[-5:]) < sum(losses[:5])


REFUSED = [
    *(("model.tied=true", p.values[0], p.values[1], "model.tied=") for p in NOT_TIED),
    ("train.accumulate=4", "backward_rank", {"rank": 3}, "rms=tensor"),
    ("train.accumulate=4", "backward_rank", {"rank": 3, "rms": "none", "basis": "gradient"}, "basis=gradient"),
    ("train.accumulate=4", "head_residual", {"match": True}, "match=True"),
    ("seed=1", "backward_rank", {"rank": 9}, "rank=9"),
    ("seed=1", "backward_rank", {"rank": 3, "basis": "hed"}, "basis=hed"),
    ("seed=1", "backward_rank", {"rank": 3, "basis": "gradient", "refresh_every": 2}, "refresh_every=2"),
    ("seed=1", "low_rank_head", {"rank": 0}, "rank=0"),
    ("seed=1", "vocab_expansion", {"size": 31}, "size=31"),
    ("seed=1", "head_residual", {"at": "step"}, "at=step"),
    ("train.accumulate=4", "feedback_route", {"scale": 0.5}, "train.accumulate=4"),
    ("train.accumulate=4", "meta_route", {"scale": 0.5}, "train.accumulate=4"),
    ("train.compile=inductor", "feedback_route", {"scale": 0.5, "depths": [1]}, "train.compile=inductor"),
    ("train.compile=inductor", "intermediate_loss", {"scale": 0.5, "depths": [1]}, "train.compile=inductor"),
    ("seed=1", "feedback_route", {"scale": 0.5, "matrix": "oya"}, "matrix=oya"),
    ("seed=1", "feedback_route", {"scale": -0.5}, "scale=-0.5"),
    ("seed=1", "feedback_route", {"scale": 0.5, "depths": [0]}, "depths=[0]"),
    ("seed=1", "feedback_route", {"scale": 0.5, "depths": [2, 2]}, "depths=[2, 2]"),
    ("seed=1", "feedback_route", {"scale": 0.5, "matrix": "oja", "rank": 9}, "rank=9"),
    ("seed=1", "feedback_route", {"scale": 0.5, "matrix": "oja", "rank": 3, "memory": 0.5}, "memory=0.5"),
    ("model.width=32", "feedback_route", {"scale": 0.5, "matrix": "residual"}, "matrix=residual"),
    ("seed=1", "intermediate_loss", {"scale": 0.5, "depths": [3]}, "depths=[3]"),
    ("seed=1", "intermediate_loss", {"scale": 0.5, "depths": []}, "depths=[]"),
    ("seed=1", "meta_route", {"scale": 0.5, "rank": 0}, "rank=0"),
    ("seed=1", "meta_route", {"scale": 0.5, "every": 0}, "every=0"),
]


def test_what_is_not_exact_is_refused_by_name_before_torch_is_loaded(tiny, tmp_path):
    base = [*tiny, f"runs={tmp_path}"]
    calls = [[*base, extra, *with_intervention((name, settings))] for extra, name, settings, _ in REFUSED]
    script = ("import json, sys\nfrom backrank import run\n"
              "codes = [run.main(call) for call in json.load(sys.stdin)]\n"
              "print(json.dumps([codes, 'torch' in sys.modules]))")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(calls), capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout) == [[2] * len(REFUSED), False], done.stderr
    for line, (_, name, _, problem) in zip(done.stderr.strip().splitlines(), REFUSED, strict=True):
        assert line.startswith("error: ") and name in line and problem in line, line
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------ accumulation (D18)


def uneven_batch(index):
    """32 x 16 ids with a different number of ignored labels in each row, and none left in rows 16 to 23."""
    x, y = torch.randint(32, (2, 32, 16), generator=torch.Generator().manual_seed(index))
    for row in range(32):
        y[row, : row * 7 % 16] = -100
    y[16:24] = -100
    return x, y


def accumulated(trainer, optim, *chosen):
    whole = trainer("train.steps=5", "train.batch=32", *optim, *chosen, batch_at=uneven_batch)
    parts = trainer("train.steps=5", "train.batch=8", "train.accumulate=4", *optim, *chosen, batch_at=lambda i: tuple(
        a[i % 4 * 8 :][:8] for a in uneven_batch(i // 4)))  # fmt: skip
    whole.fit()
    parts.fit()
    assert_close(parts.task.state_dict(), whole.task.state_dict())
    assert parts.recorder.losses() == pytest.approx(whole.recorder.losses(), abs=1e-6)


@pytest.mark.parametrize("optim", [STEADY, ("optim=sgd",)], ids=["adamw", "sgd"])
def test_parts_with_uneven_labels_add_up_to_the_whole_batch(trainer, optim):
    accumulated(trainer, optim)


@every_intervention
def test_parts_add_up_or_are_refused_with_every_intervention(trainer, name, settings):
    whole_batch = name == "backward_rank" and (settings.get("rms") is None or settings.get("basis") == "gradient")
    if whole_batch or settings.get("match") or name in ("feedback_route", "meta_route"):
        with pytest.raises(ConfigError, match=rf"{name}.*train\.accumulate=4"):
            accumulated(trainer, STEADY, *with_intervention((name, settings)))
    else:
        accumulated(trainer, STEADY, *with_intervention((name, settings)))


# --------------------------------------------------------------------------- compilation, checkpointing, half precision


NOT_COMPILED = {"rms", "keep", "match", "depths"}  # the first three change nothing in the graph, depths are refused


@pytest.mark.parametrize(("name", "settings"), [p for p in CHOSEN if not NOT_COMPILED & p.values[1].keys()])
def test_compiled_equals_eager(trainer, name, settings):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    chosen = ["model.layers=1", "train.steps=4", "optim=sgd", *with_intervention((name, settings))]
    eager, compiled = trainer(*chosen), trainer(*chosen, "train.compile=aot_eager")
    eager.fit()
    compiled.fit()
    assert_close(compiled.task.state_dict(), eager.task.state_dict())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # no recompilation, whatever is refreshed


def test_compiled_code_sees_a_basis_that_is_refreshed_in_place(trainer):
    torch._dynamo.reset()
    base = ["model.layers=1", "train.steps=6", "optim=sgd", "optim.lr=1"]

    def arm(refresh, *more):
        chosen = ("backward_rank", {"rank": 2, "basis": "random", "refresh_every": refresh})
        built = trainer(*base, *more, *with_intervention(chosen))
        built.fit()
        return built.task.state_dict()

    compiled, eager, stale = arm(2, "train.compile=aot_eager"), arm(2), arm(None)
    assert_close(compiled, eager)
    assert max(relative(stale[n], eager[n]) for n in eager if n.endswith("c_fc.weight")) > 1e-3


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_inductor_equals_eager(trainer):
    torch._dynamo.reset()
    chosen = ["model.layers=1", "train.steps=2", "optim=sgd", *with_intervention(("backward_rank", {"rank": 3}))]
    eager, compiled = trainer(*chosen), trainer(*chosen, "train.compile=inductor")
    eager.fit()
    compiled.fit()
    assert_close(compiled.task.state_dict(), eager.task.state_dict())


@every_intervention
def test_activation_checkpointing_changes_no_gradient(trainer, name, settings):
    chosen = with_intervention((name, settings))
    plain, again = trainer(*chosen), trainer(*chosen, "train.checkpointing=true")
    block = again.task.backbone.model.h[0].mlp
    calls = []
    block.register_forward_pre_hook(lambda *_: calls.append(1))
    assert_close(all_gradients(again), all_gradients(plain))
    assert len(calls) == 2  # the block ran again in the backward pass


@every_intervention
def test_bf16_autocast_stays_close_and_weights_stay_float32(trainer, name, settings):
    """20 steps at the byte model's rate: losses within 0.02 nats of float32 (bf16 holds 3 digits, logits are small)."""
    chosen = with_intervention((name, settings))
    full, half = trainer(*chosen), trainer(*chosen, "train.amp=bf16")
    full.fit()
    half.fit()
    assert half.recorder.losses() == pytest.approx(full.recorder.losses(), abs=0.02)
    assert half.recorder.losses() != full.recorder.losses()
    assert all(p.dtype == torch.float32 and p.isfinite().all() for p in half.task.state_dict().values())


# -------------------------------------------------------------------------------------------- heads of other softmaxes


@pytest.mark.parametrize("name", ["sigsoftmax", "mixture_of_softmaxes"])
def test_a_head_of_another_softmax_loses_what_its_jacobian_does_not_pass(trainer, name):
    """Against the theory's own Jacobian, taken row by row in reverse mode."""
    from backrank.probes.head import jacobian_stats
    from backrank.theory.propositions import head_ranks

    run = trainer(f"intervention=[{name}]", "train.steps=5")
    run.fit()
    task, (x, y) = run.task.double(), run.batch_at(0)
    H, y = task.hidden(x).detach()[:20], y.flatten()[:20]
    got, want = jacobian_stats(task.head, H, y), head_ranks(task.head, H, y)
    assert got["lost"] == pytest.approx(want.lost, rel=1e-9)
    assert got["rank"] == want.jacobian <= WIDTH
    # a mixture of one component is a softmax of W tanh(P h); sigsoftmax is p ~ exp(z) sigmoid(z)
    z = H @ task.head.weight.T
    if name == "sigsoftmax":
        want = (z.exp() * z.sigmoid()) / (z.exp() * z.sigmoid()).sum(1, keepdim=True)
    else:
        parts = torch.stack(
            [(H @ P.T).tanh() @ task.head.weight.T for P in task.head.P.unflatten(0, (-1, WIDTH))], 1
        ).softmax(-1)
        want = ((H @ task.head.Q.T).softmax(-1)[..., None] * parts).sum(1)
    torch.testing.assert_close(task.head(H).softmax(1), want)


def test_a_head_of_another_softmax_goes_with_no_other_site_and_no_blind_probe(config):
    for also in (["intervention=[sigsoftmax,backward_rank]", "intervention.backward_rank.rank=2"],
                 ["intervention=[mixture_of_softmaxes]", "probe=[output_error]"]):  # fmt: skip
        with pytest.raises(ConfigError, match="softmax"):
            config(*also)
