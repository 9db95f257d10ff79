"""Configuration: what composes, who beats whom, which typed text becomes what, what a run's identity is made of."""

import json
import re
import shutil

import pytest
from omegaconf import DictConfig, ListConfig, OmegaConf

from backrank import checkpoints, data
from backrank.compose import compose, compose_run, from_files, from_kept, parse, quote_text
from backrank.config import CONFIGS, SCALES, Config, ConfigError, validate
from backrank.identity import canonical, run_id
from backrank.interventions import INTERVENTIONS
from backrank.plan import Study, experiments
from backrank.probes import PROBES
from backrank.reproduce import Settings, studies_of

HEADS = "experiment=causal_test/byte_heads"
HASHES = {"text": "t", "tokenizer": "bytes"}


def refused(*overrides: str) -> ConfigError:
    """The one clear line that bad input gets."""
    with pytest.raises(ConfigError) as caught:
        validate(compose_run(overrides))
    line = str(caught.value)
    assert "\n" not in line and "$VALUE" not in line and caught.value.remedy, line
    return caught.value


def identity(*overrides: str) -> str:
    return run_id(compose_run(overrides), HASHES)


# Every experiment file


@pytest.mark.parametrize("experiment", experiments())
def test_every_experiment_composes_at_every_scale_for_every_arm(experiment, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "check", lambda _: None)  # its data may not be here, nor its models
    monkeypatch.setattr(data, "content_hash", lambda _: HASHES)
    (tmp_path / "tokenizer.json").touch()
    monkeypatch.setattr(checkpoints, "locate", lambda _: checkpoints.Location(tmp_path, None))
    monkeypatch.setattr(checkpoints, "content_hash", lambda path: path)
    ids = set()
    for scale in SCALES:
        study = Study(experiment, scale)
        assert study.seeds and study.arms and study.arms != [""]
        assert study.arms == list(study.plan.arms) or study.plan.only
        for arm in study.arms[:: max(1, len(study.arms) // (6 if scale == "paper" else 3))]:
            cfg, _ = study.config(arm)
            assert (cfg.experiment, cfg.scale, cfg.arm) == (experiment, scale, arm)
            # the id that the plan foretells is the id of the config that the job's overrides compose
            settings = {key: values[0] for key, values in study.grids(arm).items()}
            job = study.job(arm, 7, "final", settings)
            ids.add((scale, job.id))
        assert run_id(compose_run(job.overrides), HASHES) == job.id
    assert len(ids) >= len(SCALES)


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda p: p.relative_to(CONFIGS).as_posix())
def test_a_wrong_key_in_any_config_file_is_refused(path, tmp_path, monkeypatch):
    root = tmp_path / "configs"
    shutil.copytree(CONFIGS, root)
    monkeypatch.setattr("backrank.compose.CONFIGS", root)
    group, *rest = path.relative_to(CONFIGS).with_suffix("").parts
    name = "/".join(rest)
    asked = {"scale_for": [f"scale={rest[0]}", f"experiment={'/'.join(rest[1:])}"] if rest else [], "run": []}
    overrides = asked.get(group, [f"{group}={name}"])
    compose(overrides)
    copy = root / path.relative_to(CONFIGS)
    copy.write_text(copy.read_text() + "\nwidht: 3\n")
    with pytest.raises(ConfigError, match="widht"):
        compose(overrides)


@pytest.mark.parametrize("experiment", experiments())
def test_what_is_kept_of_the_files_gives_what_hydra_composes(experiment):
    common = [f"experiment={experiment}", "scale=smoke"]
    arm, own = list(compose(common).plan.arms.items())[-1]
    more = ["seed=7", "optim=sgd", "+plan.search.grids.x=[0.1,1]", "optim.betas=[0,.5]", "optim.lr=1e-3"]
    overrides = quote_text([*own, *common, f"arm={arm}", *more, "label=a, b"])
    kept, composed = from_kept(overrides), from_files(overrides)
    assert kept == composed and OmegaConf.to_yaml(kept) == OmegaConf.to_yaml(composed)
    assert list(every_node(kept)) == list(every_node(composed))
    kept.optim.lr, kept.plan.seeds = 0.5, [5]  # no one's config is another's
    assert from_kept(overrides) == composed


def every_node(node):
    """Type, declared type and flags of a config and of all below it."""
    meta = node._metadata
    yield meta.key, type(node), meta.ref_type, meta.object_type, meta.optional, meta.flags
    if isinstance(node, DictConfig | ListConfig) and not node._is_none():
        inner = node._content.values() if isinstance(node, DictConfig) else node._content
        for child in inner:
            assert child._get_parent() is node
            yield from every_node(child)
    else:
        yield node._value()


def test_axes_are_arms_of_every_combination():
    axes = "plan.axes=[{a:['optim.lr=1'],b:[]},{_:[],x:['seed=2'],y:['seed=3']}]"
    assert compose([axes, "+plan.arms.own=['seed=5']"]).plan.arms == {
        "own": ["seed=5"], "a": ["optim.lr=1"], "a_x": ["optim.lr=1", "seed=2"], "a_y": ["optim.lr=1", "seed=3"],
        "b": [], "b_x": ["seed=2"], "b_y": ["seed=3"]}  # fmt: skip
    assert refused("plan.axes=[{a:1}]").key == "plan.axes"


@pytest.mark.parametrize("odd", ["seed=1,2", "hydra.run.dir=x", "optim={lr:1.0}"])
def test_what_only_hydra_itself_can_do_is_left_to_it(odd):
    assert from_kept([odd]) is None


def test_scales_are_the_files_there_are():
    assert {p.stem for p in (CONFIGS / "scale").glob("*.yaml")} == set(SCALES)
    for path in (CONFIGS / "scale_for").rglob("*.yaml"):  # a misspelt one would never be read
        scale, *experiment = path.relative_to(CONFIGS / "scale_for").with_suffix("").parts
        assert scale in SCALES and "/".join(experiment) in experiments()


# Who beats whom


def test_scale_beats_experiment_scale_for_beats_scale_and_the_command_line_beats_all(tmp_path, monkeypatch):
    root = tmp_path / "configs"
    shutil.copytree(CONFIGS, root)
    monkeypatch.setattr("backrank.compose.CONFIGS", root)
    (root / "experiment/causal_test/mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /model: subword\n  - override /data: wikitext2\n"
        "  - override /optim: sgd\n  - override /probe: [head_gradient]\n"
        "experiment: causal_test/mine\ntrain: {steps: 600, batch: 16}\noptim: {clip: 3.0}\nseed: 9\n"
        "plan: {arms: {a: [optim=adamw, train.batch=5, seed=4]}}\n"
    )
    (root / "scale/smoke.yaml").write_text(
        "# @package _global_\ndefaults:\n  - override /data: stdlib\n  - override /model: byte\n"
        "  - override /probe: [output_error]\ntrain: {steps: 8}\noptim: {clip: 2.0}\nseed: 8\n"
    )
    folder = root / "scale_for/smoke/causal_test"
    (folder / "mine.yaml").write_text("optim: {clip: 1.5}\nseed: 7\n")
    mine = ["experiment=causal_test/mine", "scale=smoke"]
    cfg = compose(mine)
    assert (cfg.data.source, cfg.model.width, cfg.optim.name) == ("stdlib", 32, "sgd")  # groups of the experiment
    assert list(cfg.probe) == ["output_error"]
    assert (cfg.train.steps, cfg.train.batch, cfg.optim.clip, cfg.seed) == (8, 16, 1.5, 7)
    cfg = compose([*mine, "model=subword", "optim.clip=0.5", "data=wikitext2", "train.steps=3", "probe=[]"])
    assert (cfg.model.width, cfg.optim.clip, cfg.data.source, cfg.train.steps) == (96, 0.5, "hub", 3)
    assert not cfg.probe
    cfg = compose_run([*mine, "arm=a"])
    assert (cfg.optim.name, cfg.train.batch, cfg.seed, cfg.arm) == ("adamw", 5, 4, "a")
    cfg = compose_run([*mine, "arm=a", "optim=sgd", "train.batch=2", "seed=1"])
    assert (cfg.optim.name, cfg.train.batch, cfg.seed) == ("sgd", 2, 1)
    study = Study("causal_test/mine", "smoke", ["train.batch=2"])
    assert study.config("a")[0].train.batch == 2 and study.config("a")[0].optim.name == "adamw"


def test_a_setting_of_the_arms_intervention_can_be_typed_beside_the_arm():
    cfg = compose_run([HEADS, "arm=backward_r8", "intervention.backward_rank.rank=3", "optim.lr=0.5"])
    assert (cfg.intervention.backward_rank.rank, cfg.optim.lr) == (3, 0.5)
    study = Study("causal_test/byte_heads", "smoke", ["intervention.backward_rank.rms=token"], ["backward_r8"])
    cfg = study.config("backward_r8")[0]
    assert (cfg.intervention.backward_rank.rank, cfg.intervention.backward_rank.rms) == (8, "token")
    error = refused(HEADS, "arm=backward_r8", "intervention=[low_rank_head]")
    assert "needs backward_rank, which is not chosen" in str(error)


# Names and typing errors


@pytest.mark.parametrize(
    ("overrides", "key", "near"),
    [
        (["scale=lptop"], "scale", "laptop"),
        ([HEADS + "x"], "experiment", "causal_test/byte_heads"),
        (["experiment=byte_heads"], "experiment", "causal_test/byte_heads"),
        (["intervention=[backward_ran]"], "intervention", "backward_rank"),
        (["probe=[head_grad]"], "probe", "head_gradient"),
        ([HEADS, "arm=backward_r6"], "arm", "backward_r"),
        (["optim=adam"], "optim", "adamw"),
        (["logger=wandbb"], "logger", "wandb"),
        (["data=wikitext"], "data", "wikitext2"),
        (["device=gpu"], "device", "cpu"),
        (["train.loss=chunk"], "train.loss", "chunked"),
        (["optim.decay=[matrx]"], "optim.decay", "matrix"),
        (["optim.lrr=1"], "optim.lrr", "optim.lr"),
        (["lr=1"], "lr", "optim.lr"),
        (["weight_decay=1"], "weight_decay", "optim.weight_decay"),
        (["intervention=[backward_rank]", "intervention.backward_rank.rnk=3"], "intervention.backward_rank.rnk",
         "intervention.backward_rank.rank"),
        (["probe=[head_gradient]", "probe.head_gradient.evry=3"], "probe.head_gradient.evry",
         "probe.head_gradient.every"),
        (["+lable=x"], "lable", "label"),
    ],
)  # fmt: skip
def test_unknown_names_are_answered_with_the_nearest(overrides, key, near):
    error = refused(*overrides)
    assert error.key == key and f"Did you mean {near}" in error.remedy


@pytest.mark.parametrize("override", ["+foo=1", "++foo=1", "foo=1", "optim.foo=1", "++optim.foo=1", "~optim.lr"])
def test_no_prefix_gets_a_key_past_the_schema(override):
    assert override.lstrip("+~").partition("=")[0] in str(refused(override))


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["arm=a"], "needs an experiment"),
        (["intervention.backward_rank.rank=2"], "needs backward_rank, which is not chosen. Choose it: intervention=["),
        (["intervention=[backward_rank]"], "intervention.backward_rank.rank=???: has no value"),
        (["intervention={backward_rank:{rank:8}}"], "Choose by name"),
        (["intervention=null"], "intervention=null"),
        (["optim=null"], "optim=null"),
        (["scale=null"], "scale=null"),
        (["=3"], "=3"),
        (["foo bar"], "foo bar"),
        (["model.layers=${nowhere}"], "model.layers=${nowhere}: cannot be resolved"),
        (["data.name=${oc.env:BACKRANK_NOT_SET}"], "data.name=${oc.env:BACKRANK_NOT_SET}: cannot be resolved"),
        (["plan.search.grids={optim.lr:[1]}"], "+plan.search.grids="),
        (["label=${seed}"], "label=${seed}: holds ${"),
        (["seed=???"], "seed=???: has no value"),
        (["optim.lr=???"], "optim.lr=???: has no value"),
    ],
)
def test_what_cannot_be_read_says_why(overrides, says):
    assert says in str(refused(*overrides))


