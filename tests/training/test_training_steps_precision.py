"""`supervised_step()` chooses a precision, and trains with mixed precision and with a compiled model."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from models import batches, close, make_step, same, sgd, small_cnn, weights
from torch import nn

from colabkit.errors import InvalidOption, MissingPackage
from colabkit.training import steps
from colabkit.training.models import Precision, precision_on, prefers_channels_last
from colabkit.training.step_factory import supervised_step


@pytest.mark.parametrize(
    ("capability", "name"), [((6, 1), False), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16"), ((12, 0), "bf16")]
)
def test_auto_selects_the_precision_by_compute_capability(monkeypatch, capability, name):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    # torch also returns True for GPUs that only emulate bfloat16.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    chosen = precision_on(torch.device("cuda:0"), "auto")
    assert (chosen.name, chosen.dtype) == (name, {"fp16": torch.float16, "bf16": torch.bfloat16}.get(name))
    assert chosen.reason == f"the GPU has compute capability {capability[0]}.{capability[1]}"
    assert precision_on(torch.device("cuda:0"), False).name is False
    assert precision_on(torch.device("cuda:0"), "auto", torch.bfloat16).name is False


def test_the_cpu_uses_float32_unless_requested_otherwise():
    _, step = make_step()
    assert step.amp is False
    assert "amp=False (" in repr(step)
    assert make_step(amp="bf16")[1].amp == "bf16"
    assert "amp='bf16' (as requested), accumulate=2, clip=1.0" in repr(make_step(amp="bf16", accumulate=2, clip=1.0)[1])


def test_fp16_on_the_cpu_is_refused_at_the_first_batch():
    _, step = make_step(amp="fp16")
    assert step.amp == "fp16"
    with pytest.raises(InvalidOption, match=r"with a model on cpu; expected a model on a CUDA GPU. Use amp='auto'"):
        step(batches()[0])


def test_bf16_computes_the_loss_in_float32_and_resumes_from_a_state():
    seen: list[torch.dtype] = []

    def loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        assert not torch.is_autocast_enabled("cpu")
        seen.append(scores.dtype)
        return nn.functional.cross_entropy(scores, labels)

    model, step = make_step(None, loss, amp="bf16")
    inner: list[torch.dtype] = []
    model[3].register_forward_hook(lambda *given: inner.append(given[2].dtype))
    exact, reference = make_step()
    for batch in batches():
        step(batch)
        reference(batch)
    assert set(seen) == {torch.float32}
    assert set(inner) == {torch.bfloat16}
    assert all(value.dtype == torch.float32 for value in weights(model))
    assert not same(model, exact)
    assert all(torch.allclose(a, b, atol=0.02) for a, b in zip(weights(model), weights(exact), strict=True))
    resumed, again = make_step(small_cnn(width=8, seed=3), amp="bf16")
    for name, part in again.parts.items():
        part.load_state_dict(copy.deepcopy(step.parts[name].state_dict()))
    again.load_state_dict(step.state_dict())
    for one in (step, again):
        one(batches()[0])
    assert same(model, resumed)
    assert set(step.evaluate(batches())) == {"loss", "accuracy"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_uint8_images_are_converted_to_the_dtype_of_the_weights_without_mixed_precision(dtype):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)).to(dtype)
    step = supervised_step(model, sgd(model), amp=False)
    batch = torch.full((2, 3, 2, 2), 51, dtype=torch.uint8), torch.tensor([0, 1])
    assert step(batch)["loss"].isfinite()
    assert set(step.evaluate([batch])) == {"loss", "accuracy"}
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    step(batch)
    assert torch.equal(seen[0], torch.full((2, 3, 2, 2), 51, dtype=dtype) / 255)


@pytest.fixture
def scaled_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow training with scaled gradients on the CPU, which is normally refused."""
    monkeypatch.setattr(steps, "check_precision", lambda *_: None)
    monkeypatch.setattr(steps, "precision_on", lambda *_: ScaledPrecision("fp16", "planned"))


class ScaledPrecision(Precision):
    """A precision that scales gradients as for float16, but computes in float32."""

    dtype = None


def of_scale(scale: float) -> dict[str, Any]:
    return {"scale": scale, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000, "_growth_tracker": 0}


