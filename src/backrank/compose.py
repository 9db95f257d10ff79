"""Overrides -> config, with Hydra's errors turned into one line each. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .config import CONFIGS, Config, ConfigError, keys, nearest

ConfigStore.instance().store(name="schema", node=Config)

TEXT_KEYS = ("label",)


def quote_text(argv: Sequence[str]) -> list[str]:
    """Keeps free text as it was typed: `label=12345e7` is no number, and `#`, `,` and `=` are part of a label."""
    quoted = []
    for item in argv:
        key, sep, value = item.partition("=")
        if sep and key in TEXT_KEYS and value not in ("null", "") and not re.fullmatch(r"'.*'|\".*\"", value):
            value = "'" + re.sub(r"(\\*)'", r"\1\1\\'", value) + "'"
        quoted.append(f"{key}{sep}{value}")
    return quoted


def compose(overrides: Sequence[str]) -> DictConfig:
    """The config of these overrides; raises ConfigError naming key, value and remedy."""
    from . import interventions, probes  # noqa: F401 - they register their settings with Hydra

    overrides = quote_text(overrides)
    try:
        if GlobalHydra.instance().is_initialized():
            return hydra.compose("run", overrides=list(overrides))
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose("run", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise explain(error, overrides) from error


def compose_run(overrides: Sequence[str]) -> DictConfig:
    """`compose`, with the overrides of the plan's arm applied where `arm=<name>` is given; the command line beats them."""
    cfg = compose(overrides)
    if cfg.arm is None:
        return cfg
    if cfg.arm not in cfg.plan.arms:
        raise ConfigError("arm", cfg.arm, f"is no arm of experiment {cfg.experiment}", nearest(cfg.arm, cfg.plan.arms))
    typed = {key_of(o) for o in overrides}
    return compose([*(o for o in cfg.plan.arms[cfg.arm] if key_of(o) not in typed), *overrides])


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
    named = next((k for k in sorted(given, key=len, reverse=True) if re.search(rf"(?<![\w.]){re.escape(k)}(?![\w.])", text)),
                 "")
    full = next((str(e.full_key) for e in chain if getattr(e, "full_key", None)), "")
    if "Ambiguous value" in text:
        key = named
        value = given.get(key, "")
        return ConfigError(key, value, "can be read in several ways without -m",
                           f"One value that is a list: {key}=[{value}]. One text: {key}=\"'{value}'\". "
                           f"A sweep over the values: -m {key}={value}")
    if isinstance(error, OverrideParseException):
        key = key_of(error.override)
        return ConfigError(key, error.override.partition("=")[2], f"cannot be parsed ({text})", "Quote the value")
    if isinstance(error, MissingConfigException) or "Could not find" in text:
        found = re.search(r"Could not (?:find|load) '([^']+)'", text)
        missing = found.group(1) if found else named
        group, _, name = missing.partition("/")
        listed = CONFIGS / group
        options = [p.relative_to(listed).with_suffix("").as_posix() for p in listed.rglob("*.yaml")] \
            if listed.is_dir() else []
        options += [n[:-5] for n in ConfigStore.instance().list(group)] if group in ("intervention", "probe") else []
        return ConfigError(group, name or missing, "does not exist", nearest(name, options))
    key = named or full
    if re.search(r"not in struct|Key '.*' not (?:found|in)|Could not override", text) and "not Optional" not in text \
            and "could not be converted" not in text and "not a subclass" not in text:
        known = keys(OmegaConf.structured(Config))
        from .interventions import INTERVENTIONS
        from .probes import PROBES

        for group, found in (("intervention", INTERVENTIONS), ("probe", PROBES)):
            known += [f"{group}.{n}.{f}" for n, cls in found.items() for f in cls.__dataclass_fields__]
        return ConfigError(key, given.get(key, ""), "is no key of the configuration", nearest(key, known).split(" Known")[0]
                           + (" A setting of an intervention or probe needs it chosen first: intervention=[...]"
                              if key.startswith(("intervention.", "probe.")) else ""))
    value = given.get(key, "")
    if "not Optional" in text or value == "null":
        return ConfigError(key, value or "null", "cannot be null", "Give a value; 0 switches a rate or a decay off")
    reason = next((t for e in reversed(chain) if (t := " ".join(str(e).split()).split(" full_key")[0])), text)
    return ConfigError(key, value, f"is not of its type ({reason})", "Give a value of that type")


def parse(overrides: Sequence[str]) -> list[Any]:
    """Hydra's parsed overrides."""
    try:
        return OverridesParser.create().parse_overrides(list(quote_text(overrides)))
    except (OverrideParseException, ConfigCompositionException) as error:
        raise explain(error, overrides) from error
