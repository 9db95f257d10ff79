"""Downstream scores: lm-eval finds what the run's own model does, without a network; every bad input is one error."""

import json
import socket
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from backrank import data, export
from backrank.compose import compose_run
from backrank.identity import canonical
from backrank.rundir import RunDir
from backrank.studies import downstream

BYTES = ("train.steps=30", "every.eval=0", "optim.lr=0.02", "data.tokenizer=bytes", "data.vocab_size=256")
needs_lm_eval = pytest.mark.skipif(
    not all(find_spec(name) for name in downstream.NEEDS), reason="lm-eval and accelerate are not installed"
)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_):
        raise AssertionError("the network is touched")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def items_of(run, folder) -> list[dict]:
    cfg, meta = export.read_run(RunDir(run.folder.parent, run.folder.name))
    tokenizer = export.tokenizer_of(cfg.data, meta)
    downstream.write_task(folder, data.load(cfg.data).test, tokenizer, cfg.data)
    return [json.loads(line) for line in (folder / "continuation.jsonl").read_text().splitlines()]


def own_score(run, items) -> float:
    """Share of items whose right choice is the likeliest by the run's own model."""
    cfg, _ = export.read_run(RunDir(run.folder.parent, run.folder.name))
    task = export.trained_task(cfg, RunDir(run.folder.parent, run.folder.name))
    right = []
    for item in items:
        scores = []
        for choice in item["choices"]:
            x = torch.tensor([list((item["context"] + choice).encode())])
            with torch.no_grad(), task.evaluating():
                logp = task.head(task.hidden(x[:, :-1])).log_softmax(-1)
            n = len(choice.encode())
            scores.append(logp[-n:].gather(1, x[0, -n:, None]).sum())
        right.append(int(np.argmax(scores)) == item["label"])
    return float(np.mean(right))


@needs_lm_eval
def test_the_score_is_that_of_the_runs_own_model(train, tmp_path, no_network):
    parent = train(*BYTES)
    study = train(*BYTES, f"parent={parent.folder.name}", "study=downstream")
    assert study.code == 0
    items, found = items_of(parent, tmp_path / "tasks"), study.summary
    assert found["downstream/items"] == len(items) > 5
    assert found["downstream/continuation"] == found["downstream/average"] == own_score(parent, items)
    assert study.read("meta.json")["parents"] == [parent.folder.name]
    limited = train(*BYTES, f"parent={parent.folder.name}", "study=downstream", "downstream.limit=1")
    assert limited.summary["downstream/items"] == 1 and limited.folder != study.folder


def test_items_are_of_the_held_out_text_and_depend_on_the_data_alone(train, tmp_path):
    runs = [train(*BYTES, f"seed={seed}", runs=str(seed)) for seed in (1, 2)]
    first, second = (items_of(run, tmp_path / f"tasks{i}") for i, run in enumerate(runs))
    assert first == second
    cfg, _ = export.read_run(RunDir(runs[0].folder.parent, runs[0].folder.name))
    text = (Path(cfg.data.path) / "test.txt").read_text()
    for item in first:
        assert item["context"] + item["choices"][item["label"]] in text
        assert len(set(item["choices"])) == downstream.CHOICES
        assert all(choice in text for choice in item["choices"])
        assert len(item["context"]) == 10 and {len(c) for c in item["choices"]} == {6}  # 16 of a sequence
    assert len({item["label"] for item in first}) > 1


def write(folder: Path, name: str, rows: int, right: int) -> None:
    """A task of one's own: `rows` items, all but `right` of which have both choices alike and the second as the answer
    (the first of equal ones is taken)."""
    folder.mkdir(exist_ok=True)
    lines = [{"q": "ab", "choices": ["cd", "cd"], "gold": int(i >= right)} for i in range(rows)]
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / f"{name}.yaml").write_text(f"""
task: {name}
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/{name}.jsonl}}
  cache_dir: {folder}/cache
test_split: test
output_type: multiple_choice
doc_to_text: q
doc_to_choice: choices
doc_to_target: gold
""")


