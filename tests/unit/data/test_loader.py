"""Order of the data over steps, ranks, micro-batches, epochs and restarts; held-out batches."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

from megacomposer.data.batch import Batch
from megacomposer.data.blend import Blend
from megacomposer.data.config import DataConfig, DataSource
from megacomposer.data.indexed import IndexedDataset, IndexedWriter
from megacomposer.data.loader import Loader, build_loader, heldout_batches
from megacomposer.data.packing import PackedDataset

LENGTHS = [10, 3, 25, 7, 1, 18, 30, 12, 5, 9]
SEQ_LENGTH = 8
GLOBAL_BATCH = 8
LAYOUTS = [(1, 1), (1, 8), (1, 4), (2, 1), (2, 2), (2, 4), (4, 1), (4, 2)]


@pytest.fixture
def blend(corpus):
    def make(seed=0, weights=(3, 1), seq_length=SEQ_LENGTH):
        datasets = [
            PackedDataset(corpus(LENGTHS, "a"), seq_length, seed),
            PackedDataset(corpus([20, 11, 14], "b", first_id=10_000), seq_length, seed),
        ]
        return Blend(datasets, weights)

    return make


def loaders(blend, dp_size, micro_batch_size, consumed_samples=0, prefetch=False):
    return [
        Loader(
            blend,
            global_batch_size=GLOBAL_BATCH,
            micro_batch_size=micro_batch_size,
            dp_rank=rank,
            dp_size=dp_size,
            consumed_samples=consumed_samples,
            prefetch=prefetch,
        )
        for rank in range(dp_size)
    ]


def windows(batches: list[Batch]) -> list[tuple[int, ...]]:
    """The token ids of each window of the micro-batches, in order."""
    return [tuple(row) for b in batches for row in b.token_ids.view(-1, SEQ_LENGTH).tolist()]


def global_steps(ranks: list[Loader], steps: int) -> list[list[tuple[int, ...]]]:
    return [[w for rank in ranks for w in windows(rank.next_step())] for _ in range(steps)]


def three_epochs(blend) -> int:
    return -(-3 * 4 * blend.datasets[0].samples_per_epoch // (3 * GLOBAL_BATCH))


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), LAYOUTS)
def test_order_over_three_epochs_is_the_same_for_every_layout_and_resume(
    blend, dp_size, micro_batch_size
):
    """F10: one order of sample ids, each once, uninterrupted or resumed in mid-epoch elsewhere."""
    data = blend()
    steps = three_epochs(data)
    reference = global_steps(loaders(data, 1, 1), steps)
    flat = [window for step in reference for window in step]
    assert flat == [tuple(data.sample(n).token_ids.tolist()) for n in range(steps * GLOBAL_BATCH)]
    located = [data.locate(n) for n in range(steps * GLOBAL_BATCH)]
    assert len(set(located)) == len(located)
    assert max(n for k, n in located if k == 0) >= 3 * data.datasets[0].samples_per_epoch - 1

    ranks = loaders(data, dp_size, micro_batch_size)
    assert global_steps(ranks, steps) == reference

    # stop in the middle of the second epoch, and go on in a new process with this layout
    stop = steps // 2
    assert (stop * GLOBAL_BATCH * 3 // 4) % data.datasets[0].samples_per_epoch > 0
    before = loaders(data, 2, 2)
    global_steps(before, stop)
    state = json.loads(json.dumps(before[1].state_dict()))
    resumed = loaders(blend(), dp_size, micro_batch_size)
    for rank in resumed:
        rank.load_state_dict(state)
    assert global_steps(resumed, steps - stop) == reference[stop:]
    by_count = loaders(blend(), dp_size, micro_batch_size, consumed_samples=stop * GLOBAL_BATCH)
    assert global_steps(by_count, steps - stop) == reference[stop:]


def test_ids_of_the_ranks_partition_each_step(blend):
    data = blend()
    for dp_size, micro_batch_size in LAYOUTS:
        ranks = loaders(data, dp_size, micro_batch_size, consumed_samples=40)
        ids = [n for rank in ranks for n in rank.sample_numbers()]
        assert ids == list(range(40, 48))
        for rank in ranks:
            batches = rank.next_step()
            assert len(batches) == rank.micro_batches == 8 // (dp_size * micro_batch_size)
            assert rank.consumed_samples == 48


def test_prefetch_changes_nothing_and_ends_its_thread(blend):
    data = blend()
    reference = global_steps(loaders(data, 1, 2), 12)
    threads = threading.active_count()
    with loaders(data, 1, 2, prefetch=True)[0] as loader:
        first = global_steps([loader], 5)
        assert loader.state_dict()["consumed_samples"] == 5 * GLOBAL_BATCH
        assert threading.active_count() == threads + 1
        state = loader.state_dict()
        global_steps([loader], 3)
        loader.load_state_dict(state)  # what was built ahead is thrown away
        assert first + global_steps([loader], 7) == reference
    assert threading.active_count() == threads
    loader.close()
    loader.load_state_dict(state)
    assert global_steps([loader], 1) == reference[5:6]  # without a thread from here on


def test_an_error_in_the_background_is_raised_by_the_step_that_needs_it(blend):
    data = blend()
    with loaders(data, 1, 2, prefetch=True)[0] as loader:
        data.datasets.clear()
        with pytest.raises(IndexError):
            loader.next_step()
        assert loader.consumed_samples == 0


def test_batches_have_the_agreed_types_and_boundaries(blend):
    for batch in loaders(blend(), 1, 4)[0].next_step():
        assert batch.token_ids.shape == (4 * SEQ_LENGTH,)
        for name in ("token_ids", "labels", "position_ids"):
            assert getattr(batch, name).dtype == torch.int64
        assert batch.loss_mask.dtype == torch.bool
        edges = batch.cu_seqlens
        assert edges.dtype == torch.int32
        assert (edges[0], edges[-1]) == (0, 4 * SEQ_LENGTH)
        assert (edges.diff() > 0).all()
        assert {0, 8, 16, 24, 32} <= set(edges.tolist())
        assert (batch.labels[~batch.loss_mask] == 0).all()
        # ids of a document are consecutive in this corpus, and differ between documents
        mask = batch.loss_mask
        assert (batch.labels[mask] == batch.token_ids[mask] + 1).all()
        for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            piece = batch.token_ids[start:stop]
            assert (piece.diff() == 1).all()
            assert batch.position_ids[start:stop].tolist() == list(range(stop - start))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((10, 4, 0, 1), "global_batch_size 10 is not a multiple of micro_batch_size 4 x dp_size 1"),
        ((8, 2, 0, 3), "global_batch_size 8 .* 2 x dp_size 3 = 6"),
        ((8, 0, 0, 1), "micro_batch_size 0"),
        ((0, 1, 0, 1), "global_batch_size 0"),
        ((8, 1, 2, 2), "dp_rank 2"),
        ((8, 1, -1, 2), "dp_rank -1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_the_numbers(blend, sizes, message):
    names = ("global_batch_size", "micro_batch_size", "dp_rank", "dp_size")
    with pytest.raises(ValueError, match=message):
        Loader(blend(), **dict(zip(names, sizes, strict=True)))


def test_a_state_of_other_data_is_refused_and_says_what_changed(blend, tmp_path):
    state = loaders(blend(), 1, 1)[0].state_dict()
    for other, message in (
        (blend(seed=1), r"sources\[0\]\.seed: 0 -> 1"),
        (blend(weights=(1, 1)), r"sources\[0\]\.weight: 3/4 -> 1/2"),
        (blend(seq_length=4), "seq_length: 8 -> 4"),
        (Blend(blend().datasets[:1], [1]), r"sources\[1\]\.data: \w+ -> \(absent\)"),
    ):
        with pytest.raises(ValueError, match=message):
            loaders(other, 1, 1)[0].load_state_dict(state)
    changed = np.memmap(tmp_path / "a.bin", dtype=np.int32, mode="r+")
    changed[5] += 1
    changed.flush()
    data = [PackedDataset(IndexedDataset(tmp_path / n), SEQ_LENGTH, 0) for n in ("a", "b")]
    with pytest.raises(ValueError, match=r"sources\[0\]\.data"):
        loaders(Blend(data, (3, 1)), 1, 1)[0].load_state_dict(state)


@pytest.mark.parametrize(("dp_size", "micro_batch_size"), [(1, 1), (2, 1), (3, 2), (4, 4), (1, 8)])
def test_heldout_predicts_each_token_once_with_equal_counts_on_every_rank(
    corpus, dp_size, micro_batch_size
):
    dataset = corpus(LENGTHS)
    ranks = [
        list(
            heldout_batches(
                dataset,
                seq_length=SEQ_LENGTH,
                micro_batch_size=micro_batch_size,
                dp_rank=rank,
                dp_size=dp_size,
            )
        )
        for rank in range(dp_size)
    ]
    assert len({len(batches) for batches in ranks}) == 1
    batches = [batch for rank in ranks for batch in rank]
    assert all(len(batch.token_ids) == micro_batch_size * SEQ_LENGTH for batch in batches)
    predicted = [label for b in batches for label in b.labels[b.loss_mask].tolist()]
    firsts = {int(dataset.tokens(k, 0, 1)[0]) for k in range(len(dataset))}
    # each once, in the order of the file
    assert predicted == [n for n in range(1, dataset.total_tokens + 1) if n not in firsts]
    for batch in batches:
        assert (batch.token_ids[batch.loss_mask] > 0).all()
        assert batch.cu_seqlens[-1] == len(batch.token_ids)
        assert (batch.cu_seqlens.diff() > 0).all()


def test_heldout_can_be_cut_short(corpus):
    dataset = corpus(LENGTHS)
    arguments = {"seq_length": SEQ_LENGTH, "micro_batch_size": 1, "dp_rank": 0, "dp_size": 1}
    whole = list(heldout_batches(dataset, **arguments))
    short = list(heldout_batches(dataset, **arguments, max_windows=3))
    assert len(short) == 3
    assert windows(short) == windows(whole)[:3]
    assert len(list(heldout_batches(dataset, **arguments, max_windows=10_000))) == len(whole)


def test_build_loader_reads_what_the_config_names(tmp_path, tokenizer_json):
    for name in ("a", "b"):
        with IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add_document(np.arange(100))
    sources = tuple(DataSource(prefix=str(tmp_path / name)) for name in ("a", "b"))
    config = DataConfig(sources=sources, seq_length=10, prefetch=True)
    sizes = {"global_batch_size": 4, "micro_batch_size": 2, "dp_rank": 0, "dp_size": 1}
    with build_loader(config, **sizes) as loader:
        assert loader.blend.weights == [0.5, 0.5]
        assert [len(batch.token_ids) for batch in loader.next_step()] == [20, 20]
    (tmp_path / "a.idx").unlink()
    with pytest.raises(ValueError, match=r"a\.bin has no a\.idx"):
        build_loader(config, **sizes)
