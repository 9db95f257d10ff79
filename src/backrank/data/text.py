"""Text of the three splits, as UTF-8 bytes, from any source. Imports no torch, and slow readers only on use."""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import itertools
import json
import os
import shlex
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from backrank.config import ConfigError

SPLITS = ("train", "validation", "test")
FIELDS = ("source", "name", "path", "root", "hub_id", "hub_config", "column", "cache", "part")  # what decides the text
CODE_BYTES = 4 << 20  # of source code, as much as WikiText-2 trains on in a few hundred steps
STEMS = {"train": ("train",), "validation": ("validation", "valid"), "test": ("test",)}
# Parts of the standard library that some distributions leave out: without them the text is the same everywhere.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "tkinter",
    "turtle",
    "turtledemo",
    "venv",
    "distutils",
    "site-packages",
    "__pycache__",
    "pydoc_data",
}


def texts(data: Any) -> dict[str, bytes]:
    """Train, validation and test of a `Data` node as UTF-8 bytes, read once per process.

    Raises ConfigError for a source that is unknown, missing, empty, unreadable or not UTF-8.
    """
    return _read(*(getattr(data, field) for field in FIELDS))[0]


def text_hash(data: Any) -> str:
    """sha256 over the splits' text: the same text from other files or formats has the same hash."""
    return _read(*(getattr(data, field) for field in FIELDS))[1]


@functools.lru_cache(maxsize=4)
def _read(source, name, path, root, hub_id, hub_config, column, cache, part) -> tuple[dict[str, bytes], str]:
    if part is not None and (source, part) != ("stdlib", "code"):
        raise ConfigError("data.part", part, f"is no part of source {source}", "Use null, or code with source=stdlib")
    if source == "stdlib":
        found = _stdlib(cache, part)
    elif source == "text":
        found = _path(path, column)
    elif source == "hub":
        found = _hub(name, root, hub_id, hub_config, column)
    else:
        raise ConfigError("data.source", source, "unknown source", "Use stdlib, text or hub")
    digest = hashlib.sha256()
    for split in SPLITS:
        digest.update(f"{split} {len(found[split])}\n".encode() + found[split])
    return found, digest.hexdigest()