@needs_lm_eval
def test_tasks_of_ones_own_are_averaged_by_their_items(train, tmp_path, no_network):
    parent = train(*BYTES)
    folder = tmp_path / "own"
    write(folder, "many", 12, 9)
    write(folder, "few", 4, 1)
    chosen = ["study=downstream", f"downstream.include={folder}", "downstream.tasks=[many,few]"]
    study = train(*BYTES, f"parent={parent.folder.name}", *chosen)
    assert study.code == 0
    found = study.summary
    assert (found["downstream/many"], found["downstream/few"]) == (0.75, 0.25)
    assert found["downstream/average"] == 10 / 16 and found["downstream/items"] == 16


@needs_lm_eval
def test_what_cannot_be_asked_is_one_clear_error(train, tmp_path, monkeypatch, capsys):
    parent = train(*BYTES)
    folder = tmp_path / "own"
    write(folder, "fine", 2, 1)

    def refused(*chosen: str) -> str:
        capsys.readouterr()
        run = train(*BYTES, f"parent={parent.folder.name}", "study=downstream", *chosen)
        assert run.code == 2 and not (run.folder and run.folder.exists())
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        return lines[0]

    from lm_eval import tasks

    class Quick(tasks.TaskManager):  # reading the package's own tasks takes 20 s
        def __init__(self, include_path, include_defaults=False):
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(tasks, "TaskManager", Quick)
    include = f"downstream.include={folder}"
    unknown = refused(include, "downstream.tasks=[continuatoin]")
    assert "downstream.tasks=continuatoin: is no task" in unknown and "Did you mean continuation?" in unknown
    assert "downstream.include=/nowhere: is no folder" in refused("downstream.include=/nowhere")
    assert "downstream.tasks=[]" in refused("downstream.tasks=[]")
    assert "downstream.limit=0" in refused("downstream.limit=0")
    (folder / "hub.yaml").write_text(
        "task: hub\ndataset_path: nobody/nothing\ntest_split: test\noutput_type: multiple_choice\n"
    )
    with monkeypatch.context() as patch:
        import datasets

        def down(*args, **_):
            raise ConnectionError("Couldn't reach the hub")

        patch.setattr(datasets, "load_dataset", down)
        offline = refused(include, "downstream.tasks=[hub]")
        assert "downstream.tasks=hub: cannot be loaded (ConnectionError: Couldn't reach the hub)" in offline
    (folder / "broken.yaml").write_text("task: [unclosed\n")
    assert f"downstream.include={folder}/broken.yaml: is no task file" in refused(include, "downstream.tasks=[fine]")
    assert "is not the data or the tokenizer" in refused("data=stdlib")
    with monkeypatch.context() as patch:
        patch.setattr(downstream, "find_spec", lambda name: None)
        assert "study=downstream: needs lm_eval" in refused()


def test_settings_name_a_study_and_no_training_run(tmp_path):
    base = ["train.steps=1", "optim.lr=1"]
    hashes = {"text": "t", "tokenizer": "bytes"}
    (tmp_path / "own").mkdir()
    task = tmp_path / "own" / "a.yaml"
    task.write_text("task: a")
    include = f"downstream.include={tmp_path / 'own'}"
    plain = canonical(compose_run(base), hashes)
    assert canonical(compose_run([*base, "downstream.limit=3", include]), hashes) == plain
    assert "downstream" not in plain
    study = [*base, "study=downstream", "parent=0123456789ab", include]
    first = canonical(compose_run(study), hashes)
    (tmp_path / "own").rename(tmp_path / "moved")
    moved = [o.replace("/own", "/moved") for o in study]
    assert canonical(compose_run(moved), hashes) == first
    (tmp_path / "moved" / "a.yaml").write_text("task: b")
    assert canonical(compose_run(moved), hashes) != first
