"""The README's table of verdicts, written from the committed claims: no number in it is typed by hand."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import yaml

from ..config import SCALES
from . import tables
from .runs import read_table

BEGIN, END = "<!-- verdicts:", "<!-- /verdicts -->"
ORDER = ["reproduced", "by construction", "same direction", "underpowered", "differs", "adds up", "does not add up",
         "consistent", "contradiction", "kept", "broken"]  # fmt: skip


def block(root: Path) -> str:
    """One section a paper: each headline claim at the largest scale that judges it, with an interval if one has it."""
    lines = []
    for path in sorted((root / "experiments").glob("*/claims.yaml")):
        paper = path.parent.name
        ids = yaml.safe_load(path.read_text()).get("headline", [])
        folder, claims = Path("results") / paper, {}
        for scale in reversed(SCALES[1:]):
            if (path := root / folder / scale / "claims.csv").exists():
                claims[scale] = read_table(path).fillna({"note": ""}).set_index("id", drop=False)
        if not claims:
            continue
        rows = pd.DataFrame([row for i in ids if (row := best(i, claims)) is not None])
        shown = tables.show_claims(rows)[["claim", "published", "ours [95 % CI]", "n", "verdict"]]
        shown.insert(4, "scale, data", [f"{s}, {d}" if isinstance(d, str) else "" for s, d in
                                        zip(rows["scale"], rows["data"], strict=True)])  # fmt: skip
        lines.append(f"**[{paper}](experiments/{paper}/README.md)**\n")
        lines += [
            f"- scale {scale}: [report]({folder}/{scale}/report.md). {by_source(of)}" for scale, of in claims.items()
        ]
        lines += ["", tables.markdown(shown)]
    return "\n".join(lines)


def best(claim: str, claims: dict[str, pd.DataFrame]) -> pd.Series | None:
    """A claim's row: of the scales, largest first, the first with an interval, else the first judged, else any."""
    rows = [of.loc[claim] for of in claims.values() if claim in of.index]
    judged = [row for row in rows if row["verdict"] not in ("not run", "needs the paper's scale")]
    return next(iter([row for row in judged if row[["low", "high"]].notna().all()] + judged + rows), None)


def by_source(claims: pd.DataFrame) -> str:
    """The paper's statements and figures apart from the rows we added."""
    ours = claims["source"] == "ours"
    return f"The paper's: {counts(claims['verdict'][~ours])}. Added by us: {counts(claims['verdict'][ours])}."


def counts(verdicts: pd.Series) -> str:
    """How many of each verdict, the judged ones first."""
    found = verdicts.value_counts()
    names = [n for n in ORDER if n in found] + sorted(n for n in found.index if n not in ORDER)
    return ", ".join(f"{found[n]} {n}" for n in names)


def rewritten(text: str, root: Path) -> str:
    """The README's text with the block between its markers made anew."""
    return re.sub(rf"({BEGIN}[^\n]*\n).*?({END})", lambda m: m[1] + block(root) + m[2], text, flags=re.DOTALL)


def main(root: Path) -> None:
    path = root / "README.md"
    path.write_text(rewritten(path.read_text(), root))


if __name__ == "__main__":
    from ..config import ROOT

    main(ROOT)