def write_atomic(path: Path, content: bytes) -> None:
    """Write into `data.cache`: readers and racing writers see the whole file or none of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError("data.cache", path, f"cannot write ({error.strerror})", "Set data.cache elsewhere") from error


def _path(path: str | None, column: str) -> dict[str, bytes]:
    """A UTF-8 file, cut 90 / 5 / 5 % at line ends, or a folder with a file (or parquet shards) for each split."""
    place = Path(path or "").expanduser()
    if not path or not place.exists():
        raise ConfigError("data.path", path, "no such file or folder", "Give a UTF-8 text file, or a folder of splits")
    if place.is_file():
        return _cut(_utf8(place, "data.path"))
    found = _folder(place, column, "data.path")
    missing = [s for s in SPLITS if s not in found]
    if missing:
        problem = f"no .txt or .parquet for {', '.join(missing)} in this folder"
        raise ConfigError("data.path", path, problem, "It needs train.txt, validation.txt and test.txt")
    return found


def _hub(name: str, root: str | None, hub_id: str | None, config: str | None, column: str) -> dict[str, bytes]:
    """A prepared local folder if there is one (then nothing touches the network), else the `datasets` cache or hub."""
    looked = places(name, root, config)
    for folder in looked:
        found = _folder(folder, column, "data.root") if folder.is_dir() else {}
        if found:
            break
    else:
        loaded = hub_splits(name, root, hub_id, config, column)
        found = {s: _join(list(loaded[s][column])) for s in SPLITS if s in loaded}
    if set(found) == {"train"}:  # as web text is published
        return _cut(found["train"])
    missing = [s for s in SPLITS if s not in found]
    if missing:
        problem = f"no split {', '.join(missing)}; found {', '.join(found) or 'none'}"
        remedy = "It needs train, validation and test, or train alone (then cut 90/5/5)"
        raise ConfigError("data.name", name, problem, remedy)
    return found


def places(name: str, root: str | None, config: str | None) -> list[Path]:
    """The local folders in which a data set of the hub is looked for, in order; none without a root."""
    base = Path(root or "").expanduser()
    return list(dict.fromkeys([base / name, base / name / (config or ""), base])) if root else []


def shards(folder: Path, stem: str) -> list[Path]:
    """`<stem>.parquet` and `<stem>-*.parquet` of a folder, in name order."""
    return sorted([*folder.glob(f"{stem}.parquet"), *folder.glob(f"{stem}-*.parquet")])


def hub_splits(name: str, root: str | None, hub_id: str | None, config: str | None, column: str) -> Any:
    """The `datasets` splits of a hub id. Raises ConfigError naming what was looked at and the command that fetches."""
    looked, target = places(name, root, config), Path(root or "data").expanduser() / name
    where = f"no parquet or text files in {', '.join(map(str, looked))}" if looked else "data.root is not set"
    fetch = f"python -m backrank.data fetch {hub_id} {config or '-'} {shlex.quote(str(target))}"
    remedy = f"Where there is a network, run: {fetch} ; then set data.root={target.parent}"
    if not hub_id:
        raise ConfigError("data.hub_id", hub_id, where, "Set data.root to a prepared folder, or data.hub_id")
    try:
        import datasets

        loaded = datasets.load_dataset(hub_id, config)
    except Exception as error:  # network, cache, authentication, unknown name: each has its own class, one remedy
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError("data.hub_id", hub_id, f"{where}; hub: {type(error).__name__}: {first}", remedy) from error
    for split in loaded:
        if column not in loaded[split].column_names:
            raise ConfigError("data.column", column, f"{hub_id} has {loaded[split].column_names}", "Name one of them")
    return loaded


def _folder(folder: Path, column: str, key: str) -> dict[str, bytes]:
    """The splits that lie in a folder: `<split>.parquet`, `<split>-*.parquet` in name order, or `<split>.txt`."""
    found = {}
    for split in SPLITS:
        for stem in STEMS[split]:
            if paths := shards(folder, stem):
                found[split] = _join([row for path in paths for row in _parquet(path, column, key)])
            elif (folder / f"{stem}.txt").is_file():
                found[split] = _utf8(folder / f"{stem}.txt", key)
            if split in found:
                break
    return found


def _parquet(path: Path, column: str, key: str) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
        names = table.schema_arrow.names
        rows = table.read(columns=[column]).column(0).to_pylist() if column in names else None
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise ConfigError(key, path, f"unreadable as parquet ({error})", "Fetch or copy it again") from error
    if rows is None or any(not isinstance(r, str | None) for r in rows):
        raise ConfigError("data.column", column, f"no column of text in {path}; it has {names}", "Name a text column")
    return rows


def _join(rows: list[str | None]) -> bytes:
    """Rows to text, each ended by one line end.

    WikiText pads every line with blanks, " \\n" if empty, and the hub stores such empty lines as "". Putting them back
    gives the official files byte for byte.
    """
    blank = " \n" if all(row.endswith(" \n") for row in rows if row) else "\n"
    return "".join((row if row.endswith("\n") else row + "\n") if row else blank for row in rows).encode()


def _utf8(path: Path, key: str) -> bytes:
    try:
        content = path.read_bytes()
        content.decode()
    except OSError as error:
        raise ConfigError(key, path, f"unreadable ({error.strerror})", "Check its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(key, path, f"not UTF-8 at byte {error.start}", "Convert it with iconv -t UTF-8") from error
    return content


def _cut(text: bytes) -> dict[str, bytes]:
    """Contiguous 90 / 5 / 5 % of the bytes, moved on to the next line end."""
    first, second = (text.find(b"\n", len(text) * share // 100) + 1 or len(text) for share in (90, 95))
    return {"train": text[:first], "validation": text[first:second], "test": text[second:]}


def _stdlib(cache: str, part: str | None = None) -> dict[str, bytes]:
    """`extract_stdlib`, kept in a file, since parsing takes seconds: JSON, so that a cut file does not parse."""
    root = Path(sysconfig.get_paths()["stdlib"])
    code = Path(__file__).read_bytes()  # a change here may change the text
    key = hashlib.sha256(f"{sys.version} {root} {part}".encode() + code).hexdigest()[:16]
    path = Path(cache).expanduser() / f"stdlib-{key}.json"
    try:
        return {k: v.encode() for k, v in json.loads(path.read_text(encoding="utf-8")).items()}
    except (OSError, ValueError):
        try:
            found = extract_stdlib(root, part)
        except OSError as error:
            problem = f"this Python lacks part of its standard library ({error})"
            raise ConfigError("data.source", "stdlib", problem, "Use a full Python, or another data=") from error
        write_atomic(path, json.dumps({k: v.decode() for k, v in found.items()}).encode())
        return found


def extract_stdlib(root: Path, part: str | None = None) -> dict[str, bytes]:
    """The standard library's help topics and docstrings, or with part `code` its source, as whole documents.

    A document is a topic or a module, sorted by name. In the order of their names' hashes the first 5 % of the bytes
    are validation and the next 5 % test; of code only the first CODE_BYTES are read. So they spread over the subjects,
    and few move in another Python. Source is parsed, not imported: nothing runs.
    """
    documents = _code(root) if part == "code" else _documentation(root)
    encoded = {k: text.encode("utf-8", "replace") for k, text in documents.items() if text}
    order = sorted(encoded, key=lambda k: hashlib.sha256(k.encode()).digest())
    if part == "code":
        ends = itertools.accumulate(len(encoded[k]) for k in order)
        order = [k for k, end in zip(order, ends, strict=True) if end <= CODE_BYTES]
    total = sum(len(encoded[k]) for k in order)
    home, names = dict.fromkeys(sorted(order), "train"), iter(order)
    for split in SPLITS[1:]:
        size = 0
        while size < total // 20:
            name = next(names)
            home[name], size = split, size + len(encoded[name])
    return {s: b"\n".join(encoded[k] for k in home if home[k] == s) for s in SPLITS}


def _modules(root: Path) -> Iterator[tuple[str, bytes]]:
    """(dotted name, source) of the library's modules, in the order of their paths."""
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if parts[0] in sys.stdlib_module_names and not LEFT_OUT & set(parts):
            yield ".".join(p for p in parts if p != "__init__"), path.read_bytes()


