"""The W&B mirror: what it really wrote (W&B's transaction log is read back), and that it is never in a run's way."""

import gzip
import http.server
import importlib.util
import json
import logging
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from backrank import mirror as module
from backrank.config import ROOT, ConfigError, Logger
from backrank.mirror import SENT, WandbMirror, backfill, payloads, send, wandb_id
from backrank.recorder import LAYERS, METRICS, Recorder

pytest.importorskip("wandb")
KEY = "a" * 40


@pytest.fixture(autouse=True)
def no_account(monkeypatch, tmp_path):
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("HOME", "XDG_CONFIG_HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")


def run_folder(root, name="0123456789ab", **config):
    folder = root / name
    folder.mkdir(parents=True)
    config = {"scale": "smoke", "experiment": "causal_test/byte_heads", "intervention": {"backward_rank": {}}} | config
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    return folder


def transaction_logs(folder):
    """For each W&B run directory of a run folder: its records. The file is a LevelDB log: blocks of 32 KiB, chunks of
    a 7-byte header (checksum, length, type) and a piece of a protobuf record."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for path in sorted((folder / "wandb").glob("*run-*/*.wandb")):
        data, at, piece, records = path.read_bytes(), 7, b"", []
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
            piece += data[at + 7 : at + 7 + length]
            at += 7 + length
            if kind in (1, 4):  # whole, or last piece
                records.append(Record.FromString(piece))
                piece = b""
        found.append(records)
    return found


def written(folder):
    """(run record, config, history, exit codes, step metric by name) of the only W&B directory of a run folder."""
    [records] = transaction_logs(folder)
    run = next(r.run for r in records if r.WhichOneof("record_type") == "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    history = [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    axes = {
        (r.metric.glob_name or r.metric.name): r.metric.step_metric
        for r in records
        if r.WhichOneof("record_type") == "metric"
    }
    codes = [r.exit.exit_code for r in records if r.WhichOneof("record_type") == "exit"]
    return run, config, history, codes, axes


def values(history):
    """{(metric, its own step): [values]}, from history rows."""
    found = {}
    for row in history:
        for name, value in row.items():
            if not name.startswith("_") and not name.endswith("/step"):
                found.setdefault((name, row[name.split("/")[0] + "/step"]), []).append(value)
    return found


def record(folder, steps, exit_code=0, offsets=None, mode="offline"):
    recorder = Recorder(folder, WandbMirror(folder, Logger(name="wandb", mode=mode)))
    recorder.truncate(offsets or {})
    for step in steps:
        recorder.metrics(step, {"train/loss": step / 8, "optim/lr": 0.1})
    recorder.close(exit_code)
    return recorder


def test_three_runs_of_one_process_have_their_own_id_config_and_state(tmp_path):
    labels = ["a#b,c=d", None, None]
    folders = [run_folder(tmp_path, f"{index:012x}", seed=index, label=labels[index]) for index in range(3)]
    for index, folder in enumerate(folders):
        record(folder, [1, 2], exit_code=int(index == 1))
    for index, folder in enumerate(folders):
        run, config, _, codes, _ = written(folder)
        assert run.run_id == folder.name and config["seed"] == index and codes == [int(index == 1)]
        assert (run.run_group, run.job_type, run.project) == ("causal_test/byte_heads", "smoke", "backrank")
        assert list(run.tags) == ["backward_rank"]
        assert run.display_name == ("a#b,c=d" if index == 0 else folder.name)
        assert not (folder / SENT).exists()  # nothing was sent


def test_every_family_has_its_axis_and_a_resume_leaves_one_value_per_step(tmp_path):
    folder = run_folder(tmp_path)
    recorder = Recorder(folder, WandbMirror(folder, Logger(mode="offline")))
    offsets = {}
    for step in (40, 80, 120):
        recorder.metrics(step, {"train/loss": float(step), "optim/lr": 0.1, "time/step_ms": 3.0})
        if step == 80:
            offsets = recorder.offsets()
    recorder.metrics(100, {"rank/h.0/erank": 3.5, "head/lost": float("nan")})
    recorder.layers(100, [{"layer": f"h.{i}", "kind": "gradient", "part": "block", "erank": 1.0 + i} for i in (0, 1)])
    recorder.close(1)  # the run dies here

    _, _, history, _, axes = written(folder)
    found = values(history)
    assert {step for name, step in found if name == "train/loss"} == {40, 80, 120}
    assert found[("rank/h.0/erank", 100)] == [3.5] and math.isnan(found[("head/lost", 100)][0])
    assert found[("gradient/h.0/erank", 100)] == [1.0] and found[("gradient/h.1/erank", 100)] == [2.0]
    for family in ("train", "optim", "time", "rank", "head", "gradient"):
        assert axes[f"{family}/*"] == f"{family}/step"

    record(folder, (120, 160), offsets=offsets)
    found = values(written(folder)[2])  # one W&B directory is left, and it is whole
    assert {key: len(value) for key, value in found.items() if key[0] == "train/loss"} == {
        ("train/loss", step): 1 for step in (40, 80, 120, 160)
    }
    assert found[("train/loss", 120)] == [15.0] and ("rank/h.0/erank", 100) not in found


def test_a_run_that_the_server_knows_gets_only_what_it_lacks(tmp_path):
    class Run:
        """What W&B hands back on resume: the last values, step axes included."""

        def __init__(self, summary):
            self.summary, self.rows, self.axes = summary, [], {}

        def define_metric(self, name, step_metric=None):
            self.axes[name] = step_metric

        def log(self, row):
            self.rows.append(row)

    folder = run_folder(tmp_path)
    recorder = Recorder(folder)
    for step in (40, 80, 120, 160):
        recorder.metrics(step, {"train/loss": step / 8})
        recorder.metrics(step, {"val/loss": step / 4})
    recorder.close()
    stop = threading.Event()
    stop.set()
    run = Run({"train/step": 120, "val/step": 80, "train/loss": 15.0})
    send(run, folder, stop)
    assert {key: len(v) for key, v in values(run.rows).items()} == dict.fromkeys(
        [("val/loss", 120), ("train/loss", 160), ("val/loss", 160)], 1
    )
    again = Run({"train/step": 160, "val/step": 160})
    send(again, folder, stop)
    assert again.rows == []


def test_histogram_with_nan_reaches_the_tracker_with_its_count(tmp_path):
    folder = run_folder(tmp_path)
    recorder = Recorder(folder, WandbMirror(folder, Logger(mode="offline")))
    recorder.layers(3, [{"layer": "h.0", "kind": "weight", "sigma": [3.0, float("nan"), 1.0]}])
    recorder.close()
    found = values(written(folder)[2])
    assert found[("weight/h.0/sigma_nonfinite", 3)] == [1]
    assert found[("weight/h.0/sigma/_type", 3)] == ["histogram"]
    assert sum(found[("weight/h.0/sigma/values", 3)][0]) == 2


def test_config_is_plain_resolved_data(tmp_path, caplog):
    nested = {"width": 96, "model": {"width": "${width}", "path": None}, "grid": [[1, "${width}"], [None]]}
    folder = run_folder(tmp_path, **nested)
    record(folder, [1])
    assert not caplog.records  # and nothing to complain of
    config = written(folder)[1]
    assert config["model"] == {"width": 96, "path": None} and config["grid"] == [[1, 96], [None]]


SCRIPT = """
import logging, pathlib, sys, time
logging.basicConfig(format="%(message)s")
from backrank.config import Logger
from backrank.mirror import WandbMirror
from backrank.recorder import Recorder
start, folder = time.monotonic(), pathlib.Path(sys.argv[1])
recorder = Recorder(folder, WandbMirror(folder, Logger(name="wandb")))
for step in range(5):
    recorder.metrics(step, {"train/loss": 1.0 / (step + 1)})
