"""Labelled images that live on the device: scikit-learn's digits, or any folder or hub data set of images.

No torch at the top: what a data set is, is looked at before torch is loaded. Shapes: N images, B batch, C channels,
S side. Pixels are uint8, N x S x S x C; labels int64.
"""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backrank.config import ConfigError
from backrank.data.text import hub_splits, places, shards, write_atomic
from backrank.data.tokens import Shuffled

PAD = 4  # pixels of a crop's margin at a side of 32, in proportion at others
EVAL_BATCH = 512
SPLITS = ("train", "test")
Split = tuple[np.ndarray, np.ndarray]


@dataclass
class Images:
    """train and test as (pixels, labels); evaluation on `validation` and on `test` both read the test split."""

    name: str
    train: Split
    test: Split
    digest: str

    def stream(self, cfg: Any, device: Any) -> ImageStream:
        return ImageStream(self, cfg, device)


def check(data: Any) -> None:
    """Raises ConfigError unless the images are there and fit size, channels and the number of classes."""
    for key in ("size", "channels"):
        if data[key] is None:
            raise ConfigError(f"data.{key}", None, f"is needed by data.source={data.source}", f"Set data.{key}")
    if data.source == "digits":
        have = 1
        if data.size % 8:
            raise ConfigError("data.size", data.size, "is no multiple of 8, the side of the digits", "Use 16")
    else:
        have = 3
    if data.channels != have:
        raise ConfigError("data.channels", data.channels, f"but these images have {have}", f"Set data.channels={have}")
    images = load(data)
    side, classes = images.train[0].shape[1], 1 + int(max(images.train[1].max(), images.test[1].max()))
    if side != data.size:
        raise ConfigError("data.size", data.size, f"but the images have a side of {side}", f"Set data.size={side}")
    if classes > data.vocab_size:
        problem = f"but the labels go up to {classes - 1}"
        raise ConfigError("data.vocab_size", data.vocab_size, problem, f"Set data.vocab_size={classes}")


def content_hash(data: Any) -> dict[str, str]:
    """sha256 over pixels and labels: the same images from other files have the same hash."""
    return {"images": load(data).digest}


def load(data: Any) -> Images:
    """The images of a `Data` node, decoded once per set of files and kept under `data.cache`."""
    if data.source == "digits":
        return _digits(data.size)
    return _parquet(data.name, data.root, data.hub_id, data.hub_config, data.column, data.target, data.cache)


@functools.lru_cache(maxsize=2)
def _digits(size: int) -> Images:
    """1,797 digits of 8 x 8, 16 grey levels; every pixel repeated up to `size`; one fixed quarter is the test split.

    At 8 x 8 most taps of the deep convolutions would only ever meet the padding.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = (digits.images * (255 / 16)).round().astype(np.uint8)[..., None]
    pixels = pixels.repeat(size // 8, axis=1).repeat(size // 8, axis=2)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(pixels))
    labels, cut = digits.target.astype(np.int64), len(pixels) * 3 // 4
    splits = {"train": order[:cut], "test": order[cut:]}
    return _images("digits", {split: (pixels[rows], labels[rows]) for split, rows in splits.items()})


def _images(name: str, splits: dict[str, Split]) -> Images:
    digest = hashlib.sha256()
    for split, arrays in splits.items():
        for array in arrays:
            digest.update(f"{split} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
    return Images(name, splits["train"], splits["test"], digest.hexdigest())


@functools.lru_cache(maxsize=2)
def _parquet(name, root, hub_id, hub_config, column, target, cache) -> Images:
    """Parquet shards `<split>.parquet` or `<split>-*.parquet` under `<root>/<name>` or `<root>`, else the hub's."""
    for folder in places(name, root, hub_config):
        found = {split: shards(folder, split) for split in SPLITS}
        if all(found.values()):
            break
    else:
        made = Path(cache).expanduser() / f"hub-{name}"
        found = {split: [made / f"{split}.parquet"] for split in SPLITS}
        if not all(paths[0].exists() for paths in found.values()):
            loaded = hub_splits(name, root, hub_id, hub_config, column)
            for split, paths in found.items():
                made.mkdir(parents=True, exist_ok=True)
                loaded[split].to_parquet(str(paths[0]))
    files = hashlib.sha256(f"{column} {target}".encode())
    for paths in found.values():
        for path in paths:
            with open(path, "rb") as file:
                files.update(hashlib.file_digest(file, "sha256").digest())
    folder = Path(cache).expanduser() / f"images-{files.hexdigest()[:16]}"
    try:
        digest = (folder / "digest").read_text()
        splits = {s: tuple(np.load(folder / f"{s}-{part}.npy", mmap_mode="r") for part in ("x", "y")) for s in SPLITS}
        return Images(name, splits["train"], splits["test"], digest)
    except (OSError, ValueError):
        pass
    images = _images(name, {split: _decode(paths, column, target) for split, paths in found.items()})
    for split, arrays in (("train", images.train), ("test", images.test)):
        for part, array in zip(("x", "y"), arrays, strict=True):
            buffer = io.BytesIO()
            np.save(buffer, array)
            write_atomic(folder / f"{split}-{part}.npy", buffer.getvalue())
    write_atomic(folder / "digest", images.digest.encode())  # last: what holds it is whole
    return images


