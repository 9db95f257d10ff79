"""Token ids that lie in shards (`python -m backrank.data pack`), for billions of tokens. Imports no torch.

Nothing is read before it is needed: shards are memory maps, and the order of the windows is a permutation that is
computed where it is asked for, so a run starts at any position at once and its memory does not grow with the data.

Shapes: B batch, T sequence.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from backrank.config import ConfigError
from backrank.data.text import SPLITS, places
from backrank.data.tokens import Tokens, TokenStream, Windows, _long_enough, _tokenizer_name, eval_windows

ROUNDS = 6  # of the permutation; four are enough for one that no cheap test tells from a random one


class Shards:
    """The ids of a split as one 1-D array that is never in memory: `len`, slices, and arrays of indices."""

    def __init__(self, paths: list[Path], lengths: list[int], dtype: Any):
        self.paths, self.dtype = paths, np.dtype(dtype)
        self.starts = np.cumsum([0, *lengths])
        self._maps: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __getitem__(self, index: slice | np.ndarray) -> np.ndarray:
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        out = np.empty(index.shape, self.dtype)
        at = np.searchsorted(self.starts, index, side="right") - 1
        for shard in np.unique(at):
            here = at == shard
            out[here] = self._map(int(shard))[index[here] - self.starts[shard]]
        return out

    def _map(self, shard: int) -> np.ndarray:
        if shard not in self._maps:
            self._maps[shard] = np.memmap(self.paths[shard], self.dtype, "r")
        return self._maps[shard]


def permuted(numbers: np.ndarray, n: int, keys: np.ndarray) -> np.ndarray:
    """Where a permutation of 0 ... n - 1 sends these numbers (int64), in memory and time that do not depend on n.

    A Feistel network over the next even number of bits, walked until the result lies below n (less than four times on
    average), with splitmix64's mixing as the round function. Unlike shuffled blocks it moves a window anywhere, and
    unlike an affine map it leaves no constant stride between neighbours. keys: uint64, one a round.
    """
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    out = numbers.astype(np.uint64)
    todo = np.arange(len(out))
    while len(todo):
        left, right = out[todo] >> bits, out[todo] & mask
        for key in keys:
            mixed = right + key
            mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ ((mixed ^ (mixed >> np.uint64(31))) & mask)
        out[todo] = (left << bits) | right
        todo = todo[out[todo] >= n]
    return out.astype(np.int64)


class ShardWindows(Windows):
    """`Windows` whose order needs no list of all windows."""

    def rows_at(self, index: int) -> np.ndarray:
        """(B,) int64: the numbers of the windows in the index-th micro-batch since the start."""
        epoch, at = divmod(index, self.batches_per_epoch)
        keys = np.random.SeedSequence(self.seed_key, spawn_key=(epoch,)).generate_state(ROUNDS, np.uint64)
        return permuted(np.arange(at * self.batch, (at + 1) * self.batch), self.windows, keys)


@dataclass
class ShardTokens(Tokens):
    """`Tokens` whose splits are `Shards`. documents: how many each split has."""

    documents: dict[str, int] = field(default_factory=dict)

    def stream(self, cfg: Any, device: Any) -> ShardStream:
        return ShardStream(self, cfg, device)


class ShardStream(TokenStream):
    def __init__(self, tokens: ShardTokens, cfg: Any, device: Any):
        from backrank.seeding import role_seed

        self.tokens, self.cfg, self.device = tokens, cfg, device
        self.windows, self._fresh = (
            ShardWindows(tokens.train, cfg.data.sequence, cfg.train.batch, role_seed(cfg.seed, role))
            for role in ("order", "fresh")
        )
        self.order_hash = self.windows.order_hash
        seen = cfg.train.steps * cfg.train.accumulate * cfg.train.batch * cfg.data.sequence
        self.facts = {"epochs": seen / len(tokens.train), "documents": tokens.documents["train"]}

    def evaluation(self, split: str, whole: bool) -> Iterator[Any]:
        """As of text, but a batch is read when it is its turn, and of train no more than of validation."""
        ids, T = getattr(self.tokens, split), self.cfg.data.sequence
        limit = self.cfg.data.eval_tokens if whole else self.cfg.every.eval_tokens
        limit = min(len(ids), len(self.tokens.validation) if limit is None else limit)
        span = max(1, 1024 // T) * T
        for at in range(0, limit - 1, span):
            yield from map(self.to_device, eval_windows(ids[at : min(at + span + 1, limit)], T, None, span // T))


def check(data: Any) -> None:
    """Raises ConfigError unless the folder is packed, whole, and fits tokenizer, vocabulary and sequence."""
    folder, meta = _meta(data)
    settings, splits = meta["settings"], meta["splits"]
    size = np.dtype(settings["dtype"]).itemsize
    for path, tokens in ((p, t) for s in SPLITS for p, t in _shards(folder, s, splits)):
        found = path.stat().st_size if path.exists() else 0
        if found != tokens * size:
            problem = f"has {found} bytes, not {tokens * size}"
            raise ConfigError("data.path", path, problem, "Copy it again, or delete the folder and pack again")
    if data.tokenizer != "packed" and _tokenizer_name(data) != settings["tokenizer"]:
        problem = f"{folder} is packed with another tokenizer"
        raise ConfigError("data.tokenizer", data.tokenizer, problem, "Set data.tokenizer=packed, or pack again")
    largest = max(split["largest"] for split in splits.values())
    if largest >= data.vocab_size:
        remedy = f"Set data.vocab_size={settings['vocab_size']}, the tokenizer's, or more"
        raise ConfigError("data.vocab_size", data.vocab_size, f"the largest id in {folder} is {largest}", remedy)
    _long_enough(data, {s: splits[s]["tokens"] for s in SPLITS}, "tokens")


def content_hash(data: Any) -> dict[str, str]:
    """Identity of what is trained on, from the hashes of the shards, which were computed when they were written."""
    meta = _meta(data)[1]
    shards = [[split, meta["splits"][split]["shards"]] for split in SPLITS]
    return {"text": hashlib.sha256(json.dumps(shards).encode()).hexdigest(), "tokenizer": meta["settings"]["tokenizer"]}


def load(data: Any) -> ShardTokens:
    """The shards of a `Data` node; raises ConfigError as `check` does."""
    check(data)
    folder, meta = _meta(data)
    splits, identity = meta["splits"], content_hash(data)
    ids = {
        s: Shards(*map(list, zip(*_shards(folder, s, splits), strict=True)), meta["settings"]["dtype"]) for s in SPLITS
    }
    return ShardTokens(
        name=data.name,
        **ids,
        vocab_size=data.vocab_size,
        text_hash=identity["text"],
        tokenizer_hash=identity["tokenizer"],
        bytes_per_token={s: splits[s]["bytes"] / splits[s]["tokens"] for s in SPLITS},
        words={s: splits[s]["words"] for s in SPLITS},
        documents={s: splits[s]["documents"] for s in SPLITS},
    )


def packed_tokenizer(data: Any) -> tuple[Path, str]:
    """The tokenizer.json of the packed folder of a node, and the token that ends its documents."""
    folder, meta = _meta(data)
    return folder / "tokenizer.json", meta["settings"]["eod_token"]


def _shards(folder: Path, split: str, splits: dict[str, Any]) -> Iterator[tuple[Path, int]]:
    """(file, tokens) of a split's shards, in order."""
    for number, (tokens, _) in enumerate(splits[split]["shards"]):
        yield folder / f"{split}-{number:05d}.bin", tokens


