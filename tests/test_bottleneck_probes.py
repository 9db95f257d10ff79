"""The probes of backward_bottleneck against explicit computations: finite differences, SVDs, autograd, closed forms."""

import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from backrank import spectra
from backrank.config import CHOICES, ConfigError, make
from backrank.optim import lr_at
from backrank.probes import PROBES
from backrank.probes.jacobians import residual_blocks
from backrank.probes.spectra import layer_rows, parts
from backrank.run import covers, watched, widen
from backrank.theory.forgetting import forgetting
from backrank.theory.spaces import backward_product
from conftest import with_intervention
from test_probes import erank, numbers
from test_training import after, assert_same_record, fail

IMAGES = ["data=digits", "data.vocab_size=10", "data.eval_tokens=32", "train.batch=8", "train.steps=4", "every.eval=0"]
RESNET = [*IMAGES, "model.kind=resnet", "model.layers=1", "model.width=32"]
VIT = [*IMAGES, "model.kind=vit", "model.width=12", "model.patch=8"]
TWO_LAYER = [*IMAGES, "model.kind=two_layer", "model.layers=1", "model.width=276"]
KINDS = {"gpt2": [], "resnet": RESNET, "vit": VIT}
every_kind = pytest.mark.parametrize("kind", KINDS)


def probe_of(built, name, **settings):
    probe = make(PROBES[name], settings)
    probe.prepare(built.cfg, built.task)
    return probe


def measure(built, name, step=5, sequences=8, **settings):
    """What a probe makes of a trainer's model, as the trainer has it measure."""
    snapshot = built.snapshot(step, sequences)
    if next(built.task.parameters()).dtype == torch.float64 and snapshot.x_BT.is_floating_point():
        snapshot.x_BT = snapshot.x_BT.double()
    with built.task.evaluating():
        return probe_of(built, name, **settings).measure(snapshot)


def counted(built):
    """The counted matrices in float64, by name."""
    head = {"head.weight": built.task.head.weight} if built.cfg.model.kind != "gpt2" else {}
    blocks = {
        n: p for n, p in built.task.named_parameters()
        if p.ndim > 1 and not any(part in n for part in ("wte", "wpe", "conv_proj", "class_token", "pos_emb", "head."))
    }  # fmt: skip
    return {n: W.detach().double().flatten(1).numpy() for n, W in (blocks | head).items()}


def trained(built):
    """Weights that training has moved, running statistics included."""
    built.observe = lambda: None
    built.finish = lambda: None
    built.fit()
    return built


# ------------------------------------------------------------------------------------------------ what they are allowed


@pytest.mark.parametrize("name", [name for name, cls in PROBES.items() if cls.kinds])
def test_a_probe_refuses_models_it_cannot_read(config, name):
    cfg, probe = config(), make(PROBES[name], {})
    for kind in CHOICES["model.kind"]:
        cfg.model.kind = kind
        refused = pytest.raises(
            ConfigError, match=rf"model.kind={kind}: .* {name}\. Leave the probe out, or use one of"
        )
        with nullcontext() if kind in probe.kinds else refused:
            probe.check(cfg)


def test_looking_does_not_move_a_running_statistic(train):
    names = [name for name, cls in PROBES.items() if not cls.kinds or "resnet" in cls.kinds]
    looking = [f"probe=[{','.join(names)}]", *(f"probe.{name}.every=2" for name in names)]
    without, watched = train(*RESNET, runs="without"), train(*RESNET, *looking, runs="watched")
    assert (without.code, watched.code) == (0, 0) and len({row["kind"] for row in watched.layers}) == 11
    assert any("running_var" in name for name in without.weights)
    assert all(torch.equal(watched.weights[name], w) for name, w in without.weights.items())


@every_kind
def test_broken_weights_are_no_exception(trainer, kind):
    built = trainer(*KINDS[kind])
    names = [name for name, cls in PROBES.items() if not cls.kinds or kind in cls.kinds]
    probes = [probe_of(built, name) for name in names]
    for parameter in built.task.parameters():
        parameter.data.fill_(math.nan)
    with built.task.evaluating():
        for probe in probes:
            probe.measure(built.snapshot(5, 8))


# -------------------------------------------------------------------------------------------------------- r_out by size


