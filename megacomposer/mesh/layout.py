"""Layout: the one object that owns the meshes and every process group.

Ranks are numbered with TP fastest, then CP, then DP (megatron-core's order):

    rank = (dp_rank * cp + cp_rank) * tp + tp_rank             dense view, dp * cp * tp = world
    rank = expert_dp_rank * ep + ep_rank                       expert view, expert_dp * ep = world

Dense weights are sharded by FSDP over `dense_shard` consecutive indices of DP x CP and replicated
over the rest. A rank's experts are sharded over `expert_shard` consecutive indices of expert_dp and
replicated over the rest. The two widths are free of each other, and EP is free of TP and CP.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megacomposer.mesh.config import MeshConfig


def _require_divides(part: int, whole: int, message: str) -> None:
    if whole % part:
        raise ValueError(f"impossible layout: {message} ({part} does not divide {whole})")


class Layout:
    """The parallel layout of one job.

    Raises:
        ValueError: the sizes do not divide; the message names the numbers.
    """

    def __init__(self, config: MeshConfig, *, world_size: int, rank: int, device_type: str) -> None:
        tp, cp, ep = config.tp, config.cp, config.ep
        _require_divides(tp * cp, world_size, f"tp {tp} x cp {cp} ranks in a world of {world_size}")
        _require_divides(ep, world_size, f"ep {ep} in a world of {world_size}")
        dense_ranks, expert_ranks = world_size // tp, world_size // ep
        dense_shard = config.dense_shard or dense_ranks
        expert_shard = config.expert_shard or expert_ranks
        _require_divides(
            dense_shard,
            dense_ranks,
            f"dense_shard {dense_shard} of the {dense_ranks} = world {world_size} / tp {tp} ranks"
            " that hold one dense weight",
        )
        _require_divides(
            expert_shard,
            expert_ranks,
            f"expert_shard {expert_shard} of the {expert_ranks} = world {world_size} / ep {ep}"
            " ranks that hold one expert",
        )
        self.world_size, self.rank = world_size, rank
        self.tp, self.cp, self.ep = tp, cp, ep
        self.dp = world_size // (tp * cp)
        self.dense_shard, self.dense_replicate = dense_shard, dense_ranks // dense_shard
        self.expert_shard, self.expert_replicate = expert_shard, expert_ranks // expert_shard
        self.tp_rank = rank % tp
        self.cp_rank = rank // tp % cp
        self.dp_rank = rank // (tp * cp)
        self.ep_rank = rank % ep
        self._device_type = device_type

    def __str__(self) -> str:
        return (
            f"world {self.world_size} = dp {self.dp} x cp {self.cp} x tp {self.tp}; ep {self.ep};"
            f" dense weights shard {self.dense_shard} x replicate {self.dense_replicate};"
            f" experts shard {self.expert_shard} x replicate {self.expert_replicate}"
        )

    def describe(self) -> dict[str, int]:
        """The sizes that fix how tensors and random states are spread, for a checkpoint."""
        names = ("world_size", "tp", "cp", "ep", "dense_shard", "expert_shard")
        return {name: getattr(self, name) for name in names}

    def start(self) -> None:
        """Create the process groups: our two meshes and megatron-core's, over the same ranks.

        Collective. `torch.distributed` must be initialised with the layout's world.
        """
        from megatron.core import parallel_state, tensor_parallel

        assert torch.distributed.get_world_size() == self.world_size
        assert torch.distributed.get_rank() == self.rank
        self._dense_mesh = init_device_mesh(
            self._device_type,
            (self.dense_replicate, self.dense_shard, self.tp),
            mesh_dim_names=("dense_replicate", "dense_shard", "tp"),
        )
        self._expert_mesh = init_device_mesh(
            self._device_type,
            (self.expert_replicate, self.expert_shard, self.ep),
            mesh_dim_names=("expert_replicate", "expert_shard", "ep"),
        )
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=self.tp,
            context_parallel_size=self.cp,
            expert_model_parallel_size=self.ep,
            expert_tensor_parallel_size=1,
            create_gloo_process_groups=False,
        )
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.cp_group = parallel_state.get_context_parallel_group()
        self.dp_cp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.ep_group = parallel_state.get_expert_model_parallel_group()
        # The ranks that share one EP rank's experts, over which whole matrices may move.
        self.expert_exchange_group: torch.distributed.ProcessGroup = (
            torch.distributed.group.WORLD
            if self.ep == 1
            else parallel_state.get_expert_data_parallel_group()
        )
        assert torch.distributed.get_rank(self.ep_group) == self.ep_rank
        assert torch.distributed.get_rank(self.tp_group) == self.tp_rank
        # The same seed everywhere: dropout is not used, and parameters are initialised by name.
        tensor_parallel.model_parallel_cuda_manual_seed(torch.initial_seed() % 2**31)

    @property
    def dense_fsdp_mesh(self) -> DeviceMesh:
        """2-D (replicate, shard) mesh of this TP rank's dense weights; 1-D without replicas."""
        if self.dense_replicate == 1:
            return self._dense_mesh["dense_shard"]
        return self._dense_mesh["dense_replicate", "dense_shard"]

    @property
    def expert_fsdp_mesh(self) -> DeviceMesh:
        """2-D (replicate, shard) mesh of this EP rank's experts; 1-D without replicas."""
        if self.expert_replicate == 1:
            return self._expert_mesh["expert_shard"]
        return self._expert_mesh["expert_replicate", "expert_shard"]

    @property
    def dense_shard_rank(self) -> int:
        return self.rank // self.tp % self.dense_shard

    @property
    def dense_replicate_rank(self) -> int:
        return self.rank // self.tp // self.dense_shard

    @property
    def expert_shard_rank(self) -> int:
        return self.rank // self.ep % self.expert_shard

    @property
    def expert_replicate_rank(self) -> int:
        return self.rank // self.ep // self.expert_shard