@pytest.mark.parametrize("key", ["label", "optim.lr", "optim.betas", "data.path", "experiment"])
def test_a_list_without_m_is_answered_with_its_readings(key):
    value = "causal_test/byte_heads,causal_test/byte_bases" if key == "experiment" else "0.9,0.95"
    if key == "label":  # of which a comma is part
        assert compose_run([f"label={value}"]).label == value
        return
    line = str(refused(f"{key}={value}"))
    for reading in (f"{key}=[{value}]", f"{key}=\"'{value}'\"", f"-m {key}={value}"):
        assert reading in line


# Types


def test_numbers_are_floats_and_both_ways_to_write_zero_are_the_same_run():
    for text in ("1e-4", "0.0001", ".0001", "1E-4", "'1e-4'"):
        lr = compose_run([f"optim.lr={text}"]).optim.lr
        assert lr == 1e-4 and isinstance(lr, float), text
    assert isinstance(compose_run(["optim.lr=1"]).optim.lr, float)
    assert compose_run(["optim.weight_decay=0"]).optim.weight_decay == 0.0
    same = {identity(f"optim.weight_decay={text}") for text in ("0", "0.0", "0e3", "'0'")}
    assert len(same) == 1 and identity() not in same
    assert identity("optim.betas=[0,1e-1]") == identity("optim.betas=[0.0,0.1]")
    assert identity("optim.lr=1e-2") == identity("optim.lr=0.01") == identity()
    assert json.loads(json.dumps(canonical(compose_run(["optim.lr=1"]), HASHES)))["optim"]["lr"] == 1.0


