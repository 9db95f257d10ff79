"""Plans: what comes next as a function of the losses that are there, with losses made up here."""

import math

import pytest

from backrank import data
from backrank.compose import compose_run
from backrank.config import ConfigError
from backrank.identity import run_id
from backrank.plan import EXTENSIONS, Study, beyond
from backrank.run import widen

HASHES = {"text": "t", "tokenizer": "bytes"}
INF = {"validation": math.inf, "test": math.inf}


@pytest.fixture
def study(monkeypatch):
    """study(plan overrides) of two arms, `plain` and `wide`, without any data."""
    monkeypatch.setattr(data, "check", lambda _: None)
    monkeypatch.setattr(data, "content_hash", lambda _: HASHES)

    def study(
        *extra: str, seeds=(1, 2, 3), grids="{optim.lr:[0.01,0.02,0.04]}", arms="{plain:[],wide:['model.width=64']}"
    ):
        plan = [f"+plan.arms={arms}", f"+plan.search.grids={grids}"]
        return Study(None, "smoke", [*plan, *extra], seeds=list(seeds))

    return study


class Losses(dict):
    """Losses by run id, filled in by `finish` as a function of settings; test losses rank the other way round."""

    def finish(self, progress, curve, arm=None):
        for job in progress.jobs:
            if job.id not in self and arm in (None, job.arm):
                loss = curve(**{k.split(".")[-1]: v for k, v in job.settings})
                self[job.id] = INF if loss is None else {"validation": loss, "test": -loss}


def finals(progress, arm="plain"):
    return [(j.seed, dict(j.settings)) for j in progress.jobs if j.stage == "final" and j.arm == arm]


def values(progress, arm="plain", key="optim.lr"):
    return sorted({dict(j.settings)[key] for j in progress.jobs if j.arm == arm})


def valley(at):
    return lambda lr: abs(math.log(lr / at))


def test_search_then_choice_then_finals_and_the_search_run_is_one_of_them(study):
    plan, losses = study(), Losses()
    first = plan.progress(losses.get)
    assert [(j.arm, j.seed, j.stage) for j in first.jobs] == [("plain", 1, "search")] * 3 + [("wide", 1, "search")] * 3
    assert first.unnamed == 4 and not first.choices  # seeds 2 and 3 of both arms: pending, not named yet
    losses.finish(first, valley(0.02), arm="plain")
    second = plan.progress(losses.get)
    assert finals(second) == [(1, {"optim.lr": 0.02}), (2, {"optim.lr": 0.02}), (3, {"optim.lr": 0.02})]
    assert second.unnamed == 2 and not finals(second, "wide")
    [choice] = second.choices
    assert (choice.arm, choice.best, choice.edge, choice.extended) == ("plain", {"optim.lr": 0.02}, False, 0)
    assert choice.losses == [losses[run]["validation"] for run in choice.runs]
    assert choice.test_losses == [-loss for loss in choice.losses] and choice.split == "validation"
    searched = {j.id for j in first.jobs if j.arm == "plain"}
    assert len({j.id for j in second.jobs}) == len(second.jobs)
    assert next(j.id for j in second.jobs if j.stage == "final" and j.seed == 1) in searched
    assert [j.id for j in plan.progress(losses.get).jobs] == [j.id for j in second.jobs]  # no state
    losses.finish(second, valley(0.02))
    third = plan.progress(losses.get)
    assert third.unnamed == 0 and len(finals(third, "wide")) == 3
    losses.finish(third, valley(0.02))
    assert all(losses.get(j.id) for j in plan.progress(losses.get).jobs)


def test_ids_and_overrides_of_jobs_are_those_of_the_configs_they_compose(study):
    plan = study(grids="{optim.lr:[1e-3,1.0],optim.weight_decay:[0.0,1.0]}", seeds=(3,))
    for job in plan.progress({}.get).jobs:
        cfg = compose_run(job.overrides)
        assert run_id(cfg, HASHES) == job.id and (cfg.arm, cfg.seed) == (job.arm, 1)
        assert (cfg.optim.lr, cfg.optim.weight_decay) == tuple(dict(job.settings).values())


def test_a_seed_of_the_search_that_is_none_of_the_plan_has_no_final_run(study):
    plan, losses = study(seeds=(5, 6)), Losses()
    assert plan.progress(losses.get).unnamed == 4
    losses.finish(plan.progress(losses.get), valley(0.02))
    done = plan.progress(losses.get)
    assert finals(done) == [(5, {"optim.lr": 0.02}), (6, {"optim.lr": 0.02})] and done.unnamed == 0
    assert sum(j.stage == "search" for j in done.jobs) == 6


