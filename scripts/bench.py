"""Timings as ratios within one run, medians of interleaved segments: python scripts/bench.py [results/bench].

Both sides of a ratio take turns, so that a noisy machine slows them alike. Run it on an otherwise idle machine.
ONLY=spectra,measuring renews these groups alone; the other rows stay.
WeightWatcher is compared where it is installed: pip install --no-deps weightwatcher powerlaw mpmath
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as the workers of a sweep

import pandas as pd
import torch
import torch.nn.functional as F

from backrank import data
from backrank.build import build, build_task
from backrank.compose import compose_run
from backrank.config import ROOT
from backrank.head import chunked_loss, head_gradient_stats
from backrank.optim import lr_at
from backrank.probes.spectra import parts
from backrank.recorder import Recorder, atomic_write
from backrank.run import settle_paths
from backrank.rundir import RunDir
from backrank.seeding import role_seed
from backrank.spectra import gram_spectrum
from backrank.theory.logit_gradient import column_space, passed, summary

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
SIZES = {"byte": 40, "subword": 6}  # steps in a segment
ROUNDS = 15
ROUTES = "experiment=causal_test/auxiliary_routes"
BOTTLENECK = "experiment=backward_bottleneck"
PAPER = ("scale=paper", "train.compile=none")
# whose measuring is timed, at the cadence of the experiment: what it is -> overrides
MEASURED = {
    "ResNet, laptop": [f"{BOTTLENECK}/resnet18_weight_decay", "scale=laptop"],
    "vision transformer, laptop": [f"{BOTTLENECK}/vit_weight_decay", "scale=laptop"],
    "GPT-2, laptop": [f"{BOTTLENECK}/gpt2_weight_decay", "scale=laptop"],
    "toy decoder, laptop and paper": [f"{BOTTLENECK}/toy_shift", "scale=laptop"],
    "network of the proof, laptop and paper": [f"{BOTTLENECK}/two_layer", "scale=laptop"],
    # the published sizes on digits, whose pixels are enlarged to 32 x 32, or on the default text; steps of one sequence
    "ResNet-18": [f"{BOTTLENECK}/resnet18_weight_decay", *PAPER, "data=digits", "data.size=32"],
    "ViT-S": [f"{BOTTLENECK}/vit_weight_decay", *PAPER, "data=digits", "data.size=32"],
    "GPT-2-small": [f"{BOTTLENECK}/gpt2_weight_decay", *PAPER, "data=stdlib", "data.tokenizer=bytes", "train.batch=1"],
}


def config(size: str, *overrides: str):
    """The paper's model and batch on the default text."""
    tokens = {"byte": [], "subword": ["data.tokenizer=bpe", "data.vocab_size=8192"]}[size]
    cfg = compose_run(
        [
            f"experiment=causal_test/{size}_heads",
            "scale=laptop",
            "data=stdlib",
            "data.eval_tokens=4096",
            "train.steps=100000",
            "every.eval=0",
            "every.checkpoint=0",
            *tokens,
            *overrides,
        ]
    )
    settle_paths(cfg)
    return cfg


def no_probes(cfg):
    cfg.probe = {}
    return cfg


class Trained:
    """Our trainer, a segment of steps at a time."""

    def __init__(self, cfg, folder: Path):
        rundir = RunDir(folder, f"{time.monotonic_ns()}")
        rundir.path.mkdir(parents=True)
        self.trainer, _ = build(cfg, data.load(cfg.data), rundir, Recorder(rundir.path))
        self.trainer.steps, self.trainer.evaluate = 0, lambda *_, **__: {}

    def __call__(self, steps: int) -> None:
        self.trainer.steps += steps
        self.trainer.fit()


