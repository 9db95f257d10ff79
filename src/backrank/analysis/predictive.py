"""Does what the head keeps of the gradient predict the loss? Leave one condition out (causal_test, predictive study).

A case is a row of features.csv that has a next: what is known at a checkpoint, and two losses that are not, the final
one and that at the next checkpoint. A model is fitted to all conditions but one and predicts that one: first from what
needs no gradient (loss, progress, learning rate, width, data set, method), then from this and a candidate feature too.
Each condition counts once, with the relative change of its error in percent; below 0 the candidate helps. The error is
the mean absolute one: the loss falls so fast at the start that squares would judge the first checkpoints alone.

What is predicted is the fall of the loss from where it is. Its error is that of the loss itself, and a model shrunk to
nothing then says "as usual", not "the mean loss of other conditions". Rates, widths, cond(W) and numbers of directions
go in as logarithms, names as indicators. Each ridge regression chooses its penalty within the fold, by how well it
predicts whole conditions there. A random forest, whose base errs less, stands beside for some candidates. `noise` is a
control: what a feature without any content changes.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import GroupKFold, LeaveOneGroupOut
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from .figures import Missing

TARGETS = {"final": "final_loss", "next": "next_loss"}
LOGARITHMS = ("lr", "width", "directions", "cond")
BASE = ("loss", "progress", "lr", "width")  # and data and method
PRESERVED = ["retained_norm", "angle", "target_preservation", "competitor_preservation"]
GRADIENT = [*PRESERVED, "directions", "strength", "cond"]
CANDIDATES = {**{name: [name] for name in GRADIENT}, "all": GRADIENT, "noise": ["noise"]}
FOREST = ("retained_norm", "all", "noise")  # a forest takes twenty times as long
PENALTIES = [1.0, 10.0, 100.0]


def leave_one_out(features: pd.DataFrame) -> pd.DataFrame:
    """Errors of every left-out condition, one row a candidate and condition, and first those of the base alone.

    features: rows of features.csv of one experiment. arm: base or a candidate; seed: the condition's number in the
    order of names; id: its runs; error_<target> in nats, error_change_<target> in percent of the base's, the same of
    the forest, nan where there is none. Raises Missing with fewer than 4 conditions.
    """
    cases = features.dropna().sort_values(["arm", "seed", "step"], ignore_index=True) if len(features) else features
    if cases.empty or cases["arm"].nunique() < 4:
        raise Missing("leave one condition out needs 4 conditions with the probe head_features or more")
    numbers = cases.assign(noise=np.random.default_rng(0).standard_normal(len(cases)))
    numbers[[*LOGARITHMS]] = np.log(numbers[[*LOGARITHMS]])
    names = pd.get_dummies(cases[["data", "method"]], dtype=float)
    falls = cases[[*TARGETS.values()]].sub(cases["loss"], axis=0).to_numpy()
    groups = cases["arm"].to_numpy()
    folds = list(LeaveOneGroupOut().split(falls, groups=groups))

    def errors(chosen: list[str], forest: bool) -> np.ndarray:
        """Conditions x targets."""
        X, rows = np.column_stack([numbers[[*BASE, *chosen]], names]), []
        for train, test in folds:
            if forest:
                model = RandomForestRegressor(30, min_samples_leaf=3, random_state=0)
            else:
                splits = list(GroupKFold(3).split(train, groups=groups[train]))
                search = RidgeCV(PENALTIES, cv=splits, scoring="neg_mean_absolute_error")
                model = make_pipeline(StandardScaler(), search)
            rows.append(np.abs(model.fit(X[train], falls[train]).predict(X[test]) - falls[test]).mean(0))
        return np.array(rows)

    ids = cases.groupby("arm")["id"].agg(lambda runs: " ".join(dict.fromkeys(runs))).tolist()
    tables, least = [], {}  # forest -> errors of the base
    for arm, chosen in {"base": [], **CANDIDATES}.items():
        table = pd.DataFrame({"arm": arm, "seed": range(1, len(ids) + 1), "id": ids, "condition": sorted(set(groups))})
        for forest in (False, True) if arm in ("base", *FOREST) else (False,):
            found = errors(chosen, forest)
            least.setdefault(forest, found)
            for i, target in enumerate(TARGETS):
                prefix = "forest_" * forest
                table[f"{prefix}error_{target}"] = found[:, i]
                if arm != "base":
                    table[f"{prefix}error_change_{target}"] = 100 * (found[:, i] / least[forest][:, i] - 1)
        tables.append(table)
    return pd.concat(tables, ignore_index=True).round(6)  # beyond that, digits hang on the number of threads
