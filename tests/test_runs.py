"""Run folders: what counts as done, what continues, what is set aside, who may write, and what bad input leaves."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
from omegaconf import OmegaConf

from backrank import run, rundir
from backrank.compose import compose_run
from backrank.recorder import read_rows
from backrank.rundir import Held, RunDir, code_hash, stripped
from backrank.trainer import Trainer

PROBES = "probe=[feedback_rotation]"


def numbers(ran, prefix=""):
    """Every row without wall times."""
    rows = [{k: v for k, v in row.items() if not k.startswith("time/")} for row in ran.rows]
    return [row for row in rows if any(k.startswith(prefix) for k in row if k != "step")]


def contents(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def cut(monkeypatch):
    """cut(step): the next run ends there as if it were killed, without a checkpoint of that step."""

    def cut(step, error=KeyboardInterrupt):
        observe = Trainer.observe

        def stop(self):
            if self.step == step:
                monkeypatch.setattr(Trainer, "observe", observe)
                raise error("cut")
            observe(self)

        monkeypatch.setattr(Trainer, "observe", stop)

    return cut


# Done, and done for whom


def test_a_finished_run_is_left_byte_for_byte(train, capsys):
    first = train()
    before = contents(first.folder)
    again = train("label=another", "every.log=20", "every.checkpoint=5", "logger=jsonl")
    assert again.code == 0 and "was done already" in capsys.readouterr().out
    assert contents(first.folder) == before


def test_done_counts_only_with_the_probes_and_cadence_asked_for(train):
    plain = train()
    assert train(PROBES, "probe.feedback_rotation.every=10").code == 0
    old = plain.folder.with_name(plain.folder.name + ".old-1")
    assert (old / "summary.json").exists() and not read_rows(old / "layers.jsonl", finished=True)
    probed = contents(plain.folder)
    train("every.eval=10")  # coarser than what is there
    train(PROBES, "probe.feedback_rotation.every=20")
    assert contents(plain.folder) == probed
    finer = train("every.eval=4", "probe=[head_gradient]", "probe.head_gradient.every=0")
    assert finer.code == 0
    union = train()
    assert set(union.read("meta.json")["watched"]["probe"]) == {"feedback_rotation", "head_gradient"}
    assert set(union.series("rotation/mean_cos")) == {0, 10, 20} and set(union.series("head/lost")) == {0, 20}
    # 5 and 4 were asked for: 1 holds both
    assert set(union.series("val/curve_loss")) == set(range(1, 20))
    assert not plain.folder.with_name(plain.folder.name + ".old-3").exists()
    for n in (1, 2):  # kept whole, and bit-equal in all that both have
        rows = read_rows(old.with_name(f"{plain.folder.name}.old-{n}") / "metrics.jsonl", finished=True)
        for name in ("train/loss", "val/loss", "test/loss", "optim/grad_norm"):
            assert {r["step"]: r[name] for r in rows if name in r} == union.series(name)


def test_stale_code_is_named_and_rerun_with_fresh_only(train, monkeypatch):
    first = train()
    before, meta = contents(first.folder), first.read("meta.json")
    monkeypatch.setattr(run, "code_hash", lambda *_: "newer")
    cfg = compose_run(["model.width=8"])
    assert not run.is_current(RunDir(first.folder.parent, first.folder.name), cfg, fresh=True)
    assert train().code == 0 and contents(first.folder) == before
    monkeypatch.setenv("FRESH", "1")
    assert train().read("meta.json")["code_hash"] == "newer"
    old = first.folder.with_name(first.folder.name + ".old-1")
    assert json.loads((old / "meta.json").read_text()) == meta
    before = contents(first.folder)
    assert train().code == 0 and contents(first.folder) == before  # current now: FRESH reruns nothing


def test_an_unfinished_run_of_other_code_is_set_aside(train, cut, monkeypatch):
    cut(15)
    assert train().code == 130
    monkeypatch.setattr(run, "code_hash", lambda *_: "newer")
    ran = train()
    assert ran.code == 0 and "continuing" not in (ran.folder / "log.txt").read_text()
    assert ran.folder.with_name(ran.folder.name + ".old-1").exists()


def test_code_hash_sees_code_and_neither_comments_nor_docstrings(tmp_path, monkeypatch):
    base = 'def f(x):\n    """Doc."""\n    return x + 1\n'
    assert stripped(base) == stripped('# why\n\ndef f(x):  # how\n    """Other\n    text."""\n\n    return (x +\n 1)\n')
    assert stripped(base) != stripped(base.replace("+ 1", "+ 2"))
    assert stripped('class A:\n    """D."""\n') == stripped("class A:\n    pass\n")
    own = tmp_path / "backrank"
    shutil.copytree(rundir.Path(rundir.__file__).parent, own)
    monkeypatch.setattr(rundir, "__file__", str(own / "rundir.py"))

    def now():
        rundir._stripped_file.cache_clear()
        cfg = OmegaConf.create(
            {"model": {"kind": "gpt2"}, "data": {"source": "text"}, "intervention": {}, "study": None}
        )
        plain = code_hash(cfg)
        cfg.intervention.low_rank_head = {}
        return plain, code_hash(cfg)

    try:
        first = now()
        assert first[0] != first[1]
        for name in ("trainer.py", "models/gpt2.py"):
            (own / name).write_text("# a comment\n" + (own / name).read_text())
        assert now() == first
        (own / "report.py").write_text("x = 1\n")
        (own / "recorder.py").write_text((own / "recorder.py").read_text() + "\nX = 1\n")
        assert now() == first
        for name in ("trainer.py", "models/gpt2.py", "data/tokens.py", "optim.py"):
            before = now()
            (own / name).write_text((own / name).read_text() + "\nX = 1\n")
            assert now()[0] != before[0] and now()[1] != before[1]
    finally:
        rundir._stripped_file.cache_clear()


# Interrupted, resumed


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_was_cut_continues_from_its_checkpoint_bit_equal(train, cut, error, capsys):
    whole = train(PROBES, runs="whole")
    cut(15, error)
    first = train(PROBES)
    assert first.code == (130 if error is KeyboardInterrupt else 1) and first.summary is None
    assert (first.read("failed.json") is None) == (error is KeyboardInterrupt)
    state = RunDir(first.folder.parent, first.folder.name).state()
    assert state == ("interrupted" if error is KeyboardInterrupt else "failed")
    again = train(PROBES, "label=renamed", "every.log=1", "every.checkpoint=3")
    assert again.code == 0 and "continuing at step 10" in (again.folder / "log.txt").read_text()
    assert numbers(again) == numbers(whole) and again.layers == whole.layers
    assert all(torch.equal(v, whole.weights[k]) for k, v in again.weights.items())
    timed = ("wall_s", "core_s")
    assert {k: v for k, v in again.summary.items() if k not in timed} == {
        k: v for k, v in whole.summary.items() if k not in timed}  # fmt: skip
    assert again.read("failed.json") is None
    assert not again.folder.with_name(again.folder.name + ".old-1").exists()


def test_an_unfinished_run_with_more_probes_than_asked_for_keeps_them(train, cut):
    cut(15)
    train(PROBES)
    ran = train()
    assert ran.code == 0 and set(ran.series("rotation/mean_cos")) == {0, 20}
    assert "continuing at step 10" in (ran.folder / "log.txt").read_text()
    assert (ran.folder / "config.yaml").read_text().count("feedback_rotation") == 1


def test_an_unfinished_run_with_fewer_probes_than_asked_for_begins_anew(train, cut):
    cut(15)
    train()
    ran = train(PROBES)
    assert ran.code == 0 and set(ran.series("rotation/mean_cos")) == {0, 20}
    assert ran.folder.with_name(ran.folder.name + ".old-1").exists()


def test_killed_between_the_last_weights_and_the_summary(train, monkeypatch):
    whole = train(runs="whole")
    write = run.write_json

    def die(path, value):
        if path.name == "summary.json":
            raise OSError(errno.EIO, "the machine died here")
        write(path, value)

    monkeypatch.setattr(run, "write_json", die)
    assert train().code == 1
    monkeypatch.setattr(run, "write_json", write)
    monkeypatch.setattr(Trainer, "fit", lambda self: pytest.fail("it was trained already"))
    ran = train()
    assert ran.code == 0 and numbers(ran) == numbers(whole) and ran.read("failed.json") is None
    assert ran.summary["val/loss"] == whole.summary["val/loss"] and ran.summary["wall_s"] > 0


def test_a_folder_without_a_record_is_set_aside(train):
    ran = train()
    for path in ran.folder.iterdir():
        if path.name != "log.txt":
            path.unlink()
    (ran.folder / "notes of mine").write_text("x")
    assert train().code == 0
    assert (ran.folder.with_name(ran.folder.name + ".old-1") / "notes of mine").exists()


# One writer

HOLD = """
import sys, time
from backrank.rundir import RunDir
with RunDir(sys.argv[1], "abc").claim():
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_writer_who_is_named_and_whose_lock_dies_with_it(tmp_path):
    folder = RunDir(tmp_path, "abc")
    child = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(Held, match=f"run abc is held by .* pid {child.pid} since"), folder.claim():
            pytest.fail("two writers")
        assert folder.state() == "running" and str(child.pid) in folder.holder()
    finally:
        child.kill()
        child.wait()
    assert folder.holder() is None and folder.state() == "pending"
    with folder.claim():
        assert f"pid {os.getpid()}" in folder.holder()
        with pytest.raises(Held), RunDir(tmp_path, "abc").claim():
            pytest.fail("two writers in one process")
        with RunDir(tmp_path, "abd").claim():  # another run is free
            pass
    assert folder.holder() is None and not folder.path.exists()


