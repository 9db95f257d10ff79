"""The loop: what it adds to a bare one (nothing), what it records, and that a cut run continues to the same bits.

No model here has dropout (it is 0 in every configuration), so what a resumed run has to restore is weights, optimiser,
position in the data, interventions and probes.
"""

import ast
import copy
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf

import backrank
from backrank import run
from backrank import trainer as loop
from backrank.build import build_task
from backrank.data import load
from backrank.optim import lr_at
from backrank.seeding import role_seed
from conftest import CHARACTERS, EPOCH, Memory, every_intervention, with_intervention

SRC = Path(backrank.__path__[0])
MODULES = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
BLOCK = [f"backbone.model.h.{i}.{m}.weight" for i in (0, 1) for m in MODULES]
FC = "backbone.model.h.0.mlp.c_fc.weight"

# ------------------------------------------------------------------------------------------------------- resume (D19)


def after(monkeypatch, step, action):
    """Has `action(trainer)` called when update number `step` has been applied, before anything is recorded of it."""
    after_step = loop.Trainer.after_step

    def wrapped(self):
        if self.step == step:
            action(self)
        after_step(self)

    monkeypatch.setattr(loop.Trainer, "after_step", wrapped)


def fail(trainer):
    raise RuntimeError("cut here")


def without_time(rows):
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in rows]


def assert_same_record(got, want, steps=20):
    assert (got.code, want.code) == (0, 0)
    assert without_time(got.rows) == without_time(want.rows)
    assert got.layers == want.layers
    assert [row["step"] for row in got.rows if "train/loss" in row] == list(range(1, steps + 1))
    assert got.weights.keys() == want.weights.keys()
    assert all(torch.equal(got.weights[name], w) for name, w in want.weights.items())
    timed = dict.fromkeys(("wall_s", "core_s", "time/step_ms"))
    assert got.summary | timed == want.summary | timed


def cut_and_continue(train, *overrides, at=15, saved=10, steps=20):
    overrides = ["probe=[feedback_rotation,weight_spectrum]", "probe.weight_spectrum.every=4",
                 "probe.feedback_rotation.every=3", *overrides]  # fmt: skip
    whole = train(*overrides, runs="whole")
    with pytest.MonkeyPatch.context() as patch:
        after(patch, at, fail)
        cut = train(*overrides, runs="cut")
    assert (cut.code, cut.summary, cut.checkpoint["step"]) == (1, None, saved)
    assert cut.read("failed.json")["error"] == "RuntimeError" and "cut here" in (cut.folder / "log.txt").read_text()
    if at > saved + 4:  # the record is ahead of the checkpoint by rows that have to go
        assert cut.rows[-1]["step"] > saved
    continued = train(*overrides, runs="cut")
    assert "continuing at step" in (continued.folder / "log.txt").read_text()
    assert continued.folder == cut.folder and continued.read("failed.json") is None
    assert_same_record(continued, whole, steps)


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
@every_intervention
def test_a_cut_run_continues_to_the_same_bits(train, name, settings, optim):
    """The checkpoint lies within the first epoch, the cut in the second."""
    cut_and_continue(train, f"optim={optim}", *with_intervention((name, settings)))


@pytest.mark.parametrize(("saved", "at", "overrides"), [
    (10, 15, ["optim=adamw"]),
    (10, 15, ["optim=sgd"]),
    (EPOCH, 18, [f"every.checkpoint={EPOCH}"]),  # between two epochs
    (18, 20, ["every.checkpoint=9"]),  # in the second epoch, and cut after the last update
    (10, 14, ["train.accumulate=3", "train.batch=8"]),  # 3 epochs of 6 micro-batches, checkpoint at the sixth's end
    (7, 9, ["every.checkpoint=7", "every.log=0", "every.eval=0"]),
    (10, 15, ["train.checkpointing=true", "train.amp=bf16", "model.tied=true"]),
])  # fmt: skip
def test_wherever_it_was_cut(train, saved, at, overrides):
    cut_and_continue(train, *overrides, at=at, saved=saved)


def test_probes_keep_their_state_in_whatever_order_they_were_chosen(train):
    cut_and_continue(train, "probe=[weight_spectrum,feedback_rotation]")