@pytest.mark.filterwarnings("error")
def test_scaled_gradients_train_clip_and_accumulate_like_unscaled_ones(scaled_on_cpu):
    model, step = make_step(clip=0.1, accumulate=2)
    step.load_state_dict({"updates": 0, "scheduler": None, "scaler": of_scale(1024.0)})
    for batch in batches(3):
        step(batch)
    step.flush()
    assert step.state_dict()["scaler"]["scale"] == 1024.0
    assert step.updates == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps, "precision_on", precision_on)
        exact, other = make_step(clip=0.1, accumulate=2)
        for batch in batches(3):
            other(batch)
        other.flush()
    assert close(model, exact)


@pytest.mark.filterwarnings("error")
def test_an_update_that_overflows_is_skipped_and_the_scheduler_not_stepped(scaled_on_cpu):
    model = small_cnn(width=8)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    step = supervised_step(model, optimizer, scheduler=scheduler)
    state = step.state_dict()
    step.load_state_dict({**state, "scaler": of_scale(3e38)})
    before = weights(model)
    step((batches()[0][0] * 1e6, batches()[0][1]))
    assert all(map(torch.equal, before, weights(model)))
    assert (step.updates, scheduler.last_epoch) == (0, 0)
    assert step.is_whole
    assert step.state_dict()["scaler"]["scale"] == pytest.approx(1.5e38)
    saved = {**step.state_dict(), "scaler": of_scale(2.0)}
    step.load_state_dict(saved)
    step(batches()[0])
    assert (step.updates, scheduler.last_epoch) == (1, 1)
    assert step.state_dict()["scaler"]["scale"] == 2.0
    # This state is from before the first batch, so it contains no gradient scale.
    step.load_state_dict(state)
    assert step.state_dict()["scaler"]["scale"] == 65536.0
    assert len(optimizer._optimizer_step_post_hooks) == 0


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch.compile() trace models without a compiler backend."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


def test_each_batch_size_is_compiled_to_its_own_static_graph(monkeypatch):
    options: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda module, **given: options.append(given) or module)
    make_step(compile=True)[1](batches(1)[0])
    assert options
    assert all(given["dynamic"] is False for given in options)


@pytest.mark.parametrize(
    ("capability", "dtype", "expected"),
    [
        ((7, 5), torch.float32, False),
        ((7, 5), torch.float16, True),
        ((6, 1), torch.float32, False),
        ((8, 0), torch.float32, True),
        ((9, 0), torch.bfloat16, True),
    ],
)
@pytest.mark.every_case
def test_channels_last_is_preferred_where_tensor_cores_compute(monkeypatch, capability, dtype, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert prefers_channels_last(torch.device("cuda:0"), dtype) is expected
    assert not prefers_channels_last(torch.device("cpu"), dtype)


@pytest.mark.full
def test_a_compiled_model_trains_the_same_and_keeps_its_names(eager):
    model, step = make_step(compile=True)
    plain, other = make_step()
    for batch in batches(2):
        step(batch)
        other(batch)
    assert step.evaluate(batches(1)) == pytest.approx(other.evaluate(batches(1)))
    assert close(model, plain)
    assert step.parts["model"] is model
    assert "compile=True" in repr(step)


@pytest.mark.full
def test_a_compiled_or_wrapped_model_is_saved_with_its_own_names():
    model = small_cnn(width=8)
    for wrapped in (torch.compile(model, backend="eager"), nn.DataParallel(model)):
        _, step = make_step(wrapped)
        assert step.parts["model"] is model
        step(batches()[0])


def test_an_unknown_compile_mode_is_refused():
    _, step = make_step(compile="fastest")
    with pytest.raises(InvalidOption, match=r"Cannot compile Sequential: compile='fastest' fails with .*compile=True"):
        step(batches()[0])


def test_a_missing_compiler_raises_missing_package_and_other_errors_are_unchanged(monkeypatch):
    error = RuntimeError("No working C++ compiler found in torch._inductor.config.cpp.cxx: (None, 'g++')")

    def failing(*_: object) -> None:
        raise error

    monkeypatch.setattr(torch, "compile", lambda module, **_: failing)
    with pytest.raises(
        MissingPackage, match=r"torch.compile found no C\+\+ compiler\. Install a compiler .*compile=False"
    ):
        make_step(compile=True)[1](batches()[0])
    error = ZeroDivisionError("planned")
    with pytest.raises(ZeroDivisionError, match="planned"):
        make_step(compile=True)[1](batches()[0])
