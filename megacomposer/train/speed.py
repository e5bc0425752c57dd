"""Throughput, MFU and memory of a step."""

from __future__ import annotations

import dataclasses

import torch

from megacomposer.data.batch import Batch
from megacomposer.mesh.layout import Layout
from megacomposer.model.config import ModelConfig
from megacomposer.observe.flops import ModelShape, mfu, peak_flops, training_flops_per_token


def model_shape(config: ModelConfig) -> ModelShape:
    """The sizes that FLOPs depend on, with implied ones filled in."""
    sizes = {field.name: getattr(config, field.name) for field in dataclasses.fields(ModelShape)}
    gqa = config.attention == "gqa"
    sizes |= {
        "num_query_groups": config.query_groups if gqa else 0,
        "head_dim": config.gqa_head_dim if gqa else 0,
        "num_dense_layers": config.num_dense_layers if config.num_experts else 0,
    }
    return ModelShape(**sizes)


def attended_length(batches: list[Batch]) -> int:
    """Length that attention spans for the mean token, in tokens: sum(length^2) / sum(length).

    Packed documents do not see each other, so `seq_length` would overstate the work.
    """
    lengths = torch.cat([(b.cu_seqlens[1:] - b.cu_seqlens[:-1]).double() for b in batches])
    return int((lengths.square().sum() / lengths.sum()).round())


class SpeedMeter:
    """Turns step times into the `perf/` metrics."""

    def __init__(self, config: ModelConfig, layout: Layout, device: torch.device) -> None:
        self._shape = model_shape(config)
        self._ranks = layout.world_size
        self._device = device
        cuda = device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(device)) if cuda else None

    def metrics(self, *, num_tokens: int, step_s: float, length: int) -> dict[str, float]:
        """`num_tokens` of the global batch in `step_s` seconds; `length` by `attended_length`."""
        tokens_per_s = num_tokens / step_s
        flops = training_flops_per_token(self._shape, seq_length=length)
        per_gpu = tokens_per_s / self._ranks
        values = {
            "perf/tokens_per_s": tokens_per_s,
            "perf/tokens_per_s_per_gpu": per_gpu,
            "perf/tflops_per_gpu": per_gpu * flops / 1e12,
        }
        utilisation = mfu(
            tokens_per_s_per_gpu=per_gpu, flops_per_token=flops, device_peak_flops=self._peak
        )
        if utilisation is not None:
            values["perf/mfu"] = utilisation
        if self._device.type == "cuda":
            gib = 1 << 30
            values["perf/memory_allocated_gib"] = torch.cuda.memory_allocated(self._device) / gib
            values["perf/memory_peak_gib"] = torch.cuda.max_memory_allocated(self._device) / gib
            torch.cuda.reset_peak_memory_stats(self._device)
        return values