def test_a_terminated_process_saves_its_step_and_continues(train, tiny, tmp_path):
    """A real SIGTERM, in a process of its own."""
    overrides = with_intervention(("backward_rank", {"rank": 3, "refresh_every": 7}))
    whole = train(*overrides, runs="whole")
    script = ("import os, signal, sys\nimport torch\nfrom backrank import run, trainer\n"
              "torch.set_num_threads(1)\nafter = trainer.Trainer.after_step\n"
              "def wrapped(self):\n    if self.step == 12:\n"
              "        os.kill(os.getpid(), signal.SIGTERM)\n    after(self)\n"
              "trainer.Trainer.after_step = wrapped\nsys.exit(run.main(sys.argv[1:]))")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script, *tiny, *overrides, f"runs={tmp_path / 'cut'}"], timeout=120,
                          capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == run.EXIT_INTERRUPTED, done.stderr
    assert "stopped at step 12; the same command continues it" in done.stderr
    folder = tmp_path / "cut" / whole.folder.name
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["step"] == 12
    assert not (folder / "failed.json").exists() and not (folder / "summary.json").exists()
    assert_same_record(train(*overrides, runs="cut"), whole)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # the handlers are Python's own again


def test_a_run_that_is_done_is_left_alone(train):
    first = train()
    files = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in first.folder.iterdir()}
    assert train().code == 0
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in first.folder.iterdir()} == files


def test_a_run_cut_between_its_last_weights_and_its_summary_continues(train, monkeypatch):
    whole = train(runs="whole")
    write = run.write_json

    def full_disk(path, value):
        if path.name == "summary.json":
            raise OSError("no space left")
        write(path, value)

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_json", full_disk)
        assert train(runs="cut").code == 1
    assert_same_record(train(runs="cut"), whole)


# ------------------------------------------------------------------------------------------- the loop adds nothing


@pytest.mark.parametrize("optim", ["adamw", "sgd"])
def test_the_trainer_equals_a_bare_loop(trainer, optim):
    built = trainer(f"optim={optim}", "train.loss=plain", "optim.weight_decay=0.1", "optim.clip=0.3")
    cfg, model = built.cfg, copy.deepcopy(built.task)
    ids = np.asarray(load(cfg.data).train, np.int64)
    vectors = [p for p in model.parameters() if p.ndim < 2]
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0}]
    if optim == "adamw":
        optimiser = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, fused=True)
    else:
        optimiser = torch.optim.SGD(groups, lr=0.1, momentum=0.9, fused=True)
    losses, clipped = [], 0
    for step in range(20):
        epoch, at = divmod(step, EPOCH)
        seeds = np.random.SeedSequence(role_seed(1, "order"), spawn_key=(epoch,))
        rows = np.random.Generator(np.random.PCG64(seeds)).permutation((len(ids) - 1) // 16)[at * 4 :][:4]
        x = torch.from_numpy(np.stack([ids[r * 16 :][:16] for r in rows]))
        y = torch.from_numpy(np.stack([ids[r * 16 + 1 :][:16] for r in rows]))
        warm = (step + 1) / 4 if step < 4 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 4) / 16))
        for group in optimiser.param_groups:
            group["lr"] = {"adamw": 1e-2, "sgd": 0.1}[optim] * warm
        optimiser.zero_grad()
        hidden = model.backbone.model(input_ids=x, use_cache=False).last_hidden_state
        loss = F.cross_entropy(F.linear(hidden, model.head.weight).flatten(0, 1), y.flatten())
        loss.backward()
        clipped += bool(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3) > 0.3)
        optimiser.step()
        losses.append(float(loss.detach()))
    built.fit()
    assert built.recorder.losses() == pytest.approx(losses, abs=1e-6)
    for name, want in model.state_dict().items():
        got = built.task.state_dict()[name]
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7, msg=lambda m, n=name: f"{n}: {m}")
    assert clipped  # the clip is part of what was compared


@pytest.mark.parametrize("loss", ["chunked", "plain"])
def test_all_gradients_against_float64_and_the_explicit_logit_gradient(trainer, loss):
    built = trainer(f"train.loss={loss}", "model.head_std=0.5")
    x, y = built.batch_at(0)
    built.forward(x, y, (y >= 0).sum()).backward()
    double = copy.deepcopy(built.task.backbone).double()
    double.zero_grad()
    hidden = double(x).flatten(0, 1)
    H, W = hidden.detach().numpy(), built.task.head.weight.detach().double().numpy()
    Z = H @ W.T
    P = np.exp(Z - Z.max(1, keepdims=True))
    P /= P.sum(1, keepdims=True)
    P[np.arange(64), y.flatten().numpy()] -= 1
    G = P / 64
    hidden.backward(torch.from_numpy(G @ W))
    want = {f"backbone.{n}": p.grad for n, p in double.named_parameters()} | {"head.weight": torch.from_numpy(G.T @ H)}
    largest = max(float(g.norm()) for g in want.values())
    for name, p in built.task.named_parameters():
        assert float((p.grad.double() - want[name]).norm()) < 1e-6 * largest + 2e-6 * float(want[name].norm()), name