def test_the_rank_of_the_errors_by_batch_size(trainer):
    built = trainer("model.head_std=0.5")
    plain, metrics = measure(built, "output_error")[0], measure(built, "output_error", sizes=[1, 40])[0]
    assert plain == {k: v for k, v in metrics.items() if not k[-1].isdigit()}
    G, _, y = numbers(built)
    null = np.full_like(G, 1 / 32)
    null[np.arange(len(y)), y] -= 1
    assert len(metrics) == len(plain) + 4
    for n in (1, 40):
        assert metrics[f"output/r_out_{n}"] == pytest.approx(erank(G[:n]), rel=1e-5)
        assert metrics[f"output/r_out_null_{n}"] == pytest.approx(erank(null[:n]), rel=1e-6)


def test_sizes_lie_within_the_batch(config):
    assert list(config("probe=[output_error]", "probe.output_error.sizes=[64,128]").probe.output_error.sizes) == [
        64,
        128,
    ]
    with pytest.raises(ConfigError, match="output_error.sizes=129: is not between 1 and the 128 errors"):
        config("probe=[output_error]", "probe.output_error.sizes=[129]")


def test_a_record_from_before_a_setting_was_there_still_counts(config):
    cfg = config("probe=[output_error]", "probe.output_error.every=4")
    old = {"every": watched(cfg)["every"], "probe": {"output_error": {"every": 4, "sequences": 8}}}
    assert watched(cfg) == old
    cfg.probe.output_error.sizes = [8]
    assert not covers(old, watched(cfg)) and covers(watched(cfg), watched(cfg))
    cfg.probe.output_error.sizes = None
    old["probe"]["output_error"]["every"] = 6
    widen(cfg, old)
    assert cfg.probe.output_error.every == 2


# ----------------------------------------------------------------------------------------------------------- forgetting


@pytest.mark.parametrize("optim", ["adamw", "sgd", "muon"])
def test_without_a_data_gradient_the_weights_are_the_factor_times_the_first_ones(trainer, optim):
    built = trainer(*with_optim(optim), "probe=[forgetting]", "probe.forgetting.every=7")
    start = counted(built)
    built.forward = lambda *_: sum(p.sum() for p in built.task.parameters()) * 0
    built.finish = lambda: None
    built.fit()
    values = {row["step"]: row for row in built.recorder.rows if "forgetting/factor" in row}
    assert (
        list(values) == [0, 7, 14, 20]
        and values[0]["forgetting/factor"] == 1 == values[0]["forgetting/initial_share_mean"]
    )
    rates = [lr_at(step, 20, built.cfg.optim) for step in range(20)]
    for step, row in values.items():
        want = forgetting(rates[:step], 2.0, 0.9 if optim == "sgd" else 0.0)
        assert (row["forgetting/factor"], row["forgetting/budget"]) == pytest.approx(want[:2], rel=1e-12, abs=1e-15)
    factor = values[20]["forgetting/factor"]
    assert abs(factor) < 0.9
    for layer, W in counted(built).items():
        assert np.linalg.norm(W - factor * start[layer]) < 1e-6 * np.linalg.norm(start[layer])
    assert values[20]["forgetting/initial_share_mean"] == pytest.approx(1, abs=1e-5)


def with_optim(name):
    return [f"optim.name={name}", "optim.lr=0.05", "optim.momentum=0.9", "optim.weight_decay=2.0"]


def test_what_the_data_made_of_the_weights(trainer):
    built = trainer(*VIT, *with_optim("sgd"), "optim.decay=[matrix]")
    probe, start = probe_of(built, "forgetting"), counted(built)
    metrics, rows = probe.measure(built.snapshot(0, 8))
    assert metrics["forgetting/remainder_mean"] == 0 and all(row["zero"] for row in rows)
    trained(built)
    metrics, rows = probe.measure(built.snapshot(4, 8))
    assert [row["layer"] for row in rows] == list(counted(built)) and {row["kind"] for row in rows} == {"remainder"}
    for row, (layer, W) in zip(rows, counted(built).items(), strict=True):
        E = (1 if layer == "head.weight" else metrics["forgetting/factor"]) * start[
            layer
        ]  # the head does not decay here
        assert row["erank"] == pytest.approx(erank(W - E), rel=1e-6)
        assert row["initial_share"] == pytest.approx((np.linalg.norm(E) / np.linalg.norm(W)) ** 2, rel=1e-6)
    assert metrics["forgetting/remainder_mean"] == pytest.approx(np.mean([row["erank"] for row in rows]))


