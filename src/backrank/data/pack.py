"""Documents -> shards of token ids: `python -m backrank.data pack <source> <folder> --tokenizer <tokenizer.json>`.

A folder holds `<split>-<nnnnn>.bin` (ids in the smallest unsigned dtype, little-endian, every shard but a split's last
of the same length), the tokenizer.json, and meta.json, which comes last: a folder without it is unfinished. Documents
are streamed, tokenised in `jobs` processes, each ended by the end-of-document id, and joined in their order; so the
bytes are a function of the source and these settings, however often the packing was stopped and whatever `jobs` is.

progress.json says what is on disk and where the next document is; what lies after that is written again.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from backrank.config import ConfigError
from backrank.data.text import SPLITS
from backrank.data.tokens import _tokenizer
from backrank.recorder import atomic_write

FORMAT = 1  # raise it when the same documents and settings give other files
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
KINDS = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".txt": "text"}  # as `datasets` calls its readers
END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
BATCH_DOCUMENTS, BATCH_CHARACTERS = 256, 1 << 22  # what a worker gets at once: bounds the memory


def arguments(parser: argparse.ArgumentParser) -> None:
    """The settings of `pack` on a command line."""
    parser.add_argument("source", help="id of a data set on the hub, or a parquet, jsonl or txt file, or their folder")
    parser.add_argument("folder", help="where the shards go; then data=shards data.path=<folder>")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--eod", help="token that ends a document (default: the tokenizer's end token)")
    parser.add_argument("--config", help="configuration of the hub's data set, such as sample-10BT")
    parser.add_argument("--split", default="train", help="of the hub's data set")
    parser.add_argument("--revision", help="of the hub's data set (default: the newest, which is recorded)")
    parser.add_argument("--column", default="text")
    parser.add_argument(
        "--sample-by",
        choices=("document", "paragraph", "line"),
        default="document",
        help="what a document is in a txt file: the file, what blank lines separate, or a line",
    )
    parser.add_argument("--held-out", type=int, default=2000, help="documents for validation, and as many for test")
    parser.add_argument("--validation", help="file or folder whose documents are the validation split instead")
    parser.add_argument("--test", help="file or folder whose documents are the test split instead")
    parser.add_argument("--shard-tokens", type=int, default=1 << 27)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: all cores)")


@dataclass
class Split:
    """What is in one split. shards: [tokens, sha256 of the file] each; bytes and words: of the text, UTF-8."""

    shards: list[list[Any]] = field(default_factory=list)
    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    words: int = 0
    largest: int = 0


@dataclass
class Batch:
    """Documents of one split; `after`: (stream, documents read of it, position behind them), where to go on."""

    split: str
    texts: list[str]
    after: tuple[int, int, Any]


def pack(
    source: str,
    folder: str,
    tokenizer: str,
    eod: str | None = None,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
    column: str = "text",
    sample_by: str = "document",
    held_out: int = 2000,
    validation: str | None = None,
    test: str | None = None,
    shard_tokens: int = 1 << 27,
    jobs: int = 1,
    checkpoint_s: float = 20.0,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Packs, or continues packing, `source` into `folder`; returns meta.json. `arguments` explains the settings.

    Raises ConfigError for a source, tokenizer or setting that cannot be used, and for a folder that holds another
    packing or that another process works on.
    """
    for key, number, least in (("held-out", held_out, 0), ("shard-tokens", shard_tokens, 1), ("jobs", jobs, 1)):
        if number < least:
            raise ConfigError(f"--{key}", number, f"is below {least}", f"Give {least} or more")
    if held_out == 0 and not (validation and test):
        raise ConfigError("--held-out", 0, "leaves a split empty", "Hold out some, or give --validation and --test")
    target = Path(folder).expanduser()
    content, settings = _tokenizer_settings(tokenizer, eod)
    settings |= {"format": FORMAT, "shard_tokens": shard_tokens, "held_out": held_out}
    target.mkdir(parents=True, exist_ok=True)
    with open(target / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "folder", target, "is being packed by another process", "Wait, or choose another"
            ) from None
        before = _read(target / "meta.json") or _read(target / "progress.json") or {}
        hub = (before.get("settings", {}).get("streams") or [{}])[-1]
        if hub.get("hub_id") == source:  # so that what follows is the same data
            revision = revision or hub["revision"]
        sources = [
            _source(path, sample_by, f"--{key}") for key, path in (("validation", validation), ("test", test)) if path
        ]
        sources.append(_source(source, sample_by, "source", config, split, revision))
        given = [s for s, path in (("validation", validation), ("test", test)) if path]
        # how many documents of each source go where; None: all others
        plans = [[(s, None)] for s in given]
        plans.append([*((s, held_out) for s in SPLITS[1:] if s not in given), ("train", None)])
        settings |= {"streams": sources, "column": column, "given": given}
        settings = json.loads(json.dumps(settings))
        if before and before["settings"] != settings:
            differs = [k for k in settings if before["settings"].get(k) != settings[k]]
            problem = f"holds a packing with another {', '.join(differs)}"
            raise ConfigError("folder", target, problem, "Choose another folder, or delete this one")
        if "splits" in before and "after" not in before:
            say(f"{target} is packed already")
            return before
        atomic_write(target / "tokenizer.json", content.decode())
        writer = Writer(target, settings, before, checkpoint_s, say)
        writer.checkpoint()  # from here on the folder has its settings
        places = [_place(path) for path in (*filter(None, (validation, test)), source)]
        read = itertools.chain.from_iterable(
            _documents(n, sources[n], places[n], plans[n], column, writer.after)
            for n in range(writer.after[0], len(plans))
        )
        _encode_all(read, writer, content, settings, jobs)
        return writer.finish()


