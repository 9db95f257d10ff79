"""Builds the W&B workspaces, one per paper, of one scale: python scripts/wandb_dashboard.py --entity E [--scale S]."""

from __future__ import annotations

import argparse
import sys

from backrank.config import CONFIGS, SCALES

# paper -> section -> panels: (step axis, names, pattern of names); one line for each arm, the mean over its seeds
LOSS = [("train/step", ["train/loss"], None), ("val/step", ["val/curve_loss"], None)]
RANK = [("rank/step", [], "rank/.+/erank"), ("rank/step", ["rank/weight_mean"], None)]
LOST = [("head/step", ["head/lost", "head/null_lost"], None), ("head/step", ["head/cosine", "head/null_cosine"], None)]
PAPERS: dict[str, dict[str, list]] = {
    "backward_bottleneck": {"Loss by arm": LOSS, "Rank per layer": RANK},
    "lost_in_backprop": {"Loss by arm": LOSS, "Lost fraction and its null": LOST},
    "causal_test": {"Loss by arm": LOSS, "Rank per layer": RANK, "Lost fraction and its null": LOST},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--entity", required=True)
    parser.add_argument("--project", default="backrank")
    parser.add_argument("--scale", choices=SCALES, default="laptop")
    args = parser.parse_args()
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        print("wandb_workspaces is not installed: pip install wandb-workspaces", file=sys.stderr)
        return 1
    for paper, sections in PAPERS.items():
        names = [f"{paper}/{path.stem}" for path in sorted((CONFIGS / "experiment" / paper).glob("*.yaml"))]
        if not names:
            continue
        built = [
            ws.Section(
                name=title,
                is_open=True,
                panels=[
                    wr.LinePlot(x=axis, y=names, metric_regex=regex, groupby=wr.Config("arm"), groupby_aggfunc="mean")
                    for axis, names, regex in panels
                ],
            )
            for title, panels in sections.items()
        ]
        runs = ws.RunsetSettings(filters=f"Config('scale') = '{args.scale}' and Config('experiment') in {names}")
        workspace = ws.Workspace(
            entity=args.entity, project=args.project, name=f"{paper} {args.scale}", sections=built, runset_settings=runs
        )
        workspace.save()
        print(workspace.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
