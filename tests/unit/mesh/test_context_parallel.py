"""The zigzag split of a row over context-parallel ranks."""

from __future__ import annotations

import pytest
import torch

from megacomposer.mesh.context_parallel import gathered_positions, local_positions

SIZES = [(2, 1), (16, 1), (4, 2), (24, 2), (24, 3), (64, 8)]


@pytest.mark.parametrize(("tokens", "cp"), SIZES)
def test_no_position_is_lost_or_held_twice(tokens: int, cp: int) -> None:
    positions = gathered_positions(tokens, cp)
    assert positions.dtype == torch.int64
    assert positions.sort().values.tolist() == list(range(tokens))


@pytest.mark.parametrize(("tokens", "cp"), SIZES)
def test_ranks_do_equal_causal_work_in_ascending_order(tokens: int, cp: int) -> None:
    held = [local_positions(tokens, rank, cp) for rank in range(cp)]
    # Query t sees t + 1 keys.
    work = {int((positions + 1).sum()) for positions in held}
    assert len(work) == 1
    for positions in held:
        assert positions.shape == (tokens // cp,)
        assert bool((positions.diff() > 0).all())


def test_rank_holds_a_chunk_and_its_mirror() -> None:
    assert local_positions(16, 0, 2).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert local_positions(16, 1, 2).tolist() == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(("tokens", "cp"), [(6, 2), (3, 1), (20, 8)])
def test_row_that_does_not_divide_is_refused_with_its_numbers(tokens: int, cp: int) -> None:
    with pytest.raises(ValueError, match=f"row of {tokens} tokens .* 2 \\* cp = {2 * cp} equal"):
        local_positions(tokens, 0, cp)
