"""Two small models, their batches on every layout, and one training step with its gradients."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megacomposer.data.batch import Batch
from megacomposer.mesh.config import MeshConfig
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.sharding import TensorLayout, gather_to_global
from megacomposer.model.config import ModelConfig, YarnConfig
from megacomposer.model.parameters import ParameterShard
from megacomposer.optim.config import OptimConfig
from megacomposer.optim.optimizer import build_optimizer
from megacomposer.runtime.config import RuntimeConfig

if TYPE_CHECKING:
    from megacomposer.model.gpt import GPT
    from megacomposer.runtime.process import Process
    from megacomposer.train.step import StepResult, TrainStep

VOCABULARY = 61
SEQUENCES, LENGTH, PER_MICRO_BATCH = 8, 16, 2
CPU = torch.device("cpu")

MLA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    vocab_size=VOCABULARY,
    attention="mla",
    q_lora_rank=18,
    kv_lora_rank=5,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    yarn=YarnConfig(factor=4.0, original_max_positions=8, mscale=0.8, mscale_all_dim=0.5),
    num_experts=8,
    experts_per_token=2,
    moe_ffn_hidden_size=16,
    shared_expert_ffn_hidden_size=16,
    num_dense_layers=1,
    router_score="sigmoid",
    router_num_groups=4,
    router_topk_groups=2,
    router_scale=2.0,
    router_bias=True,
    router_bias_update_rate=1e-3,
    mtp_num_layers=2,
    mtp_loss_weight=0.5,
    init_std=0.1,
)
"""Every part of a Kimi- or DeepSeek-shaped model. Four ranks shard the 18 rows unevenly, and the
last of them gets none of the 5."""

GQA = ModelConfig(
    num_layers=2,
    hidden_size=32,
    ffn_hidden_size=64,
    num_attention_heads=4,
    num_query_groups=2,
    head_dim=16,
    qk_norm=True,
    vocab_size=VOCABULARY,
    tie_embeddings=True,
    num_experts=6,
    experts_per_token=2,
    moe_ffn_hidden_size=16,
    router_aux_loss_coeff=0.5,
    init_std=0.1,
)
"""Every part of a Qwen3-MoE-shaped model, tied embeddings and an auxiliary loss that weighs. Four
ranks shard the 6 experts as 2, 2, 2 and none, two ranks half of them as 2 and 1."""


def documents_of(seed: int) -> list[list[int]]:
    """Document lengths of each sequence; they sum to LENGTH."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(SEQUENCES):
        cuts = torch.randint(1, LENGTH, (2,), generator=generator).tolist()
        bounds = [0, *sorted(set(cuts)), LENGTH]
        sequences.append([b - a for a, b in zip(bounds, bounds[1:], strict=False)])
    return sequences


def global_batches(seed: int = 0) -> list[Batch]:
    """The micro-batches of one global batch; how many labels count differs, and one has none."""
    generator = torch.Generator().manual_seed(seed)
    sequences = documents_of(seed)
    batches = []
    for first in range(0, SEQUENCES, PER_MICRO_BATCH):
        lengths = [n for item in sequences[first : first + PER_MICRO_BATCH] for n in item]
        tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=generator)
        batch = packed_row(tokens, lengths)
        kept = torch.rand(sum(lengths), generator=generator) < 0.9 - 0.1 * first
        if first == SEQUENCES - PER_MICRO_BATCH:
            kept = torch.zeros_like(kept)
        batches.append(dataclasses.replace(batch, loss_mask=batch.loss_mask & kept))
    return batches


def packed_row(tokens: torch.Tensor, lengths: Sequence[int]) -> Batch:
    """Documents of these lengths end to end; each predicts its own next tokens."""
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    mask = torch.ones(len(tokens), dtype=torch.bool)
    mask[bounds[1:] - 1] = False
    labels = torch.where(mask, tokens.roll(-1), 0)
    return Batch(
        token_ids=tokens,
        labels=labels,
        loss_mask=mask,
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=bounds.to(torch.int32),
    )


