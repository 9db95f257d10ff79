"""Generated sequences and the embedding + linear model: what a batch holds, what was counted, equal paths, refusals."""

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from backrank import data as D
from backrank.compose import compose_run
from backrank.config import ConfigError, validate
from backrank.identity import run_id
from backrank.plan import Study
from test_training import after, assert_same_record, fail

SPAM = ["data=spamlang", "model=embedding", "model.layers=1", "model.heads=1", "data.vocab_size=32", "data.sequence=4"]
SHIFT = ["data=shift", "data.vocab_size=32", "data.sequence=16"]


def stream(*overrides, source="spamlang"):
    cfg = compose_run([f"data={source}", "train.steps=20", "train.batch=4", *overrides])
    return D.load(cfg.data).stream(cfg, torch.device("cpu"))


def split(s, name, whole=True):
    x, y = (torch.cat(parts) for parts in zip(*s.evaluation(name, whole), strict=True))
    return x, y


# SpamLang


@pytest.mark.parametrize("target", ["permutation", "next"])
def test_one_symbol_repeated_and_its_target(target):
    s = stream(f"data.target={target}", "data.vocab_size=50", "data.sequence=7")
    image = {}
    for x, y in [
        *map(s.batch_at, range(20)),
        *map(s.fresh, range(20)),
        s.held_out(5),
        *s.evaluation("validation", True),
    ]:
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape and x.shape[1] == 7 and y.is_contiguous()
        assert bool((x == x[:, :1]).all() and (y == y[:, :1]).all())
        for a, b in zip(x[:, 0].tolist(), y[:, 0].tolist(), strict=True):
            assert image.setdefault(a, b) == b  # the same target wherever the symbol stands
    assert sorted(image) == sorted(image.values()) == list(range(50))
    assert (list(image) == list(image.values())) == (target == "next")


def test_draws_are_a_function_of_seed_and_index_and_not_of_the_length():
    straight, jumped = stream(), stream("data.sequence=1")
    seen = [straight.batch_at(i) for i in range(20)]
    for i in (19, 0, 7):
        x, y = jumped.batch_at(i)
        assert torch.equal(x[:, 0], seen[i][0][:, 0]) and torch.equal(y[:, 0], seen[i][1][:, 0])
    assert straight.order_hash(20) == jumped.order_hash(20) != straight.order_hash(19)
    assert not torch.equal(straight.fresh(0)[0], seen[0][0])
    other = stream("seed=2")
    assert other.order_hash(20) != straight.order_hash(20) and not np.array_equal(other.targets, straight.targets)


def test_order_is_the_same_today_and_tomorrow():
    """Golden values: another order or permutation would change every seed's result."""
    s = stream("data.vocab_size=1024")
    assert s.rows_at(3, s.order).tolist() == [711, 789, 71, 909] and s.targets[:4].tolist() == [657, 707, 454, 683]


def test_facts_are_what_a_count_of_the_batches_gives():
    s = stream("data.vocab_size=40", "data.sequence=3", "train.accumulate=2")
    x = torch.cat([s.batch_at(i)[0] for i in range(40)])  # 20 steps of 2
    drawn = set(x[:, 0].tolist())
    assert s.facts == {
        "positions": x.numel(), "draws": 160 / 40, "unique": len(drawn), "coverage": len(drawn) / 40,
        "ceiling": 1 - math.exp(-4),
    }  # fmt: skip
    assert sorted(drawn) == s.drawn.tolist()


@pytest.mark.parametrize("draws", [0.5, 2, 4])
def test_coverage_is_what_uniform_draws_give(draws):
    """Empty boxes: mean V exp(-d), variance V (exp(-d) - (1 + d) exp(-2 d))."""
    V, empty = 4096, math.exp(-draws)
    deviation = math.sqrt((empty - (1 + draws) * empty**2) / V)
    settings = [f"data.vocab_size={V}", f"data.draws={draws}", "train.batch=64", f"train.steps={int(draws * V / 64)}"]
    facts = [stream(*settings, f"seed={seed}").facts for seed in range(8)]
    shares = [f["coverage"] for f in facts]
    assert facts[0]["draws"] == draws and facts[0]["ceiling"] == pytest.approx(1 - empty)
    assert np.mean(shares) == pytest.approx(1 - empty, abs=4 * deviation / math.sqrt(8))
    assert all(abs(s - (1 - empty)) < 5 * deviation for s in shares) and len(set(shares)) > 1