@pytest.mark.parametrize(
    "override",
    ["seed=1.5", "seed=true", "seed=1e0", "seed=", "model.layers=2.9", "model.layers=two", "model.tied=0.5",
     "model.tied=maybe", "optim.lr=true", "optim.lr=fast", "optim.lr=[0.1]", "optim.lr=", "train=3", "every=[1]",
     "optim.betas=[a,b]", "plan.seeds=[1.5]", "plan.search.grids={optim.lr:[a]}"],
)  # fmt: skip
def test_wrong_types_are_refused_and_never_rounded(override):
    error = refused(override)
    assert error.key in override and error.problem


def test_booleans_are_booleans():
    assert compose_run(["model.tied=1"]).model.tied is True
    assert identity("model.tied=true") == identity("model.tied=1") != identity()


@pytest.mark.parametrize(
    "override", ["optim.weight_decay=null", "optim.lr=null", "seed=null", "every=null", "data.name=null", "scale=null"]
)
def test_null_is_refused_where_a_value_is_needed(override):
    assert refused(override).key == override.split("=")[0]


LABELS = ["12345e7", "0012", "true", "1_000", "a#b,c=d", "it's \"x\"", "'a' and 'b'", "a  b ", "back\\slash\\", "\\'",
          "[a,b]", "{a: 1}", "$5 (x)", "x:y", "déjà", "~a", "-m", "'", "a,b", "=", "0x10", "1,2,3"]  # fmt: skip


