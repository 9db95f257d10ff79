"""Packed tokens: the same bytes however the packing went, windows that need no list, bad input as one error each."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models

from backrank import data as D
from backrank.config import ConfigError, Data
from backrank.data.__main__ import main
from backrank.data.pack import pack
from backrank.data.shards import ROUNDS, Shards, ShardWindows, permuted
from backrank.data.tokens import Windows, eval_windows

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz.,-'"
END = 32
ROOT = os.environ.get("BACKRANK_DATA")
quiet = {"say": lambda _: None}


def documents(n: int) -> list[str | None]:
    rng = np.random.default_rng(n)
    return [
        "".join(rng.choice(list(CHARACTERS), rng.integers(1, 90))) if rng.random() > 0.1 else None for _ in range(n)
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder with two parquet files and a tokenizer.json, the ids of every document with its end)."""
    folder = tmp_path_factory.mktemp("documents")
    texts = documents(400)
    for i, part in enumerate((texts[:150], texts[150:])):
        pq.write_table(
            pa.table({"text": part, "url": ["x"] * len(part)}), folder / f"part-{i}.parquet", row_group_size=60
        )
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(CHARACTERS)}, merges=[]))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(folder / "tokenizer"))
    return folder, [[CHARACTERS.index(c) for c in text] + [END] for text in texts if text]


def packed(made, folder, **settings):
    settings = {"tokenizer": str(made[0] / "tokenizer"), "held_out": 20, "shard_tokens": 1000, "jobs": 1} | settings
    return pack(str(made[0]), str(folder), **settings, **quiet)


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    """The folder as one worker packs it."""
    folder = tmp_path_factory.mktemp("shards")
    packed(made, folder)
    return folder


@pytest.fixture
def node(folder, tmp_path):
    def make(**keys):
        keys = {"name": "shards", "source": "shards", "path": str(folder), "tokenizer": "packed", "sequence": 16} | keys
        return Data(**{"vocab_size": 33, "cache": str(tmp_path)} | keys)

    return make


def files(folder) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.name != ".lock"}


