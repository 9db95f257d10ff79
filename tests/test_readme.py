"""The README says what the committed results say, and names only what exists."""

import re
from pathlib import Path

import pytest

from backrank.analysis.readme import best, block, counts, rewritten
from backrank.analysis.report import load
from backrank.analysis.runs import read_table
from backrank.config import ROOT
from backrank.rundir import git

README = (ROOT / "README.md").read_text()


@pytest.mark.skipif(bool(git("status", "--porcelain", "results")), reason="results of your own stand beside the README")
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


def test_a_claim_is_shown_at_the_largest_scale_that_judges_it_with_an_interval():
    import pandas as pd

    def rows(**columns):
        return pd.DataFrame({"low": 0.0, "high": 1.0, **columns}, index=["a", "b", "c"])

    paper = rows(verdict=["needs the paper's scale", "differs", "not run"], low=[0.0, None, 0.0])
    laptop = rows(verdict=["reproduced", "kept", "not run"])
    scales = {"paper": paper, "laptop": laptop}
    assert [best(claim, scales)["verdict"] for claim in "abc"] == ["reproduced", "kept", "not run"]
    assert best("b", {"paper": paper})["verdict"] == "differs" and best("d", scales) is None


def test_named_files_exist():
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert Path(ROOT / target).exists(), target


def test_named_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    patterns = [t.replace("%", ".+") for t in re.findall(r"^([a-z%-]+):", makefile, flags=re.M)]
    for target in re.findall(r"(?:^|`)make ([a-z][a-z-]*[a-z])", README, flags=re.M):
        assert any(re.fullmatch(p, target) for p in patterns), target


def test_the_readmes_intervention_runs_as_it_stands(train, monkeypatch, tmp_path, request):
    """The example is one file: imported under its own name, chosen by config, and without effect at a huge norm."""
    from hydra.core.config_store import ConfigStore

    import backrank.interventions as package
    from backrank.plugins import discover

    code = re.search(r"```python\n# src/backrank/interventions/(\w+)\.py\n(.*?)```", README, flags=re.DOTALL)
    choices = ConfigStore.instance().repo["intervention"]
    request.addfinalizer(lambda: choices.pop(f"{code[1]}.yaml", None))  # nothing stays for other tests of this process
    (tmp_path / f"{code[1]}.py").write_text(code[2])
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    found = discover(package.__name__, [str(tmp_path)], package.Intervention, "intervention")
    monkeypatch.setitem(package.INTERVENTIONS, code[1], found[code[1]])
    plain = train(runs="plain").weights
    for norm, changes in ((1e9, False), (1e-4, True)):
        ran = train(f"intervention=[{code[1]}]", f"intervention.{code[1]}.norm={norm}")
        assert ran.code == 0
        assert any(not plain[name].equal(weight) for name, weight in ran.weights.items()) == changes


COMMITTED = sorted(p.parent for p in (ROOT / "results").glob("*/*/claims.csv") if p.parent.name != "smoke")


@pytest.mark.skipif(bool(git("status", "--porcelain", "results")), reason="results of your own stand beside the rows")
@pytest.mark.parametrize("folder", COMMITTED, ids=lambda p: f"{p.parent.name}-{p.name}")
def test_committed_claims_follow_from_the_committed_rows(folder):
    paper = folder.parent.name
    results = load(paper, folder.name, folder)
    judged = results.verdicts.set_index("id")
    written = read_table(folder / "claims.csv").set_index("id")
    assert written["verdict"].to_dict() == judged["verdict"].to_dict(), f"run `make report-{paper}`"
    # what is derived by a library's fit may differ a little between its versions
    derived = judged["experiment"].map(lambda name: "unit" in results.claims.experiments.get(name, {}))
    for rows, tolerance in ((~derived, {"rel": 1e-9}), (derived, {"abs": 0.1})):
        assert written["ours"][rows].to_numpy() == pytest.approx(
            judged["ours"][rows].to_numpy(float), nan_ok=True, **tolerance
        )