# ------------------------------------------------------------------------------------------- optimiser and schedule


def test_a_weight_decay_of_zero_is_really_zero(trainer):
    """What no gradient reaches: the embedding's rows of characters that are not in the batches."""

    def rows_21_up(weight_decay, *more):
        built = trainer(f"optim.weight_decay={weight_decay}", *more)
        batch_at = built.batch_at
        built.batch_at = lambda i: tuple(a.clamp(max=20) for a in batch_at(i))
        start = built.task.backbone.embedding.weight.detach()[21:].clone()
        built.fit()
        return built, start, built.task.backbone.embedding.weight.detach()[21:]

    built, start, end = rows_21_up(0)
    assert torch.equal(start, end)
    assert built.record["decaying"] == [] and {g["weight_decay"] for g in built.optimiser.param_groups} == {0.0}
    built, start, end = rows_21_up(0.5)
    shrunk = math.prod(1 - lr_at(i, 20, built.cfg.optim) * 0.5 for i in range(20))
    torch.testing.assert_close(end, start * shrunk, rtol=1e-5, atol=0)
    assert shrunk < 0.98
    _, start, end = rows_21_up(0.5, "optim.decay=[matrix,head]")
    assert torch.equal(start, end)


def test_the_record_says_what_decays(train):
    meta = train("train.steps=1").read("meta.json")
    kinds = meta["parameter_kinds"]
    assert [n for n, k in kinds.items() if k == "matrix"] == BLOCK
    assert [n for n, k in kinds.items() if k == "embedding"] == [f"backbone.model.{e}.weight" for e in ("wpe", "wte")]
    assert [n for n, k in kinds.items() if k == "head"] == ["head.weight"]
    assert len([n for n, k in kinds.items() if k == "vector"]) == 2 * 8 + 2
    assert sorted(meta["decaying"]) == sorted(n for n, k in kinds.items() if k != "vector")
    assert train("train.steps=1", "optim.decay=[matrix]").read("meta.json")["decaying"] == BLOCK
    tied = train("train.steps=1", "model.tied=true").read("meta.json")
    assert "head.weight" not in tied["parameter_kinds"] and tied["params"] == meta["params"] - 32 * 8


def test_the_schedule_in_closed_form(train):
    cfg = OmegaConf.create({"lr": 2e-3, "warmup": 10, "final": 0.1, "schedule": "cosine"})
    late = 2e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 75 / 90)))
    want = {0: 2e-4, 4: 1e-3, 9: 2e-3, 10: 2e-3, 55: 2e-3 * 0.55, 85: late}
    assert {step: lr_at(step, 100, cfg) for step in want} == pytest.approx(want, rel=1e-12)
    assert lr_at(100, 100, cfg) == pytest.approx(2e-4)
    assert {lr_at(s, 100, OmegaConf.merge(cfg, {"schedule": "constant"})) for s in range(9, 100)} == {2e-3}
    ran = train("optim.lr=1e-2")  # warm-up 4, 20 steps; the row of step n holds the rate of the n-th update
    want = [n / 4 if n <= 4 else 0.55 + 0.45 * math.cos(math.pi * (n - 5) / 16) for n in range(1, 21)]
    assert ran.series("optim/lr") == {n: pytest.approx(1e-2 * share) for n, share in enumerate(want, 1)}


# ----------------------------------------------------------------------------------------------------------- pairing


@every_intervention
def test_arms_share_data_order_and_every_common_weight(trainer, name, settings):
    ordinary, arm = trainer(), trainer(*with_intervention((name, settings)))
    assert arm.record["order_hash"] == ordinary.record["order_hash"]
    assert arm.record["init_hash"] == ordinary.record["init_hash"]
    want, got = ordinary.task.state_dict(), arm.task.state_dict()
    got = {name.replace("parametrizations.weight.original", "weight"): W for name, W in got.items()}
    assert all(torch.equal(got[n], w) for n, w in want.items() if n.startswith("backbone."))
    if "head.weight" in got:
        assert torch.equal(got["head.weight"][:32], want["head.weight"])
    for i in (0, EPOCH, 2 * EPOCH + 1):
        assert all(torch.equal(a, b) for a, b in zip(ordinary.batch_at(i), arm.batch_at(i), strict=True))