def _decode(paths: list[Path], column: str, target: str | None) -> Split:
    """Pixels and labels of parquet shards with an image column of encoded bytes."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    pixels, labels = [], []
    for path in paths:
        try:
            table = pyarrow.parquet.read_table(path)
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError("data.root", path, f"unreadable as parquet ({error})", "Fetch it again") from error
        for key, name in (("data.column", column), ("data.target", target)):
            if name not in table.column_names:
                problem = f"no such column in {path}; it has {table.column_names}"
                raise ConfigError(key, name, problem, "Name one of them")
        labels.append(table.column(target).to_numpy())
        for row in table.column(column).to_pylist():
            pixels.append(np.asarray(Image.open(io.BytesIO(row["bytes"])).convert("RGB")))
    if len({image.shape for image in pixels}) != 1:
        raise ConfigError("data.column", column, "holds images of several sizes", "Resize them first")
    return np.stack(pixels), np.concatenate(labels).astype(np.int64)


class ImageStream:
    """Both splits on the device; crop, flip and normalisation are batched there.

    What a batch's augmentation draws is a function of its index, so that a resumed run sees the same pictures.
    """

    def __init__(self, images: Images, cfg: Any, device: Any):
        import torch

        from backrank.seeding import role_seed

        self.cfg, self.device = cfg, device
        self.order, self.other = (
            Shuffled(len(images.train[1]), cfg.train.batch, role_seed(cfg.seed, role)) for role in ("order", "fresh")
        )
        self.order_hash = self.order.order_hash
        self.splits = {
            name: tuple(torch.from_numpy(np.array(array)).to(device) for array in arrays)
            for name, arrays in (("train", images.train), ("test", images.test))
        }
        self.splits["validation"] = self.splits["test"]
        pixels = images.train[0].reshape(-1, images.train[0].shape[-1])
        mean, std = pixels.mean(0) / 255, pixels.std(0) / 255  # of the train split, per channel
        self.mean, self.std = (torch.tensor(v, dtype=torch.float32, device=device) for v in (mean, std))
        self.facts = {"train_images": len(images.train[1]), "test_images": len(images.test[1])}

    def normalised(self, pixels_BSSC: Any) -> Any:
        """float32 B x C x S x S of mean 0 and deviation 1 over the train split."""
        import torch

        x = ((pixels_BSSC.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)
        layout = torch.channels_last if self.cfg.train.channels_last else torch.contiguous_format
        return x.contiguous(memory_format=layout)

    def batch(self, order: Shuffled, index: int) -> Any:
        import torch

        def move(array: np.ndarray) -> Any:
            tensor = torch.from_numpy(array)
            return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

        pixels, labels = self.splits["train"]
        rows, kind = move(order.rows_at(index)), self.cfg.data.augment or ""
        x = pixels[rows]
        draws = np.random.Generator(np.random.PCG64(np.random.SeedSequence(order.seed_key, spawn_key=(index, 1))))
        if "crop" in kind:
            side = x.shape[1]
            pad = max(1, PAD * side // 32)
            x = torch.nn.functional.pad(x, (0, 0, pad, pad, pad, pad))  # zeros: black
            at = move(draws.integers(0, 2 * pad + 1, (2, len(rows), 1)))
            down, right = at + torch.arange(side, device=self.device)
            x = x[torch.arange(len(x), device=self.device)[:, None, None], down[:, :, None], right[:, None, :]]
        if "flip" in kind:
            x = torch.where(move(draws.integers(0, 2, len(rows)) > 0)[:, None, None, None], x.flip(2), x)
        return self.normalised(x), labels[rows]

    def batch_at(self, index: int) -> Any:
        return self.batch(self.order, index)

    def fresh(self, index: int) -> Any:
        return self.batch(self.other, index)

    def evaluation(self, split: str, whole: bool) -> Iterator[Any]:
        pixels, labels = self.splits[split]
        limit = self.cfg.data.eval_tokens if whole else self.cfg.every.eval_tokens
        for at in range(0, min(limit or len(labels), len(labels)), EVAL_BATCH):
            rows = slice(at, min(at + EVAL_BATCH, limit or len(labels)))
            yield self.normalised(pixels[rows]), labels[rows]

    def held_out(self, sequences: int) -> Any:
        pixels, labels = self.splits["test"]
        return self.normalised(pixels[:sequences]), labels[:sequences]
