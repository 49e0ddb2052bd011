"""`supervised_step()` trains like a hand-written loop, with accumulation, clipping, saved state and evaluation."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
from models import batches, close, make_step, same, sgd, small_cnn, weights
from torch import Tensor, nn

import colabkit
from colabkit.errors import ColabkitError, InvalidOption
from colabkit.loading import Loader
from colabkit.training import small_network, steps, train
from colabkit.training.step_factory import supervised_step
from colabkit.training.steps import SupervisedStep


def test_supervised_step_equals_a_hand_written_loop_bit_for_bit():
    model, step = make_step(nn.Sequential(small_cnn(width=8), nn.Dropout(0.5)))
    hand = nn.Sequential(small_cnn(width=8), nn.Dropout(0.5))
    optimizer = sgd(hand)
    torch.manual_seed(1)
    ours = [step(batch) for batch in batches()]
    torch.manual_seed(1)
    for (images, labels), values in zip(batches(), ours, strict=True):
        optimizer.zero_grad()
        scores = hand(images)
        loss = nn.functional.cross_entropy(scores, labels)
        loss.backward()
        optimizer.step()
        assert torch.equal(values["loss"], loss.detach())
        assert values["accuracy"].item() == pytest.approx((scores.argmax(1) == labels).float().mean().item())
    assert same(model, hand)
    assert step.updates == 4
    assert all(not value.requires_grad for values in ours for value in values.values())


def test_a_step_reads_no_value_from_the_device(monkeypatch):
    _, step = make_step(clip=1.0, accumulate=2)
    step(batches()[0])

    def read(*arguments: object) -> None:
        raise AssertionError("a value was read")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__", "cpu", "numpy"):
        monkeypatch.setattr(Tensor, name, read)
    for batch in batches():
        assert set(step(batch)) == {"loss", "accuracy"}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_class_indices_of_any_integer_dtype_train_like_int64(dtype):
    images = torch.rand(8, 3, 8, 8)
    for shape, model in (((8,), small_network(10, (8, 8, 3))), ((8, 8, 8), nn.Conv2d(3, 10, 1))):
        labels = torch.randint(0, 10, shape)
        step = supervised_step(model, torch.optim.SGD(model.parameters(), 0.0))
        assert torch.equal(step((images, labels.to(dtype)))["loss"], step((images, labels))["loss"])
        assert step.evaluate([(images, labels.to(dtype))]) == step.evaluate([(images, labels)])


def test_a_batch_without_labels_raises_an_error_that_names_ways_to_load_them():
    with pytest.raises(InvalidOption, match=r"the batch is a Tensor.* name the datasets of an HDF5 file"):
        make_step()[1](torch.rand(8, 3, 8, 8))


def test_uint8_images_are_scaled_to_one_and_floats_are_unchanged():
    images = torch.randint(0, 256, (8, 3, 8, 8), dtype=torch.uint8)
    labels = torch.arange(8)
    kept = images.clone()
    given = [images, images.float() / 255]
    losses = [make_step()[1]((one, labels))["loss"] for one in given]
    assert torch.equal(*losses)
    assert torch.equal(images, kept)
    normalised = torch.randn(8, 3, 8, 8) * 300
    model, step = make_step()
    with torch.no_grad():
        expected = nn.functional.cross_entropy(model(normalised), labels)
    assert torch.equal(step((normalised, labels))["loss"], expected)


def test_samples_in_float64_train_a_model_in_float32_like_samples_in_float32() -> None:
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        step = supervised_step(model, sgd(model), nn.MSELoss())
        features = torch.arange(12.0).reshape(4, 3) / 7
        step((features.to(dtype), torch.arange(4.0)))
        found.append(model)
    assert same(*found)


def test_targets_in_float64_train_a_model_in_float32_like_targets_in_float32() -> None:
    found = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        step = supervised_step(model, sgd(model), nn.HuberLoss())
        targets = torch.arange(4.0).reshape(4, 1) / 7
        step((torch.arange(12.0).reshape(4, 3) / 7, targets.to(dtype)))
        found.append(model)
    assert same(*found)


@pytest.mark.parametrize(
    ("outputs", "labels", "advice"),
    [
        ((4, 2), (4,), "Use a model with 1 output; for classes, use cross entropy"),
        ((4, 4), (4,), "Use a model with 1 output"),
        ((4, 2), (4, 3), "Use a model with 3 outputs"),
        ((4,), (4, 1), "Use a model whose output has the shape of the labels"),
    ],
)
def test_an_elementwise_loss_never_compares_an_output_with_the_label_of_another_sample(
    outputs: tuple[int, ...], labels: tuple[int, ...], advice: str
) -> None:
    model = nn.Sequential(nn.Linear(3, outputs[1] if len(outputs) > 1 else 1), nn.Flatten(len(outputs) - 1 or 0))
    step = supervised_step(model, sgd(model), nn.MSELoss())
    with pytest.raises(InvalidOption, match=f"expected one shape for both, for MSELoss. {advice}"):
        step((torch.zeros(4, 3), torch.zeros(labels)))


def test_outputs_in_a_column_are_aligned_with_labels_for_losses_of_torch_and_cause_a_warning_for_others() -> None:
    model, labels = nn.Linear(1, 1), torch.arange(4.0)
    batch = labels[:, None] * 3, labels
    with torch.no_grad():
        expected = nn.functional.huber_loss(model(batch[0])[:, 0], labels, delta=0.5)
    assert torch.equal(
        supervised_step(model, sgd(model), partial(nn.functional.huber_loss, delta=0.5))(batch)["loss"], expected
    )
    with pytest.warns(UserWarning, match=r"output has the shape \[4, 1\], and the labels have \[4\]"):
        supervised_step(model, sgd(model), lambda found, wanted: (found - wanted).pow(2).mean())(batch)


def test_accumulated_batches_equal_one_large_batch():
    many, step = make_step(accumulate=4)
    one, large = make_step()
    some = batches()
    for batch in some[:3]:
        step(batch)
        assert not step.is_whole
        assert step.updates == 0
    step(some[3])
    assert step.is_whole
    assert step.updates == 1
    large((torch.cat([images for images, _ in some]), torch.cat([labels for _, labels in some])))
    assert close(many, one)
    assert not same(many, small_cnn(width=8))


def test_flush_applies_the_mean_of_the_pending_gradients():
    many, step = make_step(accumulate=4)
    one, large = make_step()
    some = batches(2)
    for batch in some:
        step(batch)
    step.flush()
    assert step.is_whole
    large((torch.cat([images for images, _ in some]), torch.cat([labels for _, labels in some])))
    assert close(many, one)
    before = weights(many)
    step.flush()
    assert step.updates == 1
    assert all(map(torch.equal, before, weights(many)))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clip_limits_the_norm_of_all_gradients_of_an_update(accumulate):
    model, step = make_step(clip=0.01, accumulate=accumulate)
    for batch in batches(accumulate):
        step(batch)
    norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_the_scheduler_is_stepped_once_per_update():
    model = small_cnn(width=8)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = supervised_step(model, optimizer, scheduler=scheduler, accumulate=3)
    rates = []
    for batch in batches(7):
        step(batch)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.1, 0.1, 0.05, 0.05, 0.05, 0.025, 0.025]
    step.flush()
    assert (scheduler.last_epoch, step.updates) == (3, 3)


def test_a_step_resumes_from_its_state():
    def run(model: nn.Module) -> tuple[torch.optim.Optimizer, SupervisedStep]:
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
        return optimizer, supervised_step(model, optimizer, scheduler=scheduler)

    whole, resumed = small_cnn(width=8), small_cnn(width=8, seed=1)
    _, step = run(whole)
    for batch in batches()[:2]:
        step(batch)
    parts = {name: part.state_dict() for name, part in step.parts.items()}
    file = io.BytesIO()
    torch.save({"step": step.state_dict(), **parts}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for batch in batches()[2:]:
        step(batch)
    _, again = run(resumed)
    for name, part in again.parts.items():
        part.load_state_dict(saved[name])
    again.load_state_dict(saved["step"])
    assert again.updates == 2
    for batch in batches()[2:]:
        again(batch)
    assert same(whole, resumed)
    assert again.state_dict() == step.state_dict()
    with pytest.raises(InvalidOption, match="the state has a scheduler, but the step has none"):
        make_step()[1].load_state_dict(saved["step"])


def test_a_state_with_a_scheduler_of_another_class_is_refused():
    def run(kind: Any) -> SupervisedStep:
        model = small_cnn(width=8)
        optimizer = sgd(model)
        return supervised_step(model, optimizer, scheduler=kind(optimizer, 9))

    saved = run(torch.optim.lr_scheduler.CosineAnnealingLR).state_dict()
    with pytest.raises(InvalidOption, match="has the scheduler StepLR, but the state is from CosineAnnealingLR"):
        run(torch.optim.lr_scheduler.StepLR).load_state_dict(saved)
    # A state without this entry is accepted.
    del saved["scheduler_kind"]
    run(torch.optim.lr_scheduler.CosineAnnealingLR).load_state_dict(saved)


def test_loading_a_state_drops_pending_gradients():
    model, step = make_step(accumulate=2)
    start = step.state_dict()
    step(batches()[0])
    step.load_state_dict(start)
    assert step.is_whole
    for batch in batches()[2:]:
        step(batch)
    other, fresh = make_step(accumulate=2)
    for batch in batches()[2:]:
        fresh(batch)
    assert same(model, other)


@pytest.mark.parametrize("kind", [tuple, list, lambda pair: {"X": pair[0], "id": 3, "Y": pair[1]}])
def test_a_batch_is_a_pair_or_a_dict(kind):
    batch = batches()[0]
    expected = make_step()[1](batch)["loss"]
    assert torch.equal(make_step()[1](kind(batch))["loss"], expected)
    for named in (
        {"label": batch[1], "image": batch[0]},
        {"Target": batch[1], "scan": batch[0]},
        {"weight": torch.ones(1), "labels": batch[1], "pixel_values": batch[0]},
    ):
        assert torch.equal(make_step()[1](named)["loss"], expected)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.zeros(8, 3, 8, 8), "a Tensor"),
        ([torch.zeros(1), ["a"]], "a list of Tensor, list"),
        ({}, "a dict without elements"),
        (None, "None"),
    ],
)
def test_an_invalid_batch_is_refused(batch, found):
    _, step = make_step()
    advice = r"a custom step that passes .*, and use state=\{.*, 'step': step\}"
    with pytest.raises(InvalidOption, match=advice) as caught:
        step(batch)
    assert str(caught.value).startswith(f"Cannot use a batch: the batch is {found}; expected two tensors,")


def test_a_batch_without_known_names_or_with_more_fields_is_refused_with_the_way_to_load_two():
    images, labels = batches()[0]
    _, step = make_step()
    with pytest.raises(InvalidOption, match=r"a dict of 'a', 'b'; .* Name its tensors 'X' and 'Y', or 'image' and"):
        step({"a": labels, "b": images})
    with pytest.raises(InvalidOption, match=r"If the model has several inputs, write a custom step"):
        step(((images, labels), labels))
    with pytest.raises(InvalidOption, match=r"Load only these fields of a pack with fields=\['X', 'Y'\] of the Loader"):
        step((images, labels, labels))
    named = colabkit.Loader({"label": labels, "image": images}, 8, as_dict=True)
    assert len(colabkit.predict(step, named)) == len(images)


def test_bytes_that_are_no_images_are_refused_instead_of_scaled() -> None:
    model = nn.Linear(2, 2)
    codes = torch.tensor([[3, 7], [250, 1]], dtype=torch.uint8)
    with pytest.raises(InvalidOption, match=r"the samples are uint8 \[2, 2\], which may be pixels or other numbers"):
        supervised_step(model, sgd(model))((codes, torch.tensor([0, 1])))
    with pytest.raises(InvalidOption, match=r"other numbers with array.astype\('int64'\)"):
        colabkit.predict(model, Loader(codes, 2))


def test_images_as_targets_must_be_scaled_as_the_inputs_are() -> None:
    images = torch.randint(0, 256, (4, 1, 3, 3), dtype=torch.uint8)
    model = nn.Conv2d(1, 1, 1)
    with pytest.raises(InvalidOption, match=r"the labels are uint8 .* For an autoencoder, train with a custom step"):
        supervised_step(model, sgd(model), nn.MSELoss())((images, images))
    assert supervised_step(model, sgd(model), nn.MSELoss())((images, images / 255))["loss"] < 10
    # Masks of bytes are labels of a binary cross entropy.
    assert supervised_step(model, sgd(model), nn.BCEWithLogitsLoss())((images, images // 200))["loss"] < 10


def test_a_batch_on_another_device_is_refused():
    images, labels = batches()[0]
    _, step = make_step()
    for batch in ((images.to("meta"), labels), (images, labels.to("meta"))):
        with pytest.raises(
            InvalidOption, match=r"the batch is on meta, but the model is on cpu.* device='cpu' to the Load"
        ):
            step(batch)


def test_the_step_adapts_to_a_moved_model_at_the_next_batch(monkeypatch):
    asked: list[torch.device] = []
    monkeypatch.setattr(steps, "check_precision", lambda act, precision, device: asked.append(device))
    model, step = make_step()
    for batch in batches()[:2]:
        step(batch)
    assert asked == [torch.device("cpu")]
    # Pretend that the model was on another device before.
    step._device = torch.device("cuda:0")
    step(batches()[2])
    assert asked == [torch.device("cpu")] * 2
    assert step.updates == 3
    # Unlike a move between CPU and GPU, a move to "meta" creates new parameters.
    model.to("meta")
    with pytest.raises(InvalidOption, match=r"no longer those of the optimizer.*Move the model to its device before"):
        step(tuple(tensor.to("meta") for tensor in batches()[0]))


def test_a_submodule_stays_in_evaluation_mode_until_the_model_returns_to_training_mode():
    model, step = make_step(nn.Sequential(small_cnn(width=8), nn.BatchNorm1d(10)))
    model[1].eval()
    step(batches()[0])
    assert (model.training, model[1].training) == (True, False)
    step.evaluate(batches())
    assert (model.training, model[1].training) == (True, False)
    model.eval()
    step(batches()[0])
    assert (model.training, model[1].training) == (True, True)


def test_evaluate_returns_means_over_samples_and_changes_nothing():
    model, step = make_step(nn.Sequential(small_cnn(width=8), nn.BatchNorm1d(10), nn.Dropout(0.5)), accumulate=2)
    step(batches()[0])
    before, gradients = weights(model), [parameter.grad.clone() for parameter in model.parameters()]
    uneven = [(images[:size], labels[:size]) for (images, labels), size in zip(batches(3), (8, 8, 3), strict=True)]
    found = step.evaluate(iter(uneven))
    assert all(map(torch.equal, before, weights(model)))
    assert all(map(torch.equal, gradients, [parameter.grad for parameter in model.parameters()]))
    assert not step.is_whole
    model.eval()
    images, labels = torch.cat([one for one, _ in uneven]), torch.cat([one for _, one in uneven])
    scores = model(images)
    assert found["loss"] == pytest.approx(nn.functional.cross_entropy(scores, labels).item(), rel=1e-5)
    assert found["accuracy"] == pytest.approx((scores.argmax(1) == labels).float().mean().item())
    assert step.evaluate(uneven) == found
    assert not model.training
    with pytest.raises(InvalidOption, match="the loader returned no batches"):
        step.evaluate([])


def test_evaluate_closes_the_batches_and_restores_the_modes_after_an_error():
    closed = []

    def failing():
        try:
            yield batches()[0]
            raise ValueError("planned")
        finally:
            closed.append(True)

    model, step = make_step()
    with pytest.raises(ValueError, match="planned"):
        step.evaluate(failing())
    assert closed == [True]
    assert model.training


CNN = small_cnn(width=8)
PLATEAU = torch.optim.lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": 3}, "model is an int; expected a torch.nn.Module"),
        ({"optimizer": CNN.parameters()}, "optimizer is a generator; expected a torch.optim.Optimizer"),
        ({"optimizer": sgd(small_cnn(width=8))}, "none of the model's parameters"),
        (
            {"optimizer": torch.optim.LBFGS(CNN.parameters())},
            r"an LBFGS, whose step\(\) requires a closure.*Use another optimizer",
        ),
        (
            {"loss": nn.CrossEntropyLoss},
            r"loss=CrossEntropyLoss is a class; .* Create an instance: loss=CrossEntropyLoss\(",
        ),
        ({"loss": "mse"}, "loss='mse'; expected a callable"),
        (
            {"scheduler": PLATEAU(sgd(CNN))},
            r"requires a metric.* in the function for validate=, and use state=\{.*, 'scheduler': scheduler\}",
        ),
        ({"scheduler": torch.optim.lr_scheduler.StepLR(sgd(CNN), 1)}, "the scheduler belongs to another optimizer"),
        ({"scheduler": 0.1}, "scheduler is a float"),
        ({"amp": True}, "amp=True; expected 'auto', 'bf16', 'fp16' or False"),
        ({"amp": 0}, "amp=0"),
        ({"channels_last": 1}, "channels_last=1"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"accumulate": 2.5}, "accumulate=2.5"),
        ({"clip": 0}, "clip=0; expected a finite number above 0"),
        ({"clip": True}, "clip=True"),
        ({"clip": float("nan")}, "clip=nan"),
        ({"compile": None}, "compile=None"),
    ],
)
def test_invalid_arguments_are_refused_immediately(options, message):
    with pytest.raises(InvalidOption, match=message):
        supervised_step(**{"model": CNN, "optimizer": sgd(CNN), **options})


@pytest.mark.parametrize(("channels", "is_last"), [(8, False), (16, True)])
def test_models_that_fail_with_channels_last_images_get_contiguous_ones(channels, is_last):
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3), nn.Conv2d(channels, 4, 1, stride=2), nn.Flatten(), nn.LazyLinear(3)
    )
    images = torch.rand(2, 3, 11, 11).contiguous(memory_format=torch.channels_last)
    model(images)
    seen: list[bool] = []
    model.register_forward_pre_hook(
        lambda _, given: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    step = supervised_step(model, torch.optim.SGD(model.parameters(), 0.1))
    step((images, torch.tensor([0, 1])))
    assert seen == [is_last]


def test_models_with_channels_last_weights_get_channels_last_images():
    model = small_network(10, (8, 8, 3))
    for layers, is_last in ((model, True), (nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10)), False)):
        layers(torch.rand(2, 3, 8, 8))
        seen: list[bool] = []
        layers.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(not given[0].is_contiguous()))
        step = supervised_step(layers, torch.optim.SGD(layers.parameters(), 0.1))
        step((torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])))
        assert seen == [is_last]


@pytest.mark.parametrize("channels_last", [None, True])
def test_lazy_modules_are_trained(channels_last):
    model = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(10))
    step = supervised_step(model, sgd(model), channels_last=channels_last)
    losses = [step(batches()[0])["loss"].item() for _ in range(3)]
    assert losses[2] < losses[0]


def test_channels_last_converts_weights_images_and_optimizer_state():
    model, step = make_step()
    step(batches()[0])
    optimizer = step.parts["optimizer"]
    last = supervised_step(model, optimizer, channels_last=True)
    before = [id(parameter) for parameter in model.parameters()]
    seen: list[bool] = []
    model[0].register_forward_pre_hook(
        lambda _, given: seen.append(given[0].is_contiguous(memory_format=torch.channels_last))
    )
    last(batches()[1])
    weight = model[3].weight
    for tensor in (weight, optimizer.state[weight]["momentum_buffer"]):
        assert tensor.is_contiguous(memory_format=torch.channels_last)
    assert seen == [True]
    assert before == [id(parameter) for parameter in model.parameters()]
    plain, other = make_step()
    for batch in batches()[:2]:
        other(batch)
    assert close(model, plain)
    assert plain[3].weight.is_contiguous()
    assert "channels_last=True" in repr(last)


SCORES, CLASSES, SHARES = torch.randn(8, 10), torch.arange(8), torch.rand(8, 10).softmax(1)
mse, bce = nn.functional.mse_loss, nn.BCEWithLogitsLoss()


@pytest.mark.parametrize(
    ("scores", "labels", "loss", "has_accuracy"),
    [
        (SCORES, CLASSES, nn.functional.cross_entropy, True),
        (SCORES, CLASSES, nn.CrossEntropyLoss(label_smoothing=0.1), True),
        (SCORES, CLASSES, nn.functional.multi_margin_loss, True),
        (SCORES, CLASSES, lambda scores, labels: nn.functional.nll_loss(scores.log_softmax(1), labels), True),
        (SCORES, SHARES, nn.functional.cross_entropy, True),
        (SCORES, SHARES, partial(nn.functional.cross_entropy, label_smoothing=0.1), True),
        (SCORES, SHARES, bce, False),
        (SCORES, SHARES, mse, False),
        (SCORES[:, :1], SHARES[:, :1], bce, False),
        (SCORES[:, 0], SHARES[:, 0], mse, False),
        (torch.randn(8, 10, 3), torch.zeros(8, 3, dtype=torch.int64), nn.functional.cross_entropy, False),
    ],
)
def test_accuracy_is_returned_where_the_labels_define_it(scores, labels, loss, has_accuracy):
    _, step = make_step(Constant(scores), loss)
    values = step((torch.zeros(8, 3), labels))
    found = step.evaluate([(torch.zeros(8, 3), labels)])
    assert set(values) == set(found) == ({"loss", "accuracy"} if has_accuracy else {"loss"})
    if has_accuracy:
        best = labels if labels.dim() == 1 else labels.argmax(1)
        expected = (scores.argmax(1) == best).float().mean().item()
        assert values["accuracy"].item() == pytest.approx(expected)
        assert found["accuracy"] == pytest.approx(expected)


class Constant(nn.Module):
    """A model that returns given scores for any images; a step changes them only slightly."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.scores + self.offset


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.functional.l1_loss, nn.BCEWithLogitsLoss()])
def test_targets_of_shape_b_are_compared_one_by_one_with_outputs_of_shape_b_1(loss):
    model = nn.Linear(6, 1)
    step = supervised_step(model, sgd(model), loss)
    images, targets = torch.randn(8, 6), torch.rand(8)
    with torch.no_grad():
        expected = loss(model(images).flatten(), targets).item()
    assert step.evaluate([(images, targets)])["loss"] == pytest.approx(expected)
    assert step((images, targets))["loss"].item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.bool])