def test_the_splits_are_the_documents_in_order_each_with_its_end(made, folder, node):
    ids = made[1]
    read = D.load(node())
    expected = {"validation": ids[:20], "test": ids[20:40], "train": ids[40:]}
    for split, parts in expected.items():
        flat = np.concatenate(parts)
        assert np.array_equal(getattr(read, split)[:], flat)
        assert len(getattr(read, split)) == len(flat)
        text = sum(len(part) - 1 for part in parts)  # one byte a character
        assert read.bytes_per_token[split] == text / len(flat)
    assert len(list(folder.glob("train-*.bin"))) == -(-len(np.concatenate(expected["train"])) // 1000) > 3
    assert {p.stat().st_size for p in sorted(folder.glob("train-*.bin"))[:-1]} == {1000}  # one byte an id


def test_a_killed_packing_goes_on_and_ends_with_the_same_bytes_whatever_the_workers(
    made, folder, tmp_path, monkeypatch
):
    """Killed after every ninth batch: within a shard, within a file, with and without a checkpoint behind it."""
    code = f"""
import os, sys
from backrank.data import pack as P
P.BATCH_DOCUMENTS = 20
written = 0
write = P.Writer.write
def dying(self, *batch):
    global written
    write(self, *batch)
    written += 1
    if written == 9:
        os.kill(os.getpid(), 9)
P.Writer.write = dying
if __name__ == "__main__":
    P.pack({str(made[0])!r}, {str(tmp_path / "out")!r}, {str(made[0] / "tokenizer")!r}, held_out=20, shard_tokens=1000,
           jobs=int(sys.argv[1]), checkpoint_s=float(sys.argv[2]), say=print)
"""
    script = tmp_path / "dying.py"
    script.write_text(code)
    runs = 0
    while not (tmp_path / "out/meta.json").exists():
        command = [sys.executable, str(script), str(1 + runs % 2), "1e9" if runs == 2 else "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        runs += 1
        assert runs < 12
    assert runs > 2
    assert files(tmp_path / "out") == files(folder)


def test_workers_end_with_a_killed_parent(made, tmp_path):
    code = f"""
import multiprocessing, time
from backrank.data import pack as P
def hang(self, *batch):
    print(*[p.pid for p in multiprocessing.active_children()], flush=True)
    time.sleep(60)
P.Writer.write = hang
if __name__ == "__main__":
    P.pack({str(made[0])!r}, {str(tmp_path / "out")!r}, {str(made[0] / "tokenizer")!r}, jobs=2, say=lambda _: None)
"""
    (tmp_path / "hang.py").write_text(code)
    parent = subprocess.Popen([sys.executable, str(tmp_path / "hang.py")], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert workers
    parent.kill()
    parent.wait()

    def alive(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


def test_a_stream_of_the_hub_goes_on_where_it_was_at_the_same_revision(made, folder, tmp_path, monkeypatch):
    import huggingface_hub

    asked = []
    local = datasets.load_dataset

    def hub(name, config=None, *, split, revision=None, streaming, **rest):
        if "data_files" in rest:
            return local(name, config, split=split, streaming=streaming, **rest)
        asked.append((name, config, split, revision))
        paths = sorted(map(str, made[0].glob("*.parquet")))
        return local("parquet", data_files=paths, split="train", streaming=True)

    class Api:
        def dataset_info(self, name):
            assert not asked, "a continued packing asks for the revision it has"
            return type("Info", (), {"sha": "abc"})

    monkeypatch.setattr(datasets, "load_dataset", hub)
    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    monkeypatch.setattr("backrank.data.pack.BATCH_DOCUMENTS", 25)
    stop = iter([True] * 6)
    from backrank.data.pack import Writer

    write = Writer.write

    def stopping(self, *batch):
        if next(stop, None) is None:
            monkeypatch.setattr(Writer, "write", write)
            raise KeyboardInterrupt
        write(self, *batch)

    monkeypatch.setattr(Writer, "write", stopping)
    settings = {"tokenizer": str(made[0] / "tokenizer"), "held_out": 20, "shard_tokens": 1000, "config": "sample"}
    with pytest.raises(KeyboardInterrupt):
        pack("some/web", str(tmp_path / "out"), **settings, checkpoint_s=0, **quiet)
    pack("some/web", str(tmp_path / "out"), **settings, **quiet)
    assert asked == [("some/web", "sample", "train", "abc")] * 2
    mine, theirs = files(tmp_path / "out"), files(folder)
    assert mine.pop("meta.json") != theirs.pop("meta.json")  # another source
    assert mine == theirs
    again = Data(name="web", source="shards", root=str(tmp_path / "out"), hub_id="some/web", hub_config="sample",
                 tokenizer="packed", vocab_size=33, sequence=16, cache=str(tmp_path))  # fmt: skip
    D.check(again)
    again.hub_config = "larger"
    with pytest.raises(ConfigError, match="is packed from some/web sample"):
        D.check(again)


@pytest.mark.parametrize(("sample_by", "expected"), [("document", 1), ("paragraph", 3), ("line", 6)])
def test_text_files_and_given_held_out_files(made, tmp_path, sample_by, expected):
    for name in ("a", "v", "t"):
        (tmp_path / f"{name}.txt").write_text("ab\ncd\n\nef\ngh\n\nij\nkl")
    held = {"validation": str(tmp_path / "v.txt"), "test": str(tmp_path / "t.txt")}
    settings = {"tokenizer": str(made[0] / "tokenizer"), "sample_by": sample_by}
    meta = pack(str(tmp_path / "a.txt"), str(tmp_path / "out"), **settings, **held, **quiet)
    assert {s["documents"] for s in meta["splits"].values()} == {expected}
    ids = np.fromfile(tmp_path / "out/train-00000.bin", np.uint8)
    assert (ids == END).sum() == expected and ids[-1] == END


def test_what_looks_like_an_end_of_document_in_a_text_is_text(made, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a<|endoftext|>b"}\n' * 3)
    meta = pack(
        str(tmp_path / "a.jsonl"), str(tmp_path / "out"), str(made[0] / "tokenizer"), column="body", held_out=1, **quiet
    )
    assert meta["splits"]["train"]["documents"] == 1
    ids = np.fromfile(tmp_path / "out/train-00000.bin", np.uint8)
    assert (ids == END).sum() == 1


# Reading


def test_what_a_download_leaves_beside_its_files_is_not_read(made, tmp_path):
    from backrank.data.pack import _files

    names = ("a.parquet", "b/c.jsonl.gz", "d.txt")
    for name in (*names, ".cache/huggingface/a.parquet", "a.parquet.lock", "a.parquet.metadata", "d.txt.incomplete"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert [p.relative_to(tmp_path).as_posix() for p in _files(tmp_path)] == sorted(names)


def test_shards_read_as_one_array(tmp_path):
    whole = np.arange(1000, dtype=np.uint16)
    for i, part in enumerate(np.split(whole, [300, 600, 900])):
        part.tofile(tmp_path / f"{i}.bin")
    shards = Shards([tmp_path / f"{i}.bin" for i in range(4)], [300, 300, 300, 100], "<u2")
    assert len(shards) == 1000
    for cut in (slice(None), slice(290, 610), slice(5, 5), slice(0, 2000)):
        assert np.array_equal(shards[cut], whole[cut])
    index = np.random.default_rng(0).integers(0, 1000, (7, 9))
    assert np.array_equal(shards[index], whole[index])
    assert not Shards([tmp_path / "gone.bin"] * 2, [300, 300], "<u2")._maps  # nothing is opened before it is read


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 63, 64, 65, 1000, 4097])
def test_the_order_is_a_permutation(n):
    keys = np.random.SeedSequence(7).generate_state(ROUNDS, np.uint64)
    whole = permuted(np.arange(n), n, keys)
    assert np.array_equal(np.sort(whole), np.arange(n))
    for at in range(0, n, max(1, n // 7)):  # a function of the number alone
        assert permuted(np.array([at]), n, keys)[0] == whole[at]


def test_the_order_looks_like_one_drawn_at_random():
    n = 1 << 15
    orders = [
        permuted(np.arange(n), n - 5, np.random.SeedSequence(s).generate_state(ROUNDS, np.uint64))[: n - 5]
        for s in (1, 2)
    ]
    for order in orders:
        assert abs(np.corrcoef(order, np.arange(n - 5))[0, 1]) < 0.03  # five standard errors
        assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.03
        assert len(np.unique(np.diff(order))) > n // 2  # no stride
        for block in np.split(order[: n // 2], 64):  # each stretch comes from everywhere
            counts = np.bincount(block * 8 // n, minlength=8)
            assert ((counts - 32) ** 2 / 32).sum() < 40  # chi-square of 7 degrees, p < 1e-5
    assert (orders[0] == orders[1]).sum() < 10


def test_windows_of_billions_of_tokens_cost_nothing():
    class Endless:  # stands for 10^13 tokens
        def __len__(self):
            return 10**13 + 1

        def __getitem__(self, index):
            return index % 50_000

    windows = ShardWindows(Endless(), 2048, 4, 1)
    start = time.perf_counter()
    far = windows.batch_at(windows.batches_per_epoch * 3 + 10**8)
    assert time.perf_counter() - start < 1
    assert np.array_equal(far[0][:, 1:], far[1][:, :-1])
    rows = [windows.rows_at(i) for i in (0, 10**8, windows.batches_per_epoch)]
    assert len(np.unique(rows)) == 12 and np.max(rows) < windows.windows


def test_an_epoch_meets_the_windows_of_the_plain_reader_once(node):
    train = D.load(node()).train
    mine, plain = ShardWindows(train, 16, 4, 5), Windows(train[:], 16, 4, 5)
    assert mine.batches_per_epoch == plain.batches_per_epoch

    def epoch(windows, number):
        n = windows.batches_per_epoch
        return [tuple(row) for i in range(n * number, n * number + n) for row in windows.rows_at(i).reshape(-1, 1)]

    for number in (0, 1):
        assert len(set(epoch(mine, number))) == mine.batches_per_epoch * 4
    assert epoch(mine, 0) != epoch(mine, 1)
    row = int(mine.rows_at(3)[2])
    x, y = mine.batch_at(3)
    assert np.array_equal(x[2], train[:][row * 16 : row * 16 + 16])
    assert np.array_equal(y[2], train[:][row * 16 + 1 : row * 16 + 17])


@pytest.mark.parametrize("limit", [None, 100, 513])
def test_evaluation_equals_that_of_the_plain_reader(folder, config, limit):
    cfg = config("data=shards", f"data.path={folder}", "data.tokenizer=packed", "data.vocab_size=33",
                 f"data.eval_tokens={limit or 'null'}")  # fmt: skip
    source = D.load(cfg.data)
    import torch

    stream = source.stream(cfg, torch.device("cpu"))
    for split in ("validation", "test", "train"):
        ids = getattr(source, split)[:][: limit or len(source.validation)]
        mine = list(stream.evaluation(split, whole=True))
        plain = list(eval_windows(ids, 16, limit, 64))
        assert len(mine) == len(plain)
        for (a, b), (x, y) in zip(mine, plain, strict=True):
            assert np.array_equal(a, x) and np.array_equal(b, y)
    x, _ = stream.held_out(3)
    assert np.array_equal(x.flatten(), source.validation[:48])


def test_a_run_is_its_shards_wherever_they_lie(folder, train):
    over = ["data=shards", f"data.path={folder}", "data.tokenizer=packed", "data.vocab_size=33", "train.steps=12"]
    whole = train(*over, runs="whole")
    assert whole.code == 0 and whole.summary["data/train_tokens"] > 0 and 0 < whole.summary["data/epochs"] < 1
    assert (
        whole.read("meta.json")["data_hash"]
        == D.content_hash(Data(name="x", source="shards", path=str(folder), tokenizer="packed", cache=""))["text"]
    )
    moved = shutil.copytree(folder, folder.with_name("moved"))
    again = train(*[f"data.path={moved}" if o.startswith("data.path") else o for o in over], runs="whole")
    assert again.code == 0 and again.folder == whole.folder  # a run is its content, wherever that lies


# Bad input


@pytest.mark.parametrize(
    ("keys", "key", "words"),
    [
        ({"path": "/nowhere"}, "data.path", ["no packed tokens", "/nowhere", "python -m backrank.data pack"]),
        ({"vocab_size": 32}, "data.vocab_size", ["largest id", "is 32", "data.vocab_size=33"]),
        ({"sequence": 5000}, "data.sequence", ["tokens"]),
        ({"tokenizer": "bytes"}, "data.tokenizer", ["another tokenizer", "data.tokenizer=packed"]),
    ],
)
def test_bad_nodes_are_one_clear_error(node, keys, key, words):
    with pytest.raises(ConfigError) as error:
        D.check(node(**keys))
    assert error.value.key == key
    for word in words:
        assert word in str(error.value)


def test_a_hub_id_that_is_not_packed_names_the_places_and_the_command(tmp_path):
    from backrank.compose import compose_run

    data = compose_run(["data=fineweb_edu", f"data.root={tmp_path}", "train.steps=1", "optim.lr=1"]).data
    with pytest.raises(ConfigError) as error:
        D.check(data)
    place = tmp_path / "fineweb-edu" / "sample-10BT"
    command = f"python -m backrank.data pack HuggingFaceFW/fineweb-edu {place} --config sample-10BT --tokenizer"
    for part in ("data.hub_id=HuggingFaceFW/fineweb-edu", str(place), str(tmp_path / "fineweb-edu"), command):
        assert part in str(error.value)


def test_a_cut_or_unfinished_folder_is_refused(folder, node, tmp_path):
    broken = shutil.copytree(folder, tmp_path / "broken")
    shard = broken / "train-00001.bin"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"train-00001\.bin: has 999 bytes, not 1000"):
        D.check(node(path=str(broken)))
    (broken / "meta.json").rename(broken / "progress.json")
    with pytest.raises(ConfigError, match="unfinished"):
        D.check(node(path=str(broken)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--eod", "<nothing>"], "--eod=<nothing>: is no token"),
        (["--column", "body"], "--column=body: the source has text, url"),
        (["--held-out", "300"], "none is left for"),
        (["--held-out", "0"], "--held-out=0"),
        (["--jobs", "0"], "--jobs=0"),
        (["--tokenizer", "/nowhere"], "--tokenizer=/nowhere: no readable file"),
        (["--validation", "/nowhere"], "--validation=/nowhere: no such file"),
    ],
)
def test_bad_packings_are_one_clear_error(made, tmp_path, change, words, capsys):
    code = main(
        ["pack", str(made[0]), str(tmp_path / "out"), "--tokenizer", str(made[0] / "tokenizer"), "--jobs", "1", *change]
    )
    assert code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0]


def test_another_packing_in_the_folder_is_refused_and_the_same_one_is_done(made, folder, capsys):
    before = files(folder)
    with pytest.raises(ConfigError, match="another shard_tokens"):
        packed(made, folder, shard_tokens=999)
    assert packed(made, folder)["splits"] and files(folder) == before


def test_a_tokenizer_without_an_end_asks_for_one(made, tmp_path):
    Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(CHARACTERS)}, merges=[])).save(str(tmp_path / "t.json"))
    with pytest.raises(ConfigError, match="has none of the usual end tokens"):
        packed(made, tmp_path / "out", tokenizer=str(tmp_path / "t.json"))
    assert packed(made, tmp_path / "out", tokenizer=str(tmp_path / "t.json"), eod="\n")["settings"]["eod"] == 0


@pytest.mark.skipif(not ROOT, reason="BACKRANK_DATA names no folder with openwebtext-sample")
def test_web_documents_decode_to_themselves(tmp_path):
    tokenizer = f"{ROOT}/tokenizers/smollm2/tokenizer.json"
    meta = pack(f"{ROOT}/openwebtext-sample", str(tmp_path), tokenizer, held_out=30, jobs=2, **quiet)
    ids = np.fromfile(tmp_path / "validation-00000.bin", meta["settings"]["dtype"])
    decoded = Tokenizer.from_file(tokenizer).decode(ids.tolist(), skip_special_tokens=False)
    texts = pq.read_table(next(Path(ROOT, "openwebtext-sample").glob("*.parquet")))["text"].to_pylist()
    assert decoded == "".join(t + "<|endoftext|>" for t in [t for t in texts if t][:30])
