"""The objective is one global mean per head, however ranks and micro-batches split the tokens."""

from __future__ import annotations

import pytest
import torch

from megacomposer.loss.language_model import language_model_objective, masked_sums

MTP_WEIGHT = 0.3


def objective_of(
    parts: list[tuple[torch.Tensor, torch.Tensor]], *, weight: float = MTP_WEIGHT
) -> torch.Tensor:
    """The sum of all shares, as data parallelism and gradient accumulation form it.

    Each part is the [D, T] losses and mask of one micro-batch of one rank.
    """
    counts_D = torch.stack([mask.sum(dim=1) for _, mask in parts]).sum(dim=0)
    shares = [
        language_model_objective(masked_sums(loss, mask), counts_D, mtp_loss_weight=weight)
        for loss, mask in parts
    ]
    return torch.stack(shares).sum()


def split(
    loss_DT: torch.Tensor, mask_DT: torch.Tensor, sizes: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return list(zip(loss_DT.split(sizes, dim=1), mask_DT.split(sizes, dim=1), strict=True))


def random_row(heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    loss = torch.rand(heads, tokens, generator=generator, dtype=torch.float64) + 0.5
    mask = torch.rand(heads, tokens, generator=generator) < 0.4
    # One quarter of the row has no label at all: a rank with nothing to count.
    mask[:, tokens // 2 : 3 * tokens // 4] = False
    return loss, mask


@pytest.mark.parametrize("heads", [1, 2, 3])
@pytest.mark.parametrize(
    "sizes", [[40], [10, 10, 10, 10], [1, 9, 10, 20], [20, 10, 10], [0, 40], [1] * 40]
)
def test_split_of_the_tokens_changes_the_objective(heads: int, sizes: list[int]) -> None:
    loss, mask = random_row(heads, 40)
    means = [loss[d][mask[d]].mean() for d in range(heads)]
    expected = means[0]
    if heads > 1:
        expected = expected + MTP_WEIGHT * torch.stack(means[1:]).mean()
    torch.testing.assert_close(objective_of(split(loss, mask, sizes)), expected)


def test_mean_of_means_on_ranks_with_unequal_counts() -> None:
    """Ranks with 1, 1, 1 and 3 labels: the mean of their means would be 5."""
    counts = [1, 1, 1, 3]
    values = [2.0, 4.0, 6.0, 8.0]
    parts = []
    for count, value in zip(counts, values, strict=True):
        loss = torch.full((1, 3), value)
        mask = torch.arange(3)[None] < count
        parts.append((loss, mask))
    assert objective_of(parts).item() == pytest.approx(6.0)


def test_short_sequence_weighs_as_much_as_a_long_one() -> None:
    """Lengths 1 and 9: micro-batches of one must give what one micro-batch of two gives."""
    loss = torch.tensor([[10.0] + [1.0] * 9])
    mask = torch.ones(1, 10, dtype=torch.bool)
    together = objective_of(split(loss, mask, [10]))
    apart = objective_of(split(loss, mask, [1, 9]))
    assert together.item() == pytest.approx(1.9)
    assert apart.item() == pytest.approx(1.9)


def test_gradient_of_a_token_depends_on_the_split() -> None:
    loss, mask = random_row(2, 40)
    gradients = []
    for sizes in ([40], [7, 13, 20]):
        leaf = loss.clone().requires_grad_()
        objective_of(split(leaf, mask, sizes)).backward()
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    torch.testing.assert_close(gradients[0], gradients[1])
    counts = mask.sum(dim=1, keepdim=True)
    weights = torch.tensor([[1.0], [MTP_WEIGHT]], dtype=torch.float64)
    torch.testing.assert_close(gradients[0], mask * weights / counts)


@pytest.mark.parametrize("masked_heads", [[0], [1], [2], [1, 2], [0, 1, 2]])
def test_head_without_labels_gives_nan(masked_heads: list[int]) -> None:
    loss, mask = random_row(3, 12)
    mask[:, 0] = True
    mask[masked_heads] = False
    leaf = loss.clone().requires_grad_()
    value = objective_of(split(leaf, mask, [5, 7]))
    value.backward()
    assert leaf.grad is not None
    assert bool(torch.isfinite(value))
    assert torch.equal(leaf.grad[masked_heads], torch.zeros(len(masked_heads), 12).double())
    others = [d for d in range(3) if d not in masked_heads]
    assert bool((leaf.grad[others][mask[others]] > 0).all())
    if len(masked_heads) == 3:
        assert value.item() == 0.0


def test_masked_position_leaks_its_value_or_its_gradient() -> None:
    """Masked tokens have a loss too, and padding may even have an infinite one."""
    loss = torch.tensor([[1.0, float("inf"), 3.0, float("nan")]], requires_grad=True)
    mask = torch.tensor([[True, False, True, False]])
    value = objective_of([(loss, mask)])
    value.backward()
    assert value.item() == 2.0
    assert loss.grad is not None
    assert loss.grad.tolist() == [[0.5, 0.0, 0.5, 0.0]]


def test_mtp_weight_multiplies_the_mean_over_depths() -> None:
    sums, counts = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([1, 1, 1])
    value = language_model_objective(sums, counts, mtp_loss_weight=0.5)
    assert value.item() == pytest.approx(2.0 + 0.5 * 4.0)
    alone = language_model_objective(sums[:1], counts[:1], mtp_loss_weight=0.5)
    assert alone.item() == 2.0
