"""Shifted targets and context-parallel slices of a packed row."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from megacomposer.data.batch import Batch
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.context_parallel import gathered_positions
from megacomposer.mesh.layout import Layout
from megacomposer.model.inputs import ModelInputs, prepare_inputs, shift_within_documents

CPU = torch.device("cpu")


def naive_shift(values: list[int], bounds: list[int], offset: int) -> list[int]:
    shifted = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        shifted += [values[t + offset] if t + offset < end else 0 for t in range(start, end)]
    return shifted


def random_bounds(chooser: random.Random, tokens: int) -> list[int]:
    """Document boundaries, some of them twice: an empty document."""
    inner = sorted(chooser.choices(range(tokens + 1), k=chooser.randint(0, 5)))
    return [0, *inner, tokens]


def test_shift_crosses_a_document_or_loses_a_token() -> None:
    chooser = random.Random(1)
    for _ in range(200):
        tokens = chooser.randint(1, 24)
        bounds = random_bounds(chooser, tokens)
        values = [chooser.randint(1, 99) for _ in range(tokens)]
        offset = chooser.randint(0, 5)
        shifted = shift_within_documents(
            torch.tensor(values), torch.tensor(bounds, dtype=torch.int32), offset
        )
        assert shifted.tolist() == naive_shift(values, bounds, offset), (bounds, offset)


def test_shifted_mask_is_true_beyond_the_document() -> None:
    mask = torch.ones(6, dtype=torch.bool)
    bounds = torch.tensor([0, 2, 6], dtype=torch.int32)
    shifted = shift_within_documents(mask, bounds, 1)
    assert shifted.dtype == torch.bool
    assert shifted.tolist() == [True, False, True, True, True, False]


def batch_of(lengths: list[int]) -> Batch:
    """Documents of ascending token ids; each label is the next token of its document."""
    tokens = sum(lengths)
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    token_ids = torch.arange(1, tokens + 1)
    return Batch(
        token_ids=token_ids,
        labels=shift_within_documents(token_ids, bounds, 1),
        loss_mask=shift_within_documents(torch.ones(tokens, dtype=torch.bool), bounds, 1),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=bounds,
    )


def inputs_of(batch: Batch, *, cp: int, depths: int = 2) -> Iterator[ModelInputs]:
    for rank in range(cp):
        layout = Layout(MeshConfig(cp=cp), world_size=cp, rank=rank, device_type="cpu")
        yield prepare_inputs(batch, layout, mtp_num_layers=depths, device=CPU)


def test_depth_predicts_a_token_of_another_document_or_distance() -> None:
    (inputs,) = inputs_of(batch_of([5, 3]), cp=1)
    assert inputs.token_ids_DT.tolist() == [
        [1, 2, 3, 4, 5, 6, 7, 8],
        [2, 3, 4, 5, 0, 7, 8, 0],
        [3, 4, 5, 0, 0, 8, 0, 0],
    ]
    assert inputs.labels_DT.tolist() == [
        [2, 3, 4, 5, 0, 7, 8, 0],
        [3, 4, 5, 0, 0, 8, 0, 0],
        [4, 5, 0, 0, 0, 0, 0, 0],
    ]
    assert torch.equal(inputs.loss_mask_DT, inputs.labels_DT > 0)


@pytest.mark.parametrize("cp", [2, 4])
def test_context_parallel_slices_lose_the_targets_across_their_borders(cp: int) -> None:
    batch = batch_of([3, 13, 7, 1])
    (whole,) = inputs_of(batch, cp=1)
    slices = list(inputs_of(batch, cp=cp))
    order = gathered_positions(24, cp)
    for name in ("token_ids_DT", "labels_DT", "loss_mask_DT"):
        gathered = torch.cat([getattr(item, name) for item in slices], dim=1)
        assert torch.equal(gathered, getattr(whole, name)[:, order]), name
    positions = torch.cat([item.position_ids_T for item in slices])
    assert torch.equal(positions, batch.position_ids[order])
    masks = torch.cat([item.segments.mask for item in slices])
    document = torch.repeat_interleave(torch.arange(4), torch.tensor([3, 13, 7, 1]))
    expected = (order[None] <= order[:, None]) & (document[order][None] == document[order][:, None])
    assert torch.equal(masks, expected)


def test_row_that_does_not_divide_over_the_ranks_is_refused() -> None:
    layout = Layout(MeshConfig(tp=2, cp=2), world_size=4, rank=0, device_type="cpu")
    with pytest.raises(ValueError, match=r"10 tokens .* mesh\.cp 2 x mesh\.tp 2 ranks"):
        prepare_inputs(batch_of([10]), layout, mtp_num_layers=0, device=CPU)
    layout = Layout(MeshConfig(cp=2), world_size=2, rank=0, device_type="cpu")
    with pytest.raises(ValueError, match=r"row of 10 tokens .* 2 \* cp = 4"):
        prepare_inputs(batch_of([10]), layout, mtp_num_layers=0, device=CPU)