@pytest.mark.parametrize("label", LABELS)
def test_a_label_stays_as_it_was_typed(label, tmp_path):
    cfg = compose_run([f"label={label}"])
    assert cfg.label == label and isinstance(cfg.label, str)
    path = tmp_path / "config.yaml"  # as a run's folder and the tracker have it
    path.write_text(OmegaConf.to_yaml(cfg, resolve=True))
    assert OmegaConf.load(path).label == label
    assert quote_text(quote_text([f"label={label}"])) == quote_text([f"label={label}"])
    [override] = parse([f"label={label}"])  # the way through a sweep
    [study] = studies_of({"label": override.get_value_element_as_str()}, None, None)
    assert not override.is_sweep_override() and compose_run(study.common).label == label


def test_no_label_and_quoted_labels():
    assert compose_run([]).label is None and compose_run(["label=null"]).label is None
    assert compose_run(["label='a,b'"]).label == compose_run(['label="a,b"']).label == "a,b"  # quotes for Hydra


def test_paths_and_names_are_text_too():
    cfg = compose_run(["runs=/x/0012 y=z", "data.path=12345e7", "logger.project=0012", "logger.entity=1e3"])
    assert (cfg.runs, cfg.data.path, cfg.logger.project, cfg.logger.entity) == ("/x/0012 y=z", "12345e7", "0012", "1e3")


def test_the_environment_needs_no_quoting(monkeypatch):
    monkeypatch.setenv("BACKRANK_DATA", "/a b/c, d=e #f")
    monkeypatch.setenv("BACKRANK_RUNS", "0012")
    cfg = compose_run([HEADS])
    assert (cfg.data.root, cfg.runs) == ("/a b/c, d=e #f", "0012")


