"""Hydra's multirun as backrank's plans: `-m experiment=a,b` runs every arm, search and seed of both."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from omegaconf import DictConfig, open_dict, read_write

# a plain dict: Hydra's scan runs this file without entering it in sys.modules, which a dataclass would need
ConfigStore.instance().store(
    group="hydra/sweeper", name="plan", provider="backrank", node={"_target_": "hydra_plugins.plan_sweeper.PlanSweeper"}
)


class PlanSweeper(Sweeper):
    """`arm=` and `seed=` replace the plan's arms and seeds; every other sweep on the command line multiplies it.

    With Hydra's own launcher the runs go to worker processes here. Any other launcher, such as
    `hydra/launcher=submitit_slurm`, starts JOBS jobs, each of which is a worker of the same plan.
    """

    def setup(self, *, hydra_context: Any, task_function: Callable[[DictConfig], Any], config: DictConfig) -> None:
        self.context, self.config = hydra_context, config

    def sweep(self, arguments: list[str]) -> None:
        """Exits with the sweep's code, since Hydra drops what a sweeper returns."""
        from backrank.config import ConfigError
        from backrank.reproduce import execute, submit, swept

        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            problem = "processes were started for one sweep, which starts its own"
            raise ConfigError("WORLD_SIZE", os.environ["WORLD_SIZE"], problem, "Leave out torchrun, or -m")
        if self.config.hydra.launcher._target_.endswith(".BasicLauncher"):
            sys.exit(execute(swept(arguments)))

        def launch(worker: Callable[[DictConfig], Any], jobs: int, folder: str) -> Any:
            with read_write(self.config), open_dict(self.config):
                self.config.hydra.sweep.dir = folder
            launcher = Plugins.instance().instantiate_launcher(
                hydra_context=self.context, task_function=worker, config=self.config
            )
            return launcher.launch([[]] * jobs, initial_job_idx=0)

        sys.exit(submit(arguments, launch))
