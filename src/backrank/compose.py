"""Overrides -> config, with Hydra's errors turned into one line each. Imports no torch."""

from __future__ import annotations

import difflib
import functools
import itertools
import pickle
import re
from collections.abc import Iterable, Sequence
from typing import Any

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from .config import CONFIGS, Config, ConfigError, keys, nearest

ConfigStore.instance().store(name="schema", node=Config)

TEXT_KEYS = ("label",)  # whatever is typed is the text
# text too, of which a comma makes a sweep
NAME_KEYS = (
    "runs",
    "parent",
    "model.path",
    "data.path",
    "data.root",
    "data.cache",
    "data.tokenizer",
    "downstream.include",
    "logger.project",
    "logger.entity",
)
PLUGINS = ("intervention", "probe")  # groups whose choices are classes, not files
QUOTED = re.compile(r"""'(\\.|[^'\\])*'|"(\\.|[^"\\])*\"""")


def quote_text(argv: Sequence[str]) -> list[str]:
    """Keeps free text as it was typed: `label=12345e7` is no number, and `#`, `,` and `=` are part of a label."""
    quoted = []
    for item in argv:
        key, sep, value = item.partition("=")
        name = key.lstrip("+")
        text = name in TEXT_KEYS or name in NAME_KEYS and not re.search(r",|\$\{", value)
        if text and sep and value not in ("null", "", "???") and not QUOTED.fullmatch(value):
            if "${" in value:
                raise ConfigError(name, value, "holds ${, which a config reads as a reference", "Leave out the $")
            # Hydra takes backslashes as they are, except in front of a quote, the closing one included
            value = "'" + re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + "\\'" * bool(m[2]), value) + "'"
        quoted.append(f"{key}{sep}{value}")
    return quoted


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config of these overrides; raises ConfigError naming key, value and remedy."""
    from . import interventions, probes  # noqa: F401 - they register their settings with Hydra

    overrides = quote_text(overrides)
    try:
        cfg = from_kept(overrides) or from_files(overrides)
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:
        raise explain(error, overrides) from error
    with open_dict(cfg.plan.arms):
        for parts in itertools.product(*map(dict.items, axes_of(cfg))) if cfg.plan.axes else ():
            cfg.plan.arms["_".join(name for name, _ in parts if name != "_")] = [o for _, own in parts for o in own]
    return cfg


def axes_of(cfg: DictConfig) -> list[dict[str, list[str]]]:
    """`plan.axes`, references as they are written."""
    axes: Any = OmegaConf.to_container(cfg.plan.axes, resolve=False)
    if not all(isinstance(axis, dict) and all(isinstance(own, list) for own in axis.values()) for axis in axes):
        raise ConfigError("plan.axes", axes, "is no list of {name: [overrides]}", "For example [{a: [], b: [seed=2]}]")
    return [{str(name): own for name, own in axis.items()} for axis in axes]


def from_files(overrides: Sequence[str]) -> DictConfig:
    if GlobalHydra.instance().is_initialized():
        return hydra.compose("run", overrides=list(overrides))
    with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return hydra.compose("run", overrides=list(overrides))


def from_kept(overrides: Sequence[str]) -> DictConfig | None:
    """What `from_files` gives, in a fiftieth of the time; None for what only that can do.

    Hydra merges the files that are chosen, then sets the keys that are typed. What it merged is kept for as long as the
    files stay as they are.
    """
    given = [parsed(o) for o in overrides]
    if any(o.is_sweep_override() or o.key_or_group.startswith("hydra") for o in given):
        return None
    choices = [o for o in given if o.package or (CONFIGS / o.key_or_group).is_dir() or o.key_or_group in PLUGINS]
    if any(isinstance(o.value(), dict) for o in choices):  # keys, whatever they are called
        return None
    hydras = GlobalHydra.instance()
    files = str(hydras.config_loader().get_search_path()) if hydras.is_initialized() else "", CONFIGS
    stats = tuple((p, s.st_mtime_ns, s.st_size) for p in CONFIGS.rglob("*.yaml") for s in [p.stat()])
    cfg = pickle.loads(merged(tuple(o.input_line or "" for o in choices), files, stats))  # of its own, as a copy is
    ConfigLoaderImpl._apply_overrides_to_config([o for o in given if o not in choices], cfg)
    return cfg


@functools.lru_cache(maxsize=256)
def merged(choices: tuple[str, ...], *files: Any) -> bytes:
    return pickle.dumps(from_files(choices))


@functools.lru_cache(maxsize=4096)
def parsed(override: str) -> Override:
    return OverridesParser.create().parse_overrides([override])[0]


def compose_plan(overrides: Sequence[str]) -> DictConfig:
    """The config that holds the plan, of whose arms some refer to other keys.

    Settings of interventions and probes are left out: they may need an arm's own, which come with it, to be accepted.
    """
    return compose([o for o in overrides if not re.match(r"(intervention|probe)\b", key_of(o))])


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """`compose`, with the overrides of the plan's arm where `arm=<name>` is given; the command line beats them."""
    if "arm" not in map(key_of, overrides):
        return compose(overrides)
    cfg = compose_plan(overrides)
    if cfg.arm is None:
        return compose(overrides)
    if cfg.arm not in cfg.plan.arms:
        raise no_arm(cfg.arm, cfg.experiment, cfg.plan.arms)
    typed = {key_of(o) for o in overrides}
    return compose([*(o for o in cfg.plan.arms[cfg.arm] if key_of(o) not in typed), *overrides])