@pytest.mark.parametrize(("head", "power"), [("low_rank_head", 2), ("frozen_column_space", 1)])
def test_a_factorised_head_decays_with_each_factor_that_does(trainer, head, power):
    settings = {"rank": 3} if power == 2 else {}
    built = trainer(*TWO_LAYER, *with_optim("adamw"), *with_intervention((head, settings)), "data.vocab_size=280")
    built.forward = lambda *_: sum(p.sum() for p in built.task.parameters()) * 0
    probe, start = probe_of(built, "forgetting"), counted(built)["head.weight"]
    trained(built)
    metrics, rows = probe.measure(built.snapshot(4, 8))
    left = metrics["forgetting/factor"] ** power * start
    np.testing.assert_allclose(counted(built)["head.weight"], left, rtol=1e-5, atol=1e-6)
    assert rows[-1]["initial_share"] == pytest.approx(1, abs=1e-5)


def test_a_cut_run_keeps_the_first_weights_and_the_spectra(train):
    overrides = ["probe=[forgetting,tail_norms,tail_bound]", "probe.forgetting.every=4", "probe.tail_norms.every=3",
                 "probe.tail_bound.every=3", "optim=sgd"]  # fmt: skip
    whole = train(*overrides, runs="whole")
    start = train(*overrides, "train.steps=1", "optim.lr=1e-30", runs="start").weights
    with pytest.MonkeyPatch.context() as patch:
        after(patch, 15, fail)
        cut = train(*overrides, runs="cut")
    first, second, _ = cut.checkpoint["probes"]
    assert all(torch.equal(W, start[layer]) for layer, W in first.items() if layer != "decay")
    assert first["decay"][3] == 8 and second["steps"].flatten().tolist() == [0, 3, 6, 9]
    assert_same_record(train(*overrides, runs="cut"), whole)
    frozen = [row["step"] for row in whole.layers if row["kind"] == "tail_frozen"]
    assert sorted(set(frozen)) == [0, 3, 6, 9, 12, 15, 18, 20] and len(frozen) == 8 * 8


# ---------------------------------------------------------------------------------------------------------------- tails


@every_kind
def test_tails_against_svdvals_with_the_rank_of_the_step_and_with_the_last_one(trainer, kind):
    built = trainer(*KINDS[kind], "probe=[tail_norms]", "probe.tail_norms.every=2", "train.steps=4", "optim.warmup=0",
                    "optim.lr=0.03", "model.head_std=0.3")  # fmt: skip
    seen, measure_ = {}, built.probes[0].measure

    def spy(snapshot):
        errors = numbers(built)[0]
        seen[snapshot.step] = (counted(built), math.ceil(erank(errors) - 1e-4))
        return measure_(snapshot)

    built.probes[0].measure, built.finish = spy, lambda: None
    built.fit()
    assert list(seen) == [0, 2, 4]
    for kind_, frozen in (("tail", False), ("tail_frozen", True)):
        rows = [row for row in built.recorder.layer_rows if row["kind"] == kind_]
        assert [(row["step"], row["layer"]) for row in rows] == [(t, n) for t, (W, _) in seen.items() for n in W]
        for row in rows:
            weights, r = seen[row["step"]][0], seen[4 if frozen else row["step"]][1]
            s = np.linalg.svd(weights[row["layer"]], compute_uv=False)
            assert row["index"] == r + 1
            assert row["tau"] == pytest.approx(s[r] if r < len(s) else 0, rel=1e-5, abs=1e-7)
    last = [row["tau"] for row in built.recorder.layer_rows if row["kind"] == "tail" and row["step"] == 4]
    metrics = [row for row in built.recorder.rows if "tail/max" in row][-1]
    assert (metrics["tail/max"], metrics["tail/mean"]) == pytest.approx((max(last), np.mean(last)))