def test_several_labels_per_sample_may_be_whole_numbers(dtype):
    model = nn.Linear(6, 2)
    step = supervised_step(model, sgd(model), nn.BCEWithLogitsLoss())
    images, labels = torch.randn(8, 6), torch.arange(16).reshape(8, 2) % 2
    with torch.no_grad():
        expected = nn.BCEWithLogitsLoss()(model(images), labels.float()).item()
    assert step.evaluate([(images, labels.to(dtype))])["loss"] == pytest.approx(expected)
    assert step((images, labels.to(dtype)))["loss"].item() == pytest.approx(expected)


def test_a_custom_loss_gets_outputs_and_targets_unchanged():
    model, shapes = nn.Linear(6, 1), []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        shapes.append((outputs.shape, targets.shape))
        return (outputs.squeeze(1) - targets).abs().mean()

    with pytest.warns(UserWarning, match="compares each output with all labels"):
        supervised_step(model, sgd(model), loss)((torch.randn(8, 6), torch.rand(8)))
    assert shapes == [((8, 1), (8,))]


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (
            torch.rand(8),
            r"labels are float32 \[8\], and the model.s output has the shape \[8, 3\].*loss=nn\.MSELoss",
        ),
        (torch.arange(8), r"the label 7 is in the batch, but .* \[8, 3\]; expected labels from 0 to 2\..*one output"),
        (
            torch.ones(8, 3, dtype=torch.uint8),
            r"labels are uint8 \[8, 3\].*class indices of the shape \[8\].*loss=nn\.BCEWithLogitsLoss",
        ),
    ],
)
def test_labels_that_do_not_fit_cross_entropy_raise_an_error_that_names_both(labels, found):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    loader = Loader((torch.zeros(8, 3, 2, 2, dtype=torch.uint8), labels), 8)
    with pytest.raises(InvalidOption, match=found):
        train(supervised_step(model, sgd(model)), loader)


