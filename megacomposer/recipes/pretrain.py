"""Pretraining recipes. Each returns a complete configuration; the command line overrides fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from megacomposer.checkpoint.config import CheckpointConfig
from megacomposer.data.config import DataConfig, DataSource
from megacomposer.mesh.config import MeshConfig
from megacomposer.model import presets
from megacomposer.model.config import ModelConfig
from megacomposer.observe.config import ObserveConfig
from megacomposer.optim.config import OptimConfig, ScheduleConfig
from megacomposer.train.config import LoopConfig, RunConfig


def tiny() -> RunConfig:
    """A small Kimi-K2-shaped MoE with MTP on bytes: minutes on two CPU cores."""
    return RunConfig(
        run_dir="runs/tiny",
        model=presets.tiny(),
        data=DataConfig(
            sources=(DataSource(prefix="data/stdlib/train"),),
            heldout_prefix="data/stdlib/heldout",
            seq_length=256,
        ),
        train=LoopConfig(
            num_steps=200,
            micro_batch_size=4,
            global_batch_size=8,
            eval_interval_steps=100,
            eval_sequences=0,
            completion_prompt="def read_lines(path):\n",
        ),
        # The router is one of AdamW's parameters: at Muon's rate it collapses onto two experts.
        optim=OptimConfig(name="muon", lr=8e-3, muon_adam_lr_multiplier=0.3),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=20, wsd_decay_frac=0.4),
        mesh=MeshConfig(ep=2),
        checkpoint=CheckpointConfig(save_interval_steps=100),
        observe=ObserveConfig(log_interval_steps=5),
    )


def smollm2_135m() -> RunConfig:
    """A dense llama of SmolLM2-135M's shape."""
    return _large(presets.smollm2_135m(), "smollm2_135m", micro_batch_size=8)


def qwen3_30b_a3b() -> RunConfig:
    """Qwen3-30B-A3B: GQA and 128 experts; 8 GPUs or more."""
    return _large(presets.qwen3_30b_a3b(), "qwen3_30b_a3b", mesh=MeshConfig(ep=8))


def qwen3_moe_1gpu() -> RunConfig:
    """Qwen3-30B-A3B cut to 6 layers, which fits one 141 GB GPU with its optimizer state.

    Its routers are sigmoid with biases: from random weights a few steps of training make tokens
    alike, and biases follow that faster than an auxiliary loss, if the routers themselves move
    slowly (docs/moe.md).
    """
    model = dataclasses.replace(
        presets.qwen3_30b_a3b(),
        num_layers=6,
        router_score="sigmoid",
        router_bias=True,
        router_bias_update_rate=2e-2,
        router_bias_update="error",
        embedding_init_std=0.5,
    )
    run = _large(model, "qwen3_moe_1gpu", micro_batch_size=4)
    return dataclasses.replace(run, optim=dataclasses.replace(run.optim, router_lr_multiplier=0.1))


def deepseek_v3() -> RunConfig:
    """DeepSeek-V3 pretraining shape."""
    return _large(presets.deepseek_v3(), "deepseek_v3", mesh=MeshConfig(ep=64, dense_shard=64))


def kimi_k2() -> RunConfig:
    """Kimi K2 pretraining shape, EP 8 and CP 2 as in Composer 2's continued pretraining."""
    return _large(
        presets.kimi_k2(),
        "kimi_k2",
        mesh=MeshConfig(cp=2, ep=8),
        seq_length=32768,
        qk_clip_threshold=100.0,
    )


def _large(
    model: ModelConfig,
    name: str,
    *,
    mesh: MeshConfig | None = None,
    micro_batch_size: int = 1,
    seq_length: int = 4096,
    qk_clip_threshold: float = 0.0,
) -> RunConfig:
    return RunConfig(
        run_dir=f"runs/{name}",
        model=model,
        data=DataConfig(sources=(DataSource(prefix="data/code/train"),), seq_length=seq_length),
        train=LoopConfig(num_steps=10000, micro_batch_size=micro_batch_size, global_batch_size=256),
        optim=OptimConfig(name="muon", lr=3e-4, qk_clip_threshold=qk_clip_threshold),
        schedule=ScheduleConfig(kind="wsd", warmup_steps=500),
        mesh=mesh or MeshConfig(),
    )


RECIPES: dict[str, Callable[[], RunConfig]] = {
    recipe.__name__: recipe
    for recipe in (tiny, smollm2_135m, qwen3_moe_1gpu, qwen3_30b_a3b, deepseek_v3, kimi_k2)
}
