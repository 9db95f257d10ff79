"""Prepare data: `python -m backrank.data fetch` for machines without a network, `pack` for billions of tokens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from backrank.config import ConfigError
from backrank.data import pack


def fetch(hub_id: str, config: str, folder: str) -> None:
    """Write `<folder>/<split>.parquet` for every split; `data.root` is then the folder above."""
    import datasets

    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, rows in datasets.load_dataset(hub_id, None if config == "-" else config).items():
        rows.to_parquet(str(Path(folder) / f"{split}.parquet"))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m backrank.data", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="a data set of the hub, whole, as one parquet file a split")
    fetching.add_argument("hub_id")
    fetching.add_argument("config", help="its configuration, - for none")
    fetching.add_argument("folder")
    pack.arguments(commands.add_parser("pack", help="documents as token ids in shards, for data=shards"))
    args = vars(parser.parse_args(argv))
    try:
        {"fetch": fetch, "pack": pack.pack}[args.pop("command")](**args)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"failed: {error}; the same command continues it", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues it", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
