"""Data: what is read, how it becomes ids, in which order; and every bad input as one error that says what to do."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from backrank import data as D
from backrank.config import ConfigError, Data
from backrank.data import text as text_module
from backrank.data.tokens import train_bpe

SPLITS = ("train", "validation", "test")
ROOT = os.environ.get("BACKRANK_DATA")
needs_wikitext = pytest.mark.skipif(not ROOT, reason="BACKRANK_DATA names no folder with wikitext-2-v1")
WORDS = ["déjà", "vu", "the", "rank", "of", "head", "loses", "🙂", "x\ty", "  two", "gradient", "\u2028", "n't"]


def prose(lines: int) -> str:
    rng = np.random.default_rng(lines)
    return "".join(" ".join(rng.choice(WORDS, 9)) + "\n" * int(rng.integers(1, 3)) for _ in range(lines))


@pytest.fixture
def folder(tmp_path):
    """A folder of three .txt splits."""
    base = tmp_path / "corpus"
    base.mkdir()
    for split, lines in zip(("train", "valid", "test"), (400, 60, 61), strict=True):
        (base / f"{split}.txt").write_bytes(prose(lines).encode())
    return base


@pytest.fixture
def node(tmp_path, folder):
    def make(**keys):
        keys = {"name": "corpus", "source": "text", "path": str(folder), "sequence": 16} | keys
        return Data(**{"cache": str(tmp_path / "cache")} | keys)

    return make


def parquet(path: Path, rows: list, column: str = "text") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: rows}), path)


def python(code: str, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ | environment
    )


# What is read


def test_stdlib_is_deterministic_disjoint_and_about_the_stated_size(tmp_path):
    data = Data(name="stdlib", source="stdlib", cache=str(tmp_path))
    first = text_module.texts(data)
    root = Path(os.__file__).parent
    assert text_module.extract_stdlib(root) == first  # the cache file holds what extraction gives
    sizes = {s: len(t) for s, t in first.items()}
    total = sum(sizes.values())
    assert 1.5e6 < total < 3e6
    assert abs(sizes["validation"] / total - 0.05) < 0.01 and abs(sizes["test"] / total - 0.05) < 0.01
    paragraphs = {s: {p for p in t.split(b"\n\n") if len(p) > 400} for s, t in first.items()}
    for a, b in (("train", "validation"), ("train", "test"), ("validation", "test")):
        shared = paragraphs[a] & paragraphs[b]
        assert len(shared) <= 0.02 * len(paragraphs[b]), shared


def test_stdlib_text_ignores_what_is_installed_beside_it(tmp_path):
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text(
        "topics = {" + "".join(f"'t{i}': 'Topic {i}'," for i in range(50)) + "}"
    )
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "__init__.py").write_text(
        '"""Json."""\nclass A:\n    """A.\n\n      in"""\n    def f(): "F"\n    def g(): "F"\n'
    )
    before = text_module.extract_stdlib(tmp_path)
    assert b"json.A\nA.\n\nin\n\njson.A.f\nF\n" in b"".join(before.values())
    assert b"json.A.g" not in b"".join(before.values())  # the same docstring again
    for extra in ("site-packages/json", "notstdlib", "json/tests"):
        (tmp_path / extra).mkdir(parents=True)
        (tmp_path / extra / "x.py").write_text('"""Stray."""')
    assert text_module.extract_stdlib(tmp_path) == before


def test_stdlib_cache_is_rebuilt_when_cut(tmp_path):
    found = text_module._stdlib(str(tmp_path))
    (file,) = tmp_path.glob("stdlib-*.json")
    file.write_bytes(file.read_bytes()[:5000])
    assert text_module._stdlib(str(tmp_path)) == found == text_module._stdlib(str(tmp_path))


def test_one_file_is_cut_at_line_ends(tmp_path, node):
    path = tmp_path / "all.txt"
    path.write_bytes(prose(3000).encode())
    found = text_module.texts(node(path=str(path)))
    assert b"".join(found.values()) == path.read_bytes()
    assert all(t.endswith(b"\n") for t in found.values())
    assert [round(len(found[s]) / path.stat().st_size, 2) for s in SPLITS] == [0.9, 0.05, 0.05]


def test_hash_is_of_the_content_not_of_files_and_format(tmp_path, node, folder):
    from_text = D.content_hash(node())
    for split, stem in zip(SPLITS, ("train", "valid", "test"), strict=True):
        rows = (folder / f"{stem}.txt").read_text().removesuffix("\n").split("\n")
        half = len(rows) // 2
        parquet(tmp_path / "root/corpus/v1" / f"{split}-00000-of-00002.parquet", [r or None for r in rows[:half]])
        parquet(tmp_path / "root/corpus/v1" / f"{split}-00001-of-00002.parquet", rows[half:])
    hub = node(source="hub", root=str(tmp_path / "root"), hub_config="v1", name="corpus")
    assert (
        D.content_hash(hub) == from_text == D.content_hash(OmegaConf.structured(node(path=str(folder), name="other")))
    )
    assert D.content_hash(node(tokenizer="bpe", vocab_size=300))["tokenizer"] == "bpe-300"
    moved = tmp_path / "moved"
    moved.mkdir()
    texts = {s: (folder / f"{s}.txt").read_bytes() for s in ("train", "valid", "test")}
    for split, content in zip(
        SPLITS, (texts["train"] + texts["valid"][:20], texts["valid"][20:], texts["test"]), strict=True
    ):
        (moved / f"{split}.txt").write_bytes(content)  # the same bytes, another split
    assert D.content_hash(node(path=str(moved)))["text"] != from_text["text"]


def test_hub_folder_with_train_alone_is_cut(tmp_path, node):
    parquet(tmp_path / "root/train-00000-of-00001.parquet", [prose(3) for _ in range(200)])
    found = text_module.texts(node(source="hub", root=str(tmp_path / "root"), hub_id="none/none"))
    assert all(len(found[s]) > 100 for s in SPLITS)


@needs_wikitext
def test_wikitext_equals_the_official_release(tmp_path):
    data = Data(name="wikitext-2-v1", source="hub", root=ROOT, cache=str(tmp_path))
    tokens = D.load(data)
    found = text_module.texts(data)
    assert [len(found[s]) for s in SPLITS] == [10_797_148, 1_121_681, 1_256_449]
    lines = {s: found[s].count(b"\n") for s in SPLITS}
    assert list(lines.values()) == [36_718, 3_760, 4_358]
    assert [tokens.words[s] + lines[s] for s in SPLITS] == [2_088_628, 217_646, 245_569]
    assert bytes(tokens.validation[:200_000]) == found["validation"][:200_000]
    text_module._read.cache_clear()
    start = time.perf_counter()
    D.content_hash(data)
    assert time.perf_counter() - start < 1


# How it becomes ids


@pytest.mark.parametrize("tokenizer, vocab_size", [("bytes", 256), ("bpe", 400)])
def test_ids_decode_to_the_text(node, tokenizer, vocab_size, tmp_path):
    from tokenizers import Tokenizer

    data = node(tokenizer=tokenizer, vocab_size=vocab_size)
    tokens, found = D.load(data), text_module.texts(data)
    for split in SPLITS:
        ids = getattr(tokens, split)
        assert isinstance(ids, np.memmap) and ids.dtype == np.min_scalar_type(vocab_size - 1)
        if tokenizer == "bytes":
            decoded = bytes(ids)
        else:
            (file,) = (tmp_path / "cache").glob("*/tokenizer.json")
            decoded = Tokenizer.from_file(str(file)).decode(ids.tolist()).encode()
        assert decoded == found[split]
        assert tokens.bytes_per_token[split] == pytest.approx(len(found[split]) / len(ids))
        assert tokens.words[split] == len(found[split].decode().split())
    assert tokens.text_hash == D.content_hash(data)["text"] and tokens.vocab_size == vocab_size


def test_bpe_training_is_deterministic_whatever_the_threads():
    code = (
        "import hashlib; from backrank.data.text import extract_stdlib; from backrank.data.tokens import train_bpe;"
        "import os; from pathlib import Path; t = extract_stdlib(Path(os.__file__).parent)['train'][:400000];"
        "print(hashlib.sha256(train_bpe(t, 1500).to_str().encode()).hexdigest())"
    )
    runs = [python(code, TOKENIZERS_PARALLELISM=p, RAYON_NUM_THREADS=n) for p, n in (("false", "1"), ("true", "4"))]
    assert runs[0].stdout == runs[1].stdout != "", runs[0].stderr


def test_given_tokenizer(tmp_path, node, folder):
    path = tmp_path / "tokenizer.json"
    train_bpe((folder / "train.txt").read_bytes(), 320).save(str(path))
    assert D.load(node(tokenizer=str(path), vocab_size=1000)).vocab_size == 1000  # fewer ids than V is fine
    largest = max(int(getattr(D.load(node(tokenizer=str(path), vocab_size=320)), s).max()) for s in SPLITS)
    D.load(node(tokenizer=str(path), vocab_size=largest + 1))
    with pytest.raises(ConfigError, match=f"data.vocab_size={largest}: the largest id in the text is {largest}"):
        D.load(node(tokenizer=str(path), vocab_size=largest))


def test_a_tokenizer_that_pads_and_cuts_reads_the_whole_text_and_no_more(tmp_path, node, folder):
    tokenizer = train_bpe((folder / "train.txt").read_bytes(), 320)
    tokenizer.save(str(tmp_path / "plain.json"))
    tokenizer.enable_padding(length=32)
    tokenizer.enable_truncation(max_length=4)
    tokenizer.save(str(tmp_path / "padding.json"))
    plain, padded = (D.load(node(tokenizer=str(tmp_path / f"{n}.json"), vocab_size=400)) for n in ("plain", "padding"))
    assert all(np.array_equal(getattr(plain, s), getattr(padded, s)) for s in SPLITS)


@pytest.mark.parametrize("damage", ["cut", "flipped", "gone", "meta"])
def test_damaged_cache_is_rebuilt(tmp_path, node, damage):
    data = node(tokenizer="bpe", vocab_size=300)
    before = {s: np.array(getattr(D.load(data), s)) for s in SPLITS}
    (file,) = (tmp_path / "cache").glob("*/meta.json" if damage == "meta" else "*/train.npy")
    content = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        changed = content[:-1] + bytes([content[-1] ^ 1]) if damage == "flipped" else content[: len(content) // 2]
        file.write_bytes(changed)
    after = D.load(data)
    assert all(np.array_equal(getattr(after, s), before[s]) for s in SPLITS) and file.read_bytes() == content


def test_two_processes_may_build_the_same_cache(node, tmp_path):
    data = node(tokenizer="bpe", vocab_size=300)
    code = (
        "import hashlib; from backrank.config import Data; from backrank import data as D;"
        f"t = D.load({data!r}); print(hashlib.sha256(bytes(t.train)).hexdigest())"
    )
    racers = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    hashes = {r.communicate(timeout=60)[0] for r in racers}
    assert len(hashes) == 1 and "" not in hashes and all(r.returncode == 0 for r in racers)
    assert not list((tmp_path / "cache").rglob(".*"))  # no temporary file stays


# In which order


def test_every_window_is_visited_once_an_epoch():
    ids = np.arange(16 * 10 + 1, dtype=np.uint16)
    windows = D.Windows(ids, sequence=16, batch=3, seed_key=7)
    assert (windows.windows, windows.batches_per_epoch) == (10, 3)
    epochs = [[windows.batch_at(3 * e + i) for i in range(3)] for e in range(4)]
    starts = [np.concatenate([x[:, 0] for x, _ in epoch]) for epoch in epochs]
    for epoch, start in zip(epochs, starts, strict=True):
        assert len(set(start.tolist())) == 9 and set(start.tolist()) <= set(range(0, 160, 16))
        for x, y in epoch:
            assert x.shape == y.shape == (3, 16) and x.dtype == y.dtype == np.int64
            assert np.array_equal(y, x + 1)
            assert np.array_equal(x, x[:, :1] + np.arange(16))
    assert len({tuple(s) for s in starts}) == 4  # another order each epoch


def test_any_position_is_reached_without_what_lies_before():
    ids = np.random.default_rng(0).integers(0, 256, 5000).astype(np.uint8)
    straight = D.Windows(ids, 8, 4, seed_key=1)
    seen = [straight.batch_at(i) for i in range(500)]
    for i in (499, 0, 154, 155, 156, 300):
        for a, b in zip(D.Windows(ids, 8, 4, seed_key=1).batch_at(i), seen[i], strict=True):
            assert np.array_equal(a, b)
    first = straight.order_hash(300)
    assert first == D.Windows(ids, 8, 4, seed_key=1).order_hash(300)
    assert first != straight.order_hash(299) and first != D.Windows(ids, 8, 4, seed_key=2).order_hash(300)


def test_order_is_the_same_today_and_tomorrow():
    """A golden value: another order would change every seed's result."""
    assert D.Windows(np.zeros(1001, np.uint8), 10, 4, seed_key=3).rows_at(26).tolist() == [61, 36, 30, 81]