def test_looking_who_holds_a_run_keeps_nobody_from_claiming_it(tmp_path):
    """`status` looks by locking for a moment; a run that starts in that moment must not take it for a writer."""
    folder = RunDir(tmp_path, "abc")
    with folder.claim():
        pass
    looking = subprocess.Popen(
        [sys.executable, "-c", "import fcntl, sys, time; f = open(sys.argv[1]); fcntl.flock(f, fcntl.LOCK_SH); "
         "print(1, flush=True); time.sleep(0.03)", str(folder.lock)], stdout=subprocess.PIPE)  # fmt: skip
    looking.stdout.readline()
    with folder.claim():
        pass
    looking.wait()


def test_a_held_run_is_left_alone(train, tmp_path, capsys):
    ran = train()
    before = contents(ran.folder)
    with RunDir(ran.folder.parent, ran.folder.name).claim():
        assert train(PROBES).code == 0
    captured = capsys.readouterr()
    assert f"held by {os.uname().nodename} pid {os.getpid()}" in captured.err and contents(ran.folder) == before


# Bad input: one line, exit code 2, nothing made, nothing lost


def refused(ran, capsys, *words):
    err = capsys.readouterr().err
    lines = [line for line in err.splitlines() if line]
    assert ran.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), err
    for word in words:
        assert word in lines[0], (word, lines[0])
    return lines[0]


