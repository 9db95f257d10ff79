"""Exports: `transformers` finds the run's own loss from the files alone; what cannot be exported leaves nothing."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from backrank import data, export
from backrank.config import ConfigError
from backrank.data.pack import pack
from backrank.data.tokens import eval_windows
from backrank.rundir import RunDir
from conftest import with_intervention

SHORT = ("train.steps=3", "every.eval=0")


def exported(run, folder) -> int:
    return export.main([run.folder.name, str(folder), "--runs", str(run.folder.parent)])


def loss_of(folder, run) -> float:
    """The test loss by transformers' own forward pass on the run's test split."""
    cfg, _ = export.read_run(RunDir(run.folder.parent, run.folder.name))
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    total = tokens = 0
    for x, y in eval_windows(data.load(cfg.data).test[:], cfg.data.sequence, cfg.data.eval_tokens):
        x, y = torch.from_numpy(x), torch.from_numpy(y).flatten()
        with torch.no_grad():
            logits = model(input_ids=x).logits.flatten(0, 1)
        total += float(F.cross_entropy(logits.double(), y, reduction="sum"))
        tokens += int((y >= 0).sum())
    return total / tokens


@pytest.mark.parametrize(
    "settings",
    [
        ["model.kind=gpt2"],
        ["model.kind=gpt2", "model.tied=true"],
        ["model.kind=toy"],
        with_intervention(("low_rank_head", {"rank": 3})),
        with_intervention(("frozen_column_space", {})),
        with_intervention(("vocab_expansion", {"size": 48})),
        with_intervention(("vocab_expansion", {"size": 48}), ("low_rank_head", {"rank": 3})),
        with_intervention(("backward_rank", {"rank": 3})),
    ],
    ids=lambda o: "-".join(o),
)
def test_transformers_finds_the_loss_of_the_run(train, tmp_path, settings):
    run = train(*SHORT, *settings)
    assert exported(run, tmp_path / "out") == 0
    assert loss_of(tmp_path / "out", run) == pytest.approx(run.summary["test/loss"], abs=1e-5)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_adapters_are_merged(train, tmp_path):
    parent = train(*SHORT)
    chosen = ["intervention=[adapters]", "intervention.adapters.rank=2", "intervention.adapters.allocate=erank"]
    run = train(*SHORT, f"parent={parent.folder.name}", "optim.lr=0.1", *chosen)
    assert exported(run, tmp_path / "out") == 0
    loss = loss_of(tmp_path / "out", run)
    assert loss == pytest.approx(run.summary["test/loss"], abs=1e-5)
    assert abs(loss - parent.summary["test/loss"]) > 1e-3


def test_ids_of_the_exported_byte_tokenizer_are_the_bytes(train, tmp_path):
    run = train(*SHORT, "data.tokenizer=bytes", "data.vocab_size=256")
    assert exported(run, tmp_path / "out") == 0
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = " Ab\u0000\n\n  déjà \U0001f642 <0x41>\t\r\x7f"
    assert tokenizer(text, add_special_tokens=False).input_ids == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert len(tokenizer) == 256


def test_a_trained_bpe_goes_with_the_model(train, tmp_path):
    run = train(*SHORT, "data.tokenizer=bpe", "data.vocab_size=300")
    assert exported(run, tmp_path / "out") == 0
    cfg, _ = export.read_run(RunDir(run.folder.parent, run.folder.name))
    tokenizer, ids = AutoTokenizer.from_pretrained(tmp_path / "out"), data.load(cfg.data).test[:]
    text = tokenizer.decode(ids.tolist())
    assert text.encode() == (Path(cfg.data.path) / "test.txt").read_bytes()
    lines = [tokenizer(line, add_special_tokens=False).input_ids for line in text.splitlines(keepends=True)]
    assert np.array_equal(np.concatenate(lines), ids)


def test_a_run_on_shards_takes_its_tokenizer_and_end_along(train, tmp_path):
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate("abcdefgh ")}, merges=[]))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.save(str(tmp_path / "t.json"))
    rng = np.random.default_rng(0)
    (tmp_path / "d.txt").write_text("\n".join("".join(rng.choice(list("abcdefgh "), 60)) for _ in range(60)))
    place = tmp_path / "packed"
    pack(
        str(tmp_path / "d.txt"), str(place), str(tmp_path / "t.json"), sample_by="line", held_out=5, say=lambda _: None
    )
    run = train(*SHORT, "data=shards", f"data.path={place}", "data.tokenizer=packed", "data.vocab_size=10")
    assert exported(run, tmp_path / "out") == 0
    assert loss_of(tmp_path / "out", run) == pytest.approx(run.summary["test/loss"], abs=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 9
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.eos_token_id == 9


def test_an_export_that_differs_is_refused_and_leaves_nothing(train, tmp_path, monkeypatch, capsys):
    run = train(*SHORT)
    trained = export.trained_task

    def other(cfg, rundir):
        task = trained(cfg, rundir)
        forward = task.backbone.forward
        monkeypatch.setattr(task.backbone, "forward", lambda x, taps=None: 1.001 * forward(x, taps))
        return task

    monkeypatch.setattr(export, "trained_task", other)
    before = sorted(tmp_path.iterdir())
    assert exported(run, tmp_path / "out") == 2
    assert "its logits differ by" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


def test_what_cannot_be_exported_is_one_clear_error(train, tmp_path, capsys):
    run = train(*SHORT)
    other = ["data=spamlang", "data.vocab_size=32", "model=embedding", "model.layers=1", "model.heads=1"]
    symbols = train(*SHORT, *other)
    assert symbols.code == 0
    study = train(*SHORT, f"parent={run.folder.name}", "study=pruning")
    assert study.code == 0
    unfinished = train(*SHORT, "seed=7")
    (unfinished.folder / "summary.json").unlink()
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "file").touch()
    capsys.readouterr()
    for folder, where, words in (
        (symbols.folder, tmp_path / "out", "model.kind=embedding: is no language model"),
        (study.folder, tmp_path / "out", "is a study (pruning)"),
        (unfinished.folder, tmp_path / "out", "is no finished run"),
        (unfinished.folder.with_name("nothing"), tmp_path / "out", "run=nothing: is no finished run"),
        (run.folder, taken, "is there already"),
    ):
        assert export.main([folder.name, str(where), "--runs", str(folder.parent)]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and words in lines[0]
    assert not (tmp_path / "out").exists()


def test_a_head_that_is_no_matrix_is_refused(config, tmp_path):
    from backrank.build import build_task

    cfg = config()
    task = build_task(cfg)[0]
    task.head.linear = False
    with pytest.raises(ConfigError, match="is no matrix"):
        export.export(task, cfg, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("extra", [0, 16])
def test_any_base_model_of_transformers_is_exported(config, tmp_path, extra):
    from transformers import LlamaConfig, LlamaModel

    from backrank.head import DenseHead
    from backrank.task import Task

    class Llama(torch.nn.Module):
        def __init__(self):
            super().__init__()
            size = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
            self.model = LlamaModel(LlamaConfig(vocab_size=32, max_position_embeddings=16, **size))
            self.embedding = self.model.embed_tokens

        def forward(self, x_BT, taps=None):
            return self.model(input_ids=x_BT).last_hidden_state

    head = DenseHead.create(32, 8, torch.Generator().manual_seed(0)).expand(extra, torch.Generator().manual_seed(1))
    task = Task(Llama(), head, [], "plain")
    export.export(task, config(), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    x_BT = torch.arange(20).view(2, 10)
    torch.testing.assert_close(model(input_ids=x_BT).logits, task.head(task.hidden(x_BT)).view(2, 10, 32 + extra))
