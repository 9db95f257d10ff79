"""The local record: strict JSON, offsets and resume, damage, disk errors."""

import errno
import json
import os

import numpy as np
import pytest

from backrank.config import ConfigError
from backrank.recorder import LAYERS, METRICS, Recorder, atomic_write, read_rows


def strict(path):
    """Rows by a parser that refuses NaN and Infinity."""

    def refuse(token):
        raise AssertionError(f"{token} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_rows_are_strict_json_and_name_what_was_not_finite(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.metrics(120, {"train/loss": float("nan"), "optim/lr": np.float32(0.5), "optim/grad_norm": -np.inf})
    recorder.layers(100, [{"layer": "h.0", "kind": "weight", "erank": np.float64(3), "flag": np.bool_(True)}])
    recorder.close()
    assert strict(tmp_path / METRICS) == [
        {"step": 120, "train/loss": None, "optim/lr": 0.5, "optim/grad_norm": None,
         "nonfinite": {"train/loss": "nan", "optim/grad_norm": "-inf"}}
    ]  # fmt: skip
    assert strict(tmp_path / LAYERS) == [{"step": 100, "layer": "h.0", "kind": "weight", "erank": 3.0, "flag": True}]


@pytest.mark.parametrize("values", [np.array([3.0, np.nan, 1.0, np.inf]), [3.0, float("nan"), 1.0, np.float32("inf")]])
def test_histogram_with_nan_is_kept_without_it_and_counted(tmp_path, values):
    recorder = Recorder(tmp_path)
    recorder.layers(0, [{"layer": "h.0", "kind": "weight", "sigma": values}])
    recorder.close()
    row = strict(tmp_path / LAYERS)[0]
    assert row["sigma"] == [3.0, 1.0] and row["nonfinite"] == {"sigma": 2}


def filled(folder, steps, close=True):
    recorder = Recorder(folder)
    for step in steps:
        recorder.metrics(step, {"train/loss": step / 7})
        recorder.layers(step, [{"layer": "h.0", "kind": "weight", "erank": float(step)}])
    if close:
        recorder.close()
    return recorder


def test_resume_is_byte_equal_to_an_uncut_record(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    filled(whole, range(20))
    offsets = filled(cut, range(10)).offsets()
    assert offsets == {name: (cut / name).stat().st_size for name in (METRICS, LAYERS)}
    with open(cut / METRICS, "a") as file:  # rows after the checkpoint, the last one torn
        file.write('{"step": 10, "train/loss": 99}\n{"step": 11, "tra')
    recorder = Recorder(cut)
    recorder.truncate(json.loads(json.dumps(offsets)))
    for step in range(10, 20):
        recorder.metrics(step, {"train/loss": step / 7})
        recorder.layers(step, [{"layer": "h.0", "kind": "weight", "erank": float(step)}])
    recorder.close()
    for name in (METRICS, LAYERS):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()


def test_restart_without_a_checkpoint_begins_empty_and_is_never_silent(tmp_path):
    filled(tmp_path, range(3))
    recorder = Recorder(tmp_path)
    with pytest.raises(RuntimeError, match="truncate"):
        recorder.metrics(0, {"train/loss": 1.0})
    recorder.truncate({})
    assert recorder.offsets() == {METRICS: 0, LAYERS: 0}


def test_rows_not_flushed_belong_to_the_past_after_truncate(tmp_path):
    recorder = filled(tmp_path, range(3), close=False)
    offsets = recorder.offsets()
    recorder.metrics(3, {"train/loss": 9.0})
    recorder.truncate(offsets)
    recorder.close()
    assert [row["step"] for row in read_rows(tmp_path / METRICS, finished=True)] == [0, 1, 2]


def test_file_shorter_than_the_checkpoint_is_named_and_nothing_is_cut(tmp_path):
    offsets = filled(tmp_path, range(5)).offsets()
    os.truncate(tmp_path / LAYERS, 7)
    before = (tmp_path / METRICS).read_bytes()
    with pytest.raises(ConfigError) as caught:
        Recorder(tmp_path).truncate({**offsets, METRICS: 3})
    for part in (str(tmp_path / LAYERS), "7 bytes", str(offsets[LAYERS]), "FRESH=1", ".old-"):
        assert part in str(caught.value)
    assert (tmp_path / METRICS).read_bytes() == before


def test_torn_last_line_is_dropped_while_unfinished_only(tmp_path):
    path = tmp_path / METRICS
    path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_rows(path, finished=False) == [{"step": 1}, {"step": 2}]
    with pytest.raises(ConfigError, match=r"line 3 .*FRESH=1") as caught:
        read_rows(path, finished=True)
    assert str(path) in str(caught.value)
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    for finished in (True, False):
        with pytest.raises(ConfigError, match="line 2 "):
            read_rows(path, finished)
    assert read_rows(tmp_path / "none", finished=False) == []
    with pytest.raises(ConfigError, match="missing"):
        read_rows(tmp_path / "none", finished=True)


def test_full_disk_is_one_clear_error_and_leaves_whole_lines(tmp_path, monkeypatch):
    recorder = filled(tmp_path, range(3))
    recorder.metrics(3, {"train/loss": 3.0})
    real = open

    class Full:
        """A raw file on a disk with room for five more bytes."""

        def __init__(self, *args, **kwargs):
            self.file, self.room = real(*args, **kwargs), 5

        def write(self, data):
            if not self.room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.room = 0
            return self.file.write(data[:5])

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def __getattr__(self, name):
            return getattr(self.file, name)

    monkeypatch.setattr("builtins.open", Full)
    with pytest.raises(ConfigError, match="No space left.*RUNS=") as caught:
        recorder.flush()
    monkeypatch.undo()
    assert str(tmp_path) in str(caught.value)
    assert [row["step"] for row in strict(tmp_path / METRICS)] == [0, 1, 2]
    recorder.close()  # room again: the row was not lost
    assert [row["step"] for row in strict(tmp_path / METRICS)] == [0, 1, 2, 3]


def test_folder_that_cannot_be_written_is_named(tmp_path):
    for write in (lambda f: Recorder(f).metrics(0, {}), lambda f: atomic_write(f / "meta.json", "{}")):
        with pytest.raises(ConfigError, match="RUNS=") as caught:
            write(tmp_path / "none")
        assert str(tmp_path / "none") in str(caught.value)


def test_atomic_write_keeps_the_old_file_on_failure_and_no_draft(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    atomic_write(path, "old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ConfigError):
        atomic_write(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"] and path.read_text() == "old"


def test_close_ends_the_mirror_with_the_exit_code_even_if_the_disk_is_full(tmp_path, monkeypatch):
    calls = []

    class Mirror:
        def begin(self):
            calls.append(("begin", (tmp_path / METRICS).exists()))

        def close(self, exit_code):
            calls.append(exit_code)

    recorder = Recorder(tmp_path, Mirror())
    recorder.metrics(0, {"train/loss": 1.0})

    def fail():
        raise ConfigError("runs", tmp_path, "cannot be written", "")

    monkeypatch.setattr(recorder, "flush", fail)
    with pytest.raises(ConfigError):
        recorder.close(1)
    assert calls == [("begin", True), 1]
