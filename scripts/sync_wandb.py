"""Sends finished runs to W&B from their own files: python scripts/sync_wandb.py [runs root] [--project P] [--entity E].

A run that was sent holds a wandb.json; asking again sends nothing twice. Exits 1 if a run could not be sent.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from omegaconf import OmegaConf

from backrank.config import ConfigError, Logger
from backrank.mirror import SENT, backfill


def main() -> int:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "root",
        nargs="?",
        type=Path,
        default=os.environ.get("BACKRANK_RUNS", "results/runs"),
        help="folder that holds the runs",
    )
    parser.add_argument("--project", help="instead of the project in each run's config")
    parser.add_argument("--entity", help="instead of the entity in each run's config")
    args = parser.parse_args()
    done = [path.parent for path in sorted(args.root.glob("*/summary.json")) if ".old-" not in path.parent.name]
    waiting = [folder for folder in done if not (folder / SENT).exists()]
    sent, damaged = 0, 0
    for folder in waiting:
        keys = OmegaConf.load(folder / "config.yaml").get("logger") or {}
        logger = Logger(**{**keys, "mode": "online"})
        logger.project, logger.entity = args.project or logger.project, args.entity or logger.entity
        try:
            if not backfill(folder, logger):
                break  # the next run would wait for the same server
            sent += 1
        except ConfigError as error:
            print(error, file=sys.stderr)
            damaged += 1
    left = len(waiting) - sent
    print(f"{args.root}: {sent} sent now, {len(done) - len(waiting)} before, {left} not sent ({damaged} damaged)")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