def splits(folder, **sizes):
    folder.mkdir()
    for split in ("train", "validation", "test"):
        (folder / f"{split}.txt").write_bytes(sizes.get(split, b"abc de. " * 100))
    return folder


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["optim.weight_decay=null"], ["optim.weight_decay=null", "cannot be null"]),
        (["intervention=[backward_rank]"], ["intervention.backward_rank.rank=???", "has no value"]),
        (["intervention=[backward_rank]", "intervention.backward_rank.rank=0"], ["rank=0", "1 to 8"]),
        (["intervention=[low_rank_head]", "intervention.low_rank_head.rank=9"], ["rank=9", "1 to 8"]),
        (["data.path=/nowhere"], ["data.path=/nowhere", "no such file"]),
        (["data.tokenizer=/nowhere"], ["data.tokenizer=/nowhere"]),
        (["data.vocab_size=31"], ["data.vocab_size=31", "largest id in the text is 31", "data.vocab_size=32"]),
        (["data.sequence=5000", "data.eval_tokens=null"], ["data.sequence=5000", "fewer than a sequence"]),
        (["train.batch=4096"], ["train.batch=4096", "fewer than one batch"]),
        (["train.loss=liger"], ["train.loss=liger", "train.loss=chunked"]),
        (["experiment=causal_test/byte_heads", "arm=x"], ["arm=x", "Known: "]),
        (["label=${x}"], ["label=${x}"]),
    ],
)
def test_bad_input_is_one_line_and_makes_no_folder(train, tmp_path, capsys, overrides, words):
    if "liger" in overrides[0] and shutil.which("nvidia-smi"):
        pytest.skip("may be there")
    refused(train(*overrides), capsys, *words)
    assert not [p for p in (tmp_path / "runs").glob("*") if p.name != ".locks"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there(train, tmp_path, capsys):
    refused(train("device=cuda"), capsys, "device=cuda", "is not there", "device=cpu")
    ran = train()
    before = contents(ran.folder)
    capsys.readouterr()
    refused(train("device=cuda", PROBES), capsys, "device=cuda")  # would rerun what is finished
    assert contents(ran.folder) == before and not ran.folder.with_name(ran.folder.name + ".old-1").exists()


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"train": b""}, ["train", "fewer than a sequence"]),
        ({"test": b"ab"}, ["test", "fewer than a sequence"]),
        ({"train": b"abc\xff\xfe" * 100}, ["not UTF-8 at byte 3", "iconv"]),
    ],
)
def test_bad_text(train, tmp_path, capsys, sizes, words):
    folder = splits(tmp_path / "bad text", **sizes)
    refused(train(f"data.path={folder}"), capsys, *words)
    (folder / "train.txt").unlink()
    (tmp_path / "bad text").rename(tmp_path / "fewer")
    refused(train(f"data.path={tmp_path / 'fewer'}"), capsys, "train", "train.txt")