class Bare:
    """The loop a reader would write by hand, over the same model and batches."""

    def __init__(self, cfg, loss: Callable):
        self.cfg, self.loss, self.step = cfg, loss, 0
        self.task, _ = build_task(cfg)
        self.windows = data.Windows(
            data.load(cfg.data).train, cfg.data.sequence, cfg.train.batch, role_seed(cfg.seed, "order")
        )
        self.optimiser = torch.optim.AdamW(
            self.task.parameters(),
            lr=cfg.optim.lr,
            betas=tuple(cfg.optim.betas),
            weight_decay=cfg.optim.weight_decay,
            fused=True,
        )

    def __call__(self, steps: int) -> None:
        for _ in range(steps):
            self.optimiser.param_groups[0]["lr"] = lr_at(self.step, self.cfg.train.steps, self.cfg.optim)
            x, y = (torch.from_numpy(a) for a in self.windows.batch_at(self.step))
            loss = self.loss(self.task.hidden(x), self.task.head.weight, y.flatten(), y.numel())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.task.parameters(), self.cfg.optim.clip)
            self.optimiser.step()
            self.optimiser.zero_grad(set_to_none=True)
            self.step += 1


def cross_entropy(hidden, weight, targets, denominator):
    return F.cross_entropy(hidden @ weight.T, targets, reduction="sum") / denominator


def race(*sides: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Median seconds of each side; they take turns, and the first round is not counted."""
    times: list[list[float]] = [[] for _ in sides]
    for number in range(rounds + 1):
        for side, kept in zip(sides, times, strict=True):
            tick = time.perf_counter()
            side()
            if number:
                kept.append(time.perf_counter() - tick)
    return [statistics.median(kept) for kept in times]


def steps_of(size: str, *sides: Callable[[int], None]) -> list[float]:
    """Median seconds a step."""
    return [t / SIZES[size] for t in race(*(partial(side, SIZES[size]) for side in sides))]


def explicit_lost(H, W, y) -> float:
    """The lost fraction by an explicit projection: QR of W, the whole N x V logit gradient."""
    G = torch.softmax(H @ W.T, 1)
    G[torch.arange(len(y)), y] -= 1
    Q = torch.linalg.qr(W).Q
    return float((G - (G @ Q) @ Q.T).norm() / G.norm())


def probe_overhead(cfg, folder: Path, rounds: int = 3) -> tuple[float, str]:
    """1 + seconds of all probes over a run at its cadence / seconds of its steps, and how both were found."""
    total = cfg.train.steps
    cfg.every.eval = cfg.every.checkpoint = 0
    settle_paths(cfg)
    side = Trained(cfg, folder)
    trainer, due = side.trainer, side.trainer.probes
    kept = {probe.name(): probe.measure for probe in due}
    seconds = dict.fromkeys(kept, 0.0)

    def timed(name: str, snapshot: object) -> object:
        tick = time.perf_counter()
        try:
            return kept[name](snapshot)
        finally:
            seconds[name] += time.perf_counter() - tick

    trainer.probes = []
    step_s = race(partial(side, 5 if rounds > 1 else 1), rounds=rounds)[0] / (5 if rounds > 1 else 1)
    trainer.probes = due
    for probe in due:
        probe.due = lambda step, steps: True
        probe.measure = partial(timed, probe.name())
    trainer.step, trainer.steps = 0, total
    trainer.observe()  # once for what is done once
    seconds.update(dict.fromkeys(seconds, 0.0))
    for _ in range(rounds):
        trainer.observe()
    events = {p.name(): (total // p.every if p.every else 1) + 1 for p in due}
    measuring = sum(events[name] * s / rounds for name, s in seconds.items())
    detail = f"{step_s * 1e3:.0f} ms a step; {measuring:.1f} s of measuring in {total * step_s:.0f} s of steps"
    return 1 + measuring / (total * step_s), detail


def spectra_rows(row: Callable, folder: Path) -> None:
    """Singular values of GPT-2-small's 48 block matrices, a block after another: ours, torch's and WeightWatcher's."""
    model = build_task(compose_run(["model=gpt2_small", "train.steps=1", "optim.lr=1"]))[0]
    named = list(parts(model)["block"].items())
    blocks = [named[i : i + 4] for i in range(0, len(named), 4)]

    def each(of: Callable[[list], object]) -> Callable[[], object]:
        turn = itertools.cycle(blocks)
        return lambda: of(next(turn))

    sides = {
        "ours": each(lambda block: gram_spectrum([W for _, W in block])),
        "float64 svdvals": each(lambda block: [torch.linalg.svdvals(W.double()) for _, W in block]),
    }
    if importlib.util.find_spec("weightwatcher"):
        from weightwatcher import WeightWatcher

        watcher = WeightWatcher(model=model.backbone.model)
        known = watcher.describe()
        ids = {f"backbone.model.{long}.weight": int(i) for i, long in zip(known.layer_id, known.longname, strict=True)}
        sides["WeightWatcher's get_ESD"] = each(lambda block: [watcher.get_ESD(layer=ids[name]) for name, _ in block])
    ours, *others = (len(blocks) * t for t in race(*sides.values(), rounds=len(blocks)))
    for name, seconds in zip(list(sides)[1:], others, strict=True):
        bound, met = (">= 3", seconds / ours >= 3) if "svdvals" in name else ("", None)
        row(f"{name} / ours, spectra of GPT-2-small's 48 block matrices", seconds / ours, bound, met,
            f"{seconds:.1f} against {ours:.1f} s")  # fmt: skip


def sweep_seconds(jobs: int, threads: int, folder: Path) -> float:
    """Wall seconds of a byte sweep of eight runs, start-up included."""
    shutil.rmtree(folder / "sweep", ignore_errors=True)
    command = ["-m", "seed=1,2,3,4,5,6,7,8", "train.steps=300", "data.eval_tokens=4096"]
    tick = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "backrank.run", *command, f"runs={folder / 'sweep'}"],
        env={**os.environ, "JOBS": str(jobs), "OMP_NUM_THREADS": str(threads)},
        check=True,
        capture_output=True,
    )
    return time.perf_counter() - tick


