"""Cases that break pipelines of this kind, through the entry points: what dies, fails, races, is shared or missing."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from backrank import build, reproduce, run, sweep
from backrank.config import ConfigError
from backrank.plan import Study
from backrank.recorder import read_rows
from backrank.rundir import RunDir
from backrank.sweep import Sweep, Worker
from backrank.trainer import Trainer

DATA = os.environ.get("BACKRANK_DATA")


@pytest.fixture
def command(tiny, tmp_path, monkeypatch):
    """The words of a sweep over seeds of the tiny run, its results in tmp_path."""
    monkeypatch.setattr(sys, "argv", ["backrank"])
    for name in ("JOBS", "SCALE", "ONLY", "SEEDS", "LOGGER", "DEVICE", "HYDRA_FULL_ERROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RESULTS", str(tmp_path / "results"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")  # restored afterwards: looking sets it

    def command(*more, seeds="1,2,3", runs="runs"):
        return ["-m", *tiny, f"runs={tmp_path / runs}", *([f"seed={seeds}"] if seeds else []), *more]

    return command


def call(argv, jobs=1, monkeypatch=None):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JOBS", str(jobs))
        return run.main(argv)


@contextmanager
def started(argv, jobs=1, **env):
    """The entry point as a process of a session of its own; what is left of it is killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "backrank.run", *argv], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "JOBS": str(jobs), "OMP_NUM_THREADS": "1", **env}, start_new_session=True)  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def until(condition, seconds=90):
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return found


def folders(root, kept=False):
    return sorted(p for p in root.glob("*") if p.name != ".locks" and (kept or ".old-" not in p.name))


def done(root):
    return {p.parent.name for p in root.glob("*/summary.json")}


def contents(*paths):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for path in paths for p in sorted(path.rglob("*")) if p.is_file()}


def losses(root):
    """Everything that was measured in each finished run, without times."""
    return {
        p.name: [{k: v for k, v in r.items() if k != "time/step_ms"} for r in read_rows(p / "metrics.jsonl", True)]
        for p in folders(root) if (p / "summary.json").exists()
    }  # fmt: skip


def raises_for(monkeypatch, seed, error):
    real = build.build

    def broken(cfg, *rest):
        if cfg.seed == seed:
            raise error
        return real(cfg, *rest)

    monkeypatch.setattr(build, "build", broken)
    return lambda: monkeypatch.setattr(build, "build", real)


LONG = ("train.steps=300", "every.eval=0", "every.log=0", "every.checkpoint=25")


@pytest.fixture(scope="module")
def long_runs(tiny, tmp_path_factory):
    """Uncut runs of the sweeps that are killed below: {id: rows}."""
    root = tmp_path_factory.mktemp("uncut")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["backrank"])
        patch.setenv("JOBS", "1")
        assert run.main(["-m", *tiny, f"runs={root}", "seed=1,2,3", *LONG]) == 0
    return losses(root)


# D1


def test_d1_sweep_killed_during_its_second_run(command, tmp_path, capsys, long_runs):
    root = tmp_path / "runs"
    argv = command(*LONG)
    with started(argv) as process:
        until(lambda: len(done(root)) == 1 and any(
            (p / "checkpoint.pt").exists() for p in folders(root) if p.name not in done(root)))  # fmt: skip
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    finished = done(root)
    assert len(finished) == 1 and len(folders(root)) == 2
    before = contents(root / next(iter(finished)))
    assert call(argv) == 0
    out = capsys.readouterr().out
    assert "1 runs were done already and left as they are" in out and "2 runs done, 1 skipped, 0 failed" in out
    assert contents(root / next(iter(finished))) == before
    assert losses(root) == long_runs and len(folders(root, kept=True)) == 3
    before = contents(root)
    assert call(argv) == 0 and "0 runs done, 3 skipped" in capsys.readouterr().out
    assert {p: b for p, b in contents(root).items() if ".locks" not in p.parts} == {
        p: b for p, b in before.items() if ".locks" not in p.parts}  # fmt: skip