@pytest.mark.parametrize("limit", [None, 1, 2, 17, 64, 65, 66, 10_000])
@pytest.mark.parametrize("batch", [1, 3, 100])
def test_evaluation_counts_every_target_once(limit, batch):
    ids = np.arange(130, dtype=np.uint8)
    pairs = list(D.eval_windows(ids, 16, limit, batch))
    used = 130 if limit is None else min(limit, 130)
    kept = [(x[y != -100], y[y != -100]) for x, y in pairs]
    inputs, targets = (np.concatenate([k[i] for k in kept] or [np.empty(0)]) for i in (0, 1))
    assert np.array_equal(inputs, np.arange(used - 1)) and np.array_equal(targets, np.arange(1, used))
    assert all(x.shape == y.shape and x.shape[1] == 16 and x.shape[0] == batch for x, y in pairs[:-1])
    assert all(1 <= x.shape[0] <= batch and x.dtype == y.dtype == np.int64 for x, y in pairs)


# Bad input: one error, with the key, the value and a remedy


def broken(case: str, node, folder: Path, tmp_path: Path) -> tuple[Data, str, str]:
    """-> the node, the key blamed, and what the message must hold."""
    empty = tmp_path / "empty"
    empty.mkdir()
    if case == "no path":
        return node(path=None), "data.path", "no such file or folder"
    if case == "missing":
        return node(path=str(tmp_path / "nowhere")), "data.path", "nowhere"
    if case == "empty folder":
        return node(path=str(empty)), "data.path", "train, validation, test"
    if case == "no test split":
        (folder / "test.txt").unlink()
        return node(), "data.path", "no .txt or .parquet for test in"
    if case == "not UTF-8":
        (folder / "valid.txt").write_bytes(b"ab\n" * 40 + "é".encode("latin-1"))
        return node(), "data.path", f"{folder / 'valid.txt'}: not UTF-8 at byte 120"
    if case == "short":
        (folder / "test.txt").write_bytes(b"0123456789abcdef")
        return node(), "data.sequence", "split test of corpus has 16 bytes"
    if case == "empty file":
        (folder / "train.txt").write_bytes(b"")
        return node(), "data.sequence", "split train of corpus has 0 bytes"
    if case == "bad parquet":
        (folder / "train.parquet").write_bytes(b"PAR1 no")
        return node(source="hub", root=str(folder)), "data.root", "unreadable as parquet"
    if case == "column":
        parquet(folder / "train.parquet", ["a"], "body")
        return node(source="hub", root=str(folder)), "data.column", "body"
    if case == "not text":
        parquet(folder / "train.parquet", [1, 2])
        return node(source="hub", root=str(folder)), "data.column", "no column of text"
    if case == "hub splits":
        (folder / "train.txt").unlink()
        return node(source="hub", root=str(folder)), "data.name", "no split train; found validation, test"
    if case == "no hub id":
        return node(source="hub", root=str(empty)), "data.hub_id", f"{empty / 'corpus'}, {empty}"
    if case == "source":
        return node(source="ftp"), "data.source", "Use stdlib, text, hub"
    if case == "tokenizer":
        return node(tokenizer="wordpiece"), "data.tokenizer", "Use bytes, bpe or the path"
    if case == "bad tokenizer":
        (tmp_path / "tokenizer.json").write_text("{}")
        return node(tokenizer=str(tmp_path / "tokenizer.json")), "data.tokenizer", "not a tokenizer.json"
    if case == "bytes vocabulary":
        return node(vocab_size=255), "data.vocab_size", "256"
    if case == "bpe vocabulary":
        return node(tokenizer="bpe", vocab_size=256), "data.vocab_size", "257"
    raise AssertionError(case)