def trainer_rows(row: Callable, folder: Path) -> None:
    for size in SIZES:
        trained, bare = steps_of(size, Trained(no_probes(config(size)), folder), Bare(config(size), chunked_loss))
        row(f"trainer / bare loop, {size}, same loss", trained / bare, "<= 1.03", trained / bare <= 1.03,
            f"{trained * 1e3:.1f} against {bare * 1e3:.1f} ms a step")  # fmt: skip
    ours, plain = steps_of("subword", Bare(config("subword"), chunked_loss), Bare(config("subword"), cross_entropy))
    row("chunked loss / F.cross_entropy, subword step", ours / plain, "<= 0.80", ours / plain <= 0.8,
        f"{ours * 1e3:.1f} against {plain * 1e3:.1f} ms a step")  # fmt: skip
    reduced = ("intervention=[backward_rank]", "intervention.backward_rank.rank=48",
               "intervention.backward_rank.refresh_every=20")  # fmt: skip
    sides = [Trained(no_probes(config("subword", *chosen)), folder) for chosen in (reduced, ())]
    with_it, without = steps_of("subword", *sides)
    row("backward_rank r48 / none, subword step", with_it / without, "<= 1.05", with_it / without <= 1.05,
        f"{with_it * 1e3:.1f} against {without * 1e3:.1f} ms a step")  # fmt: skip


def route_rows(row: Callable, folder: Path) -> None:
    arms = [arm for arm in config("byte", ROUTES).plan.arms if arm != "rate_plus_10"]  # backprop is the first
    sides = [Trained(no_probes(config("byte", ROUTES, f"arm={arm}")), folder) for arm in arms]
    backprop, *routes = steps_of("byte", *sides)
    for arm, with_it in zip(arms[1:], routes, strict=True):
        row(f"route {arm} / none, byte step", with_it / backprop, "", None,
            f"{with_it * 1e3:.1f} against {backprop * 1e3:.1f} ms a step")  # fmt: skip


