"""A run small enough for a test: a few kilobytes of text and a model with every kind of part."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy

from megacomposer.data.config import DataConfig, DataSource
from megacomposer.data.indexed import IndexedWriter
from megacomposer.model import presets
from megacomposer.optim.config import OptimConfig, ScheduleConfig
from megacomposer.runtime.config import RuntimeConfig
from megacomposer.train.config import LoopConfig, RunConfig

EOD = 256


def write_corpus(folder: Path, *, documents: int = 40, seed: int = 7) -> Path:
    """A learnable `.bin/.idx` pair of byte tokens, documents of 5 to 150 tokens; its prefix."""
    random = numpy.random.default_rng(seed)
    prefix = folder / "train"
    with IndexedWriter(prefix, numpy.uint16) as writer:
        for _ in range(documents):
            start, step = random.integers(0, 64, 2)
            length = int(random.integers(5, 150))
            tokens = (start + (step % 3 + 1) * numpy.arange(length)) % 64 + 32
            writer.add_document(numpy.append(tokens, EOD))
    return prefix


def small_config(corpus: str, run_dir: str = "unused") -> RunConfig:
    """MLA, a dense and a MoE layer, shared expert, expert bias and one MTP depth."""
    model = dataclasses.replace(
        presets.tiny(),
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        moe_ffn_hidden_size=32,
        shared_expert_ffn_hidden_size=32,
    )
    return RunConfig(
        run_dir=run_dir,
        model=model,
        data=DataConfig(sources=(DataSource(prefix=corpus),), seq_length=32),
        train=LoopConfig(num_steps=20, micro_batch_size=8, global_batch_size=8),
        optim=OptimConfig(lr=2e-3),
        schedule=ScheduleConfig(kind="constant"),
        runtime=RuntimeConfig(device="cpu", collective_timeout_s=60.0),
    )