def test_d1_parent_of_two_workers_killed(command, tmp_path, capsys, long_runs):
    """The workers notice, save and end; nothing of theirs is lost."""
    root = tmp_path / "runs"
    argv = command(*LONG)
    with started(argv, jobs=2) as process:
        until(lambda: len([p for p in folders(root) if (p / "checkpoint.pt").exists()]) == 2)
        process.kill()
        process.wait()
    until(lambda: not any(RunDir(root, p.name).holder() for p in folders(root)))
    before = contents(*(root / run for run in done(root)))
    cut = [p for p in folders(root) if p.name not in done(root) and (p / "checkpoint.pt").exists()]
    assert call(argv) == 0
    assert losses(root) == long_runs and contents(*{p.parent for p in before}) == before
    for path in cut:
        assert "continuing at step" in (path / "log.txt").read_text()


def test_ctrl_c_with_two_workers_saves_all_exits_130_and_resumes_bit_equal(command, tmp_path, long_runs):
    root = tmp_path / "runs"
    argv = command(*LONG)
    with started(argv, jobs=2) as process:
        until(lambda: len([p for p in folders(root) if (p / "checkpoint.pt").exists()]) == 2)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        output = process.communicate(timeout=60)[0]
        assert process.returncode == 130, output
    assert "stopping: runs in hand are saved" in output and "Traceback" not in output and "FAILED" not in output
    assert not any((p / "failed.json").exists() for p in folders(root))
    assert len(done(root)) < 3
    assert call(argv) == 0
    assert losses(root) == long_runs


# D2


def test_d2_one_failed_run_stops_no_other_and_is_named(command, tmp_path, capsys, monkeypatch):
    root = tmp_path / "runs"
    mend = raises_for(monkeypatch, 2, RuntimeError("no luck today"))
    assert call(command()) == 1
    out = capsys.readouterr().out
    [bad] = [p for p in folders(root) if not (p / "summary.json").exists()]
    assert len(folders(root)) == 3
    assert f"{bad.name} run seed 2: RuntimeError: no luck today (log: {bad / 'log.txt'})" in out
    log = (bad / "log.txt").read_text()
    assert "Traceback" in log and "no luck today" in log
    for path in folders(root):
        assert path == bad or "no luck" not in (path / "log.txt").read_text()
    good = [p for p in folders(root) if p != bad]
    before = contents(*good)
    mend()
    assert call(command()) == 0
    assert "1 runs done, 2 skipped, 0 failed" in capsys.readouterr().out and contents(*good) == before
    assert not (bad / "failed.json").exists()


def test_d2_every_failed_run_of_a_typed_sweep_is_told_apart(command, capsys):
    assert call(command("optim.lr=0.01,1e30", "optim.clip=0", "every.log=1", seeds="1,2")) == 1
    out = capsys.readouterr().out
    assert "2 runs failed" in out and "0 skipped, 2 failed" in out and "left 0)" in out
    for seed in (1, 2):
        assert f"run seed {seed} optim.lr=1e+30: NonFiniteLoss" in out


def test_d2_a_worker_that_is_killed_fails_its_run_alone(command, tmp_path, capsys):
    root, said = tmp_path / "runs", []
    studies = [Study(None, "laptop", command(*LONG, seeds=None)[1:], seeds=[1, 2, 3])]
    plan = Sweep(studies, root, workers=2, said=said.append)
    victims = []
    execute = Worker.execute

    def kill_first(self, job, also):
        if job.seed == 1 and not victims:

            def kill():
                until(lambda: (root / job.id / "checkpoint.pt").exists())
                os.kill(self.process.pid, signal.SIGKILL)

            victims.append(job.id)
            sweep.threading.Thread(target=kill).start()
        return execute(self, job, also)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "execute", kill_first)
        assert plan.run() == 1
    [victim] = victims
    assert len(done(root)) == 2 and victim not in done(root)
    assert f"{victim} run seed 1: the worker was killed by SIGKILL" in "\n".join(said)
    assert json.loads((root / victim / "failed.json").read_text())["error"] == "WorkerDied"
    assert Sweep(studies, root, said=said.append).run() == 0  # and goes on from its checkpoint
    assert "continuing at step" in (root / victim / "log.txt").read_text() and len(done(root)) == 3


