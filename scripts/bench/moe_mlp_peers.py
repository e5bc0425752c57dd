"""Expert layers that moe_mlp.py compares: ours and public ones, each of which is optional.

A call takes x [T, H], gate_up [E, 2I, H], down [E, H, I], probs [T, K] and expert ids [T, K].
"""

from __future__ import annotations

import contextlib
import functools
import signal
import tempfile
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
import triton

from megacomposer.kernels.grouped_mlp import grouped_swiglu
from megacomposer.kernels.moe_routing import routing_map

if TYPE_CHECKING:
    from moe_mlp_cases import Case

Call = Callable[..., torch.Tensor]


def load(name: str, case: Case) -> Call:
    """The implementation's call. Raises ImportError where its package is not installed."""
    return _ours if name.startswith("ours") else PEERS[name](case)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError inside once that long has passed."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"more than {seconds} s with its warm-up")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _ours(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, probs: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    map = routing_map(ids, gate_up.shape[0], ids_rise=True)
    return grouped_swiglu(x, gate_up, down, map, probs)


def _grouped_mm(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, probs: torch.Tensor,
    ids: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """What torchtitan and others write, without padding: `_grouped_mm` between two index ops."""
    sorted_ids, order = torch.sort(ids.flatten(), stable=True)
    experts = torch.arange(gate_up.shape[0], device=ids.device)
    ends = torch.searchsorted(sorted_ids, experts, right=True).to(torch.int32)
    token = order // ids.shape[1]
    hidden = torch._grouped_mm(x.index_select(0, token), gate_up.transpose(1, 2), offs=ends)
    gate, up = hidden.chunk(2, dim=1)
    prob = probs.flatten().index_select(0, order)
    activation = (F.silu(gate.float()) * up.float() * prob[:, None]).to(x.dtype)
    y = torch._grouped_mm(activation, down.transpose(1, 2), offs=ends)
    return torch.zeros_like(x).index_add_(0, token, y)


def _compiled(_: Case) -> Call:
    # One shape and its routings share a graph: ids are data.
    return torch.compile(_grouped_mm, dynamic=False)


def _max_autotuned(_: Case) -> Call:
    return torch.compile(_grouped_mm, dynamic=False, mode="max-autotune-no-cudagraphs")


def _tune_briefly(*modules: Any) -> None:
    """Triton's and quack's autotuners in these: all their settings, each timed for 25 ms."""
    for tuner in (value for module in modules for value in vars(module).values()):
        if hasattr(tuner, "_do_bench"):
            tuner._do_bench = functools.partial(triton.testing.do_bench, warmup=5, rep=25)


def _liger(_: Case) -> Call:
    from liger_kernel.ops import fused_moe_kernels
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    _tune_briefly(fused_moe_kernels)

    def call(
        x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, probs: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        return LigerFusedMoEFunction.apply(x, gate_up, down, ids.to(torch.int32), probs)

    return call


def _sonic(_: Case) -> Call:
    """SonicMoE's layer from its routing on, which like ours is given ids and probabilities."""
    from quack import gemm_interface
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import _DownProjection, _UpProjection, reduction_over_k_gather
    from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

    _tune_briefly(gemm_interface, reduction_over_k_gather)

    def call(
        x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, probs: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        (tokens, choices), experts = ids.shape, gate_up.shape[0]
        rows, kind = tokens * choices, ActivationType.SWIGLU
        counts, offsets, token_of_row, choice_of_row, row_of_choice = (
            torch.empty(size, dtype=torch.int32, device=x.device)
            for size in (experts, experts + 1, rows, rows, rows)
        )
        TC_topk_router_metadata_triton(
            ids.to(torch.int32), experts, counts, offsets, token_of_row, choice_of_row,
            row_of_choice,
        )  # fmt: skip
        maps = (token_of_row, choice_of_row, row_of_choice, None, False)
        # Its weights are [out, in, experts] by strides of our stacks; gate above up as in ours.
        activation, hidden = _UpProjection.apply(
            x, gate_up.permute(1, 2, 0), None, offsets, rows, choices, *maps, kind, False, True
        )
        return _DownProjection.apply(
            activation, hidden, down.permute(1, 2, 0), None, probs, offsets, tokens, choices, *maps,
            kind,
        )  # fmt: skip

    return call


def _sequential(case: Case) -> Call:
    """megatron-core's unfused permute, its loop over experts, and its unpermute."""
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.experts import SequentialMLP
    from megatron.core.transformer.transformer_config import TransformerConfig

    rows, hidden, inner, experts = case.sizes
    config = TransformerConfig(
        num_layers=1, hidden_size=hidden, num_attention_heads=1, num_moe_experts=experts,
        ffn_hidden_size=inner, moe_ffn_hidden_size=inner, gated_linear_unit=True,
        activation_func=F.silu, add_bias_linear=False, bias_activation_fusion=True,
        params_dtype=torch.bfloat16, bf16=True, perform_initialization=False,
        use_cpu_initialization=True,
    )  # fmt: skip
    linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    with torch.device("meta"):
        loop = SequentialMLP(experts, config, linears, pg_collection=_single_process_groups(case))

    def call(
        x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, probs: torch.Tensor,
        ids: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        mask = torch.zeros(x.shape[0], experts, dtype=torch.bool, device=x.device)
        mask.scatter_(1, ids, True)
        probs_TE = torch.zeros_like(mask, dtype=probs.dtype).scatter(1, ids, probs)
        rows_RH, probs_R, order, *_ = moe_utils.permute(
            x, mask, probs=probs_TE, num_out_tokens=rows
        )
        weights = {}
        for expert, (first, second) in enumerate(zip(gate_up.unbind(), down.unbind(), strict=True)):
            weights[f"local_experts.{expert}.linear_fc1.weight"] = first
            weights[f"local_experts.{expert}.linear_fc2.weight"] = second
        counts = mask.sum(0)
        y, _ = torch.func.functional_call(loop, weights, (rows_RH, counts, probs_R))
        return moe_utils.unpermute(y, order, x.shape, routing_map=mask)

    return call


def _single_process_groups(case: Case) -> Any:
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection

    if not torch.distributed.is_initialized():
        with tempfile.NamedTemporaryFile(delete=False) as file:
            store = torch.distributed.FileStore(file.name, 1)
        backend = "nccl" if case.device.type == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
    return get_default_pg_collection()


PEERS: dict[str, Callable[[Case], Call]] = {
    "torch": lambda _: _grouped_mm,
    "torch.compile": _compiled,
    "max-autotune": _max_autotuned,
    "mcore": _sequential,
    "liger": _liger,
    "sonic": _sonic,
}