@pytest.mark.parametrize(
    ("best", "searched", "edge", "extended"),
    [
        (0.02, [0.01, 0.02, 0.04], False, 0),
        (0.005, [0.0025, 0.005, 0.01, 0.02, 0.04], False, 2),
        (0.0001, [0.0025, 0.005, 0.01, 0.02, 0.04], True, 2),
        (0.08, [0.01, 0.02, 0.04, 0.08, 0.16], False, 2),
        (9.0, [0.01, 0.02, 0.04, 0.08, 0.16], True, 2),
    ],
)
def test_an_edge_extends_the_grid_towards_it_at_most_twice(study, best, searched, edge, extended):
    plan, losses = study(), Losses()
    for _ in range(EXTENSIONS + 3):
        losses.finish(plan.progress(losses.get), valley(best))
    done = plan.progress(losses.get)
    assert values(done) == searched
    choice = done.choices[0]
    assert (choice.edge, choice.extended) == (edge, extended)
    assert choice.best["optim.lr"] == min(searched, key=lambda lr: valley(best)(lr))
    assert len(finals(done)) == 3


def test_an_edge_beside_a_diverged_point_is_extended_the_other_way(study):
    plan, losses = study(), Losses()
    for _ in range(4):
        losses.finish(plan.progress(losses.get), lambda lr: None if lr > 0.01 else valley(0.005)(lr))
    done = plan.progress(losses.get)
    assert values(done) == [0.0025, 0.005, 0.01, 0.02, 0.04]
    assert done.choices[0].best == {"optim.lr": 0.005} and math.inf in done.choices[0].losses


def test_diverged_points_are_never_chosen_and_an_arm_of_diverged_points_is_blocked(study):
    plan, losses = study(), Losses()
    for _ in range(5):
        losses.finish(plan.progress(losses.get), lambda lr: None, arm="plain")
        losses.finish(plan.progress(losses.get), lambda lr: None if lr < 0.02 else 1 / lr, arm="wide")
    done = plan.progress(losses.get)
    assert done.blocked == ["plain"] and not finals(done) and done.unnamed == 0
    assert {j.stage for j in done.jobs if j.arm == "plain"} == {"search"}
    assert len(finals(done, "wide")) == 3


def test_a_failed_search_run_blocks_its_arm_alone(study):
    plan, losses = study(), Losses()
    jobs = plan.progress(losses.get).jobs
    losses.finish(plan.progress(losses.get), valley(0.02))
    del losses[jobs[0].id]
    done = plan.progress(losses.get, failed=lambda run: run == jobs[0].id)
    assert done.blocked == ["plain"] and not finals(done) and len(finals(done, "wide")) == 3


def test_several_keys_mean_their_product_and_both_edges_extend(study):
    plan = study(grids="{optim.lr:[0.01,0.02],optim.weight_decay:[0.1,0.2,0.4]}", arms="{plain:[]}")
    losses = Losses()
    first = plan.progress(losses.get)
    assert len(first.jobs) == 6 and len({j.id for j in first.jobs}) == 6
    losses.finish(first, lambda lr, weight_decay: valley(0.02)(lr) + valley(0.2)(weight_decay))
    second = plan.progress(losses.get)
    assert values(second) == [0.01, 0.02, 0.04] and len(second.jobs) == 9  # lr alone was on an edge
    losses.finish(second, lambda lr, weight_decay: valley(0.02)(lr) + valley(0.2)(weight_decay))
    [choice] = plan.progress(losses.get).choices
    assert choice.best == {"optim.lr": 0.02, "optim.weight_decay": 0.2} and not choice.edge
    losses.clear()
    for _ in range(4):
        losses.finish(plan.progress(losses.get), lambda lr, weight_decay: valley(9)(lr) + valley(0.2)(weight_decay))
    assert plan.progress(losses.get).choices[0].edges == ["optim.lr"]  # of the two keys, the one that is


def test_zero_is_no_edge_and_has_no_ratio(study):
    plan, losses = study(grids="{optim.weight_decay:[0.0,0.1]}", arms="{plain:[]}"), Losses()
    losses.finish(plan.progress(losses.get), lambda weight_decay: weight_decay)
    done = plan.progress(losses.get)
    assert done.choices[0].best == {"optim.weight_decay": 0.0} and not done.choices[0].edge
    losses.clear()
    for _ in range(4):
        losses.finish(plan.progress(losses.get), lambda weight_decay: 1 - weight_decay)
    assert values(plan.progress(losses.get), key="optim.weight_decay") == [0.0, 0.1, 0.2, 0.4]
    assert beyond([0.003, 0.01, 0.03], low=True) == 0.0009 and beyond([0.01, 0.03], low=False) == 0.09