def test_workers_that_cannot_start_are_a_failure_of_their_runs_and_not_a_wait_for_ever(command, tmp_path, monkeypatch):
    said = []
    study = Study(None, "laptop", command(seeds=None)[1:], seeds=[1, 2, 3])
    study.config("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "omegaconf.py").write_text("raise SystemExit(3)\n")
    assert Sweep([study], tmp_path / "runs", workers=2, said=said.append).run() == 1
    assert sum("the worker ended with exit code 3" in line for line in said) == 6  # as it happens, and in the end


def test_an_error_of_the_sweep_itself_ends_it_and_is_raised(command, tmp_path, monkeypatch):
    def fail():
        raise ConfigError("runs", "x", "no room for the table", "Make some")

    study = Study(None, "laptop", command(seeds=None)[1:], seeds=[1, 2])
    monkeypatch.setattr(Worker, "execute", lambda *_: ("ran", {"wall_s": 1.0, "val/loss": 1.0}))
    for workers in (1, 2):
        with pytest.raises(ConfigError, match="no room"):
            Sweep([study], tmp_path / "runs", workers=workers, said=lambda _: None, after_each=fail).run()


def test_a_damaged_run_is_named_and_fresh_mends_it(command, tmp_path, capsys, monkeypatch):
    root = tmp_path / "runs"
    assert call(command(seeds="1,2")) == 0
    (folders(root)[0] / "meta.json").write_text("{")
    (folders(root)[1] / "summary.json").write_text("")
    for jobs in (1, 2):
        capsys.readouterr()
        assert call(command(seeds="1,2"), jobs=jobs) == 2
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "is no valid JSON" in err and "FRESH=1" in err
    monkeypatch.setenv("FRESH", "1")
    assert call(command(seeds="1,2")) == 0 and len(done(root)) == 4
    assert len(folders(root)) == 2 and len(folders(root, kept=True)) == 4


# D3


def test_d3_the_same_run_started_three_times_within_a_second(command, tmp_path):
    argv = [*command(*LONG, seeds=None)[1:], "seed=1"]
    with started(argv) as a, started(argv) as b, started(argv) as c:
        outputs = [p.communicate(timeout=120)[0] for p in (a, b, c)]
        assert [p.returncode for p in (a, b, c)] == [0, 0, 0], outputs
        pids = [p.pid for p in (a, b, c)]
    ran = [o for o in outputs if " done: val/loss" in o]
    held = [o for o in outputs if "is held by" in o]
    assert len(ran) == 1 and len(held) == 2, outputs
    assert all(any(f"pid {pid} since" in o for pid in pids) for o in held)
    [folder] = folders(tmp_path / "runs", kept=True)
    steps = [r["step"] for r in read_rows(folder / "metrics.jsonl", True) if "train/loss" in r]
    assert steps == list(range(1, 301))


def test_a_sweep_waits_for_a_run_in_other_hands_and_takes_its_result(command, tmp_path, capsys):
    root = tmp_path / "runs"
    study = Study(None, "laptop", command(seeds=None)[1:], seeds=[1, 2])
    first = study.job("", 1, "final", {}).id
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, time; from backrank.rundir import RunDir\n"
         "with RunDir(sys.argv[1], sys.argv[2]).claim(): print(1, flush=True); sys.stdin.read()", str(root), first],
        stdout=subprocess.PIPE, stdin=subprocess.PIPE)  # fmt: skip
    try:
        holder.stdout.readline()
        plan = Sweep([study], root, said=lambda line: "seed 2" in line and holder.stdin.close())
        assert plan.run() == 0  # seed 2 goes first, then the lock is free
        assert len(done(root)) == 2
    finally:
        holder.kill()
        holder.wait()


# D4, D5


@pytest.mark.parametrize("label", ["12345e7", "0012", "a#b,c=d 'e' \"f\" \\", "true"])
def test_d4_d5_labels_are_whole_in_the_folder_and_multiply_nothing(command, tmp_path, label):
    assert call(command(f"label={label}", seeds="7")) == 0
    [folder] = folders(tmp_path / "runs")
    assert json.loads((folder / "meta.json").read_text())["label"] == label
    assert OmegaConf.load(folder / "config.yaml").label == label


def test_d4_zero_written_in_two_ways_is_one_run(command, tmp_path):
    assert call(command("optim.weight_decay=0,0.0", "optim.lr=1e-4,0.0001", seeds="7")) == 0
    [folder] = folders(tmp_path / "runs")
    cfg = OmegaConf.load(folder / "config.yaml")
    assert cfg.optim.weight_decay == 0 and cfg.optim.lr == 1e-4 and isinstance(cfg.optim.lr, float)


