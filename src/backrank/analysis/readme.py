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
    """One section a paper: its headline claims at the largest scale that has a report, and the count of verdicts."""
    lines = []
    for path in sorted((root / "experiments").glob("*/claims.yaml")):
        paper = path.parent.name
        ids = yaml.safe_load(path.read_text()).get("headline", [])
        scale = next((s for s in reversed(SCALES[1:]) if (root / "results" / paper / s / "claims.csv").exists()), None)
        if scale is None:
            continue
        folder = Path("results") / paper / scale
        claims = read_table(root / folder / "claims.csv").fillna({"note": ""}).set_index("id", drop=False)
        rows = claims.loc[[i for i in ids if i in claims.index]]
        shown = tables.show_claims(rows)[["claim", "published", "ours [95 % CI]", "n", "verdict"]]
        data = ", ".join(sorted(set(rows["data"].dropna().astype(str)) - {"published"}))
        title = f"**[{paper}](experiments/{paper}/README.md)**, scale {scale}, data {data}"
        lines += [f"{title}, [full report]({folder}/report.md). {by_source(claims)}\n", tables.markdown(shown)]
    return "\n".join(lines)


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