def test_the_bound_on_the_next_tail_of_two_layers(trainer):
    lr, decay = 0.5, 0.1
    built = trainer(*TWO_LAYER, "probe=[tail_bound]", "probe.tail_bound.every=3", "optim.name=sgd", f"optim.lr={lr}",
                    "optim.momentum=0", "optim.schedule=constant", "optim.warmup=0", f"optim.weight_decay={decay}",
                    "optim.decay=[matrix]")  # fmt: skip
    seen, measure_ = {}, built.probes[0].measure

    def spy(snapshot):
        G = numbers(built)[0]
        e, x, hidden = np.linalg.norm(G, axis=1), snapshot.x_BT.flatten(1).numpy(), snapshot.hidden_ND.numpy()
        c_data = np.mean([np.mean(e * np.linalg.norm(a, axis=1)) for a in (x, hidden)])
        s = [np.linalg.svd(W, compute_uv=False) for W in counted(built).values()]
        seen[snapshot.step] = s, c_data, math.ceil(erank(G) - 1e-4)
        return measure_(snapshot)

    built.probes[0].measure, built.finish = spy, lambda: None
    built.fit()
    assert list(seen) == [0, 1, 3, 4]
    rows = [row for row in built.recorder.layer_rows if row["kind"] == "tail_bound"]
    assert [row["step"] for row in rows] == [1, 1, 4, 4]
    ratios = {"uniform": [], "directional": []}
    for (first, second), pair in zip((rows[:2], rows[2:]), (0, 3), strict=True):
        (W1, W2), c_data, r = seen[pair]
        after_ = seen[pair + 1][0]
        for kind, c in (("uniform", 1 / W2[-1]), ("directional", 1 / W2[r - 1])):
            bound = (1 - lr * decay) * W1[r] + 2 * lr * c_data * c * W2[r]
            assert first[kind] == pytest.approx(bound, rel=1e-4)
            assert second[kind] == pytest.approx(W2[r], rel=1e-5)  # nothing behind it, and the head does not decay
            ratios[kind] += [bound / after_[0][r], W2[r] / after_[1][r]]
        assert (first["tau"], second["tau"]) == pytest.approx((after_[0][r], after_[1][r]), rel=1e-5)
    metrics = [row for row in built.recorder.rows if "bound/cases" in row][-1]
    assert metrics["bound/cases"] == 4
    for kind, values in ratios.items():
        assert metrics[f"bound/kept_{kind}"] == np.mean(np.array(values) >= 1)
        assert metrics[f"bound/ratio_{kind}"] == pytest.approx(sorted(values)[1], rel=1e-4)  # torch's: the lower middle


# ------------------------------------------------------------------------------------------------- shape of the spectra


