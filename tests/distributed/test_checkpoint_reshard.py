"""A checkpoint loads, bit for bit, under any other layout and number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from checkpoint_samples import Scheme, differing_keys, rng_sample, sample

from megacomposer.checkpoint.native import load_checkpoint, save_checkpoint
from runner import run_distributed

SCHEMES = [
    Scheme(),
    Scheme(tp=2),
    Scheme(shards=2),
    Scheme(shards=3),
    Scheme(replicas=3),
    Scheme(tp=2, shards=2),
    Scheme(tp=4),
    Scheme(shards=4),
    Scheme(shards=2, replicas=2),
]


def load_every_scheme_from_every_other(root: str) -> list[str]:
    """On 4 ranks: the first `scheme.size` of them save and load; returns what came out wrong."""
    rank = torch.distributed.get_rank()
    groups = {size: torch.distributed.new_group(list(range(size))) for size in (1, 2, 3, 4)}
    for seed, scheme in enumerate(SCHEMES):
        if rank < scheme.size:
            save_checkpoint(
                Path(root) / str(seed),
                seed,
                sample(scheme, rank, seed),
                {},
                rng_sample(rank, seed),
                keep_last=0,
                layout={"tp": scheme.tp},
                group=groups[scheme.size],
            )
    torch.distributed.barrier()
    faults = []
    for seed, saved in enumerate(SCHEMES):
        for scheme in SCHEMES:
            if rank >= scheme.size:
                continue
            tensors = sample(scheme, rank, None)
            loaded = load_checkpoint(
                Path(root) / str(seed),
                tensors,
                expect={},
                layout={"tp": scheme.tp},
                group=groups[scheme.size],
            )
            wrong = differing_keys(tensors, scheme, rank, seed)
            wanted_rng = rng_sample(rank, seed)["words"] if saved == scheme else None
            rng = loaded.rng_state["words"] if loaded.rng_state is not None else None
            rng_is_right = rng is wanted_rng or (rng is not None and torch.equal(rng, wanted_rng))
            if wrong or not rng_is_right:
                faults.append(f"{saved} -> {scheme}: {wrong} rng {rng}, wanted {wanted_rng}")
    return faults


def test_no_pair_of_layouts_changes_a_bit_or_restores_another_ranks_random_state(tmp_path) -> None:
    assert run_distributed(load_every_scheme_from_every_other, 4, str(tmp_path)) == [[]] * 4
    shards = {path.name for path in (tmp_path / "7" / "step_00000007").glob("*.distcp")}
    assert shards == {f"__{rank}_0.distcp" for rank in range(4)}  # every rank wrote its own