def measuring_rows(row: Callable, folder: Path) -> None:
    measured = {size: config(size, f"train.steps={steps}") for size, steps in (("byte", 600), ("subword", 1200))}
    for what, cfg in (measured | {what: compose_run(given) for what, given in MEASURED.items()}).items():
        ratio, detail = probe_overhead(cfg, folder, 1 if "small" in what else 3)
        row(f"run with probes / without, {what}", ratio, "<= 1.05", ratio <= 1.05, detail)


def lost_rows(row: Callable, folder: Path) -> None:
    torch.manual_seed(0)
    H, W = torch.randn(1024, 96, dtype=torch.float64), torch.randn(8192, 96, dtype=torch.float64) * 0.1
    y = torch.randint(8192, (1024,))
    error = abs(head_gradient_stats(H, W, y)["lost"] - explicit_lost(H, W, y))
    gram, explicit = race(lambda: head_gradient_stats(H, W, y), lambda: explicit_lost(H, W, y), rounds=7)
    row("lost fraction, Gram identity against explicit projection: |difference|", error, "<= 1e-9", error <= 1e-9,
        "float64, N 1,024, D 96, V 8,192")  # fmt: skip
    row("explicit projection / Gram identity, seconds", explicit / gram, "", None,
        f"{explicit * 1e3:.0f} against {gram * 1e3:.0f} ms")  # fmt: skip
    H, W = torch.randn(1024, 768), torch.randn(50257, 768) * 0.02  # GPT-2's head, float32 as a model is
    y = torch.randint(50257, (1024,))

    def streamed():
        space = column_space(W)
        return summary(passed(H, y, space), space)["lost"]

    difference = abs(streamed() - explicit_lost(H.double(), W.double(), y))
    row("the same, streamed in float32 against float64, GPT-2's head: |difference|", difference, "<= 1e-6",
        difference <= 1e-6, "N 1,024, D 768, V 50,257")  # fmt: skip
    ours, explicit = race(streamed, lambda: explicit_lost(H, W, y), rounds=3)
    row("explicit projection / streamed, GPT-2's head, both in float32, seconds", explicit / ours, "", None,
        f"{explicit:.1f} against {ours:.1f} s, factorisations included")  # fmt: skip


def gradient_rows(row: Callable, folder: Path) -> None:
    """SmolLM2-135M's shape with drawn weights, 1,024 tokens in two sequences: what is measured costs the same."""
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    model = LlamaModel(LlamaConfig(vocab_size=49152, num_key_value_heads=3, **shape)).eval()
    weight, space = model.embed_tokens.weight.detach(), column_space(model.embed_tokens.weight.detach())
    x, y = torch.randint(49152, (2, 512)), torch.randint(49152, (1024,))

    def hidden():
        return model(input_ids=x, use_cache=False).last_hidden_state.flatten(0, 1)

    with torch.no_grad():
        forward, measured = race(
            lambda: F.cross_entropy(hidden() @ weight.T, y), lambda: passed(hidden(), y, space), rounds=5
        )
    row("forward with the lost fraction of every token / forward with the loss, SmolLM2-135M", measured / forward,
        "<= 1.5", measured / forward <= 1.5, f"{measured:.2f} against {forward:.2f} s for 1,024 tokens")  # fmt: skip


ONE_LOSS = """
import resource, sys, time, torch
from backrank.head import LOSSES
name, tokens, vocab, width = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)
H, W = torch.randn(tokens, width, requires_grad=True), (torch.randn(vocab, width) * 0.02).requires_grad_()
y = torch.randint(vocab, (tokens,))
LOSSES[name](H[:1], W[:64], y[:1] % 64, 1).backward()
before, tick = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
LOSSES[name](H, W, y, tokens).backward()
peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
print(time.perf_counter() - tick, peak - 4 * (H.numel() + W.numel()))
"""


