"""Everything a run consists of, built from its configuration, saved and restored as one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch

from megacomposer.checkpoint.native import (
    LoadedState,
    load_checkpoint,
    resolve_checkpoint,
    save_checkpoint,
)
from megacomposer.checkpoint.rng import capture_rng, restore_rng
from megacomposer.data.loader import Loader, build_loader
from megacomposer.data.tokenizer import Tokenizer, load_tokenizer
from megacomposer.mesh.layout import Layout
from megacomposer.mesh.sharding import TensorLayout, whole_layout
from megacomposer.model.gpt import GPT
from megacomposer.model.initialization import initialize_parameters
from megacomposer.model.parallelize import parallelize
from megacomposer.model.parameters import ParameterShard, describe_parameters
from megacomposer.observe.logging import get_logger
from megacomposer.optim.optimizer import Optimizer, build_optimizer
from megacomposer.runtime.process import Process
from megacomposer.train.config import RunConfig

_logger = get_logger(__name__)

# Fields of ModelConfig that change how a model trains but not what its weights mean.
_TRAINING_FIELDS = (
    "dtype",
    "recompute",
    "backend",
    "init_std",
    "embedding_init_std",
    "mtp_loss_weight",
    "router_aux_loss_coeff",
    "router_bias_update",
    "router_bias_update_rate",
    "router_z_loss_coeff",
    "router_replay_threshold",
    "moe_backend",
)


@dataclasses.dataclass(kw_only=True)
class TrainState:
    """The live run on this rank."""

    config: RunConfig
    layout: Layout
    model: GPT
    shards: list[ParameterShard]
    optimizer: Optimizer
    loader: Loader
    tokenizer: Tokenizer
    step: int = 0
    """Optimizer steps done."""
    trained_tokens: int = 0
    skipped_steps: int = 0

    @property
    def checkpoints(self) -> Path:
        return Path(self.config.run_dir) / "checkpoints"

    def model_tensors(self) -> dict[str, tuple[TensorLayout, torch.Tensor]]:
        """Weights and router biases by checkpoint key."""
        tensors = {shard.name: (shard.layout, shard.local) for shard in self.shards}
        for name, layer in self.model.moe_layers().items():
            if self.config.model.router_bias:
                key, bias = f"{name}.router.expert_bias", layer.router.expert_bias
                layout = whole_layout(key, tuple(bias.shape), is_primary=self.layout.rank == 0)
                tensors[key] = (layout, bias)
        return tensors

    def _router_loads(self) -> dict[str, torch.Tensor]:
        """What the routers' auxiliary loss keeps from step to step; empty without one."""
        layers = self.model.moe_layers().items()
        loads = {name: getattr(layer.router, "expert_load", None) for name, layer in layers}
        return {name: load for name, load in loads.items() if load is not None}

    def save(self) -> Path:
        """Write a checkpoint of this step. Collective."""
        return save_checkpoint(
            self.checkpoints,
            self.step,
            {**self.model_tensors(), **self.optimizer.state_tensors()},
            {
                "model": model_identity(self.config),
                "optimizer": optimizer_identity(self.config),
                "loader": self.loader.state_dict(),
                "optimizer_scalars": self.optimizer.state_scalars(),
                "trained_tokens": self.trained_tokens,
                "skipped_steps": self.skipped_steps,
                "router_loads": {k: load.tolist() for k, load in self._router_loads().items()},
            },
            capture_rng(),
            keep_last=self.config.checkpoint.keep_last,
            layout=self.layout.describe(),
        )

    def restore(self) -> Path | None:
        """Continue this run's own newest checkpoint, else start from `checkpoint.load_from`.

        Collective. Returns what was loaded, or None for a fresh start.
        """
        settings = self.config.checkpoint
        own = resolve_checkpoint(self.checkpoints)
        source = self.checkpoints if own is not None else settings.load_from
        if source is None:
            return None
        weights_only = own is None and settings.load_model_only
        expect: dict[str, Any] = {"model": model_identity(self.config)}
        tensors = self.model_tensors()
        if not weights_only:
            expect["optimizer"] = optimizer_identity(self.config)
            tensors |= self.optimizer.state_tensors()
        loaded = load_checkpoint(
            Path(source),
            tensors,
            expect=expect,
            layout=self.layout.describe(),
            allow_unused=weights_only,
            skip_corrupt=settings.skip_corrupt,
        )
        if not weights_only:
            self._restore_position(loaded)
        return loaded.path

    def _restore_router_loads(self, saved: dict[str, list[float]]) -> None:
        """A checkpoint without them (of a run without the loss, say) leaves even loads."""
        loads = self._router_loads()
        for name in loads.keys() & saved.keys():
            loads[name].copy_(torch.tensor(saved[name]))
        if self.layout.rank == 0 and (missing := loads.keys() - saved.keys()):
            _logger.info(
                "%d routers have no saved loads: their auxiliary loss starts from even ones",
                len(missing),
            )

    def _restore_position(self, loaded: LoadedState) -> None:
        host = loaded.host_state
        self.loader.load_state_dict(host["loader"])
        self.optimizer.load_state_scalars(host["optimizer_scalars"])
        self.step = loaded.step
        self.trained_tokens = int(host["trained_tokens"])
        self.skipped_steps = int(host["skipped_steps"])
        self._restore_router_loads(host.get("router_loads", {}))
        if loaded.rng_state is not None:
            restore_rng(loaded.rng_state)
        elif self.layout.rank == 0:
            _logger.warning(
                "%s was saved under another layout: weights, moments and data position continue,"
                " random generators are seeded anew",
                loaded.path.name,
            )


def model_identity(config: RunConfig) -> dict[str, Any]:
    """The model fields that a checkpoint must agree with."""
    fields = config.model.to_dict()
    return {name: value for name, value in fields.items() if name not in _TRAINING_FIELDS}


def optimizer_identity(config: RunConfig) -> str:
    """The kind of moments that a checkpoint must agree with: both Muons keep the same."""
    name = config.optim.name
    return "muon" if name == "muon_reference" else name


def build_state(config: RunConfig, process: Process) -> TrainState:
    """Build layout, data, model and optimizer, with initial weights. Collective.

    The layout and the data are checked before the model is allocated.

    Raises:
        ValueError: an impossible layout, missing or damaged data, or a tokenizer larger than the
            model's vocabulary.
    """
    layout = Layout(
        config.mesh,
        world_size=process.world_size,
        rank=process.rank,
        device_type=process.device.type,
    )
    tokenizer = load_tokenizer(config.data.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ValueError(
            f"tokenizer {tokenizer.spec} has ids up to {tokenizer.vocab_size} but model.vocab_size"
            f" is {config.model.vocab_size}; set --model.vocab_size {tokenizer.vocab_size}"
        )
    loader = build_loader(
        config.data,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=config.train.micro_batch_size,
        dp_rank=layout.dp_rank,
        dp_size=layout.dp,
        tokenizer=tokenizer,
    )
    layout.start()
    model = GPT(config.model, layout)
    parallelize(model, layout)
    shards = describe_parameters(
        model, layout, split_output_heads=config.optim.muon_o_proj == "per_head"
    )
    initialize_parameters(shards, config.model, seed=config.runtime.seed)
    return TrainState(
        config=config,
        layout=layout,
        model=model,
        shards=shards,
        optimizer=build_optimizer(config.optim, shards, layout),
        loader=loader,
        tokenizer=tokenizer,
    )