def test_the_shape_of_the_spectra_at_both_ends(trainer):
    built = trainer(*IMAGES, "model.kind=vit", "model.width=36", "model.patch=8", "probe=[spectrum_shape]",
                    "optim.warmup=0", "optim.lr=0.03")  # fmt: skip
    seen, measure_ = {}, built.probes[0].measure

    def spy(snapshot):
        values = {n: np.linalg.svd(W, compute_uv=False) for n, W in counted(built).items()}
        seen[snapshot.step] = values, math.ceil(erank(numbers(built)[0]) - 1e-4)
        return measure_(snapshot)

    built.probes[0].measure, built.finish = spy, lambda: None
    built.fit()
    for step in (0, 4):
        rows = {row["layer"]: row for row in built.recorder.layer_rows if row["step"] == step}
        values, r = seen[step]
        assert list(rows) == list(values) and 1 <= r < 10
        for layer, s in values.items():
            row, first = rows[layer], seen[0][0][layer]
            if layer == "head.weight":  # ten values: all of them are the tail
                assert row["tail"] == 10
                assert row["exponent"] == pytest.approx(1 + 10 / (2 * np.log(s / s[9]).sum()), rel=1e-4)
            low, high = -(-r // 2), min(2 * r, len(s) - 1)
            assert (row["index"], row["gap"]) == (r, pytest.approx(s[r - 1] / s[r], rel=1e-5))
            assert row["gap_neighbours"] == pytest.approx(
                np.exp(-np.diff(np.log(s[low - 1 : high + 1])).mean()), rel=1e-5
            )
            assert row["gap_initial"] == pytest.approx(first[r - 1] / first[r], rel=1e-5)
        metrics = next(row for row in built.recorder.rows if row["step"] == step and "shape/gap" in row)
        for name in ("exponent", "ks", "gap", "gap_initial", "gap_neighbours"):
            assert metrics[f"shape/{name}"] == pytest.approx(np.mean([row[name] for row in rows.values()]))
        assert metrics["shape/fitted"] == metrics["shape/gaps"] == len(values)


def test_what_ends_before_the_rank_has_neither_gap_nor_exponent(trainer):
    metrics, rows = measure(trainer(*TWO_LAYER), "spectrum_shape")  # twenty hidden units, ten classes
    assert [row["tail"] is None for row in rows] == [False, False] and metrics["shape/fitted"] == 2
    metrics, rows = measure(trainer(), "spectrum_shape")  # width 8, r_out above it
    assert metrics == {"shape/fitted": 0, "shape/gaps": 0} and rows[0]["gap"] is None is rows[0]["exponent"]


@every_kind
def test_spectra_shared_by_probes_are_the_ones_of_each_alone(trainer, kind, monkeypatch):
    built, solved = trainer(*KINDS[kind]), []
    monkeypatch.setattr(
        spectra, "_eigen_solve", lambda gram, solve=spectra._eigen_solve: solved.append(1) or solve(gram)
    )
    alone = measure(built, "weight_spectrum")
    apart = layer_rows(parts(built.task), "weight")
    assert alone == apart
    snapshot = built.snapshot(5, 8)
    with built.task.evaluating():
        probe_of(built, "tail_norms").measure(snapshot)
        before = len(solved)
        assert probe_of(built, "weight_spectrum").measure(snapshot) == alone
    assert len(solved) - before <= len({min(W.shape) for W in parts(built.task)["other"].values()})


# ------------------------------------------------------------------------------------------------------------- coupling


def entering(built, kind, x):
    """By layer, the norms of what enters its matrix: samples x positions, by a forward pass written out."""
    task, found = built.task, {}
    backbone = task.backbone

    def put(name, a):  # a: samples, positions, features
        found[name] = a.detach().norm(dim=-1).numpy()

    if kind == "gpt2":
        h = backbone.model.wte(x) + backbone.model.wpe(torch.arange(x.shape[1]))
        for i, block in enumerate(backbone.model.h):
            a, name = block.ln_1(h), f"backbone.model.h.{i}."
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in block.attn.c_attn(a).chunk(3, dim=-1))
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
            h = h + block.attn.c_proj(mixed)
            b = block.ln_2(h)
            up = block.mlp.act(block.mlp.c_fc(b))
            h = h + block.mlp.c_proj(up)
            for leaf, t in (("attn.c_attn", a), ("attn.c_proj", mixed), ("mlp.c_fc", b), ("mlp.c_proj", up)):
                put(f"{name}{leaf}.weight", t.flatten(0, 1)[:, None])  # one error per token
        return found
    if kind == "vit":
        h = backbone.stem(x)
        for i, block in enumerate(backbone.blocks):
            a, name, mha = block.ln_1(h), f"backbone.encoder.layers.encoder_layer_{i}.", block.self_attention
            qkv = (a @ mha.in_proj_weight.T + mha.in_proj_bias).chunk(3, dim=-1)
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in qkv)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
            h = h + mha.out_proj(mixed)
            b = block.ln_2(h)
            up = block.mlp[1](block.mlp[0](b))
            h = h + block.mlp[3](up)
            for leaf, t in (("self_attention.in_proj_weight", a), ("self_attention.out_proj.weight", mixed),
                            ("mlp.0.weight", b), ("mlp.3.weight", up)):  # fmt: skip
                put(name + leaf, t)
        features = backbone.features(h)
    else:

        def conv(name, module, x):
            patches = F.unfold(x, module.kernel_size, padding=module.padding, stride=module.stride)
            put(f"backbone.{name}.weight", patches.transpose(1, 2))
            return module(x)

        h = F.relu(backbone.bn1(conv("conv1", backbone.conv1, x)))
        for i in range(1, 5):
            block, name = getattr(backbone, f"layer{i}")[0], f"layer{i}.0"
            out = F.relu(block.bn1(conv(f"{name}.conv1", block.conv1, h)))
            out = block.bn2(conv(f"{name}.conv2", block.conv2, out))
            down = block.downsample
            h = F.relu(out + (down[1](conv(f"{name}.downsample.0", down[0], h)) if down else h))
        features = backbone.features(h)
    put("head.weight", features[:, None])
    return found