def _encode_all(read: Iterator[Batch], writer: Writer, content: bytes, settings: dict[str, Any], jobs: int) -> None:
    """Batches through the workers into the writer, in order; twice as many batches as workers are in hand at most."""
    waiting: deque[tuple[Any, Batch]] = deque()
    start = (content, settings["eod"], settings["dtype"])
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _start_worker, start) as pool:
        try:
            for batch in read:
                waiting.append((pool.submit(_encode, batch.texts), batch))
                batch.texts = []
                if len(waiting) > 2 * jobs:
                    future, done = waiting.popleft()
                    writer.write(done, *future.result())
            for future, done in waiting:
                writer.write(done, *future.result())
        except BrokenProcessPool:
            remedy = "Fewer --jobs need less memory; the same command continues it"
            raise ConfigError("--jobs", jobs, "a worker was killed", remedy) from None
        finally:
            pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------------------------- tokenising


def _tokenizer_settings(path: str, eod: str | None) -> tuple[bytes, dict[str, Any]]:
    """The tokenizer's file, and what it decides: its hash, its vocabulary, the dtype, the end-of-document id."""
    try:
        tokenizer, sha256 = _tokenizer(path)
    except ConfigError as error:
        raise ConfigError("--tokenizer", path, error.problem, "Give the path of a tokenizer.json") from error
    known = tokenizer.get_vocab()
    end = eod or next((token for token in END_TOKENS if token in known), None)
    if end not in known:
        problem = f"is no token of {path}" if eod else f"{path} has none of the usual end tokens"
        raise ConfigError("--eod", eod, problem, "Name one of its tokens: --eod '<token>'")
    vocab = max(known.values()) + 1
    dtype = np.min_scalar_type(vocab - 1).newbyteorder("<").str
    settings = {"tokenizer": sha256, "vocab_size": vocab, "dtype": dtype, "eod": known[end], "eod_token": end}
    return Path(path).expanduser().read_bytes(), settings


