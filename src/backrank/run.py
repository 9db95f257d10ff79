"""One run, or with -m a sweep: compose -> validate -> look at the data -> claim the folder -> build -> fit -> summary.

python -m backrank.run experiment=causal_test/byte_heads arm=backward_r8 seed=1
python -m backrank.run -m experiment=causal_test/byte_heads scale=laptop
torchrun --nproc-per-node 2 -m backrank.run experiment=causal_test/subword_heads arm=ordinary parallel=ddp
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from . import data
from .compose import compose_run, quote_text
from .config import CONFIGS, ROOT, ConfigError, parent_arm, validate
from .distributed import Elsewhere, Parallel, Processes, Silent, exit_code, is_first, joined
from .identity import canonical, hash_of, run_id, trunk_of
from .mirror import WandbMirror
from .recorder import Recorder, atomic_write, disk, read_rows
from .rundir import Held, RunDir, code_hash, counting, provenance, write_json
from .studies import measure
from .trunk import Trunk

log = logging.getLogger("backrank")
EXIT_CONFIG, EXIT_FAILED, EXIT_INTERRUPTED = 2, 1, 130


@dataclass(frozen=True)
class Outcome:
    id: str
    status: str  # done: it was finished already; ran: it is now
    summary: dict[str, Any]


def runs_root(cfg: DictConfig) -> Path:
    root = Path(cfg.runs)
    return root if root.is_absolute() else ROOT / root


def settle_paths(cfg: DictConfig) -> None:
    """Relative folders are relative to the project, whatever the working directory."""
    if not Path(cfg.data.cache).is_absolute():
        cfg.data.cache = str(ROOT / cfg.data.cache)


def identify(cfg: DictConfig) -> tuple[str, dict[str, str]]:
    """Run id and content hashes of the data; raises ConfigError for anything wrong. Loads no torch."""
    validate(cfg)
    settle_paths(cfg)
    data.check(cfg.data)
    hashes = data.content_hash(cfg.data)
    return run_id(cfg, hashes), hashes


def watched(cfg: DictConfig) -> dict[str, Any]:
    """Cadences and probes. A setting that is null is one that a probe does not have, so that a schema may grow."""
    every, probes = (OmegaConf.to_container(cfg[key], resolve=True) for key in ("every", "probe"))
    return {"every": every, "probe": {n: {k: v for k, v in p.items() if v is not None} for n, p in probes.items()}}


def covers(have: dict[str, Any], want: dict[str, Any]) -> bool:
    """Whether a record holds what another asks for: its probes with their settings, cadences that divide its own."""

    def divides(a: int, b: int) -> bool:
        return b == 0 or (a > 0 and b % a == 0)

    every = (
        all(
            have["every"][k] == v if k == "eval_tokens" else divides(have["every"][k], v)
            for k, v in want["every"].items()
            if k in ("eval", "eval_tokens")
        )
        and have["every"].get("fit", False) >= want["every"]["fit"]
    )
    return every and all(
        name in have["probe"]
        and divides(have["probe"][name]["every"], p["every"])
        and {**have["probe"][name], "every": 0} == {**p, "every": 0}
        for name, p in want["probe"].items()
    )


def widen(cfg: DictConfig, have: dict[str, Any]) -> None:
    """Adds to a config the probes and cadences of a record, or of another experiment's config, so that it covers both.

    Settings of which a run can have one only (a probe's, but for its cadence) stay as the config has them.
    """
    cfg.every.eval = math.gcd(cfg.every.eval, have["every"]["eval"])
    cfg.every.fit = cfg.every.fit or have["every"].get("fit", False)
    for name, settings in have["probe"].items():
        if name not in cfg.probe:
            OmegaConf.update(cfg, f"probe.{name}", settings, force_add=True)
        elif {**settings, "every": 0} == {**watched(cfg)["probe"][name], "every": 0}:
            cfg.probe[name].every = math.gcd(cfg.probe[name].every, settings["every"])


def check_parent(cfg: DictConfig) -> None:
    """Raises ConfigError unless the run that this one starts from is named, where its plan asks for one, and there."""
    if cfg.parent is None and (leader := parent_arm(cfg.plan, cfg.arm)):
        problem = f"arm {cfg.arm} starts from a run of arm {leader}"
        raise ConfigError("parent", None, problem, "Run it with -m, which runs that first, or name it: parent=<run id>")
    if cfg.parent is not None and not RunDir(runs_root(cfg), cfg.parent).done:
        raise ConfigError("parent", cfg.parent, f"is no finished run in {runs_root(cfg)}", "Name one that is")


def adopt(cfg: DictConfig, rundir: RunDir) -> None:
    """Gives a config the probes and cadences of a record that is to be continued, in the order of its config.yaml."""
    path = rundir.path / "config.yaml"
    try:
        written = OmegaConf.load(path)
        every, probe = written.every, written.probe
    except Exception as error:  # whatever a damaged file makes of it
        raise ConfigError(
            "runs", path, f"cannot be read ({type(error).__name__})", f"Run with FRESH=1, or move {rundir.path} away"
        ) from error
    OmegaConf.update(cfg, "every", every)
    cfg.probe = probe


def is_current(rundir: RunDir, cfg: DictConfig, fresh: bool) -> bool:
    """Whether a finished run holds what this config asks for.

    With `fresh` it must also come from the current code, or from code that a recheck found to give the same numbers.
    """
    meta = rundir.read("meta.json", damaged_is_none=fresh) or {}
    stale = fresh and meta.get("code_hash") not in counting(cfg, code_hash(cfg))
    if fresh and rundir.read("summary.json", damaged_is_none=True) is None:
        return False
    return bool(meta) and covers(meta["watched"], watched(cfg)) and not stale


def run_one(
    cfg: DictConfig,
    fresh: bool = False,
    also: Sequence[dict[str, Any]] = (),
    parallel: Parallel | None = None,
    keep_trunk: bool = True,
) -> Outcome:
    """Runs, continues or skips one run.

    `fresh` starts stale, damaged, failed and unfinished ones anew; `also`: what other experiments watch in this run;
    `keep_trunk`: a longer run may come that branches from this one's.
    Raises ConfigError for bad input, Held if another process has the run, Interrupted after a signal; any other error
    is written to the run's own log and failed.json, and raised.
    """
    parallel = parallel or Parallel()
    identity, hashes = identify(cfg)
    if cfg.parallel != parallel.mode:
        problem = "is a single run that torchrun starts, not one of a sweep"
        raise ConfigError("parallel", cfg.parallel, problem, "torchrun -m backrank.run ..., or parallel=none")
    check_parent(cfg)
    for other in also:
        widen(cfg, other)
    rundir = RunDir(runs_root(cfg), identity)
    code = code_hash(cfg)
    with rundir.claim():
        meta, aside = rundir.read("meta.json", damaged_is_none=fresh), True
        if meta is not None and rundir.done:
            if is_current(rundir, cfg, fresh):
                return Outcome(identity, "done", rundir.read("summary.json") or {})
            widen(cfg, meta["watched"])
        # what two versions of the code, or two sets of probes, wrote half each is no record of either
        elif meta is not None and not fresh and meta["code_hash"] == code:
            if covers(meta["watched"], watched(cfg)):
                adopt(cfg, rundir)
                aside = False
            else:
                widen(cfg, meta["watched"])
        moved = rundir.set_aside() if aside else None
        try:
            return Outcome(identity, "ran", fit(cfg, rundir, hashes, code, parallel, keep_trunk))
        except ConfigError:
            if moved and not rundir.path.exists():  # refused before it began
                moved.rename(rundir.path)
            raise


def fit(
    cfg: DictConfig, rundir: RunDir, hashes: dict[str, str], code: str, parallel: Parallel, keep_trunk: bool
) -> dict[str, Any]:
    """Builds and trains in a claimed folder, from its checkpoint if it has one."""
    made = not rundir.path.exists()
    with disk(rundir.root):
        rundir.path.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(rundir.path / "log.txt", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    recorder, ended = None, "failed"
    cpu, wall = time.process_time(), time.perf_counter()
    try:
        source = data.load(cfg.data)
        recorder = Recorder(rundir.path, WandbMirror(rundir.path, cfg.logger) if cfg.logger.name == "wandb" else None)
        if cfg.study:
            measured = measure(cfg, source, runs_root(cfg))
            trainer, record = None, {"device": measured.device, "parents": measured.parents, "facts": {}}
        else:
            from .build import build  # from here on torch is loaded

            trainer, record = build(cfg, source, rundir, recorder, parallel)
        state, trunk = rundir.load() if trainer else {}, None
        if trainer and cfg.optim.schedule == "wsd" and cfg.parallel == "none":  # else all would have to branch at once
            key = [trunk_of(canonical(cfg, hashes)), code, watched(cfg), record["device"]]
            trunk = Trunk(rundir, hash_of(key), cfg.train.steps - cfg.optim.cooldown)
            if state is None and (state := trunk.branch()):
                log.info("branching from a trunk at step %d", state["step"])
        atomic_write(rundir.path / "config.yaml", OmegaConf.to_yaml(cfg, resolve=True))
        write_json(
            rundir.path / "meta.json",
            {
                **provenance(),
                **record,
                "parent": cfg.parent,
                "id": rundir.id,
                "code_hash": code,
                "data": cfg.data.name,
                "data_hash": data.content(hashes),
                "tokenizer_hash": hashes.get("tokenizer"),
                "watched": watched(cfg),
                **{key: cfg[key] for key in ("seed", "experiment", "scale", "arm", "label")},
            },
        )
        made = False
        with parallel.agreeing():
            parallel.tell((cfg, rundir.id, state and state["step"]))  # all is well here: the others build the same
        if trainer is None:
            recorder.truncate({})
            recorder.metrics(1, measured.metrics)
            recorder.layers(1, measured.rows)
            recorder.flush()
            state = {"step": 1, "wall_s": time.perf_counter() - wall, "core_s": time.process_time() - cpu}
        elif state is None or "optimiser" in state:
            parallel.listening = False
            if state is None:
                recorder.truncate({})
            else:
                trainer.restore(state)
                log.info("continuing at step %d", trainer.step)
            if trunk and keep_trunk:
                save = trainer.save
                trainer.save = lambda state: (save(state), trunk.leave(state))
            (rundir.path / "failed.json").unlink(missing_ok=True)
            trainer.fit()
            parallel.listening = True
            seconds = trainer.elapsed()
            state = {
                "step": trainer.step,
                "task": parallel.whole_task.state_dict(),
                "offsets": recorder.offsets(),
                "wall_s": round(seconds, 3),
                "core_s": round(seconds / (time.perf_counter() - wall) * (time.process_time() - cpu), 3),
            }
            rundir.save(state)  # weights alone, for later studies
            if trunk and not keep_trunk:
                shutil.rmtree(trunk.path, ignore_errors=True)
        else:  # trained to the end, and ended before the summary was written
            recorder.truncate(state["offsets"])
        facts = record["facts"]
        if hasattr(source, "words"):  # what turns a loss a token into one a word
            facts |= {f"{split}_words": source.words[split] for split in source.words}
            facts |= {f"{split}_tokens": len(getattr(source, split)) for split in source.words}
        summary = summarise(rundir.path) | {
            **{f"data/{name}": value for name, value in facts.items()},
            "id": rundir.id,
            "steps": state["step"],
            "wall_s": state["wall_s"],
            "core_s": state["core_s"],
        }
        for name in ("val/loss", "test/loss"):
            if trainer and summary[name] is None:  # the last update did it
                from .trainer import NonFiniteLoss

                raise NonFiniteLoss(f"{name} is not finite at step {state['step']}: lower optim.lr")
        write_json(rundir.path / "summary.json", summary)
        (rundir.path / "failed.json").unlink(missing_ok=True)
        ended = "done"
        return summary
    except BaseException as error:
        # a cluster's worker leaves by SystemExit when its time is up
        if type(error).__name__ == "Interrupted" or isinstance(error, (KeyboardInterrupt, SystemExit)):
            ended = "interrupted"
        elif isinstance(error, ConfigError) and made:  # refused before anything was made: nothing stays
            shutil.rmtree(rundir.path, ignore_errors=True)
        else:
            if isinstance(error, ConfigError):  # says all there is to say, and whoever called says it
                handler.handle(log.makeRecord(log.name, logging.ERROR, "", 0, "%s", (error,), None))
            else:
                log.error("%s", traceback.format_exc())
                error.logged = True  # type: ignore[attr-defined]
            with suppress(ConfigError):  # a full disk is no reason to hide the error
                write_json(
                    rundir.path / "failed.json",
                    {
                        "error": type(error).__name__,
                        "message": str(error),
                        "time": time.time(),
                        "diverged": type(error).__name__ == "NonFiniteLoss",
                    },
                )
        raise
    finally:
        if recorder:
            recorder.close(0 if ended == "done" else 1)
        log.removeHandler(handler)
        handler.close()


def follow(parallel: Processes) -> None:
    """What every process but the first does: builds the same, trains along, and ends as that one does (Elsewhere)."""
    cfg, identity, step = parallel.told()
    from .build import build
    from .trainer import Interrupted, NonFiniteLoss

    log.setLevel(logging.WARNING)
    rundir = RunDir(runs_root(cfg), identity)
    with parallel.agreeing():
        trainer, _ = build(cfg, data.load(cfg.data), rundir, Silent(), parallel)
        state = rundir.load()
        if (state and state["step"]) != step:  # two machines with a folder each would sum gradients of two models
            problem = f"has the run at step {state and state['step']}, that of the first process at {step}"
            raise ConfigError("runs", rundir.root, problem, "Name a folder that all processes share")
    if state is None or "optimiser" in state:
        if state is not None:
            trainer.restore(state)
        try:
            trainer.fit()
        except (Interrupted, NonFiniteLoss) as error:  # the first process meets it too, and says so
            raise Elsewhere(exit_code(error)) from None
    parallel.told()


def summarise(folder: Path) -> dict[str, Any]:
    """First and last value of every metric but the per-step ones: `<name>@0` at the start, `<name>` at the end."""
    summary: dict[str, Any] = {}
    for row in read_rows(folder / "metrics.jsonl", finished=True):
        for name, value in row.items():
            of_layers = re.fullmatch(r"rank/.*(/erank|_mean)", name) and name != "rank/weight_mean"
            curve = name.startswith(("time/", "val/curve")) or of_layers
            if curve or name in ("step", "nonfinite"):
                continue
            if row["step"] == 0:
                summary[f"{name}@0"] = value
            else:
                summary[name] = value
        if "val/curve_accuracy" in row:  # the best of the curve has a name of its own: the last value is the headline
            summary["val/best_accuracy"] = max(summary.get("val/best_accuracy", 0.0), row["val/curve_accuracy"])
    return summary


# ------------------------------------------------------------------------------------------------------ entry point


def single(overrides: Sequence[str]) -> int:
    """`python -m backrank.run` without -m."""
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    silent = not is_first()  # what all processes find wrong with the settings, one says
    try:
        cfg = compose_run(overrides)
        with joined(cfg) as parallel:
            silent = False
            if parallel.rank > 0:
                follow(parallel)
            outcome = run_one(cfg, bool(os.environ.get("FRESH")), parallel=parallel)
    except Elsewhere as error:
        return error.code
    except ConfigError as error:
        if not silent:
            print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except Held as error:
        print(f"{error}; nothing to do here", file=sys.stderr)
        return 0
    except KeyboardInterrupt:
        print("stopped; the same command continues it from its last checkpoint", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        if type(error).__name__ == "Interrupted":
            print(error, file=sys.stderr)
            return EXIT_INTERRUPTED
        if not hasattr(error, "logged"):
            traceback.print_exc()
        print(f"failed: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    said = "was done already" if outcome.status == "done" else "done"
    loss = f": val/loss {outcome.summary['val/loss']}" if "val/loss" in outcome.summary else ""
    print(f"{outcome.id} {said}{loss} in {runs_root(cfg) / outcome.id}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Single runs are composed here; -m and Hydra's own flags go through Hydra, whose sweeper is the plan."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not any(a.startswith("-") for a in argv):
        return single(argv)
    import hydra

    os.environ["HYDRA_FULL_ERROR"] = "1"  # errors come here whole, to be said in one line
    sys.argv = [sys.argv[0], *quote_text(argv)]
    from . import interventions, probes  # noqa: F401

    codes: list[int] = []

    @hydra.main(config_path=str(CONFIGS), config_name="run", version_base="1.3")
    def job(cfg: DictConfig) -> int:
        from hydra.core.hydra_config import HydraConfig

        codes.append(single(list(HydraConfig.get().overrides.task)))
        return codes[-1]

    try:
        job()
    except SystemExit as end:
        return int(end.code or 0)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return EXIT_INTERRUPTED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except Exception as error:
        from hydra.errors import HydraException
        from omegaconf.errors import OmegaConfBaseException

        if isinstance(error, (HydraException, OmegaConfBaseException)):
            from .compose import explain

            print(f"error: {explain(error, [a for a in argv if not a.startswith('-')])}", file=sys.stderr)
            return EXIT_CONFIG
        raise
    return max(codes, default=0)


if __name__ == "__main__":
    sys.exit(main())