def test_d5_a_sweep_over_lists_and_one_list_without_m(command, tmp_path, capsys):
    assert call(command("optim.betas=[0.9,0.95],[0.8,0.9]", "probe=[],[head_gradient]", seeds="7")) == 0
    assert {tuple(OmegaConf.load(p / "config.yaml").optim.betas) for p in folders(tmp_path / "runs")} == {
        (0.9, 0.95), (0.8, 0.9)}  # fmt: skip
    assert len(folders(tmp_path / "runs", kept=True)) == 2  # the probe is no other run: it is measured at once
    assert all("head/lost@0" in json.loads((p / "summary.json").read_text()) for p in folders(tmp_path / "runs"))
    capsys.readouterr()
    assert run.main([*command(seeds=None)[1:], "optim.betas=0.9,0.95"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "optim.betas=[0.9,0.95]" in err and "-m optim.betas=0.9,0.95" in err


# Experiments, plans, what two of them share


@pytest.fixture
def paper(command, monkeypatch, tmp_path):
    """Two experiments of a paper, cut down: `one` and `two` share a run and watch different things in it."""
    plan = {
        "one": ("[feedback_rotation]", "{a: [], b: [optim.weight_decay=0.2]}"),
        "two": ("[head_gradient]", "{c: [], d: [optim.weight_decay=0.3]}"),
    }
    from backrank.config import CONFIGS

    root = tmp_path / "configs"
    shutil.copytree(CONFIGS, root)
    for name in ("backrank.compose", "backrank.plan", "backrank.run"):
        monkeypatch.setattr(f"{name}.CONFIGS", root)
    shutil.rmtree(root / "experiment")
    (root / "experiment/causal_test").mkdir(parents=True)
    tiny = [w for w in command(seeds=None)[1:] if not w.startswith(("runs=", "data=", "device="))]
    nested: dict = {}
    for word in tiny:
        key, _, value = word.partition("=")
        group, field = key.split(".")
        nested.setdefault(group, {})[field] = value if field in ("path", "tokenizer", "cache") else int(value)
    for name, (probe, arms) in plan.items():
        text = {**nested, "experiment": f"causal_test/{name}",
                "plan": {"arms": OmegaConf.to_container(OmegaConf.create(arms)), "seeds": [1, 2],
                         "search": {"grids": {"optim.lr": [0.01, 0.02, 0.04]}}}}  # fmt: skip
        header = f"# @package _global_\ndefaults:\n  - override /data: text\n  - override /probe: {probe}\n\n"
        (root / f"experiment/causal_test/{name}.yaml").write_text(header + OmegaConf.to_yaml(OmegaConf.create(text)))
    monkeypatch.setenv("BACKRANK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("JOBS", "1")
    monkeypatch.setenv("SCALE", "paper")
    return tmp_path / "runs"


def test_two_experiments_that_share_runs_both_get_their_rows_from_one_of_each(paper, capsys):
    assert run.main(["-m", "experiment=causal_test/one,causal_test/two", "scale=paper"]) == 0
    ids = {}
    for name in ("one", "two"):
        study = Study(f"causal_test/{name}", "paper")
        known = Sweep([study], paper)
        progress = known.progress()[0]
        assert progress.unnamed == 0 and all(known.settled(study, job) for job in progress.jobs)
        ids[name] = {j.id for j in progress.jobs}
    shared = ids["one"] & ids["two"]
    assert shared and not [p for p in folders(paper, kept=True) if ".old-" in p.name]
    for path in folders(paper):
        summary = json.loads((path / "summary.json").read_text())
        assert ("rotation/mean_cos" in summary) == (path.name in ids["one"])
        assert ("head/lost" in summary) == (path.name in ids["two"])
    before = contents(*folders(paper))
    assert run.main(["-m", "experiment=causal_test/two,causal_test/one", "scale=paper"]) == 0
    assert contents(*folders(paper)) == before


def test_one_experiment_after_the_other_reruns_what_they_share_with_both(paper, capsys):
    assert run.main(["-m", "experiment=causal_test/one", "scale=paper"]) == 0
    first = losses(paper)
    assert run.main(["-m", "experiment=causal_test/two", "scale=paper"]) == 0
    again = losses(paper)
    for name, rows in first.items():
        keep = [[{k: v for k, v in r.items() if not k.startswith("head/")} for r in x] for x in (rows, again[name])]
        assert [r for r in keep[0] if len(r) > 1] == [r for r in keep[1] if len(r) > 1]
    before = contents(*folders(paper))
    assert run.main(["-m", "experiment=causal_test/one,causal_test/two", "scale=paper"]) == 0
    assert contents(*folders(paper)) == before


def test_arm_and_seed_pick_and_any_other_sweep_multiplies(paper, capsys):
    argv = ["-m", "experiment=causal_test/one", "scale=paper", "arm=b", "seed=1,2"]
    assert run.main([*argv, "optim.lr=0.01,0.02"]) == 0
    found = [OmegaConf.load(p / "config.yaml") for p in folders(paper)]
    assert {(c.arm, c.seed, c.optim.lr, c.optim.weight_decay) for c in found} == {
        ("b", s, lr, 0.2) for s in (1, 2) for lr in (0.01, 0.02)}  # fmt: skip
    assert len(found) == 4
    capsys.readouterr()
    assert run.main(["experiment=causal_test/one", "scale=paper", "arm=b", "seed=1", "optim.lr=0.02"]) == 0
    assert "done already" in capsys.readouterr().out
    for bad, word in ((["arm=c"], "Known: a, b"), (["seed=x"], "seed=x"), (["experiment=causal_test/tow"], "two"),
                      (["scale=papr"], "paper"), (["plan.seeds=[]"], "plan.seeds")):  # fmt: skip
        chosen = [a for a in argv[:3] if a.split("=")[0] != bad[0].split("=")[0]]
        assert run.main([*chosen, *bad]) == 2
        err = capsys.readouterr().err
        assert word in err and err.count("\n") == 1


def test_ctrl_c_in_the_middle_of_a_search_goes_on_where_it_was(paper, monkeypatch, capsys):
    assert run.main(["-m", "experiment=causal_test/one", "scale=paper"]) == 0
    whole = losses(paper)
    paper.rename(paper.with_name("whole"))
    after, counts = Trainer.after_step, []

    def kick(self):
        counts.append(1)
        if len(counts) == 27:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)
        after(self)

    monkeypatch.setattr(Trainer, "after_step", kick)
    assert run.main(["-m", "experiment=causal_test/one", "scale=paper"]) == 130
    assert len(done(paper)) == 1 and len(folders(paper)) == 2
    monkeypatch.setattr(Trainer, "after_step", after)
    assert run.main(["-m", "experiment=causal_test/one", "scale=paper"]) == 0
    assert losses(paper) == whole


def test_ctrl_c_where_no_step_is_running(paper, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build, "build", stop)
    assert run.main(["-m", "experiment=causal_test/one", "scale=paper"]) == 130
    assert reproduce.main(["run", "causal_test"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_search_with_a_diverged_point_chooses_among_the_others(paper, monkeypatch, capsys):
    real = build.build

    def diverge(cfg, *rest):
        trainer, record = real(cfg, *rest)
        if cfg.optim.lr == 0.02:
            with torch.no_grad():
                trainer.task.head.weight.fill_(float("inf"))
        return trainer, record

    monkeypatch.setattr(build, "build", diverge)
    assert run.main(["-m", "experiment=causal_test/one", "scale=paper", "arm=a", "probe=[]"]) == 0
    [choice] = Sweep([Study("causal_test/one", "paper", ["probe=[]"], ["a"])], paper).progress()[0].choices
    assert choice.best["optim.lr"] != 0.02 and float("inf") in choice.losses
    before = contents(*folders(paper))
    assert run.main(["-m", "experiment=causal_test/one", "scale=paper", "arm=a", "probe=[]"]) == 0
    assert contents(*folders(paper)) == before  # a point that diverged is an answer


def test_a_search_that_only_diverged_blocks_its_arm_and_says_so(paper, monkeypatch, capsys):
    real = build.build

    def diverge(cfg, *rest):
        trainer, record = real(cfg, *rest)
        with torch.no_grad():
            trainer.task.head.weight.fill_(float("inf"))
        return trainer, record

    monkeypatch.setattr(build, "build", diverge)
    run.main(["-m", "experiment=causal_test/one", "scale=paper", "arm=a", "probe=[]"])
    assert "causal_test/one a: its search has no usable result or its parent failed" in capsys.readouterr().out
    assert not done(paper) and len(folders(paper)) == 3


def test_reproduce_runs_plans_and_tells_its_state(paper, monkeypatch, capsys):
    assert reproduce.main(["plan", "causal-test"]) == 0
    assert "one" in capsys.readouterr().out and not paper.exists()
    mend = raises_for(monkeypatch, 2, RuntimeError("no luck"))
    monkeypatch.setattr(reproduce, "report", lambda *_: 0)
    assert reproduce.main(["run", "causal_test"]) == 1
    capsys.readouterr()
    assert reproduce.main(["status", "causal_test"]) == 0
    out = capsys.readouterr().out
    assert "no luck" in out and "failed" in out
    mend()
    monkeypatch.setenv("ONLY", "two")
    assert reproduce.main(["run", "causal_test"]) == 0
    monkeypatch.setattr(run, "code_hash", lambda *_: "newer")
    capsys.readouterr()
    assert reproduce.main(["status", "causal_test"]) == 0
    row = next(line for line in capsys.readouterr().out.splitlines() if "causal_test/two" in line).split("│")
    finished, stale = (cell.strip() for cell in (row[2], row[-2]))
    assert finished == stale != "0"


@pytest.mark.parametrize(
    ("env", "says"),
    [({"SCALE": "lptop"}, "Did you mean laptop"), ({"ONLY": "tow"}, "ONLY=tow"), ({"SEEDS": "a"}, "SEEDS=a"),
     ({"JOBS": "0"}, "JOBS=0"), ({"DEVICE": "tpu"}, "device=tpu"), ({"LOGGER": "x"}, "logger=x")],
)  # fmt: skip
def test_nonsense_in_the_environment_is_one_line_before_anything_is_made(paper, monkeypatch, capsys, env, says):
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert reproduce.main(["run", "causal_test"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and says in err and not paper.exists()
    assert reproduce.main(["run", "causal_tets"]) == 2
    assert reproduce.main(["walk"]) == 2


def test_a_device_that_is_not_there_is_found_before_the_first_run(paper, monkeypatch, capsys):
    monkeypatch.setattr(reproduce, "has_cuda", lambda: False)
    monkeypatch.setenv("DEVICE", "cuda")
    assert reproduce.main(["run", "causal_test"]) == 2
    assert "device=cuda: is not there" in capsys.readouterr().err and not paper.exists()


def test_results_that_cannot_be_written_are_named(paper, monkeypatch, capsys):
    paper.write_text("in the way")
    code = run.main(["-m", "experiment=causal_test/one", "scale=paper", "arm=a"])
    captured = capsys.readouterr()
    assert code == 2 and str(paper) in captured.err and "RUNS=" in captured.err and captured.err.count("\n") == 1
    assert paper.read_text() == "in the way"


def test_d5_seeds_and_folders_from_the_environment_need_no_quoting(paper, tmp_path, monkeypatch):
    root = tmp_path / "runs, a=b #1"
    for name, value in {"BACKRANK_RUNS": str(root), "SEEDS": "0, 1", "ONLY": "one",
                        "BACKRANK_DATA": str(tmp_path / "no, such = folder")}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(reproduce, "report", lambda *_: 0)
    assert reproduce.main(["run", "causal_test"]) == 0
    metas = [json.loads((p / "meta.json").read_text()) for p in folders(root)]
    assert {m["scale"] for m in metas} == {"paper"} and {m["seed"] for m in metas} == {0, 1}
    assert {OmegaConf.load(p / "config.yaml").data.root for p in folders(root)} == {os.environ["BACKRANK_DATA"]}


# D6, D7, D8


def test_d6_d7_tracker_of_a_sweep(command, tmp_path, monkeypatch, capsys):
    """Runs of one process: each is its own there, failed ones marked; a run that goes on leaves one value a step."""
    pytest.importorskip("wandb")
    from test_mirror import values, written

    for name in [n for n in os.environ if n.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "NETRC"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    after = Trainer.after_step

    def fail(self):
        if self.step == 15 and self.every.log == 4 and not mended:
            raise RuntimeError("no luck")
        after(self)

    mended: list[int] = []
    monkeypatch.setattr(Trainer, "after_step", fail)
    argv = command("logger=wandb", "logger.mode=offline", "label=a#b,c=d", "probe=[feedback_rotation]", seeds="1,2")
    assert call(argv) == 1
    first = [written(p) for p in folders(tmp_path / "runs")]
    assert [w[0].run_id for w in first] == [p.name for p in folders(tmp_path / "runs")]
    assert all(w[3] == [1] and w[0].display_name == "a#b,c=d" for w in first)
    assert sorted(w[1]["seed"] for w in first) == [1, 2]
    mended.append(1)
    assert call(argv) == 0
    for path in folders(tmp_path / "runs"):
        _, config, history, codes, axes = written(path)
        found = values(history)
        assert codes == [0] and config["label"] == "a#b,c=d"
        assert {k: len(v) for k, v in found.items() if k[0] == "train/loss"} == {
            ("train/loss", s): 1 for s in range(1, 21)}  # fmt: skip
        assert {k[1] for k in found if k[0] == "rotation/mean_cos"} == {0, 20}
        assert axes["train/*"] == "train/step" and axes["rotation/*"] == "rotation/step"


def test_d8_no_key_and_stdin_closed(command, tmp_path):
    pytest.importorskip("wandb")
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    env |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_ERROR_REPORTING": "false",
            "WANDB_CONFIG_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}  # fmt: skip
    argv = [*command(seeds=None)[1:], "logger=wandb"]
    child = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-m", "backrank.run"]
    ran = subprocess.run([*child, *argv], env=env, capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr
    notices = [line for line in ran.stderr.splitlines() if "W&B" in line]
    assert len(notices) == 1 and "sync_wandb" in notices[0]
    assert len(done(tmp_path / "runs")) == 1


# D10


@pytest.mark.parametrize("many", [False, True])
def test_d10_what_has_no_value_is_named_before_anything_is_made(command, tmp_path, capsys, many, monkeypatch):
    monkeypatch.setattr(build, "build", lambda *_: pytest.fail("allocated"))
    argv = command("intervention=[low_rank_head]", seeds="1,2" if many else None)
    assert run.main(argv if many else argv[1:]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: intervention.low_rank_head.rank=???: has no value") and err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


# D20


def test_d20_data_that_is_not_here(tmp_path):
    """Within seconds: the data set, where it was looked for, and the command that fetches it."""
    env = {k: v for k, v in os.environ.items() if k != "BACKRANK_DATA"}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "BACKRANK_DATA": str(tmp_path / "a place")}
    argv = ["experiment=causal_test/byte_heads", "scale=paper", "arm=ordinary", f"runs={tmp_path / 'runs'}"]
    start = time.process_time(), time.monotonic()
    ran = subprocess.run([sys.executable, "-m", "backrank.run", *argv], env=env, capture_output=True, text=True)
    assert time.monotonic() - start[1] < 15  # 5 on a machine with nothing else to do
    assert ran.returncode == 2 and ran.stderr.count("\n") == 1, ran.stderr
    for part in ("data.hub_id=Salesforce/wikitext", str(tmp_path / "a place/wikitext-2-v1"), "python -m backrank.data",
                 f"'{tmp_path / 'a place/wikitext-2-v1'}'"):  # fmt: skip
        assert part in ran.stderr, part
    assert not (tmp_path / "runs").exists()


@pytest.mark.skipif(not DATA, reason="BACKRANK_DATA names no folder with wikitext-2-v1")
def test_d20_a_prepared_folder_needs_no_network(tmp_path):
    argv = ["experiment=causal_test/byte_heads", "scale=paper", "arm=ordinary", f"runs={tmp_path / 'runs'}",
            "train.steps=3", "data.eval_tokens=2048", "probe=[]"]  # fmt: skip
    alone = ["unshare", "-n"] if subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0 else []
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "BACKRANK_DATA": DATA,
           "OMP_NUM_THREADS": "1"}  # fmt: skip
    ran = subprocess.run([*alone, sys.executable, "-m", "backrank.run", *argv], env=env, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    [folder] = folders(tmp_path / "runs")
    assert json.loads((folder / "meta.json").read_text())["data"] == "wikitext-2-v1" and Path(DATA).is_dir()


def test_rows_of_a_plan_without_a_search_are_collected_again_and_again(tmp_path, monkeypatch, tiny):
    """Fixed settings leave nothing to choose: no search.csv, and the next collection reads what this one wrote."""
    from backrank.analysis.runs import collect, read_table

    one = [*tiny, f"runs={tmp_path / 'runs'}", "probe=[]", "optim.lr=0.01"]
    study = Study("causal_test/byte_heads", "smoke", one, arms=["ordinary"], seeds=[1, 2])
    assert Sweep([study], tmp_path / "runs", said=lambda _: None).run() == 0
    folder = tmp_path / "results"
    for _ in range(2):
        collect([study], tmp_path / "runs", folder)
        rows = read_table(folder / "runs.csv")
        assert list(rows["seed"]) == [1, 2]
        assert rows["val_loss_active"].equals(rows["val_loss"])  # every class is active
    assert not (folder / "search.csv").exists() and not (folder / "layers.parquet").exists()