def _start_worker(content: bytes, eod: int, dtype: str) -> None:
    from tokenizers import Tokenizer

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; the parent ends the workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    parent = multiprocessing.parent_process()
    assert parent is not None
    # a worker whose parent was killed would wait for ever
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    global _worker
    tokenizer = Tokenizer.from_buffer(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # `<|endoftext|>` in a web page is text, not the end of a document
    _worker = tokenizer, eod, dtype


_worker: tuple[Any, int, str]


def _encode(texts: list[str]) -> tuple[bytes, dict[str, int]]:
    """Ids of the documents, each with its end, and what is counted in them."""
    tokenizer, eod, dtype = _worker
    ids: list[int] = []
    for text in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
        ids += text.ids
        ids.append(eod)
    counted = {
        "tokens": len(ids),
        "documents": len(texts),
        "bytes": sum(len(text.encode("utf-8", "replace")) for text in texts),
        "words": sum(len(text.split()) for text in texts),
    }
    return np.array(ids, dtype).tobytes(), counted | {"largest": max(ids)}


# ---------------------------------------------------------------------------------------------------------- reading


def _place(source: str) -> Path | None:
    path = Path(source).expanduser()
    return path if path.exists() else None


def _files(place: Path) -> list[Path]:
    """The readable files of a folder, by path, or the file itself."""
    if place.is_file():
        return [place] if _kind(place) else []
    seen = (p for p in place.rglob("*") if not any(part.startswith(".") for part in p.relative_to(place).parts))
    return sorted(p for p in seen if p.is_file() and _kind(p))


def _kind(path: Path) -> str | None:
    """The reader by the last suffix, or the one in front of a compression, which `datasets` undoes."""
    return KINDS.get(path.with_suffix("").suffix if path.suffix in COMPRESSED else path.suffix)


def _source(
    source: str,
    sample_by: str,
    key: str,
    config: str | None = None,
    split: str = "train",
    revision: str | None = None,
) -> dict[str, Any]:
    """What identifies a source: a hub id at a revision, or the names and sizes of files."""
    if place := _place(source):
        files = _files(place)
        kinds = {_kind(path) for path in files}
        if len(kinds) != 1:
            problem = f"holds {' and '.join(sorted(map(str, kinds))) or 'no parquet, jsonl or txt'} files"
            raise ConfigError(key, source, problem, "Give files of one kind")
        names = [
            [path.relative_to(place).as_posix() if place.is_dir() else path.name, path.stat().st_size] for path in files
        ]
        kind = kinds.pop()
        return {"kind": kind, "files": names, **({"sample_by": sample_by} if kind == "text" else {})}
    if key != "source" or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source):
        raise ConfigError(key, source, "no such file or folder", "Give a file, a folder or, as the source, a hub id")
    if revision is None:
        try:
            from huggingface_hub import HfApi

            revision = HfApi().dataset_info(source).sha
        except Exception as error:  # network, authentication, unknown name: each has its own class, one remedy
            raise _unreachable(source, error) from error
    return {"hub_id": source, "config": config, "split": split, "revision": revision}


def _unreachable(source: str, error: Exception) -> ConfigError:
    first = (str(error).splitlines() or [""])[0]
    problem = f"no such file or folder here, and the hub: {type(error).__name__}: {first}"
    return ConfigError("source", source, problem, "Run it where there is a network, or give a folder of parquet files")


def _stream(source: dict[str, Any], place: Path | None) -> Any:
    """The rows of a source as a `datasets` stream, which knows its position and goes on from one."""
    import datasets

    if place is None:
        try:
            return datasets.load_dataset(
                source["hub_id"], source["config"], split=source["split"], revision=source["revision"], streaming=True
            )
        except Exception as error:
            raise _unreachable(source["hub_id"], error) from error
    options = {"sample_by": source["sample_by"]} if "sample_by" in source else {}
    files = [str(path) for path in _files(place)]
    return datasets.load_dataset(source["kind"], data_files=files, split="train", streaming=True, **options)


def _documents(
    number: int,
    source: dict[str, Any],
    place: Path | None,
    plan: list[tuple[str, int | None]],
    column: str,
    after: tuple[int, int, Any],
) -> Iterator[Batch]:
    """Batches of one source from where `after` is; a batch lies in one split. Empty documents are passed over."""
    stream = _stream(source, place)
    names = stream.column_names  # None where only the rows say
    if names is not None and column not in names:
        raise ConfigError("--column", column, f"the source has {', '.join(names)}", "Name one of them")
    if names is not None and len(names) > 1:
        stream = stream.select_columns([column])
    read, position = after[1:] if after[0] == number else (0, None)
    if position is not None:
        stream.load_state_dict(position)
    ends = list(itertools.accumulate(many if many is not None else 1 << 62 for _, many in plan))
    texts: list[str] = []
    size = 0
    for row in _rows(stream, source):
        text = row.get(column)
        if not isinstance(text, str | None):
            raise ConfigError("--column", column, f"holds {type(text).__name__}, not text", "Name a column of text")
        if not text:
            continue
        texts.append(text)
        size += len(text)
        read += 1
        if len(texts) == BATCH_DOCUMENTS or size >= BATCH_CHARACTERS or read in ends:
            yield Batch(_split_of(read, plan, ends), texts, (number, read, stream.state_dict()))
            texts, size = [], 0
    if texts:
        yield Batch(_split_of(read, plan, ends), texts, (number, read, stream.state_dict()))