recorder.close(0)
assert not {"wandb", "torch"} & set(sys.modules)
print("trained", time.monotonic() - start)
"""


def silent_server():
    """A port that accepts and never answers."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(50)
    return server, f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("case", ["no key, stdin closed", "fake key, closed port", "fake key, server never answers"])
def test_no_account_or_no_network_costs_ten_seconds_at_most(tmp_path, case):
    folder, env, server = run_folder(tmp_path), dict(os.environ), None
    if "fake key" in case:
        env |= {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9"}
    if "never" in case:
        server, env["WANDB_BASE_URL"] = silent_server()
    command = ["sh", "-c", 'exec "$@" <&-', "sh", sys.executable, "-c", SCRIPT, str(folder)]
    start = time.monotonic()
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    whole = time.monotonic() - start
    if server:
        server.close()
    assert done.returncode == 0, done.stderr
    trained = float(done.stdout.split()[1])
    assert trained <= 10 and whole - trained < 10, (trained, whole)  # the exit does not wait either
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("W&B mirror: "), done.stderr
    assert len((folder / METRICS).read_text().splitlines()) == 5
    assert len(values(written(folder)[2])) == 5 and written(folder)[3] == [0]  # kept offline, whole


def test_a_mirror_that_hangs_is_killed_in_time(tmp_path, monkeypatch, caplog):
    """The child sleeps for a minute (a stand-in interpreter); closing the run waits for its limit and ends it."""
    fake = tmp_path / "python"
    fake.write_text("#!/bin/sh\nexec sleep 60\n")
    fake.chmod(0o755)
    monkeypatch.setattr(module.sys, "executable", str(fake))
    folder = run_folder(tmp_path)
    mirror = WandbMirror(folder, Logger(timeout_s=1.0))
    mirror.begin()
    child, start = mirror._child, time.monotonic()
    with caplog.at_level(logging.WARNING):
        assert mirror.close(0) is False
    assert time.monotonic() - start < 3 and child.wait(5) != 0
    assert [r.message for r in caplog.records if "not finished in time" in r.message] and len(caplog.records) == 1


def test_the_child_ends_when_the_run_is_killed_and_marks_it_failed(tmp_path):
    folder = run_folder(tmp_path)
    script = SCRIPT.replace("recorder.close(0)", "recorder.flush(); time.sleep(3); import os; os.kill(os.getpid(), 9)")
    subprocess.run([sys.executable, "-c", script, str(folder)], env=dict(os.environ, WANDB_MODE="offline"), timeout=30)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with suppress(StopIteration):  # begun, and its first record not on disk yet
            if transaction_logs(folder) and written(folder)[3]:
                break
        time.sleep(0.1)
    assert written(folder)[3] == [1] and len(values(written(folder)[2])) == 5


@pytest.mark.parametrize("broken", ["no config", "no interpreter", "no wandb"])
def test_whatever_breaks_the_run_goes_on_with_one_notice(tmp_path, monkeypatch, caplog, broken):
    folder = run_folder(tmp_path)
    if broken == "no config":
        (folder / "config.yaml").unlink()
    elif broken == "no interpreter":
        monkeypatch.setattr(module.sys, "executable", str(tmp_path / "none"))
    else:
        (tmp_path / "wandb.py").write_text("raise ImportError('no W&B here')\n")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        record(folder, range(3), mode="auto")
    assert len(caplog.records) == 1 and "sync_wandb" in caplog.records[0].message
    assert len((folder / METRICS).read_text().splitlines()) == 3


def test_rerun_has_its_own_id_in_the_tracker(tmp_path):
    folder = run_folder(tmp_path)
    assert wandb_id(folder) == folder.name
    run_folder(tmp_path, folder.name + ".old-1")
    assert wandb_id(folder) == folder.name + "-2"


def sync(root, **env):
    command = [sys.executable, str(ROOT / "scripts/sync_wandb.py"), str(root)]
    return subprocess.run(command, env=dict(os.environ, **env), capture_output=True, text=True, timeout=120)


def finished(root, name):
    folder = run_folder(root, name)
    recorder = Recorder(folder)
    recorder.metrics(1, {"train/loss": 1.0})
    recorder.close()
    (folder / "summary.json").write_text("{}")
    return folder


def test_sync_without_a_server_says_so_and_loses_nothing(tmp_path):
    folder = finished(tmp_path, "0123456789ab")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    done = sync(tmp_path)
    assert done.returncode == 1 and "1 not sent" in done.stdout and "key" in done.stderr.lower(), done
    assert {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()} == before


def test_sync_sends_each_finished_run_once(tmp_path, monkeypatch):
    """The child is replaced by one that notes what it is asked to send and reports success, as W&B would."""
    first, second = finished(tmp_path, "a" * 12), finished(tmp_path, "b" * 12)
    damaged, running = finished(tmp_path, "c" * 12), finished(tmp_path, "d" * 12)
    finished(tmp_path, "a" * 12 + ".old-1")
    (damaged / METRICS).write_text('{"step": 1')
    (running / "summary.json").unlink()
    script = load("sync_wandb")
    asked = []

    class Sent(WandbMirror):
        def begin(self):
            asked.append(module.describe(self.folder, self.logger)["init"]["id"])

        def close(self, exit_code=0, limit_s=None):
            (self.folder / SENT).write_text("{}")
            return True

    monkeypatch.setattr(module, "WandbMirror", Sent)
    monkeypatch.setattr(sys, "argv", ["sync", str(tmp_path)])
    assert script.main() == 1  # the damaged one is named, the others are sent
    assert asked == ["a" * 12 + "-2", "b" * 12]
    assert script.main() == 1 and len(asked) == 2
    with pytest.raises(ConfigError, match="line 1"):
        backfill(damaged, Logger())
    assert backfill(first, Logger()) and backfill(second, Logger()) and len(asked) == 2


class Server(http.server.BaseHTTPRequestHandler):
    """As much of W&B's server as one run needs: keeps history lines by offset, the last summary, the exit code."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        asked = json.loads(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
        kept, project = self.server.kept, {"id": "p", "name": "backrank", "entity": {"id": "e", "name": "ent"}}
        answer, query = {"data": {}}, asked.get("query", "")
        if "RunResumeStatus" in query:
            tail = json.dumps([json.dumps({"_step": len(kept["history"]) - 1})])
            run = {
                "id": "i", "name": "n", "displayName": "n", "config": "{}", "wandbConfig": '{"t": {"value": 1}}',
                "summaryMetrics": kept["summary"], "historyTail": tail, "historyLineCount": len(kept["history"]),
                "eventsTail": "[]", "eventsLineCount": 0, "logLineCount": 0,
            }  # fmt: skip
            answer["data"] = {"model": project | {"bucket": run if kept["known"] else None}}
        elif "UpsertBucket" in query:
            kept["known"] = True
            run = {"id": "i", "name": asked["variables"]["name"], "displayName": "n", "project": project}
            run |= {"config": "{}", "historyLineCount": 0}
            answer["data"] = {"upsertBucket": {"bucket": run, "inserted": True}}
        elif "CreateRunFiles" in query:
            answer["data"] = {"createRunFiles": {"runID": "i", "uploadHeaders": [], "files": []}}
        for name, chunk in (asked.get("files") or {}).items():
            if name == "wandb-history.jsonl":
                kept["history"][chunk["offset"] :] = [json.loads(line) for line in chunk["content"]]
            elif name == "wandb-summary.json":
                kept["summary"] = chunk["content"][-1]
        if asked.get("complete"):
            kept["codes"].append(asked["exitcode"])
        data = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.send_error(404)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as http_server:
        http_server.kept = {"known": False, "history": [], "summary": "{}", "codes": []}
        threading.Thread(target=http_server.serve_forever, daemon=True).start()
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{http_server.server_port}")
        yield http_server.kept
        http_server.shutdown()


def test_online_a_resume_and_a_sync_send_each_value_once(tmp_path, server, caplog):
    folder = run_folder(tmp_path)
    whole = record(folder, (40, 80), mode="auto", exit_code=1)
    offsets = whole.offsets()
    record(folder, (120,), 1, offsets, mode="auto")
    assert len(server["history"]) == 3
    record(folder, (120, 160), 0, offsets, mode="auto")  # back to step 80; what W&B has of 120 stays
    once = {(name, step): 1 for name in ("train/loss", "optim/lr") for step in (40, 80, 120, 160)}
    assert {key: len(value) for key, value in values(server["history"]).items()} == once
    assert server["codes"] == [1, 1, 0] and not caplog.records
    assert json.loads((folder / SENT).read_text())["id"] == folder.name

    (folder / "summary.json").write_text("{}")
    late = finished(tmp_path, "late")
    server.update(known=False, history=[], summary="{}")
    for _ in range(2):  # the second call has nothing to send
        done = sync(tmp_path)
        assert done.returncode == 0, done
    assert "0 sent now, 2 before" in done.stdout and server["codes"] == [1, 1, 0, 0]
    assert values(server["history"]) == {("train/loss", 1): [1.0]}
    assert json.loads((late / SENT).read_text())["id"] == "late"


def load(script):
    spec = importlib.util.spec_from_file_location(script, ROOT / "scripts" / f"{script}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_dashboard_names_only_what_is_recorded():
    import torch

    from backrank.head import head_gradient_stats
    from backrank.probes.spectra import layer_rows

    x, w = torch.randn(6, 3), torch.randn(5, 3)
    names = {f"head/{key}" for key in head_gradient_stats(x, w, torch.tensor([0, 1, 2, 3, 4, 0]))}
    names |= set(layer_rows({"block": {"h.0": w}}, "weight")[0])
    trainer = (ROOT / "src/backrank/trainer.py").read_text()
    names |= set(re.findall(r'"((?:train|optim|time)/\w+)"', trainer))
    if 'f"val/curve_{k}"' in trainer:
        names |= {"val/curve_loss"}
    panels = [p for sections in load("wandb_dashboard").PAPERS.values() for panels in sections.values() for p in panels]
    assert len(panels) > 8
    for axis, wanted, regex in panels:
        assert set(wanted) <= names, set(wanted) - names
        matched = [name for name in names if regex and re.fullmatch(regex, name)] + wanted
        assert matched and {name.split("/")[0] + "/step" for name in matched} == {axis}


def test_configs_fill_the_schema():
    for name in ("jsonl", "wandb"):
        node = OmegaConf.merge(OmegaConf.structured(Logger), OmegaConf.load(ROOT / f"configs/logger/{name}.yaml"))
        assert node.name == name


def test_rows_of_equal_step_are_one_call():
    rows = [{"step": s, "layer": layer, "kind": "weight", "erank": 1.0, "note": "x"} for s in (1, 2) for layer in "ab"]
    assert list(payloads(LAYERS, rows, {"weight/step": 1})) == [
        {"weight/a/erank": 1.0, "weight/b/erank": 1.0, "weight/step": 2}
    ]


def test_module_imports_neither_torch_nor_wandb():
    code = "import sys, backrank.mirror, backrank.recorder; assert not {'torch', 'wandb'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path("/"))