@pytest.mark.parametrize(
    "case",
    ["no path", "missing", "empty folder", "no test split", "not UTF-8", "short", "empty file", "bad parquet", "column",
     "not text", "hub splits", "no hub id", "source", "tokenizer", "bad tokenizer", "bytes vocabulary",
     "bpe vocabulary"],
)  # fmt: skip
def test_bad_input_is_one_error_with_a_remedy(case, node, folder, tmp_path):
    data, key, part = broken(case, node, folder, tmp_path)
    with pytest.raises(ConfigError) as caught:
        D.check(data)
    assert caught.value.key == key and part in str(caught.value) and caught.value.remedy
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError):
        D.load(data)


def test_tokens_too_few_after_encoding(node, folder):
    (folder / "test.txt").write_bytes(b"the rank of head\n" * 2)
    data = node(tokenizer="bpe", vocab_size=300, sequence=30)
    D.check(data)
    with pytest.raises(ConfigError, match=r"split test of corpus has \d+ tokens"):
        D.load(data)


def test_fewer_windows_than_a_batch():
    with pytest.raises(ConfigError, match="train.batch=8: the split has 6 windows of 16 tokens"):
        D.Windows(np.zeros(100, np.uint8), 16, 8, seed_key=0)


def test_cache_that_cannot_be_written(node, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data.cache="):
        D.load(node(cache=str(tmp_path / "file")))


# Without torch, without a network


def test_no_torch_is_imported(node):
    code = (
        "import sys; from backrank.config import Data; from backrank import data as D;"
        f"D.load({node(tokenizer='bpe', vocab_size=300)!r});"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pandas') if m in sys.modules])"
    )
    done = python(code)
    assert done.stdout == "[]\n", done.stderr


def test_offline_names_the_data_set_the_places_and_the_command(node, tmp_path):
    data = node(source="hub", root=str(tmp_path), hub_id="Salesforce/wikitext", hub_config="wikitext-2-v1", name="wt2")
    code = f"""
import time
from backrank.config import ConfigError, Data
from backrank import data as D
start = time.perf_counter()
try:
    D.check({data!r})
except ConfigError as error:
    print(time.perf_counter() - start, error)
"""
    done = python(code, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hf"))
    seconds, message = done.stdout.split(maxsplit=1)
    assert float(seconds) < 5
    command = f"python -m backrank.data fetch Salesforce/wikitext wikitext-2-v1 {tmp_path / 'wt2'}"
    places = f"{tmp_path / 'wt2'}, {tmp_path / 'wt2' / 'wikitext-2-v1'}, {tmp_path}"
    for part in ("data.hub_id=Salesforce/wikitext", places, command, f"data.root={tmp_path}"):
        assert part in message


def test_a_prepared_folder_needs_no_network(node, tmp_path):
    """What the named command writes (here from a local folder in the hub's place) is then read without a socket."""
    made = tmp_path / "upstream"
    for split in SPLITS:
        parquet(made / f"{split}-00000-of-00001.parquet", prose(200).split("\n"))
    command = [sys.executable, "-m", "backrank.data", "fetch", str(made), "-", str(tmp_path / "root/corpus")]
    subprocess.run(
        command, check=True, timeout=60, capture_output=True, env=os.environ | {"HF_HOME": str(tmp_path / "hf")}
    )
    data = node(source="hub", root=str(tmp_path / "root"), hub_id="Salesforce/wikitext")
    code = f"""
import sys
def refuse(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto"):
        raise AssertionError(event)
sys.addaudithook(refuse)
from backrank.config import Data
from backrank import data as D
D.check({data!r})
print(D.load({data!r}).text_hash)
"""
    done = python(code, HF_HUB_OFFLINE="1")
    fetched = node(source="hub", hub_id=str(made))  # no root: through the package datasets
    again = python(
        f"from backrank.config import Data; from backrank import data as D; print(D.load({fetched!r}).text_hash)",
        HF_HOME=str(tmp_path / "hf"),
    )
    direct = D.content_hash(node(source="hub", root=str(made)))["text"]
    assert done.stdout.strip() == direct, done.stderr
    assert again.stdout.strip() == direct, again.stderr