def test_errors_of_the_model_are_raised_unchanged():
    class FailingModel(Constant):
        def forward(self, images):
            raise ZeroDivisionError("planned")

    _, step = make_step(FailingModel(SCORES))
    with pytest.raises(ZeroDivisionError, match="planned") as caught:
        step((torch.zeros(8, 3), CLASSES))
    assert not isinstance(caught.value, ColabkitError)
    assert caught.traceback[-1].name == "forward"


def test_a_nan_loss_is_returned_and_a_loss_of_several_numbers_is_refused():
    batch = (torch.zeros(8, 3), CLASSES)
    _, step = make_step(Constant(SCORES * float("nan")))
    assert step(batch)["loss"].isnan()
    for loss, found in (
        (nn.CrossEntropyLoss(reduction="none"), r"a tensor of shape \[8\]"),
        (lambda scores, labels: 0.5, "a float"),
    ):
        with pytest.raises(InvalidOption, match=f"the loss is {found}; expected a tensor with a single number"):
            make_step(Constant(SCORES), loss)[1](batch)


def test_outputs_of_any_type_are_passed_to_the_loss():
    class TwoOutputs(Constant):
        def forward(self, images):
            return self.scores + self.offset, self.offset

    _, step = make_step(TwoOutputs(SCORES), lambda both, labels: nn.functional.cross_entropy(both[0], labels) + both[1])
    assert set(step((torch.zeros(8, 3), CLASSES))) == {"loss"}