def _meta(data: Any) -> tuple[Path, dict[str, Any]]:
    """The packed folder of a node and its meta.json."""
    looked = [Path(data.path).expanduser()] if data.path else places(data.name, data.root, data.hub_config)
    looked = sorted(looked, key=lambda folder: -len(folder.parts))  # the sample that is asked for before others
    key = "data.hub_id" if data.hub_id and not data.path else "data.path"
    value = data.hub_id if key == "data.hub_id" else data.path
    target = looked[0] if looked else Path("data") / data.name
    options = f" --config {data.hub_config}" if data.hub_id and data.hub_config else ""
    command = (
        f"python -m backrank.data pack {data.hub_id or '<hub id, file or folder>'} {shlex.quote(str(target))}"
        f"{options} --tokenizer <tokenizer.json>"
    )
    for folder in looked:
        try:
            meta = json.loads((folder / "meta.json").read_text())
        except (FileNotFoundError, NotADirectoryError):
            if not (folder / "progress.json").exists():
                continue
            raise ConfigError(key, value, f"the packing in {folder} is unfinished", f"Continue it: {command}") from None
        except (OSError, ValueError) as error:
            raise ConfigError(
                key, folder / "meta.json", f"cannot be read ({error})", f"Pack again: {command}"
            ) from error
        origin = meta["settings"]["streams"][-1]
        if (
            data.hub_id
            and "hub_id" in origin
            and (origin["hub_id"], origin["config"]) != (data.hub_id, data.hub_config)
        ):
            problem = f"{folder} is packed from {origin['hub_id']} {origin['config'] or ''}".rstrip()
            raise ConfigError(key, value, problem, f"Set data.hub_id and data.hub_config to that, or run: {command}")
        return folder, meta
    where = f"no packed tokens (meta.json) in {', '.join(map(str, looked))}" if looked else "data.root is not set"
    then = "" if looked else f" ; then set data.root={target.parent}"
    raise ConfigError(key, value, where, f"Where the documents can be had, run: {command}{then}")