def no_arm(arm: str, experiment: str | None, known: Iterable[str]) -> ConfigError:
    if experiment is None:
        return ConfigError("arm", arm, "needs an experiment, whose plan has the arms", "Give experiment=<paper>/<name>")
    return ConfigError("arm", arm, f"is no arm of experiment {experiment}", nearest(arm, known))


def key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+~")


def explain(error: Exception, overrides: Sequence[str]) -> ConfigError:
    """A Hydra or OmegaConf error as key, value, problem and remedy."""
    chain: list[Any] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    text = " ".join(str(error).split())
    given = {key_of(o): o.partition("=")[2] for o in overrides}
    found_in = [k for k in given if re.search(rf"(?<![\w.]){re.escape(k)}(?![\w.])", text)]
    named = max(found_in, key=len, default="")
    full = next((str(e.full_key) for e in chain if getattr(e, "full_key", None)), "")
    if isinstance(error, YAMLError):
        return ConfigError("configs", CONFIGS, f"a file there is no YAML ({text})", "Correct it")
    # Hydra names the file that it was merging, which may be none of those that were asked for
    if in_file := re.match(r"In '(.+?)': \w+ raised while composing config: (.*?) full_key: (\S+)", text):
        name, problem, key = in_file.groups()
        return ConfigError(key, "", f"{problem}, in configs/{name}.yaml", "Correct the file")
    if "Ambiguous value" in text:
        key = named
        value = given.get(key, "")
        return ConfigError(
            key,
            value,
            "can be read in several ways without -m",
            f"One value that is a list: {key}=[{value}]. One text: {key}=\"'{value}'\". "
            f"A sweep over the values: -m {key}={value}",
        )
    if isinstance(error, OverrideParseException):
        key = key_of(error.override)
        return ConfigError(key, error.override.partition("=")[2], f"cannot be parsed ({text})", "Quote the value")
    if isinstance(error, MissingConfigException) or "Could not find" in text:
        found = re.search(r"Could not (?:find|load) '([^']+)'", text)
        missing = found.group(1) if found else named
        group, _, name = missing.partition("/")
        listed = CONFIGS / group
        options = (
            [p.relative_to(listed).with_suffix("").as_posix() for p in listed.rglob("*.yaml")]
            if listed.is_dir()
            else []
        )
        options += [n[:-5] for n in ConfigStore.instance().list(group)] if group in PLUGINS else []
        return ConfigError(group, name or missing, "does not exist", nearest(name, options))
    key = named or full
    value = given.get(key, "")
    if isinstance(error, ValueError) and not isinstance(error, OmegaConfBaseException):  # Hydra's own, for a group
        key = next((k for k, v in given.items() if v == "null" and (CONFIGS / k).is_dir()), next(iter(given), ""))
        return ConfigError(
            key,
            given.get(key, ""),
            f"cannot be read ({text})",
            "Name one of its choices, or leave it out; [] is none of a list",
        )
    if (
        re.search(r"not in struct|Key '.*' not (?:found|in)|Could not override", text)
        and "not Optional" not in text
        and "could not be converted" not in text
        and "not a subclass" not in text
    ):
        return unknown_key(key, value)
    if "not Optional" in text or value == "null":
        return ConfigError(key, value or "null", "cannot be null", "Give a value; 0 switches a rate or a decay off")
    # OmegaConf's inner messages are templates
    reasons = (" ".join(str(e).split()).split(" full_key")[0] for e in reversed(chain))
    reason = next((r for r in reasons if r and "$VALUE" not in r), text)
    return ConfigError(key, value, f"is not of its type ({reason})", "Give a value of that type")


def unknown_key(key: str, value: str) -> ConfigError:
    from .interventions import INTERVENTIONS
    from .probes import PROBES

    known = keys(OmegaConf.structured(Config))
    for group, classes in (("intervention", INTERVENTIONS), ("probe", PROBES)):
        settings = [f"{group}.{n}.{f}" for n, cls in classes.items() for f in cls.__dataclass_fields__]
        if key in settings:
            name = key.split(".")[1]
            return ConfigError(key, value, f"needs {name}, which is not chosen", f"Choose it: {group}=[{name}]")
        if key == group:
            return ConfigError(
                key,
                value,
                "is no choice",
                f"Choose by name, {group}=[<name>,...], then set {group}.<name>.<setting>; {nearest('', classes)}",
            )
        known += settings
    if key in known:
        return ConfigError(key, value, "has entries that are not there yet", f"Add them with a plus: +{key}=...")
    # a key without its group is the likeliest slip
    close = [k for k in known if k.endswith(f".{key}")] or difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    return ConfigError(
        key,
        value,
        "is no key of the configuration",
        f"Did you mean {close[0]}?" if close else "Its keys are in src/backrank/config.py",
    )


def parse(overrides: Sequence[str]) -> list[Any]:
    """Hydra's parsed overrides."""
    try:
        return OverridesParser.create().parse_overrides(list(quote_text(overrides)))
    except (OverrideParseException, ConfigCompositionException) as error:
        raise explain(error, overrides) from error