def _code(root: Path) -> dict[str, str]:
    return {name: source.decode("utf-8", "replace") for name, source in _modules(root)}


def _documentation(root: Path) -> dict[str, str]:
    seen: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old escapes in the library's own strings
        topics = ast.parse((root / "pydoc_data" / "topics.py").read_bytes()).body
        table = next(n.value for n in topics if isinstance(n, ast.Assign | ast.AnnAssign))
        documents = {f"topic {k}": _once(v, seen) for k, v in sorted(ast.literal_eval(table).items())}
        for name, source in _modules(root):
            documents[name] = _docstrings(ast.parse(source), name, seen)
    return documents


def _docstrings(tree: ast.Module, name: str, seen: set[str]) -> str:
    """Docstrings of a module, its classes and functions in source order, each under its qualified name."""
    out, stack = [], [(tree, name)]
    while stack:
        node, name = stack.pop()
        doc = _once(inspect.cleandoc(ast.get_docstring(node, clean=False) or ""), seen)
        if doc:
            out.append(f"{name}\n{doc}")
        inner = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)]
        stack += [(n, f"{name}.{n.name}") for n in reversed(inner)]
    return "\n".join(out)


def _once(text: str, seen: set[str]) -> str:
    """The text, ended by a line end; empty if it has been seen (aliases and copies share docstrings)."""
    text = text.strip() + "\n"
    if text == "\n" or text in seen:
        return ""
    seen.add(text)
    return text