# Fields against each other


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["optim.lr=nan"], "optim.lr"),
        (["optim.lr=inf"], "optim.lr"),
        (["optim.lr=0"], "optim.lr"),
        (["optim.weight_decay=-1"], "optim.weight_decay"),
        (["train.steps=0"], "train.steps"),
        (["train.accumulate=0"], "train.accumulate"),
        (["seed=-1"], "seed"),
        (["every.log=-1"], "every.log"),
        (["model.width=33"], "model.width"),
        (["optim.betas=[0.9]"], "optim.betas"),
        (["optim.betas=[0.9,1.0]"], "optim.betas"),
        (["data.eval_tokens=5"], "data.eval_tokens"),
        (["probe=[head_gradient]", "probe.head_gradient.every=-1"], "probe.head_gradient.every"),
        (["probe=[head_gradient]", "probe.head_gradient.sequences=0"], "probe.head_gradient.sequences"),
        *((["intervention=[backward_rank]", f"intervention.backward_rank.rank={r}"], "intervention.backward_rank.rank")
          for r in (0, -1, 33)),
        *((["intervention=[low_rank_head]", f"intervention.low_rank_head.rank={r}"], "intervention.low_rank_head.rank")
          for r in (0, -1, 33)),
        (["intervention=[backward_rank]", "intervention.backward_rank.rank=3", "intervention.backward_rank.rms=x"],
         "intervention.backward_rank.rms"),
        (["intervention=[backward_rank]", "intervention.backward_rank.rank=3", "train.accumulate=2"],
         "intervention.backward_rank.rms"),
        (["intervention=[backward_rank]", "intervention.backward_rank.rank=3",
          "intervention.backward_rank.basis=gradient", "intervention.backward_rank.refresh_every=2"],
         "intervention.backward_rank.refresh_every"),
        (["intervention=[vocab_expansion]", "intervention.vocab_expansion.size=255"],
         "intervention.vocab_expansion.size"),
        (["intervention=[low_rank_head,vocab_expansion]", "intervention.low_rank_head.rank=2",
          "intervention.vocab_expansion.size=300"], "intervention.vocab_expansion.size"),
        (["intervention=[low_rank_head,frozen_column_space]", "intervention.low_rank_head.rank=2"],
         "intervention.low_rank_head.rank"),
        (["intervention=[head_residual,low_rank_head]", "intervention.low_rank_head.rank=2"],
         "intervention.head_residual.at"),
        (["intervention=[frozen_column_space]", "model.tied=true"], "model.tied"),
        (["intervention=[head_residual]", "intervention.head_residual.at=update", "model.tied=true"],
         "intervention.head_residual.at"),
    ],
)  # fmt: skip
def test_values_and_combinations_that_cannot_be_are_named(overrides, key):
    assert refused(*overrides).key == key


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [("SCALE", "lptop", "laptop"), ("ONLY", "byte_head", "byte_heads"), ("SEEDS", "1,x", "SEEDS=x"),
     ("SEEDS", "-1", "SEEDS=-1"), ("SEEDS", "1.5", "SEEDS=1.5"), ("JOBS", "0", "JOBS=0"), ("JOBS", "many", "JOBS=many"),
     ("DEVICE", "gpu", "device=gpu"), ("LOGGER", "tensorboard", "logger=tensorboard")],
)  # fmt: skip
def test_nonsense_in_the_environment_is_named(variable, value, says, monkeypatch):
    monkeypatch.setattr(data, "check", lambda _: None)
    with pytest.raises(ConfigError, match=re.escape(says)):
        for study in Settings({"SCALE": "smoke", variable: value}).studies("causal_test"):
            study.config(study.arms[0])


def test_seeds_and_experiments_from_the_environment():
    studies = Settings({"SEEDS": "0,1, 2", "ONLY": "byte_heads,causal_test/byte_bases"}).studies("causal_test")
    assert [s.seeds for s in studies] == [[0, 1, 2]] * 2
    assert [s.name for s in studies] == ["causal_test/byte_heads", "causal_test/byte_bases"]
    assert Settings({"FRESH": "0", "REUSE": "1"}).fresh is False
    with pytest.raises(ConfigError, match="causal_test"):
        Settings({}).studies("causal_tst")