def loss_rows(row: Callable, folder: Path) -> None:
    """Loss and both gradients at V 131,072, D 576, each in a process of its own: seconds, and memory besides the
    gradients. Whole logits of 8,192 tokens would take 4.3 GB a copy, so that only ours is run on so many."""

    def one(name: str, tokens: int) -> tuple[float, float]:
        command = [sys.executable, "-c", ONE_LOSS, name, str(tokens), "131072", "576"]
        seconds, memory = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        return float(seconds), float(memory) / 2**20

    names = [name for name in ("chunked", "torch", "plain") if name != "torch" or hasattr(F, "linear_cross_entropy")]
    found = {name: [one(name, 1024) for _ in range(3)] for name in names}
    seconds, memory = ({n: statistics.median(x[i] for x in of) for n, of in found.items()} for i in (0, 1))
    for name in names[1:]:
        row(f"{name} loss / chunked, V 131,072, 1,024 tokens, seconds", seconds[name] / seconds["chunked"], "", None,
            f"{seconds[name]:.1f} against {seconds['chunked']:.1f} s; {memory[name]:,.0f} against "
            f"{memory['chunked']:,.0f} MiB besides the gradients")  # fmt: skip
    took, held = one("chunked", 8192)
    # a chunk of 128 rows, the gradients once more (times the one from above), and what small tensors take
    bound = 4 * (128 * 131072 + (8192 + 131072) * 576) / 2**20 + 64
    row("chunked loss, V 131,072, 8,192 tokens, MiB besides the gradients", held, f"<= {bound:.0f}", held <= bound,
        f"{took:.1f} s; the logits alone are 4,096 MiB")  # fmt: skip


def sweep_rows(row: Callable, folder: Path) -> None:
    one, two, both = race(*(partial(sweep_seconds, *x, folder) for x in ((1, 1), (2, 1), (1, 2))), rounds=3)
    detail = "eight runs of 300 steps, start-up included"
    row("byte sweep, seconds JOBS=1 / JOBS=2", one / two, ">= 1.4", one / two >= 1.4,
        f"{one:.1f} against {two:.1f} s, one thread a worker; {detail}")  # fmt: skip
    row("byte sweep, seconds JOBS=1 with two threads / JOBS=2 with one", both / two, "", None,
        f"{both:.1f} against {two:.1f} s; {detail}")  # fmt: skip


GROUPS = {"trainer": trainer_rows, "routes": route_rows, "measuring": measuring_rows, "lost": lost_rows,
          "loss": loss_rows, "gradient": gradient_rows, "spectra": spectra_rows, "sweep": sweep_rows}  # fmt: skip


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "results" / "bench"
    chosen = [name for name in os.environ.get("ONLY", "").split(",") if name] or list(GROUPS)
    if unknown := set(chosen) - set(GROUPS):
        sys.exit(f"error: ONLY={','.join(unknown)}: is no group of timings. Known: {', '.join(GROUPS)}")
    path = out / "bench.csv"
    kept = (
        {row["what"]: row for row in pd.read_csv(path, dtype=str).fillna("").to_dict("records")}
        if path.exists()
        else {}
    )

    def row(what: str, value: float, bound: str, met: bool | None, detail: str) -> None:
        word = {True: "yes", False: "NO", None: ""}[met]
        kept[what] = {"what": what, "measured": f"{value:.3g}", "bound": bound, "met": word, "detail": detail,
                      "date": time.strftime("%Y-%m-%d")}  # fmt: skip
        print(kept[what], flush=True)

    with tempfile.TemporaryDirectory() as name, contextlib.redirect_stderr(io.StringIO()):
        for group in chosen:
            GROUPS[group](row, Path(name))
    table = pd.DataFrame(kept.values()).fillna("")
    from backrank.analysis.tables import markdown

    text = (
        f"# Timings\n\nRatios within one run, medians of interleaved segments; {torch.get_num_threads()} thread unless "
        f"a row says otherwise; the default text or digits.\n\nMachine: {platform.machine()}, {os.cpu_count()} cores; "
        f"Python {platform.python_version()}, torch {torch.__version__}; `make bench`.\n\n{markdown(table)}\n"
    )
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(out / "bench.md", text)
    atomic_write(path, table.to_csv(index=False))
    print(f"written: {out / 'bench.md'}")


if __name__ == "__main__":
    main()
