"""A finished run as a `transformers` checkpoint: `python -m backrank.export <run id> <folder>`.

Everything that a run may have done to the model is merged into plain weights: a factorised or frozen head becomes one
matrix, adapters are added to theirs. Rows of the head that are never a target stay, since the softmax that was trained
runs over them; the embedding gets rows of zeros for them, which no text reaches.
"""

from __future__ import annotations

import argparse
import copy
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from .config import ROOT, Config, ConfigError
from .rundir import RunDir

if TYPE_CHECKING:
    from torch import Tensor

    from .task import Task

TOLERANCE = 1e-5  # of the largest logit (or 1): float32 kernels differ by a tenth of it
TOKENS = 512  # of the batch on which the logits are compared, at most


def read_run(rundir: RunDir) -> tuple[DictConfig, dict[str, Any]]:
    """Config and meta.json of a finished training run. Raises ConfigError for any other."""
    meta = rundir.read("meta.json")
    if not rundir.done or meta is None:
        raise ConfigError("run", rundir.id, f"is no finished run in {rundir.root}", "Name one that is")
    written = OmegaConf.load(rundir.path / "config.yaml")
    known = OmegaConf.structured(Config)
    cfg = OmegaConf.merge(known, {key: written[key] for key in known if key in written})
    if cfg.study:
        raise ConfigError(
            "run", rundir.id, f"is a study ({cfg.study}), which trains nothing", "Name the run it measures"
        )
    return cfg, meta  # type: ignore[return-value]


def trained_task(cfg: DictConfig, rundir: RunDir, key: str = "run") -> Task:
    """The model of a run with its final weights, adapters merged, on the CPU. Raises ConfigError if they do not fit."""
    from .build import build_task

    task = build_task(cfg)[0]
    state = rundir.load()
    if state is None:
        raise ConfigError(key, rundir.id, "has no weights", "Run it again with FRESH=1")
    try:
        task.load_state_dict(merged(state["task"]))
    except RuntimeError as error:
        problem = f"has another shape ({str(error).splitlines()[-1].strip()})"
        raise ConfigError(key, rundir.id, problem, "Name a run of the same model, vocabulary and head") from None
    return task


def merged(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights with their adapters (interventions/adapters.py) added: W + B A under the name that W had."""
    out = {name: W for name, W in state.items() if ".parametrizations." not in name}
    for name, W in state.items():
        path, _, leaf = name.partition(".parametrizations.")
        if leaf.endswith(".original"):
            plus = name.removesuffix("original") + "0"
            out[f"{path}.{leaf.removesuffix('.original')}"] = W + (state[f"{plus}.B"] @ state[f"{plus}.A"]).view_as(W)
    return out


def export(task: Task, cfg: DictConfig, folder: Path, tokenizer: Any = None) -> None:
    """Writes the task to `folder` as what `AutoModelForCausalLM` loads, float32, with its tokenizer.

    Raises ConfigError for a model without a counterpart, and, leaving nothing behind, if the logits of what was written
    are not the task's own.
    """
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM, PreTrainedModel

    base, head = getattr(task.backbone, "model", None), task.head
    if not isinstance(base, PreTrainedModel):
        problem = "is no language model of transformers: nothing would load it"
        raise ConfigError("model.kind", cfg.model.kind, problem, "Name a run of model.kind=gpt2, toy or llama")
    if not head.linear:
        problem = f"has a head ({type(head).__name__}) that is no matrix, as transformers has it"
        raise ConfigError("intervention", list(cfg.intervention), problem, "Name a run with a linear head")
    config = copy.deepcopy(base.config)
    config.vocab_size, config.tie_word_embeddings = head.vocab, bool(cfg.model.tied)
    config.use_cache = True
    config.bos_token_id = config.eos_token_id = tokenizer and tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    state = {name: W.detach().clone() for name, W in base.state_dict().items()}
    extra = head.vocab - task.backbone.embedding.weight.shape[0]
    if extra:
        name = next(n for n, p in base.named_parameters() if p is task.backbone.embedding.weight)
        state[name] = nn.functional.pad(state[name], (0, 0, 0, extra))
    model.base_model.load_state_dict(state)
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(head.weight)  # tied: the same matrix again
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.save_pretrained(draft)
        if tokenizer is not None:
            tokenizer.save_pretrained(draft)
        compare(task, cfg, draft)
        draft.chmod(0o755)
        draft.rename(folder)  # fails if something has been put there
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def compare(task: Task, cfg: DictConfig, folder: Path) -> None:
    """Raises ConfigError unless the model in a folder has the task's logits on a batch of drawn tokens."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    shape = (2, min(cfg.data.sequence, TOKENS))
    x_BT = torch.randint(cfg.data.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), task.evaluating():
        ours = task.head(task.hidden(x_BT)).view(*shape, -1)
        theirs = model(input_ids=x_BT).logits
    worst = float((ours - theirs).abs().max())
    if not worst <= TOLERANCE * max(1.0, float(ours.abs().max())):
        problem = f"its logits differ by {worst:.1e} from those that transformers computes from the export"
        raise ConfigError("model.kind", cfg.model.kind, problem, "Nothing was written; use the run itself")


# -------------------------------------------------------------------------------------------------------- tokenizers


def byte_tokenizer() -> Any:
    """A tokenizer (package `tokenizers`) whose ids are the UTF-8 bytes: no character is known, so all fall back."""
    from tokenizers import Tokenizer, decoders, models

    tokenizer = Tokenizer(models.BPE(vocab={f"<0x{b:02X}>": b for b in range(256)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def tokenizer_of(node: Any, meta: dict[str, Any]) -> Any:
    """The tokenizer of a run's data for `transformers`, or None for data that is no text; meta: the run's meta.json.

    An end token is that of packed documents; text is joined without one. Raises ConfigError if the file is gone or
    another.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    from .data import shards, tokens

    name, end = meta["tokenizer_hash"], None
    if name is None:
        return None
    if name == "bytes":
        tokenizer = byte_tokenizer()
    elif name.startswith("bpe-"):
        path = Path(node.cache) / f"{meta['data_hash'][:16]}-{name[:16]}-{tokens.FORMAT}" / "tokenizer.json"
        if not path.exists():
            tokens.load(node)
        if not path.exists():
            raise ConfigError("data.name", node.name, "is not the text that the run was trained on", "Put it back")
        tokenizer = Tokenizer.from_file(str(path))
    else:
        path = node.tokenizer
        if node.source == "shards":
            path, end = shards.packed_tokenizer(node)
        tokenizer, found = tokens._tokenizer(str(path))
        if found != name:
            raise ConfigError("data.tokenizer", path, "is not the file that the run was trained with", "Put it back")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=end, model_max_length=node.sequence, clean_up_tokenization_spaces=False
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m backrank.export", description=__doc__)
    parser.add_argument("run", help="id of a finished run")
    parser.add_argument("folder", help="where the checkpoint goes; not there yet, or empty")
    parser.add_argument("--runs", default=os.environ.get("BACKRANK_RUNS", "results/runs"), help="folder of all runs")
    args = parser.parse_args(argv)
    folder, rundir = Path(args.folder), RunDir(ROOT / args.runs, args.run)
    try:
        if folder.exists() and (folder.is_file() or any(folder.iterdir())):
            raise ConfigError("folder", folder, "is there already", "Name another")
        cfg, meta = read_run(rundir)
        export(trained_task(cfg, rundir), cfg, folder, tokenizer_of(cfg.data, meta))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.run} is in {folder}: transformers.AutoModelForCausalLM.from_pretrained({str(folder)!r})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