def test_an_empty_folder_of_data(train, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    refused(train(f"data.path={tmp_path / 'empty'}"), capsys, "train.txt")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("meta.json", "{"), ("meta.json", ""), ("meta.json", "[]"), ("summary.json", '{"val/lo'), ("summary.json", "3"),
        ("checkpoint.pt", b"PK\x03\x04 no checkpoint"), ("checkpoint.pt", b""), ("metrics.jsonl", b'{"step": 0}\n'),
        ("layers.jsonl", b""), ("config.yaml", b"{"), ("config.yaml", b""),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_named_and_fresh_starts_anew(train, cut, capsys, monkeypatch, name, damage):
    if name in ("meta.json", "summary.json"):
        ran = train(PROBES, "probe.feedback_rotation.every=4")
        (ran.folder / name).write_text(damage)
    else:
        cut(15)
        ran = train("probe=[weight_spectrum]")
        (ran.folder / name).write_bytes(damage)
    again = [PROBES, "probe.feedback_rotation.every=4"] if name.endswith(".json") else ["probe=[weight_spectrum]"]
    capsys.readouterr()
    line = refused(train(*again), capsys, str(ran.folder / name), "FRESH=1")
    assert "runs=" in line or "record=" in line
    kept = (ran.folder / name).read_bytes()
    assert kept == (damage if isinstance(damage, bytes) else damage.encode())
    monkeypatch.setenv("FRESH", "1")
    fresh = train(*again)
    assert fresh.code == 0 and fresh.summary["val/loss"] > 0
    assert (fresh.folder.with_name(fresh.folder.name + ".old-1") / name).read_bytes() == kept


def test_rows_beyond_the_checkpoint_that_are_cut_short_do_no_harm(train, cut):
    whole = train(runs="whole")
    cut(15)
    ran = train()
    with open(ran.folder / "metrics.jsonl", "ab") as file:
        file.write(b'{"step": 15, "trai')
    again = train()
    assert again.code == 0 and numbers(again) == numbers(whole)


def test_results_folder_that_is_a_file(train, tmp_path, capsys):
    (tmp_path / "runs").write_text("in the way")
    refused(train(), capsys, str(tmp_path / "runs"), "cannot be written", "RUNS=")
    assert (tmp_path / "runs").read_text() == "in the way"


def test_cache_folder_that_is_a_file(train, tmp_path, capsys):
    (tmp_path / "cache").write_text("in the way")
    refused(train(f"data.cache={tmp_path / 'cache'}"), capsys, str(tmp_path / "cache"), "data.cache")


def test_full_disk_keeps_what_is_there_and_the_same_command_goes_on(train, tmp_path, capsys, monkeypatch):
    whole = train(runs="whole")
    save = torch.save
    calls = []

    def full(state, path):
        calls.append(path)
        if len(calls) == 2:  # the first checkpoint fits, the next does not
            path.write(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, path)

    monkeypatch.setattr(torch, "save", full)
    capsys.readouterr()
    ran = train("every.checkpoint=6", "every.log=0")
    refused(ran, capsys, "No space left", str(ran.folder), "RUNS=")
    assert "No space left" in (ran.folder / "log.txt").read_text()
    again = train("every.checkpoint=6", "every.log=0")
    assert again.code == 0 and "continuing at step 6" in (again.folder / "log.txt").read_text()
    assert numbers(again) == numbers(whole)


def test_full_disk_on_a_real_small_file_system(train, tmp_path, capsys):
    small = tmp_path / "runs"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    try:
        ran = train()
        line = refused(ran, capsys, "No space left", "RUNS=")
        assert str(small) in line
        assert not (ran.folder / "summary.json").exists()
        subprocess.run(["mount", "-o", "remount,size=16m", small], check=True)
        assert train().code == 0
    finally:
        subprocess.run(["umount", small], check=True)


# NaN, end to end


def test_a_loss_that_is_not_finite_ends_the_run_with_its_row(train, capsys):
    ran = train("optim.lr=1e30", "optim.schedule=constant", "optim.warmup=0", "every.log=1")
    assert ran.code == 1 and ran.summary is None and ran.read("failed.json")["diverged"]
    assert ran.rows[-1]["train/loss"] is None and ran.rows[-1]["nonfinite"]["train/loss"]
    err = capsys.readouterr().err.splitlines()
    assert "lower optim.lr" in err[-1] and err[-1].startswith("failed: NonFiniteLoss")
    assert "NonFiniteLoss" in (ran.folder / "log.txt").read_text()
    assert sum("Traceback" in line for line in err) <= 1


def test_the_last_update_alone_may_do_it(train, monkeypatch):
    step = torch.optim.AdamW.step
    counts = []

    def poison(self, *args, **kwargs):
        result = step(self, *args, **kwargs)
        counts.append(1)
        if len(counts) == 20:
            with torch.no_grad():
                self.param_groups[0]["params"][0].fill_(float("nan"))
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", poison)
    ran = train()
    assert ran.code == 1 and ran.summary is None
    assert ran.read("failed.json")["diverged"] and "finite" in ran.read("failed.json")["message"]


def test_a_final_loss_that_is_not_finite_is_no_result(train, monkeypatch):
    """Weights may be finite and their loss not."""
    from backrank.task import Task

    evaluate = Task.evaluate
    monkeypatch.setattr(Task, "evaluate", lambda *args: {**evaluate(*args), "loss": float("inf")})
    ran = train()
    assert ran.code == 1 and ran.summary is None and ran.read("failed.json")["diverged"]
    assert train().code == 1 and "val/loss is not finite" in ran.read("failed.json")["message"]


# Signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_the_step_and_exits_with_130(train, monkeypatch, number, capsys):
    after = Trainer.after_step

    def kick(self):
        if self.step == 7:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
        after(self)

    whole = train(runs="whole")
    monkeypatch.setattr(Trainer, "after_step", kick)
    assert train().code == 130
    assert "stopped at step 7; the same command continues it" in capsys.readouterr().err
    monkeypatch.setattr(Trainer, "after_step", after)
    ran = train()
    assert ran.code == 0 and "continuing at step 7" in (ran.folder / "log.txt").read_text()
    assert numbers(ran) == numbers(whole)
