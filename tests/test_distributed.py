"""One run over several processes: the same numbers as one, whoever stops, fails or continues it."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import CHOSEN, Ran, with_intervention
from processes import doing

from backrank import run
from backrank.config import ConfigError
from backrank.interventions import INTERVENTIONS
from backrank.rundir import RunDir

SHORT = ["train.steps=8", "every.eval=4"]
MODES = ("ddp", "fsdp")


def folder(name: str) -> str:
    return "runs-" + re.sub(r"\W+", "-", name)


@pytest.fixture
def processes(tiny, tmp_path):
    """processes({name: overrides or (overrides, what is done)}) runs all over two processes: exit codes by name.

    Each run has a folder `runs-<name>` of its own in tmp_path.
    """

    def processes(cases, count=2, timeout=240):
        given = {}
        for name, case in cases.items():
            overrides, does = case if isinstance(case, tuple) else (case, {})
            given[name] = {"overrides": [*tiny, f"runs={tmp_path / folder(name)}", *overrides], "does": does}
        (tmp_path / "cases.json").write_text(json.dumps(given))
        script = Path(__file__).with_name("processes.py")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
        done = subprocess.run(
            [*command, script, tmp_path / "cases.json", tmp_path], capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stderr[-4000:]
        print(done.stderr)
        codes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(count)]
        return {name: [code[name] for code in codes] for name in cases}

    return processes


@pytest.fixture
def left(tmp_path):
    """left(name): what the run `name` left, as a Ran."""

    def left(name: str) -> Ran:
        (config,) = (tmp_path / folder(name)).glob("[!.]*/config.yaml")
        return Ran(0, config.parent)

    return left


@pytest.fixture
def alone(monkeypatch):
    """The environment of the only process that torchrun started."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))


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


def accepted(mode: str):
    """Overrides by name: no intervention, and every one that goes with a mode."""
    cases = {"none": []}
    for parameter in CHOSEN:
        name, settings = parameter.values
        try:
            INTERVENTIONS[name](**settings).check_parallel(mode)
        except ConfigError:
            continue
        cases[parameter.id] = with_intervention((name, settings))
    return cases


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_have_the_numbers_of_one(mode, processes, train, left):
    cases = {name: [*SHORT, *overrides] for name, overrides in accepted(mode).items()}
    cases["accumulated"] = [*SHORT, "train.accumulate=2"]
    cases["tied"] = [*SHORT, "model.tied=true"]
    cases["sgd"] = [*SHORT, "optim=sgd", "optim.lr=0.1", "optim.weight_decay=0.1"]
    cases["bf16"] = [*SHORT, "train.checkpointing=true"]
    uneven = [*SHORT, "train.accumulate=2", *with_intervention(("low_rank_head", {"rank": 3}))]
    codes = processes(
        {name: [*case, f"parallel={mode}"] for name, case in cases.items()}
        | {"uneven": ([*uneven, f"parallel={mode}"], {"uneven": True})},
        timeout=500
    )
    assert {name: code for name, code in codes.items() if code != [0, 0]} == {}
    found = {name: difference(train(*case, runs=f"one-{folder(name)}"), left(name)) for name, case in cases.items()}
    with doing(uneven=True):
        found["uneven"] = difference(train(*uneven, runs="one-uneven"), left("uneven"))
    print(found)
    assert {name: by for name, by in found.items() if by > 1e-5} == {}
