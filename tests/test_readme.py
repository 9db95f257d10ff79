"""The README says what the committed results say, and names only what exists."""

import re
from pathlib import Path

from backrank.analysis.readme import block, counts, rewritten
from backrank.config import ROOT

README = (ROOT / "README.md").read_text()


def test_verdicts_are_those_of_the_committed_claims():
    assert rewritten(README, ROOT) == README, "run `make readme`"


def test_a_changed_claim_changes_the_block(tmp_path):
    source = ROOT / "experiments" / "causal_test" / "claims.yaml"
    (tmp_path / "experiments" / "p").mkdir(parents=True)
    (tmp_path / "experiments" / "p" / "claims.yaml").write_text(source.read_text())
    assert block(tmp_path) == ""


def test_counts_put_judged_verdicts_first():
    import pandas as pd

    assert counts(pd.Series(["not run", "differs", "reproduced", "not run"])) == "1 reproduced, 1 differs, 2 not run"


def test_named_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert Path(ROOT / target).exists(), target


def test_named_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    patterns = [t.replace("%", ".+") for t in re.findall(r"^([a-z%-]+):", makefile, flags=re.M)]
    for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*[a-z])", README, flags=re.M):
        assert any(re.fullmatch(p, target) for p in patterns), target
