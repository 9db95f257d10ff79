"""Prepare a data set for machines without a network: `python -m backrank.data <hub id> <config or -> <folder>`."""

import sys
from pathlib import Path


def main(hub_id: str, config: str, folder: str) -> None:
    """Write `<folder>/<split>.parquet` for every split; `data.root` is then the folder above."""
    import datasets

    Path(folder).mkdir(parents=True, exist_ok=True)
    for split, rows in datasets.load_dataset(hub_id, None if config == "-" else config).items():
        rows.to_parquet(str(Path(folder) / f"{split}.parquet"))


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    main(*sys.argv[1:])