def _rows(stream: Any, source: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows, with whatever a reader or the network raises as one error."""
    try:
        yield from stream
    except (OSError, ValueError, RuntimeError) as error:  # a damaged file, a lost connection
        name = source.get("hub_id") or f"{len(source['files'])} files"
        problem = f"reading stopped ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        raise ConfigError("source", name, problem, "The same command continues it") from error


def _split_of(read: int, plan: list[tuple[str, int | None]], ends: list[int]) -> str:
    """Where the `read`-th document of a source goes, counted from 1."""
    return next(split for (split, _), end in zip(plan, ends, strict=True) if read <= end)


# ---------------------------------------------------------------------------------------------------------- writing


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ConfigError("folder", path, f"is no valid JSON ({error})", "Delete the folder and pack again") from error


class Writer:
    """Appends ids to the shards, and keeps progress.json behind what is on disk."""

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        before: dict[str, Any],
        checkpoint_s: float,
        say: Callable[[str], None],
    ):
        self.folder, self.settings, self.checkpoint_s, self.say = folder, settings, checkpoint_s, say
        self.splits = {s: Split(**before["splits"][s]) if before else Split() for s in SPLITS}
        self.after: tuple[int, int, Any] = tuple(before.get("after", (0, 0, None)))  # type: ignore[assignment]
        self.dtype = np.dtype(settings["dtype"])
        self.began = self.saved = time.monotonic()
        self.at_start = sum(s.tokens for s in self.splits.values())
        self.split, self.file, self.filled = "", None, 0
        if before:
            say(f"continuing after {self.at_start:,} tokens")
        if before.get("open"):
            self._reopen(*before["open"])

    def _reopen(self, split: str, filled: int) -> None:
        path, size = self._path(split), filled * self.dtype.itemsize
        if not path.exists() or path.stat().st_size < size:
            raise ConfigError("folder", path, "is shorter than was packed", "Delete the folder and pack again")
        with open(path, "rb") as file:
            file_hash = hashlib.sha256()
            for at in range(0, size, 1 << 24):
                file_hash.update(file.read(min(1 << 24, size - at)))
        os.truncate(path, size)
        self.split, self.file, self.hash, self.filled = split, open(path, "ab"), file_hash, filled  # noqa: SIM115

    def _path(self, split: str) -> Path:
        return self.folder / f"{split}-{len(self.splits[split].shards):05d}.bin"

    def write(self, batch: Batch, ids: bytes, counted: dict[str, int]) -> None:
        if batch.split != self.split:
            self.close()
        split, left = self.splits[batch.split], memoryview(ids)
        while left:
            if self.file is None:
                self.split, self.hash, self.filled = batch.split, hashlib.sha256(), 0
                self.file = open(self._path(batch.split), "wb")  # noqa: SIM115 - open until it is full
            part = left[: (self.settings["shard_tokens"] - self.filled) * self.dtype.itemsize]
            self.file.write(part)
            self.hash.update(part)
            self.filled += len(part) // self.dtype.itemsize
            left = left[len(part) :]
            if self.filled == self.settings["shard_tokens"]:
                self.close()
        for name in ("tokens", "documents", "bytes", "words"):
            setattr(split, name, getattr(split, name) + counted[name])
        split.largest = max(split.largest, counted["largest"])
        self.after = batch.after
        if time.monotonic() - self.saved >= self.checkpoint_s:
            self.checkpoint()

    def close(self) -> None:
        """Ends the open shard."""
        if self.file is not None:
            self._sync()
            self.file.close()
            self.splits[self.split].shards.append([self.filled, self.hash.hexdigest()])
        self.split, self.file, self.filled = "", None, 0

    def _sync(self) -> None:
        assert self.file is not None
        self.file.flush()
        os.fsync(self.file.fileno())

    def state(self) -> dict[str, Any]:
        return {"settings": self.settings, "splits": {name: asdict(split) for name, split in self.splits.items()}}

    def checkpoint(self) -> None:
        if self.file is not None:
            self._sync()
        opened = [self.split, self.filled] if self.file is not None else None
        atomic_write(
            self.folder / "progress.json", json.dumps(self.state() | {"after": self.after, "open": opened}) + "\n"
        )
        self.saved = time.monotonic()
        tokens = sum(split.tokens for split in self.splits.values())
        rate = (tokens - self.at_start) / max(self.saved - self.began, 1e-9)
        documents = sum(split.documents for split in self.splits.values())
        if rate:
            self.say(f"{documents:,} documents, {tokens:,} tokens, {rate:,.0f} tokens/s")

    def finish(self) -> dict[str, Any]:
        self.close()
        if empty := [name for name, split in self.splits.items() if not split.tokens]:
            problem = (
                f"of {sum(s.documents for s in self.splits.values())} documents none is left for {', '.join(empty)}"
            )
            raise ConfigError("--held-out", self.settings["held_out"], problem, "Hold out fewer, in another folder")
        meta = self.state()
        atomic_write(self.folder / "meta.json", json.dumps(meta, indent=1) + "\n")
        (self.folder / "progress.json").unlink(missing_ok=True)
        return meta