# Identity


def test_what_does_not_change_the_numbers_does_not_change_the_id():
    base = identity()
    for override in ("label=x", "device=cpu", "runs=/x", "logger=wandb", "logger=wandb logger.project=p",
                     "probe=[head_gradient]", "every.log=3 every.eval=7 every.eval_tokens=99 every.checkpoint=1",
                     "plan.seeds=[4]", "data.cache=/y", "data.name=other"):  # fmt: skip
        assert identity(*override.split()) == base, override
    paper = [HEADS, "scale=paper"]
    assert identity(*paper) == identity(*paper, "arm=ordinary") == identity(HEADS, "scale=cpu")
    same = ["data=wikitext2", "data.eval_tokens=200000", "train.steps=600"]  # under another experiment's name, or none
    assert identity(*same, "scale=paper") == identity(*paper)


def test_what_changes_the_numbers_changes_the_id():
    seen = [identity()]
    for override in ("seed=2", "optim.lr=0.02", "optim.weight_decay=0", "optim=sgd", "model.layers=3",
                     "model.tied=true", "train.steps=7", "train.batch=3", "train.amp=bf16", "data.sequence=64",
                     "data.eval_tokens=5000", "intervention=[head_residual]", "optim.decay=[matrix]"):  # fmt: skip
        seen.append(identity(override))
    cfg = compose_run([])
    seen += [run_id(cfg, {**HASHES, "text": "u"}), run_id(cfg, {**HASHES, "tokenizer": "bpe-300"})]
    assert len(set(seen)) == len(seen)


def test_interventions_count_in_their_order():
    settings = ["intervention.backward_rank.rank=3"]
    one, two = (identity(f"intervention=[{order}]", *settings)
                for order in ("backward_rank,head_residual", "head_residual,backward_rank"))  # fmt: skip
    assert one != two
    assert list(compose_run(["intervention=[head_residual,backward_rank]", *settings]).intervention) == [
        "head_residual", "backward_rank"]  # fmt: skip
    assert identity("intervention=[backward_rank]", "intervention.backward_rank.rms=tensor", *settings) == identity(
        "intervention=[backward_rank]", *settings)  # fmt: skip


def test_every_field_is_identity_or_named_as_none():
    plain = canonical(compose_run(["intervention=[head_residual]"]), HASHES)
    assert set(plain) == {"seed", "model", "data", "optim", "train", "intervention"}
    assert set(plain["data"]) == {"vocab_size", "sequence", "eval_tokens", "content"}
    every = set(Config.__dataclass_fields__["train"].default_factory.__dataclass_fields__)
    assert set(plain["train"]) == every - {"channels_last"}  # null: not set, so no part of the run
    named = canonical(compose_run(["train.channels_last=true", "data.size=16"]), HASHES)
    assert named["train"]["channels_last"] is True and named["data"]["size"] == 16
    assert canonical(compose_run(["study=theory_checks"]), HASHES)["study"] == "theory_checks"


def test_data_that_moved_keeps_the_id_and_changed_data_does_not(tmp_path, tiny):
    def ask(folder, *more):
        cfg = compose_run([*tiny, f"data.path={folder}", *more])
        return run_id(cfg, data.content_hash(cfg.data))

    source = next(o for o in tiny if o.startswith("data.path=")).partition("=")[2]
    here, there = tmp_path / "here", tmp_path / "there, with = and spaces"
    for folder in (here, there):
        folder.mkdir()
        for split in ("train", "validation", "test"):
            shutil.copy(f"{source}/{split}.txt", folder)
    moved = f"data.path='{there}'"
    base = ask(here)
    assert base == ask(source) == ask(here, moved)
    other = tmp_path / "characters elsewhere.json"
    shutil.copy(f"{source}/characters.json", other)
    assert ask(here, f"data.tokenizer={other}") == base
    with open(there / "train.txt", "a") as file:
        file.write("a")
    copy = tmp_path / "a third place"  # texts are read once a process
    shutil.copytree(there, copy)
    assert ask(copy) != base


def test_plugins_declare_what_the_tests_read():
    for group in (INTERVENTIONS, PROBES):
        assert group and all(name == cls.name() for name, cls in group.items())
