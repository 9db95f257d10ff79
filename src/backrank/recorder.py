"""The local record of a run: metrics.jsonl and layers.jsonl, one strict JSON object a line. Imports no torch.

These files are the truth. A tracker (`mirror.WandbMirror`) reads them while they grow, so that it shows what was
written and can be rebuilt at any time. A metric is named <family>/<name>; the tracker has a step axis per family.
"""

from __future__ import annotations

import json
import math
import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from backrank.config import ConfigError

METRICS, LAYERS = "metrics.jsonl", "layers.jsonl"
FLUSH_S = 5.0  # a reader that follows the files lags at most this far behind, and the trainer rarely touches the disk


@contextmanager
def disk(folder: Path):
    """Turn any failure to write below `folder` into one ConfigError that names it."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            "runs", folder, f"cannot be written ({error.strerror or error})",
            "Free space or rights there, or choose another root with RUNS=; the same command then continues the run",
        ) from error  # fmt: skip


def atomic_write(path: Path, data: str | bytes) -> None:
    """Replace `path` as a whole: a reader, or a crash at any moment, sees the old file or the new one."""
    path = Path(path)
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with disk(path.parent):
        try:
            with open(draft, "wb") as file:
                file.write(data.encode() if isinstance(data, str) else data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
        finally:
            draft.unlink(missing_ok=True)


def finite(value: Any) -> tuple[Any, Any]:
    """(what JSON can hold, what had to go): a non-finite number becomes None and its name, in a list it is dropped and
    counted. NumPy scalars and arrays become plain numbers and lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None, str(value)
    if isinstance(value, (list, tuple)):
        pairs = [finite(item) for item in value]
        kept = [item for item, gone in pairs if not isinstance(gone, str)]
        return kept, sum(1 if isinstance(gone, str) else gone or 0 for _, gone in pairs) or None
    return value, None


def make_row(head: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """One row; `nonfinite` (only there if needed) maps a name to "nan", "inf", "-inf" or, for a list, to a count."""
    cleaned = {name: finite(value) for name, value in values.items()}
    gone = {name: lost for name, (_, lost) in cleaned.items() if lost is not None}
    return head | {name: kept for name, (kept, _) in cleaned.items()} | ({"nonfinite": gone} if gone else {})


def read_rows(path: Path, finished: bool) -> list[dict]:
    """The rows of a JSONL file. Killed writers leave half a last line: dropped while the run is unfinished.

    Raises ConfigError (file, line, remedy) for any other line that is not JSON, and for a finished run's half line.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError as error:
        if not finished:
            return []
        raise ConfigError("record", path, "the file is missing", "FRESH=1 reruns the run") from error
    tail = lines.pop()  # what follows the last newline: nothing, or a line cut short
    rows = []
    for number, line in enumerate(lines + ([tail] if tail and finished else []), 1):
        try:
            if number > len(lines):
                raise ValueError("the last line has no end")
            rows.append(json.loads(line))
        except ValueError as error:
            problem = f"line {number} is damaged ({error})"
            remedy = "Restore the file, or FRESH=1 reruns the run (the old folder is kept as <id>.old-<n>)"
            raise ConfigError("record", path, problem, remedy) from error
    return rows


class Recorder:
    """Appends rows to the files of one run folder; starts and ends the mirror that follows them.

    Call `truncate` first: with the checkpoint's offsets, or with {} when there is no checkpoint. Writes are buffered;
    any of the methods raises ConfigError naming the folder when the disk is full or the folder cannot be written.
    """

    def __init__(self, folder: Path, mirror: Any = None):
        self.folder, self.mirror = Path(folder), mirror
        self._pending: dict[str, list[bytes]] = {METRICS: [], LAYERS: []}
        self._size: dict[str, int] | None = None  # bytes on disk; None until truncate
        self._flushed = time.monotonic()

    def metrics(self, step: int, values: dict[str, Any]) -> None:
        """Append one row {"step", <name>: value, ...}; step counts optimiser updates."""
        self._append(METRICS, [make_row({"step": int(step)}, values)])

    def layers(self, step: int, rows: list[dict]) -> None:
        """Append rows {"step", "layer", "kind", ...}, one per layer and kind; a value may be a list."""
        self._append(LAYERS, [make_row({"step": int(step)}, row) for row in rows])

    def _append(self, name: str, rows: list[dict]) -> None:
        if self._size is None:
            if any(path.exists() and path.stat().st_size for path in (self.folder / METRICS, self.folder / LAYERS)):
                raise RuntimeError(f"{self.folder} holds rows already: call truncate(offsets) before the first row")
            self.truncate({})
        self._pending[name] += [json.dumps(row, allow_nan=False).encode() + b"\n" for row in rows]
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Write what is buffered. After a failure the files end in whole lines and the rows stay buffered."""
        self._flushed = time.monotonic()
        for name, lines in self._pending.items():
            if not lines:
                continue
            data = b"".join(lines)
            with disk(self.folder), open(self.folder / name, "r+b", buffering=0) as file:
                file.seek(self._size[name])
                try:
                    done = 0
                    while done < len(data):
                        done += file.write(data[done:])
                except OSError:
                    file.truncate(self._size[name])
                    raise
            self._size[name] += len(data)
            lines.clear()

    def offsets(self) -> dict[str, int]:
        """Sizes of both files in bytes after a flush: what a checkpoint stores."""
        if self._size is None:
            self.truncate({})
        self.flush()
        return dict(self._size)

    def truncate(self, offsets: dict[str, int]) -> None:
        """Cut both files back to a checkpoint's offsets (absent: 0 bytes); then the mirror starts, at their first row.

        Raises ConfigError if a file is shorter than its offset: rows the checkpoint counts on are gone.
        """
        kept = {name: int(offsets.get(name, 0)) for name in (METRICS, LAYERS)}
        with disk(self.folder):
            for name in kept:  # both are looked at before either is cut
                path = self.folder / name
                path.touch()
                if path.stat().st_size < kept[name]:
                    raise ConfigError(
                        "record", path, f"is {path.stat().st_size} bytes, the checkpoint counts on {kept[name]}",
                        "FRESH=1 reruns the run (the old folder is kept as <id>.old-<n>)",
                    )  # fmt: skip
            for name, size in kept.items():
                os.truncate(self.folder / name, size)
        self._size = kept.copy()
        for lines in self._pending.values():
            lines.clear()
        if self.mirror:
            self.mirror.begin()

    def close(self, exit_code: int = 0) -> None:
        """Flush, and end the mirror with the run's exit code (0: done; anything else marks the run failed there)."""
        try:
            self.flush()
        finally:
            if self.mirror:
                self.mirror.close(exit_code)
