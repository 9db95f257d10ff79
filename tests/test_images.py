"""Images, their models, and Muon: initial ranks, taps, augmentation and resume."""

import copy

import pytest
import torch

from backrank import data
from backrank.build import build_task
from backrank.compose import compose_run
from backrank.config import ConfigError
from backrank.probes.spectra import parts
from backrank.spectra import effective_rank, gram_spectrum

RESNET = ["data=digits", "model.kind=resnet", "model.layers=1", "model.width=16"]
VIT = ["data=digits", "model.kind=vit", "model.layers=2", "model.width=8", "model.heads=2", "model.patch=4"]


@pytest.mark.parametrize(("model", "images", "counted", "want"), [
    ("resnet18", "cifar10", 21, 188.9), ("vit_s", "cifar100", 49, 304.3), ("toy", "stdlib", 8, 113.0),
])  # fmt: skip
def test_initial_ranks_are_the_published_ones(model, images, counted, want):
    cfg = compose_run([f"model={model}", f"data={images}", "train.steps=1", "optim.lr=1"])
    matrices = list(parts(build_task(cfg)[0])["block"].values())
    assert len(matrices) == counted
    found = sum(float(effective_rank(s)) for s in gram_spectrum(matrices)) / counted
    assert found == pytest.approx(want, abs=0.3)


def test_no_tap_of_a_convolution_is_dead_at_the_default_size(trainer):
    built = trainer(*RESNET, "train.batch=64")
    x, y = built.batch_at(0)
    built.task(x, y, len(y)).backward()
    for name, p in built.task.named_parameters():
        if p.ndim == 4:
            assert (p.grad.abs().amax((0, 1)) > 0).all(), name


@pytest.mark.parametrize("augment", ["null", "crop", "flip", "crop_flip"])
def test_a_batch_is_a_function_of_its_index_and_holds_moved_pictures(trainer, augment):
    built, again = (trainer(*RESNET, f"data.augment={augment}") for _ in range(2))
    later = again.batch_at(7)
    assert all(torch.equal(a, b) for a, b in zip(built.batch_at(7), later, strict=True))
    plain = trainer(*RESNET)
    x, y = built.batch_at(7)
    same, labels = plain.batch_at(7)
    assert torch.equal(y, labels) and x.shape == same.shape == (4, 1, 16, 16)
    assert torch.equal(x, same) == (augment == "null")
    black = float(same.min())
    for moved, picture in zip(x[:, 0], same[:, 0], strict=True):  # moved by at most 2 pixels, and mirrored or not
        padded = torch.nn.functional.pad(picture, (2, 2, 2, 2), value=black)
        shifts = [padded[i : i + 16, j : j + 16] for i in range(5) for j in range(5)]
        assert any(torch.equal(moved, s) or torch.equal(moved, s.flip(1)) for s in shifts)


@pytest.mark.parametrize("optim", ["sgd", "muon"])
@pytest.mark.parametrize("model", [RESNET, VIT], ids=["resnet", "vit"])
def test_a_cut_run_with_augmentation_continues_to_the_same_bits(trainer, model, optim):
    settings = [*model, "data.augment=crop_flip", f"optim={'adamw' if optim == 'muon' else optim}",
                f"optim.name={optim}", "train.steps=12", "every.checkpoint=5"]  # fmt: skip
    saved = []
    whole = trainer(*settings, save=lambda state: saved.append(copy.deepcopy(state)))
    whole.fit()
    cut = trainer(*settings)
    cut.restore(saved[0])
    assert cut.step == 5
    cut.fit()
    for name, tensor in whole.task.state_dict().items():
        assert torch.equal(tensor, cut.task.state_dict()[name]), name