def test_an_arms_grids_replace_the_common_ones(study):
    plan = study("+plan.search.arms={wide:{grids:{optim.weight_decay:[0.1,0.2]}}}")
    jobs = plan.progress({}.get).jobs
    assert [dict(j.settings) for j in jobs if j.arm == "wide"] == [{"optim.weight_decay": v} for v in (0.1, 0.2)]
    assert values(plan.progress({}.get)) == [0.01, 0.02, 0.04]


def test_a_key_that_was_typed_is_not_searched(study):
    done = study("optim.lr=0.5").progress({}.get)
    assert {j.stage for j in done.jobs} == {"final"} and len(done.jobs) == 6 and not done.choices
    assert compose_run(done.jobs[0].overrides).optim.lr == 0.5
    both = study("optim.lr=0.5", grids="{optim.lr:[0.1,0.2],optim.weight_decay:[0.1,0.2]}").progress({}.get)
    assert {tuple(dict(j.settings)) for j in both.jobs} == {("optim.weight_decay",)}


def test_selection_follows_the_named_split(study):
    for split, best in (("validation", 0.02), ("test", 0.005)):
        plan, losses = study(f"plan.search.split={split}"), Losses()
        for _ in range(4):
            losses.finish(plan.progress(losses.get), lambda lr: {0.02: 1.0, 0.005: 1.4}.get(lr, 1.3))
        choice = plan.progress(losses.get).choices[0]
        assert (choice.split, choice.best) == (split, {"optim.lr": best})


def test_what_is_typed_reaches_the_references_of_the_arms():
    """Ranks of the sweep are shares of the width, and SpamLang's symbols too."""
    typed = ["experiment=lost_in_backprop/head_sweep", "scale=laptop", "model.width=256", "probe.head_gradient.every=7"]
    for width, arm in ((256, "full"), (32, "narrow_8")):
        assert compose_run([*typed, f"arm={arm}"]).intervention.low_rank_head.rank == width
    assert Study("lost_in_backprop/head_sweep", "laptop", typed[2:]).config("narrow_8")[0].intervention == \
        compose_run([*typed, "arm=narrow_8"]).intervention  # fmt: skip
    spam = ["experiment=lost_in_backprop/spamlang", "scale=laptop", "arm=v_16384", "model.width=64"]
    assert compose_run(spam).data.vocab_size == round(16384 / 576 * 64)


def test_a_plan_without_arms_is_the_config_itself(study):
    done = study(grids="{}", arms="{}").progress({}.get)
    assert [(j.arm, j.seed, j.stage) for j in done.jobs] == [("", s, "final") for s in (1, 2, 3)]
    assert len({j.id for j in study(grids="{}", arms="{}", seeds=(1, 1, 2)).progress({}.get).jobs}) == 2


def test_equal_points_of_a_grid_are_one_run(study):
    assert values(study(grids="{optim.lr:[0.01,0.010,1e-2,0.02]}").progress({}.get)) == [0.01, 0.02]
    assert len(study(grids="{optim.lr:[0.01,0.010]}", arms="{plain:[]}").progress({}.get).jobs) == 3


@pytest.mark.parametrize(
    ("grids", "says"),
    [("{optim.lr:[]}", "plan.search.grids.optim.lr"), ("{optim.lrr:[1.0,2.0]}", "optim.lrr"),
     ("{train:[1.0,2.0]}", "train"), ("{train.batch:[1.0,2.0]}", "train.batch"), ("{optim.lr:[1.0,inf]}", "finite")],
)  # fmt: skip
def test_a_grid_that_cannot_be_searched_is_refused(study, grids, says):
    with pytest.raises(ConfigError, match=says):
        study(grids=grids).config("plain")


def test_nothing_to_run_and_unknown_arms_are_refused(study):
    with pytest.raises(ConfigError, match="plan.seeds.*leaves nothing to run"):
        study("plan.seeds=[]", seeds=())
    with pytest.raises(ConfigError, match="arm=backward_r6.*Did you mean backward_r16"):
        Study("causal_test/byte_heads", "smoke", arms=["backward_r6"])


def test_job_names_tell_jobs_apart(study):
    jobs = study().progress({}.get).jobs
    assert str(jobs[0]) == "run plain seed 1 lr=0.01" and len({str(j) for j in jobs}) == len(jobs)
    assert str(Study(None, "smoke", ["train.steps=3"], point="train.steps=3").job("", 1, "final", {})) == (
        "run seed 1 train.steps=3")  # fmt: skip