@every_kind
def test_coupling_against_numpy(trainer, kind):
    built = trained(trainer(*KINDS[kind], "model.head_std=0.3"))
    metrics, rows = measure(built, "coupling")
    with built.task.evaluating():
        G, _, _ = numbers(built)
        a = entering(built, kind, built.snapshot(5, 8).x_BT)
    e, r = np.linalg.norm(G, axis=1), math.ceil(erank(G))
    assert [row["layer"] for row in rows] == list(counted(built)) and a.keys() == counted(built).keys()
    for row, (layer, W) in zip(rows, counted(built).items(), strict=True):
        s = np.linalg.svd(W, compute_uv=False)
        s = s[s > 1e-6 * s[0]]
        assert row["c_data"] == pytest.approx(np.mean(e * a[layer].mean(1)), rel=1e-4), layer
        assert row["uniform"] == pytest.approx(1 / s[-1], rel=1e-4)
        assert row["directional"] == pytest.approx(1 / s[min(r, len(s)) - 1], rel=1e-4)
    c_data, uniform, directional = (np.array([row[k] for row in rows]) for k in ("c_data", "uniform", "directional"))
    assert metrics == pytest.approx({
        "coupling/c_data": c_data.mean(),
        "coupling/uniform_max": uniform.max(), "coupling/uniform_product": c_data.mean() * uniform.max(),
        "coupling/directional_max": directional.max(),
        "coupling/directional_product": c_data.mean() * directional.max(),
    })  # fmt: skip


def test_a_singular_matrix_couples_by_its_smallest_value_above_the_cutoff(trainer):
    built = trainer()
    W = built.task.backbone.model.h[0].attn.c_proj.weight
    W.data = torch.diag(torch.tensor([4.0, 2.0, 1.0, 0.5, 1e-4, 0, 0, 0]))
    row = next(row for row in measure(built, "coupling")[1] if row["layer"].endswith("h.0.attn.c_proj.weight"))
    assert (row["uniform"], row["directional"]) == (pytest.approx(1e4), pytest.approx(1e4))  # r_out is above 5
    W.data.zero_()
    assert measure(built, "coupling")[0]["coupling/uniform_max"] == math.inf


# ------------------------------------------------------------------------------------------------------------ Jacobians


def read(kind, state):
    return state.mean((2, 3)) if kind == "resnet" else state[:, -1 if kind == "gpt2" else 0]


def moved(kind, state, delta):
    if kind == "resnet":
        return state + delta[:, :, None, None]
    state = state.clone()
    state[:, -1 if kind == "gpt2" else 0] += delta
    return state


def differences(kind, blocks, state):
    """B x C x D: central differences of what is read behind `blocks` by the position of the state in front of them."""

    def behind(x):
        for block in blocks:
            x = block(x)
        return read(kind, x)

    width, h, columns = state.shape[1 if kind == "resnet" else 2], 1e-5, []
    for d in range(width):
        delta = torch.zeros(len(state), width, dtype=state.dtype)
        delta[:, d] = h
        columns.append((behind(moved(kind, state, delta)) - behind(moved(kind, state, -delta))) / (2 * h))
    return torch.stack(columns, dim=-1)


def explicit(built, kind, sequences=3):
    """States (the stem's first), and by block its J and P_{>k} of every k, by finite differences in float64."""
    built.task.double()
    blocks = list(residual_blocks(built.task).values())
    x = built.snapshot(5, sequences).x_BT
    with torch.no_grad(), built.task.evaluating():
        if kind == "gpt2":
            states = [built.task.backbone.model.wte(x) + built.task.backbone.model.wpe(torch.arange(x.shape[1]))]
        else:
            states = [built.task.backbone.stem(x.double())]
        for block in blocks:
            states.append(block(states[-1]))
        P = [differences(kind, blocks[k:], states[k]) for k in range(len(blocks))]
        J = []
        for block, state in zip(blocks, states[:-1], strict=True):
            shortcut = getattr(block, "downsample", None) or torch.nn.Identity()
            J.append(differences(kind, [block], state) - differences(kind, [shortcut], state))
    return states, J, P