def batches_of(layout: Layout, seed: int = 0) -> list[Batch]:
    """This DP rank's micro-batches. The same micro-batches exist on every layout."""
    batches = global_batches(seed)
    share = len(batches) // layout.dp
    return batches[layout.dp_rank * share : (layout.dp_rank + 1) * share]


class GradientRecorder:
    """An optimizer that keeps every gradient, whole, and changes no parameter."""

    def __init__(self, shards: list[ParameterShard]) -> None:
        self.shards = shards
        self.gradients: dict[str, torch.Tensor] = {}
        self.local: dict[str, torch.Tensor] = {}

    def step(self, *, lr: float) -> None:
        for shard in self.shards:
            grad = shard.local_grad
            assert grad is not None, shard.name
            assert grad.dtype == torch.float32, shard.name
            self.local[shard.name] = grad.clone()
            self.gradients[shard.name] = gather_to_global(shard.layout, grad)

    def zero_grad(self) -> None:
        for shard in self.shards:
            shard.parameter.grad = None

    def state_tensors(self) -> dict[str, tuple[TensorLayout, torch.Tensor]]:
        return {}

    def state_scalars(self) -> dict[str, int | float]:
        return {}

    def load_state_scalars(self, scalars: dict[str, int | float]) -> None: ...

    def metrics(self) -> dict[str, float]:
        return {}


@dataclasses.dataclass
class Job:
    """A sharded model on this rank, and its step."""

    layout: Layout
    model: GPT
    shards: list[ParameterShard]
    optimizer: Any
    train_step: TrainStep

    def step(self, *, seed: int = 0, lr: float = 1e-2) -> StepResult:
        return self.train_step(batches_of(self.layout, seed), lr=lr)

    def state(self) -> dict[str, torch.Tensor]:
        """Copies of everything that a step may change on this rank."""
        tensors = {shard.name: shard.local for shard in self.shards}
        tensors |= {name: moment for name, (_, moment) in self.optimizer.state_tensors().items()}
        for name, layer in self.model.moe_layers().items():
            for leaf, value in layer.router.named_buffers():
                tensors[f"{name}.{leaf}"] = value
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@contextmanager
def start_job(process: Process, config: ModelConfig, mesh: MeshConfig, *, adamw: bool = False):
    """Build `config` on `mesh`; several jobs may follow each other in one process."""
    from megacomposer.model.gpt import GPT
    from megacomposer.model.initialization import initialize_parameters
    from megacomposer.model.parallelize import parallelize
    from megacomposer.model.parameters import describe_parameters
    from megacomposer.train.step import TrainStep

    gc.collect()  # the job before this one, and with it the threads of its groups
    layout = Layout(
        mesh, world_size=process.world_size, rank=process.rank, device_type=process.device.type
    )
    layout.start()
    model = GPT(config, layout)
    parallelize(model, layout)
    shards = describe_parameters(model, layout)
    initialize_parameters(shards, config, seed=11)
    recorder = GradientRecorder(shards)
    optimizer = build_optimizer(OptimConfig(), shards) if adamw else recorder
    step = TrainStep(model, layout, shards, optimizer, clip_grad_norm=0.0, device=CPU)
    try:
        yield Job(layout, model, shards, optimizer, step)
    finally:
        close_groups()


def close_groups() -> None:
    """End every process group but the world's.

    megatron-core makes dozens of them for a layout and forgets them without ending them, and each
    has a gloo thread that wakes 100 times a second.
    """
    from megatron.core import parallel_state

    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


@contextmanager
def start_cpu_process() -> Iterator[Process]:
    """One rank on the CPU, also on a machine that has a GPU."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from megacomposer.runtime.process import start_process

    with start_process(RuntimeConfig(device="cpu", collective_timeout_s=300.0)) as process:
        gc.freeze()  # what is imported stays; collecting between jobs need not look at it
        yield process
