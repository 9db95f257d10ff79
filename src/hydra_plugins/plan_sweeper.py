"""Hydra's multirun as backrank's plans: `-m experiment=a,b` runs every arm, search and seed of both."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig

# a plain dict: Hydra's scan runs this file without entering it in sys.modules, which a dataclass would need
ConfigStore.instance().store(
    group="hydra/sweeper", name="plan", provider="backrank", node={"_target_": "hydra_plugins.plan_sweeper.PlanSweeper"}
)


class PlanSweeper(Sweeper):
    """`arm=` and `seed=` replace the plan's arms and seeds; every other sweep on the command line multiplies it."""

    def setup(self, *, hydra_context: Any, task_function: Callable[[DictConfig], Any], config: DictConfig) -> None:
        self.config = config

    def sweep(self, arguments: list[str]) -> None:
        """Exits with the sweep's code, since Hydra drops what a sweeper returns."""
        from backrank.compose import parse
        from backrank.reproduce import execute, studies_of

        axes: dict[str, list[str]] = {}
        for override in parse(arguments):
            key = override.get_key_element()
            swept = override.is_sweep_override()
            axes[key] = list(override.sweep_string_iterator()) if swept else [override.get_value_element_as_str()]
        arms, seeds = axes.pop("arm", None), axes.pop("seed", None)
        studies, swept = [], [key for key, values in axes.items() if len(values) > 1]
        for point in itertools.product(*axes.values()):
            studies += studies_of(dict(zip(axes, point, strict=True)), arms, seeds, swept)
        sys.exit(execute(studies))