def test_two_experiments_cadences_join_to_one_that_covers_both():
    cfg = compose_run(["probe=[head_gradient]", "every.eval=6", "probe.head_gradient.every=4"])
    widen(cfg, {"every": {"eval": 9}, "probe": {"head_gradient": {"every": 6, "sequences": 8},
                                               "output_error": {"every": 0, "sequences": 8}}})  # fmt: skip
    assert cfg.every.eval == 3 and cfg.probe.head_gradient.every == 2 and cfg.probe.output_error.every == 0


@pytest.mark.parametrize(
    ("arms", "named"),
    [
        ("{wide:{grid:{}}}", "plan.search.arms"),
        ("{wdie:{grids:{optim.lr:[1.0]}}}", "Did you mean wide"),
        ("{wide:{grids:{optim.lr:[high]}}}", "plan.search.grids"),
    ],
)
def test_a_search_of_its_own_that_cannot_be_read_or_fits_no_arm_is_refused(tiny, arms, named):
    plan = ["+plan.arms={plain:[],wide:['model.width=64']}", f"+plan.search.arms={arms}"]
    with pytest.raises(ConfigError, match=named):
        Study(None, "laptop", [*tiny, *plan]).config("wide")


def test_own_grids_go_by_pattern():
    study = Study("causal_test/residual_usage", "paper")
    assert study.grids("sgd_full") == study.grids("sgd_frozen") == {"optim.lr": [0.03, 0.1, 0.3, 1.0]}
    assert study.grids("adamw_full") == {"optim.lr": [0.003, 0.01, 0.02, 0.04]}


FOLLOWS = "+plan.search.arms={wide:{follows:plain,times:{optim.lr:1.1}}}"


def test_an_arm_that_follows_another_has_its_choice_times_a_factor_and_no_search(study):
    plan, losses = study(FOLLOWS), Losses()
    first = plan.progress(losses.get)
    assert {j.arm for j in first.jobs} == {"plain"} and first.unnamed == 2 + 3
    for _ in range(4):
        losses.finish(plan.progress(losses.get), valley(0.08))
    done = plan.progress(losses.get)
    assert [c.arm for c in done.choices] == ["plain"] and done.unnamed == 0
    assert finals(done, "wide") == [(seed, {"optim.lr": 0.088}) for seed in (1, 2, 3)]  # the extended choice's
    assert len([j for j in done.jobs if j.arm == "wide"]) == 3
    cfg = compose_run(next(j.overrides for j in done.jobs if j.arm == "wide"))
    assert (cfg.optim.lr, cfg.model.width) == (0.088, 64)


def test_what_it_follows_is_searched_though_only_the_arm_is_asked_for_or_its_rate_is_typed(study):
    plan, losses = study(FOLLOWS), Losses()
    plan.arms = ["wide"]
    assert [(j.arm, j.stage) for j in plan.progress(losses.get).jobs] == [("plain", "search")] * 3
    losses.finish(plan.progress(losses.get), valley(0.02))
    assert finals(plan.progress(losses.get), "wide") == [(seed, {"optim.lr": 0.022}) for seed in (1, 2, 3)]
    typed = study(FOLLOWS, "optim.lr=0.5").progress({}.get)
    assert finals(typed, "wide") == [(seed, {"optim.lr": 0.55}) for seed in (1, 2, 3)] and typed.unnamed == 0
    assert {compose_run(j.overrides).optim.lr for j in typed.jobs if j.arm == "wide"} == {0.55}


def test_an_arm_is_blocked_with_the_one_it_follows(study):
    plan, losses = study(FOLLOWS), Losses()
    for _ in range(4):
        losses.finish(plan.progress(losses.get), lambda lr: None)
    done = plan.progress(losses.get)
    assert done.blocked == ["plain", "wide"] and done.unnamed == 0 and not finals(done, "wide")


@pytest.mark.parametrize("own", ["{follows:narrow,times:{optim.lr:1.1}}", "{follows:wide,times:{optim.lr:1.1}}",
                                 "{follows:plain}", "{grid:{optim.lr:[0.1]}}"])  # fmt: skip
def test_what_an_arm_cannot_follow_is_refused(study, own):
    with pytest.raises(ConfigError, match=r"plan\.search\.arms\.wide"):
        study(f"+plan.search.arms={{wide:{own}}}")


def test_a_setting_of_an_intervention_can_be_searched(study):
    arms = "{plain:['intervention=[feedback_route]','intervention.feedback_route.scale=0.3']}"
    grids = "{optim.lr:[0.01,0.02],intervention.feedback_route.scale:[0.1,0.5]}"
    jobs = study(arms=arms, grids=grids).progress({}.get).jobs
    assert len({j.id for j in jobs}) == 4
    for job in jobs:
        cfg = compose_run(job.overrides)
        assert run_id(cfg, HASHES) == job.id
        assert cfg.intervention.feedback_route.scale == dict(job.settings)["intervention.feedback_route.scale"]
