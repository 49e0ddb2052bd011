"""`supervised_step()` by what models give, what labels are and what losses return."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from models import make_step
from torch import Tensor, nn

from colabkit.errors import ColabkitError, InvalidOption

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
def test_there_is_an_accuracy_where_labels_tell_the_highest_score(scores, labels, loss, has_accuracy):
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
    """Gives the same scores for all images, and nearly so after a step."""

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores
        self.offset = nn.Parameter(torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        return self.scores + self.offset


def test_errors_of_the_model_keep_their_own_traceback():
    class Failing(Constant):
        def forward(self, images):
            raise ZeroDivisionError("planned")

    _, step = make_step(Failing(SCORES))
    with pytest.raises(ZeroDivisionError, match="planned") as caught:
        step((torch.zeros(8, 3), CLASSES))
    assert not isinstance(caught.value, ColabkitError)
    assert caught.traceback[-1].name == "forward"


def test_a_loss_that_is_no_number_passes_and_one_of_many_is_refused():
    batch = (torch.zeros(8, 3), CLASSES)
    _, step = make_step(Constant(SCORES * float("nan")))
    assert step(batch)["loss"].isnan()
    for loss, found in (
        (nn.CrossEntropyLoss(reduction="none"), r"a tensor of shape \[8\]"),
        (lambda scores, labels: 0.5, "a float"),
    ):
        with pytest.raises(InvalidOption, match=f"the loss is {found}, it has to be a single number"):
            make_step(Constant(SCORES), loss)[1](batch)


def test_outputs_of_any_kind_reach_the_loss_as_they_are():
    class Two(Constant):
        def forward(self, images):
            return self.scores + self.offset, self.offset

    _, step = make_step(Two(SCORES), lambda both, labels: nn.functional.cross_entropy(both[0], labels) + both[1])
    assert set(step((torch.zeros(8, 3), CLASSES))) == {"loss"}