def test_muon_steps_matrices_orthogonally_and_leaves_the_rest_to_adamw(trainer):
    built = trainer(*VIT, "optim.name=muon", "optim.weight_decay=0", "train.steps=1", "optim.warmup=0", "optim.lr=0.1")
    before = {n: p.detach().clone() for n, p in built.task.named_parameters()}
    built.fit()
    name = "backbone.encoder.layers.encoder_layer_0.mlp.0.weight"
    step = (dict(built.task.named_parameters())[name].detach() - before[name]).double()
    assert float(effective_rank(gram_spectrum(step))) > 6  # of 8: directions nearly alike, whatever the gradient
    head = (built.task.head.weight.detach() - before["head.weight"]).abs()
    assert torch.allclose(head[head > 0], torch.tensor(0.1), rtol=1e-2)  # the first step of Adam is lr in every element


def test_evaluation_moves_no_running_statistic(trainer):
    built = trainer(*RESNET, "train.steps=1")
    built.fit()
    state = copy.deepcopy(built.task.state_dict())
    found = built.evaluate("test")
    assert 0 <= found["accuracy"] <= 1 and found["tokens"] == 450
    with built.task.evaluating():  # as probes are run
        built.snapshot(1, 8).gradients()
    assert all(torch.equal(v, built.task.state_dict()[k]) for k, v in state.items() if "running" in k)


@pytest.mark.parametrize(("key", "value", "said"), [
    ("data.size", 12, "multiple of 8"), ("data.channels", 3, "have 1"), ("data.vocab_size", 5, "go up to 9"),
    ("data.augment", "twirl", "is not known"), ("data.size", "null", "is needed"),
])  # fmt: skip
def test_bad_settings_are_one_error(key, value, said, config):
    with pytest.raises(ConfigError, match=said) as error:
        config(*RESNET, f"{key}={value}")
    assert error.value.key == key


def test_the_hash_of_digits_is_that_of_their_content():
    cfg = compose_run(["data=digits", "train.steps=1", "optim.lr=1"]).data
    first = data.content_hash(cfg)
    cfg.size = 8
    assert data.content_hash(cfg) != first
    images = data.load(cfg)
    assert len(images.train[1]) == 1347 and len(images.test[1]) == 450 and set(images.test[1]) == set(range(10))


class Waits(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes every operation for which the host would wait for a GPU: a tensor read as a number, a size that depends on
    values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount")

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        mask = name in ("index", "index_put_") and any(t is not None and t.dtype == torch.bool for t in args[1])
        if name.strip("_") in [n.strip("_") for n in self.NAMES] or mask:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("optim", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("model", [[*RESNET, "data.augment=crop_flip"], [*VIT, "data.augment=crop_flip"], []],
                         ids=["resnet", "vit", "gpt2"])  # fmt: skip
def test_no_step_waits_for_the_device_between_two_rows_of_the_log(trainer, model, optim):
    settings = [*model, f"optim={'adamw' if optim == 'muon' else optim}", f"optim.name={optim}", "every.eval=0"]
    built = trainer(*settings, "every.log=0", "every.checkpoint=0", "train.steps=4", "probe=[]")
    waits, flush = Waits(), built.flush
    inside = []

    def flushed():  # the log reads numbers: outside
        inside.append(len(waits.found))
        flush()
        del waits.found[inside[-1] :]

    built.flush, built.finish = flushed, lambda: None
    with waits:
        built.fit()
    assert inside and not waits.found
    with waits:
        bool((torch.ones(2)[torch.tensor([True, False])] > 0).all())
    assert len(waits.found) >= 2  # it does see them


@pytest.mark.parametrize("model", [RESNET, VIT], ids=["resnet", "vit"])
def test_a_compiled_step_has_the_gradients_of_the_plain_one(trainer, model):
    found = []
    for compiled in ("none", "aot_eager"):
        built = trainer(*model, "train.batch=16", f"train.compile={compiled}", "train.channels_last=true")
        x, y = built.batch_at(0)
        built.forward(x, y, len(y)).backward()
        found.append({name: p.grad for name, p in built.task.named_parameters()})
    for name, plain in found[0].items():
        torch.testing.assert_close(found[1][name], plain, rtol=1e-4, atol=1e-5)