@every_kind
def test_jacobians_against_finite_differences(trainer, kind):
    built = trained(trainer(*KINDS[kind], "optim.lr=0.03"))
    _, J, P = explicit(built, kind)
    names = list(residual_blocks(built.task))
    for name, matrices, layers in (("layer_jacobian", J, names), ("backward_product", P, ["stem", *names[:-1]])):
        metrics, rows = measure(built, name, sequences=3)
        assert [row["layer"] for row in rows] == layers
        for row, m_BCD in zip(rows, matrices, strict=True):
            assert row["erank"] == pytest.approx(np.mean([erank(m.numpy()) for m in m_BCD]), rel=1e-5)
            assert row["erank_of_mean"] == pytest.approx(erank(m_BCD.mean(0).numpy()), rel=1e-5)
        assert metrics == {f"rank/{name}_mean": pytest.approx(np.mean([row["erank"] for row in rows]))}
    assert P[0].shape == (3, built.cfg.model.width, J[0].shape[-1])
    if kind == "gpt2":  # the last token acts on itself alone: the product is the Jacobian
        for b in range(3):
            torch.testing.assert_close(backward_product([j[b] for j in J]), P[0][b], rtol=1e-5, atol=1e-8)


@every_kind
def test_the_residual_stream_against_an_svd(trainer, kind):
    built = trained(trainer(*KINDS[kind]))
    states, _, _ = explicit(built, kind, sequences=24 if kind == "gpt2" else 8)  # more than the split has: padded
    metrics, rows = measure(built, "residual_stream", sequences=24 if kind == "gpt2" else 8)
    assert [row["layer"] for row in rows] == list(residual_blocks(built.task))
    for row, state in zip(rows, states[1:], strict=True):
        X = state.flatten(0, 1)[:299] if kind == "gpt2" else read(kind, state)
        assert row["shape"] == list(X.shape) and row["kind"] == "residual_stream"
        assert row["erank"] == pytest.approx(erank((X - X.mean(0)).numpy()), rel=1e-6)
    assert metrics["rank/residual_stream_mean"] == pytest.approx(np.mean([row["erank"] for row in rows]))


# -------------------------------------------------------------------------------------------------- the two-layer proof


def test_the_proofs_steps_against_autograd(trainer):
    built = trained(trainer(*TWO_LAYER, "model.head_std=0.3"))
    metrics, rows = measure(built, "proof_steps", sequences=30)
    built.task.double()
    x, y = built.snapshot(4, 30).x_BT.double().flatten(1), built.snapshot(4, 30).y_BT
    W1, W = built.task.backbone.first.weight, built.task.head.weight
    before = x @ W1.T
    before.retain_grad()
    F.cross_entropy(torch.cat([before.relu(), x], dim=1) @ W.T, y).backward()
    delta, G1, W2, G2 = before.grad, W1.grad, W[:, : len(W1)].detach(), W.grad[:, : len(W1)]
    outside = G1 - W2.T @ torch.linalg.pinv(W2.T) @ G1
    torch.testing.assert_close(delta.T @ x, G1)

    def rank(matrix):
        return int(torch.linalg.matrix_rank(matrix, rtol=1e-6))

    assert not rows and metrics == pytest.approx({
        "proof/delta_rank": rank(delta), "proof/delta_erank": erank(delta.numpy()),
        "proof/g1_rank": rank(G1), "proof/g1_erank": erank(G1.numpy()),
        "proof/g2_rank": rank(G2), "proof/g2_erank": erank(G2.numpy()),
        "proof/outside": float(outside.square().sum() / G1.square().sum()),
        "proof/r_star": 9, "proof/r_a": rank(x), "proof/product": 9 * rank(x), "proof/min": min(9, rank(x)),
    }, rel=1e-5)  # fmt: skip
    assert metrics["proof/g1_rank"] <= metrics["proof/product"] and metrics["proof/outside"] > 0.05