def test_seeds_differ_in_every_role_and_other_settings_in_none(trainer):
    first, second = trainer().record, trainer("seed=2").record
    assert first["order_hash"] != second["order_hash"]
    assert all(first["init_hash"][part] != second["init_hash"][part] for part in ("backbone", "head"))
    other = trainer("optim=sgd", "optim.weight_decay=0", "train.amp=bf16", "every.eval=1").record
    assert (other["order_hash"], other["init_hash"]) == (first["order_hash"], first["init_hash"])
    tied = trainer("model.tied=true").record
    assert tied["init_hash"]["backbone"] == first["init_hash"]["backbone"]


def test_building_a_model_draws_from_no_global_generator(config):
    torch.manual_seed(5)
    before = torch.get_rng_state()
    build_task(config(*with_intervention(("low_rank_head", {"rank": 3}))))
    assert torch.equal(torch.get_rng_state(), before)


# ------------------------------------------------------------------------------------------------- non-finite (D13)


def spoil(value):
    def action(trainer):
        trainer.task.get_parameter(FC).data[3, 2] = value

    return action


def assert_stopped(ran, saved):
    failed = ran.read("failed.json")
    assert ran.code == run.EXIT_FAILED and ran.summary is None
    assert (failed["error"], failed["diverged"]) == ("NonFiniteLoss", True)
    assert "NonFiniteLoss" in (ran.folder / "log.txt").read_text()
    assert ran.checkpoint["step"] == saved
    assert all(w.isfinite().all() for w in ran.weights.values())
    return failed["message"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named_with_its_step_and_stops_the_run(train, monkeypatch, value):
    after(monkeypatch, 7, spoil(value))
    ran = train("every.checkpoint=5", "probe=[weight_spectrum]", "probe.weight_spectrum.every=1")
    message = assert_stopped(ran, saved=5)
    assert FC in message and "step 7" in message
    good = [row for row in ran.layers if not row["nonfinite_entries"]]
    bad = [row for row in ran.layers if row["nonfinite_entries"]]
    assert [(row["step"], row["layer"], row["nonfinite_entries"]) for row in bad] == [(7, FC, 1)]
    spectral = ("erank", "erank_sigma", "participation", "stable_rank", "sigma_1", "frobenius")
    assert all(bad[0][key] is None for key in spectral)
    assert all(row["erank"] > 0 for row in good) and {row["step"] for row in good} == set(range(8))
    [row] = [row for row in ran.rows if row["step"] == 7 and f"rank/{FC}/erank" in row]
    assert row[f"rank/{FC}/erank"] is None and row["rank/weight_mean"] is None


@pytest.mark.parametrize("cadence", [[], ["every.log=0", "every.eval=0"]])
def test_a_loss_that_is_not_finite_is_recorded_at_its_step_and_stops_the_run(train, monkeypatch, cadence):
    after(monkeypatch, 7, spoil(math.nan))
    ran = train("every.checkpoint=5", *cadence)
    message = assert_stopped(ran, saved=5)
    assert "step 8" in message
    assert ran.rows[-1]["step"] == 8 and ran.rows[-1]["train/loss"] is None
    assert ran.rows[-1]["nonfinite"]["train/loss"] == "nan"
    assert all(math.isfinite(loss) for step, loss in ran.series("train/loss").items() if step < 8)


def test_the_last_good_checkpoint_continues_once_the_cause_is_gone(train, monkeypatch):
    whole = train("every.checkpoint=5", runs="whole")
    with monkeypatch.context() as patch:
        after(patch, 7, spoil(math.nan))
        assert_stopped(train("every.checkpoint=5", runs="cut"), saved=5)
    assert_same_record(train("every.checkpoint=5", runs="cut"), whole)


@pytest.mark.parametrize("probes", ["[head_gradient]", "[feedback_rotation]", "[output_error]", "[gradient_spectrum]"])
def test_probes_meet_a_head_that_is_not_finite_without_a_crash_of_their_own(train, monkeypatch, probes):
    def action(trainer):
        trainer.task.head.weight.data[3, 2] = math.nan

    after(monkeypatch, 7, action)
    name = probes.strip("[]")
    ran = train("every.checkpoint=5", f"probe={probes}", f"probe.{name}.every=1")
    assert_stopped(ran, saved=5)


def test_a_weight_spoiled_by_the_last_update_fails_the_run(train, monkeypatch):
    after(monkeypatch, 20, spoil(math.nan))
    ran = train("every.checkpoint=5")
    assert (ran.code, ran.summary, ran.read("failed.json")["diverged"]) == (run.EXIT_FAILED, None, True)


@pytest.mark.parametrize(("step", "saved"), [(10, 5), (20, 15)])
def test_a_weight_spoiled_at_a_checkpoints_own_step_does_not_replace_the_good_one(train, monkeypatch, step, saved):
    after(monkeypatch, step, spoil(math.nan))
    assert_stopped(train("every.checkpoint=5", "every.eval=0"), saved)


# ---------------------------------------------------------------------------------------------------------- imports


def test_the_trainer_knows_no_concrete_part():
    """Only the standard library and torch: whatever it works with is handed to it."""
    modules = set()
    for node in ast.walk(ast.parse((SRC / "trainer.py").read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules.add("backrank" if node.level else node.module.split(".")[0])
    assert modules - set(sys.stdlib_module_names) == {"torch"}


def test_configuration_data_planning_and_reports_never_load_torch():
    names = [p.relative_to(SRC.parent).with_suffix("").as_posix().replace("/", ".") for p in SRC.rglob("*.py")]
    light = ("config", "compose", "plan", "plugins", "sweep", "reproduce", "run", "rundir", "recorder", "mirror",
             "analysis", "data", "interventions", "probes")  # fmt: skip
    names = sorted(n.removesuffix(".__init__") for n in names if n.split(".")[1] in light and "__main__" not in n)
    script = ("import importlib, json, sys\n"
              "for name in json.load(sys.stdin):\n"
              "    importlib.import_module(name)\n"
              "    loaded = {'torch', 'torchvision', 'transformers'} & sys.modules.keys()\n"
              "    assert not loaded, f'{name} loads {loaded}'\n")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps(names), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert len(names) > 20


def test_the_fixtures_settings_are_what_they_say(trainer):
    built = trainer()
    assert isinstance(built.recorder, Memory) and len(CHARACTERS) == 32
    assert built.task.head.weight.shape == (32, 8) and len(built.task.backbone.model.h) == 2


# ------------------------------------------------------------------------------------------------------------- llama


def llama(vocab=100, **settings):
    from backrank.models import llama as module

    sizes = {"width": 64, "mlp": None, "layers": 3, "heads": 4, "kv_heads": 2} | settings
    return module.build(SimpleNamespace(**sizes), SimpleNamespace(vocab_size=vocab, sequence=32))


def test_llama_is_the_library_s_own_bit_for_bit():
    torch.manual_seed(0)
    backbone, x = llama(), torch.randint(100, (3, 32))
    taps = {1: None, 3: None}
    out, want = backbone(x, taps), backbone.model(x, output_hidden_states=True)
    assert torch.equal(out, want.last_hidden_state) and torch.equal(taps[3], out)
    assert torch.equal(taps[1], want.hidden_states[1])
    past = backbone(torch.cat([x[:, :16], x[:, :16]], 1))  # causal: what comes later changes nothing before
    assert torch.allclose(past[:, :16], out[:, :16], atol=1e-6)


def test_llama_has_the_published_sizes():
    """Parameters of lost_in_backprop's sweep at both ends (a head A B beside them) and of SpamLang's model."""
    with torch.device("meta"):
        sweep = llama(49_152, width=4096, layers=6, heads=32, kv_heads=None)
        spamlang = llama(49_152, width=576, mlp=1536, layers=30, heads=9, kv_heads=3)
    backbone = sum(p.numel() for p in sweep.parameters())
    assert [round((backbone + d * (4096 + 49_152)) / 1e9, 3) for d in (32, 4096)] == [1.814, 2.030]
    body = sum(p.numel() for name, p in spamlang.named_parameters() if "embed" not in name)
    assert round(body / 1e6, 1) == 106.2


def test_llama_trains_with_every_kind_of_head(trainer):
    for also in ([], ["model.tied=true"], ["intervention=[low_rank_head]", "intervention.low_rank_head.rank=2"]):
        run = trainer("model.kind=llama", "model.kv_heads=1", "train.steps=20", "optim.lr=1e-2", *also)
        x, y = run.batch_at(0)
        before = run.task(x, y, y.numel()).item()
        run.fit()
        assert run.task(x, y, y.numel()).item() < before - 0.05
