"""One run over several processes: the same numbers as one, whoever stops, fails or continues it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from backrank import run
from backrank.compose import compose_run
from backrank.config import ConfigError
from backrank.interventions import INTERVENTIONS
from backrank.rundir import RunDir
from conftest import CHOSEN, Ran, with_intervention
from processes import doing

MODES = ("ddp", "fsdp")
SHORT = ["train.steps=6", "every.eval=4"]
LONGER = ["train.steps=8", "every.eval=4", *with_intervention(("feedback_route", {
    "scale": 0.5, "matrix": "oja", "rank": 3, "memory": 5.0}))]  # has a state that training moves  # fmt: skip
ACCUMULATED = [*SHORT, "train.accumulate=2"]
PROBED = [
    *SHORT, "probe=[weight_spectrum,gradient_spectrum,head_gradient,layer_jacobian]", "probe.head_gradient.every=3",
    *with_intervention(("backward_rank", {"rank": 3}), ("frozen_column_space", {})),
]  # fmt: skip
SAME = {
    "none": SHORT,
    "accumulated": ACCUMULATED,
    "tied": [*SHORT, "model.tied=true"],
    "sgd": [*SHORT, "optim=sgd", "optim.lr=0.1", "optim.weight_decay=0.1"],
    "checkpointing": [*SHORT, "train.checkpointing=true"],
    "muon": [*SHORT, "optim.name=muon"],
    "probed": PROBED,
    **{p.id: [*SHORT, *with_intervention(p.values)] for p in CHOSEN},
}


def folder(name: str) -> str:
    return "runs-" + re.sub(r"\W+", "-", name)


def left(root: Path, name: str) -> Ran:
    """What the run `name` below root left."""
    (config,) = (root / folder(name)).glob("[!.]*/config.yaml")
    return Ran(0, config.parent)


def over_two(tiny, root: Path, cases, timeout=400):
    """Runs all over two processes, {name: overrides or (overrides, what is done)}: exit codes by name.

    Each run has a folder `runs-<name>` of its own in root.
    """
    given = {}
    for name, case in cases.items():
        overrides, does = case if isinstance(case, tuple) else (case, {})
        given[name] = {"overrides": [*tiny, f"runs={root / folder(name)}", *overrides], "does": does}
    (root / "cases.json").write_text(json.dumps(given))
    script = Path(__file__).with_name("processes.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, script, root / "cases.json", root], capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr[-4000:]
    print(done.stderr)
    codes = [json.loads((root / f"{rank}.json").read_text()) for rank in range(2)]
    return {name: tuple(code[name] for code in codes) for name in cases}


@pytest.fixture(scope="module")
def ended(tiny, tmp_path_factory):
    """(folder, exit codes) of all that the tests below look at: starting processes is what takes the time."""
    root = tmp_path_factory.mktemp("processes")
    cases = {}
    for mode in MODES:
        for name, overrides in SAME.items():
            if accepts(mode, name):
                cases[f"{name} {mode}"] = [*overrides, f"parallel={mode}"]
        cases[f"uneven {mode}"] = ([*ACCUMULATED, f"parallel={mode}"], {"uneven": True})
        cases[f"stopped {mode}"] = ([*LONGER, f"parallel={mode}"], {"stop": 5, "rank": 1})
    cases["stopped again"] = cases["stopped fsdp"]
    cases |= {
        "held": [*SHORT, "parallel=ddp"],
        "no rate": [*SHORT, "optim.lr=0", "parallel=ddp"],
        "apart": ([*SHORT, "parallel=ddp"], {"apart": True, "rank": 1}),
        "no parent": [*SHORT, "parent=000000000000", "parallel=ddp"],
        "unmeasured": ([*SHORT, "every.eval=5", "parallel=fsdp"], {"fail": 5}),
        "diverged": [*SHORT, "optim=sgd", "optim.lr=1e30", "optim.clip=0", "parallel=fsdp"],
    }
    identity, _ = run.identify(compose_run([*tiny, *SHORT]))
    with RunDir(root / folder("held"), identity).claim():
        return root, over_two(tiny, root, cases)


def accepts(mode: str, name: str) -> bool:
    chosen = {p.id: p.values for p in CHOSEN}.get(name)
    if chosen is None:
        return (mode, name) != ("fsdp", "muon")
    try:
        INTERVENTIONS[chosen[0]](**chosen[1]).check_parallel(mode)
    except ConfigError:
        return False
    return True


@pytest.fixture
def alone(monkeypatch):
    """The environment of the only process that torchrun started."""
    env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)


def kept(ran: Ran) -> list[str]:
    """Its checkpoints."""
    return sorted(p.name for pattern in ("checkpoint*", "shards-*") for p in ran.folder.glob(pattern))


def difference(a: Ran, b: Ran) -> float:
    """The largest difference in losses, gradient norms and final weights."""
    found = []
    for name in ("train/loss", "optim/grad_norm", "val/curve_loss", "val/loss", "test/loss"):
        one, other = a.series(name), b.series(name)
        assert one.keys() == other.keys() and one, name
        found += [abs(one[step] - other[step]) for step in one]
    assert a.weights.keys() == b.weights.keys()
    found += [float((a.weights[name] - b.weights[name]).abs().max()) for name in a.weights]
    return max(found)


def test_two_processes_have_the_numbers_of_one(ended, train):
    root, codes = ended
    one = {name: train(*overrides, runs=folder(name)) for name, overrides in SAME.items()}
    with doing(uneven=True):
        one["uneven"] = train(*ACCUMULATED, runs=folder("uneven"))
    pairs = {f"{name} {mode}": (name, mode) for name in one for mode in MODES if accepts(mode, name)}
    assert {name: codes[name] for name in pairs if codes[name] != (0, 0)} == {}
    found = {pair: difference(one[name], left(root, pair)) for pair, (name, _) in pairs.items()}
    print(found)
    assert {pair: by for pair, by in found.items() if not by < 1e-5} == {}
    for pair, (_, mode) in pairs.items():
        assert left(root, pair).read("meta.json")["parallel"] == {"mode": mode, "processes": 2}
        assert all(type(weight) is torch.Tensor for weight in left(root, pair).weights.values())


@pytest.mark.parametrize("mode", MODES)
def test_probes_read_ordinary_tensors_of_the_whole_model(ended, train, mode):
    one, two = train(*PROBED).layers, left(ended[0], f"probed {mode}").layers
    assert len(one) == len(two) > 0
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for key, value in a.items():
            near = isinstance(value, (int, float))
            assert b[key] == (pytest.approx(value, rel=1e-3, abs=1e-5) if near else value), key


def test_stopped_runs_continue_in_any_mode_and_number_of_processes(ended, tiny, train, alone, tmp_path, monkeypatch):
    """What 2 x ddp, 2 x fsdp, 1 x fsdp and one process leave at step 5 another of them finishes."""
    root, codes = ended
    stopped = ("stopped ddp", "stopped fsdp", "stopped again")
    assert {codes[name] for name in stopped} == {(run.EXIT_INTERRUPTED,) * 2}
    for name in stopped:
        shutil.copytree(root / folder(name), tmp_path / folder(name))
    for name, mode in (("by 1 fsdp", "fsdp"), ("by 1", "none")):
        with doing(stop=5):
            assert train(*LONGER, f"parallel={mode}", runs=folder(name)).code == run.EXIT_INTERRUPTED
    for name in ("stopped fsdp", "by 1 fsdp"):
        assert kept(left(tmp_path, name)) == ["shards-5"]
    continued = {"by 1 fsdp": "fsdp", "by 1": "fsdp", "stopped again": "ddp"}
    codes = over_two(tiny, tmp_path, {name: [*LONGER, f"parallel={mode}"] for name, mode in continued.items()})
    assert set(codes.values()) == {(0, 0)}
    for name in ("stopped fsdp", "stopped ddp"):
        assert train(*LONGER, runs=folder(name)).code == 0
    whole = train(*LONGER)
    for name in (*stopped, "by 1 fsdp", "by 1"):
        assert "continuing at step 5" in (left(tmp_path, name).folder / "log.txt").read_text()
        assert difference(whole, left(tmp_path, name)) < 1e-5, name
        assert kept(left(tmp_path, name)) == ["checkpoint.pt"]


def test_a_failure_to_keep_pieces_leaves_the_old_checkpoint(train, alone, monkeypatch):
    chosen, adopt = ["train.steps=6", "every.checkpoint=2", "parallel=fsdp"], RunDir.adopt

    def full(self, draft, step):
        if step == 4:
            raise OSError("no space left")
        adopt(self, draft, step)

    monkeypatch.setattr(RunDir, "adopt", full)
    ran = train(*chosen)
    assert (ran.code, kept(ran)) == (run.EXIT_FAILED, ["shards-2"])
    monkeypatch.setattr(RunDir, "adopt", adopt)
    assert train(*chosen).code == 0
    assert "continuing at step 2" in (ran.folder / "log.txt").read_text()
    assert kept(ran) == ["checkpoint.pt"]


def test_what_ends_one_process_ends_all(ended):
    """Bad input, a run in other hands, a failed measurement, a loss that is no number: the same exit code in all."""
    root, codes = ended
    expected = {"held": 0, "no rate": 2, "no parent": 2, "apart": 2, "unmeasured": 1, "diverged": 1}
    assert {name: codes[name] for name in expected} == {name: (code, code) for name, code in expected.items()}
    assert left(root, "unmeasured").read("failed.json")["message"] == "cannot measure"
    assert left(root, "diverged").read("failed.json")["diverged"]


def test_a_process_that_dies_in_training_ends_the_command(tiny, tmp_path):
    """None waits for it. Through torchrun and the module itself, as it is typed."""
    code = "from processes import doing\nfrom backrank.run import main\nimport sys\n"
    code += "with doing(die=3, rank=1):\n    sys.exit(main(sys.argv[1:]))\n"
    script = tmp_path / "dies.py"
    script.write_text(code)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script]
    done = subprocess.run(
        [*command, *tiny, f"runs={tmp_path}", "parallel=ddp"], capture_output=True, text=True, timeout=100,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    assert done.returncode != 0 and "dies" in done.stderr


REFUSED = {
    "processes without a mode": ([], {"WORLD_SIZE": "2"}, "parallel=none: but 2 processes"),
    "a mode without torchrun": (["parallel=ddp"], {"RANK": None}, "parallel=ddp: needs processes that torchrun"),
    "rows that do not divide": (["parallel=ddp"], {"WORLD_SIZE": "3"}, "train.batch=4: is not divisible by the 3"),
    "an unknown mode": (["parallel=pipeline"], {}, "parallel=pipeline: is not known"),
    "a compiled step": (["parallel=ddp", "train.compile=aot_eager"], {}, "train.compile=aot_eager"),
    "whole matrices": (["parallel=fsdp", "optim.name=muon"], {}, "optim.name=muon"),
    "a sequential sketch": (
        ["parallel=ddp", *with_intervention(("feedback_route", {"scale": 1, "matrix": "frequent_directions"}))],
        {},
        "intervention.feedback_route.matrix=frequent_directions",
    ),
    "a step within the step": (
        ["parallel=fsdp", *with_intervention(("meta_route", {"scale": 1}))],
        {},
        "parallel=fsdp: is not exact with intervention meta_route",
    ),
    "a norm over the batch": (
        ["parallel=ddp", "data=digits", "model=resnet18", "model.width=16", "data.vocab_size=10"],
        {},
        "parallel=ddp: splits the batch over which model.kind=resnet normalises",
    ),
    "a sweep": (["-m", "parallel=ddp", "seed=1,2"], {"WORLD_SIZE": "2"}, "WORLD_SIZE=2"),
    "a sweep of such runs": (["-m", "parallel=ddp", "seed=1"], {}, "parallel=ddp: is a single run"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_exact_is_refused_by_name(what, alone, tiny, tmp_path, monkeypatch, capfd):
    overrides, env, said = REFUSED[what]
    for name, value in env.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    first = [overrides[0]] if overrides[:1] == ["-m"] else []
    assert run.main([*first, *tiny, f"runs={tmp_path}", *overrides[len(first) :]]) in (run.EXIT_CONFIG, run.EXIT_FAILED)
    assert said in "".join(capfd.readouterr())
    assert not list(tmp_path.glob("*/summary.json"))