def test_evaluation_reads_every_symbol_once_and_train_those_that_were_drawn():
    s = stream("data.vocab_size=100", "data.sequence=300")
    for name, want in (("validation", range(100)), ("test", range(100)), ("train", s.drawn)):
        assert split(s, name)[0][:, 0].tolist() == list(want), name
    assert 0 < len(s.drawn) < 100
    assert split(s, "validation", whole=False)[0].shape == (20480 // 300, 300)  # every.eval_tokens
    assert s.held_out(6)[0][:, 0].tolist() == list(range(6))
    assert len(split(stream("data.vocab_size=100", "data.sequence=300", "data.eval_tokens=301"), "train")[0]) == 1


# The embedding + linear model on it


@pytest.mark.parametrize("optim", [["optim=adamw", "optim.lr=0.02"], ["optim=sgd", "optim.lr=0.5"]])
def test_equal_draws_give_equal_paths_at_any_length(trainer, optim):
    settings = [
        *SPAM,
        *optim,
        "optim.weight_decay=0",
        "data.draws=4",
        "train.steps=32",
        "train.batch=4",
        "optim.clip=0",
    ]
    runs = [trainer(*settings, f"data.sequence={length}") for length in (1, 64)]
    for run in runs:
        run.fit()
    short, long = runs
    assert short.record["order_hash"] == long.record["order_hash"]
    assert short.record["init_hash"] == long.record["init_hash"]
    losses = short.recorder.losses()
    assert len(losses) == 32 and losses == pytest.approx(long.recorder.losses(), abs=1e-5)
    assert losses[-1] < losses[0] - 0.1
    for name, weight in short.task.state_dict().items():
        torch.testing.assert_close(weight, long.task.state_dict()[name], rtol=1e-4, atol=1e-5)
    for key in ("loss", "accuracy"):
        assert short.evaluate("validation")[key] == pytest.approx(long.evaluate("validation")[key], abs=1e-5)


def test_what_was_drawn_is_learned_and_what_was_not_is_not(train):
    run = train(*SPAM, "data.vocab_size=64", "model.width=64", "data.draws=2", "train.steps=32", "optim.lr=0.05",
                "optim.warmup=0", "optim.schedule=constant", "every.fit=true", "data.sequence=2")  # fmt: skip
    s = run.summary
    assert (s["data/positions"], s["data/draws"], s["val/tokens"]) == (256, 2, 128)
    assert s["data/unique"] == s["fit/tokens"] / 2 == 64 * s["data/coverage"] < 64
    assert s["val/accuracy"] <= s["data/coverage"] and s["fit/accuracy"] > 0.9
    unseen = (s["val/accuracy"] - s["fit/accuracy"] * s["data/coverage"]) / (1 - s["data/coverage"])
    assert unseen == pytest.approx(0, abs=1e-9)


def test_the_model_is_an_embedding_and_a_head(trainer):
    built = trainer(*SPAM)
    assert set(built.task.state_dict()) == {"backbone.embedding.weight", "head.weight"}
    embedding = built.task.backbone.embedding.weight.detach()
    assert embedding.shape == (32, 8) and 0.8 < float(embedding.std()) < 1.2
    x, taps = torch.tensor([[3, 3], [5, 5]]), {1: None}
    assert torch.equal(built.task.hidden(x, taps), embedding[[3, 3, 5, 5]]) and torch.equal(
        taps[1], embedding[[3, 3, 5, 5]]
    )
    trainer(*SPAM, "train.checkpointing=true", "model.tied=true").fit()


@pytest.mark.parametrize("overrides", [SPAM, [*SPAM, "train.accumulate=2"], SHIFT])
def test_a_cut_run_continues_to_the_same_bits(train, overrides):
    whole = train(*overrides, runs="whole")
    with pytest.MonkeyPatch.context() as patch:
        after(patch, 15, fail)
        assert train(*overrides, runs="cut").code == 1
    continued = train(*overrides, runs="cut")
    assert "continuing at step 10" in (continued.folder / "log.txt").read_text()
    assert_same_record(continued, whole)


# Shift by one


def test_the_target_is_the_symbol_before():
    s = stream("data.sequence=6", "data.vocab_size=9", source="shift")
    x, y = s.batch_at(2)
    assert x.shape == y.shape == (4, 6) and bool((y[:, 0] == -100).all()) and torch.equal(y[:, 1:], x[:, :-1])
    assert torch.equal(s.batch_at(2)[0], x) and not torch.equal(s.batch_at(3)[0], x)
    assert set(torch.cat([s.batch_at(i)[0] for i in range(20)]).unique().tolist()) == set(range(9))
    assert s.facts == {"positions": 20 * 4 * 5}


def test_held_out_sequences_are_others_and_the_same_for_every_seed():
    one, two = (stream(f"seed={seed}", "data.sequence=16", "data.eval_tokens=640", source="shift") for seed in (1, 2))
    x = {name: split(one, name)[0] for name in ("train", "validation", "test")}
    assert all(part.shape == (40, 16) for part in x.values())
    rows = {name: set(map(tuple, part.tolist())) for name, part in x.items()}
    assert not rows["train"] & rows["validation"] and not rows["validation"] & rows["test"]
    assert all(torch.equal(split(two, name)[0], x[name]) for name in ("validation", "test"))
    assert torch.equal(x["train"], torch.cat([one.batch_at(i)[0] for i in range(10)]))
    assert torch.equal(one.held_out(3)[0], x["validation"][:3]) and one.order_hash(5) != two.order_hash(5)


def test_a_causal_decoder_learns_it(trainer):
    built = trainer(*SHIFT, "data.vocab_size=8", "data.sequence=8", "model.width=32", "train.steps=150",
                    "train.batch=32", "optim.lr=1e-2", "every.eval=0")  # fmt: skip
    built.fit()
    assert built.evaluate("test")["loss"] < 0.5 * math.log(8)


# Settings


@pytest.mark.parametrize(
    ("overrides", "key", "says"),
    [
        (["data=spamlang", "data.draws=4", "train.steps=100", "train.batch=64"], "train.steps", "Set train.steps=64"),
        (["data=spamlang", "data.draws=4", "train.steps=64", "train.batch=64", "train.accumulate=2"], "train.steps",
         "128 sequences a step. Set train.steps=32"),
        (["data=spamlang", "data.draws=0.1", "train.steps=2", "train.batch=64"], "train.steps", "a multiple of 0.0625"),
        (["data=spamlang", "data.draws=-1", "train.steps=2"], "train.steps", "a multiple of"),
        (["data=spamlang", "data.target=null", "train.steps=2"], "data.target", "Use permutation or next"),
        (["data=spamlang", "data.target=same", "train.steps=2"], "data.target", "Use permutation or next"),
        (["data=spamlang", "data.vocab_size=1", "train.steps=2"], "data.vocab_size", "Use 2 or more"),
        (["data=shift", "data.target=next", "train.steps=2"], "data.target", "Leave it null"),
        (["data=shift", "data.sequence=1", "train.steps=2"], "data.sequence", "Use 2 or more"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_one_error_with_a_remedy(overrides, key, says):
    with pytest.raises(ConfigError) as caught:
        cfg = compose_run(overrides)
        validate(cfg)
        D.check(cfg.data)
    assert caught.value.key == key and says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(("override", "key"), [("model.layers=2", "model.layers"), ("model.heads=2", "model.heads")])
def test_the_embedding_has_one_layer_and_one_head(trainer, override, key):
    with pytest.raises(ConfigError, match=f"{key}=2: but model.kind=embedding has 1. Set {key}=1"):
        trainer(*SPAM, override)


@pytest.mark.parametrize(("arm", "steps", "positions"), [("draws4_len1", 64, 4096), ("draws4_len64", 64, 262_144),
                                                        ("positions_len1", 2048, 131_072),
                                                        ("positions_len64", 32, 131_072)])  # fmt: skip
def test_steps_and_positions_of_the_arms_follow_from_the_draws(arm, steps, positions):
    cfg, _ = Study("causal_test/spamlang", "paper").config(arm)
    assert cfg.train.steps == steps
    assert D.load(cfg.data).stream(cfg, torch.device("cpu")).facts["positions"] == positions


def test_what_makes_other_sequences_is_another_run():
    def identity(*overrides):
        cfg = compose_run(["train.steps=2", *overrides])
        return run_id(cfg, D.content_hash(cfg.data))

    same = ["data.sequence=64", "data.vocab_size=64"]
    ids = [identity("data=spamlang", *same, *extra) for extra in ([], ["data.target=next"], ["data.sequence=1"],
                                                                  ["data.draws=2"], ["seed=2"])]  # fmt: skip
    ids += [identity("data=shift", *same), identity("data=spamlang", *same, "data.cache=/x")]
    assert len(set(ids)) == len(ids) - 1 and ids[0] == ids[-1]


def test_no_torch_is_imported():
    code = (
        "import sys; from backrank.config import Data; from backrank import data as D;"
        "d = Data(name='s', source='spamlang', target='next'); D.load(d); D.content_hash(d);"
        "D.load(Data(name='s', source='shift')); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "False\n", done.stderr
