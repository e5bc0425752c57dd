"""The one place where an op's implementation is chosen.

| op               | triton                                  | torch                           |
|------------------|-----------------------------------------|---------------------------------|
| rms_norm         | CUDA; bf16, fp16, fp32; 1 <= H <= 16384 | the rest: CPU, float64, wider H |
| batched_products | CUDA; bf16, fp16, fp32; sm90, see below | bmm: CPU                        |
| muon_momentum    | CUDA                                    | one piece at a time: CPU        |
| muon_pack        | CUDA                                    | one piece at a time: CPU        |
| muon_copy        | CUDA                                    | one rectangle at a time: CPU    |
| muon_update      | CUDA                                    | one piece at a time: CPU        |
| varlen_attention | none                                    | flash varlen or SDPA, see below |
| masked_attention | none                                    | SDPA with a mask                |
| max_logits       | CUDA; bf16, fp16, fp32; D <= 256        | bmm by blocks of rows: the rest |
| routing_map      | CUDA; any integer dtype                 | stable sort: CPU                |
| permute, combine | CUDA; bf16, fp16, fp32                  | gather + fp32 sum: the rest     |
| grouped_swiglu   | CUDA; bf16, fp16, fp32; no products     | the rest; products, see below   |

`reference` (plain, fp32 or float64 inside, result in the input's dtype) is chosen only by request.

Which torch built-in runs inside the torch column is a rule of device, dtype and shape too, and is
kept here as well:

- varlen_attention: one segment -> SDPA causal; several segments on CUDA in bf16/fp16 with head dims
  <= 256 -> `torch.nn.attention.varlen`; otherwise SDPA once per distinct segment length.
- products of grouped_swiglu: CUDA bf16 with H and I multiples of 8 -> on Hopper CUDA C++ with
  gather and SwiGLU in it, elsewhere `torch._grouped_mm` (neither waits for the device); otherwise
  a loop over experts, which on CUDA reads the row counts back to the host.

The environment variable MEGACOMPOSER_KERNELS overrides the choice for every op:
`reference` (of grouped_swiglu: without expert parallelism only), `torch`, or `triton`. `triton`
means: wherever the op has a Triton kernel, on inputs the table would not give it as well, which
raises ValueError where the kernel cannot take them; ops whose triton column says none keep `torch`.
On a CPU tensor Triton runs only in its interpreter (TRITON_INTERPRET=1 set before triton is
imported).
"""

from __future__ import annotations

import dataclasses
import os
from typing import Literal, get_args

import torch

Implementation = Literal["triton", "torch", "reference"]
OVERRIDE_VARIABLE = "MEGACOMPOSER_KERNELS"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TritonLimits:
    """What an op's Triton kernel takes."""

    dtypes: tuple[torch.dtype, ...]
    """Accepted dtypes of the op's first tensor."""
    max_last_dim: int
    """Largest accepted size of its last dim, elements; the smallest is 1."""

    def refusal(self, x: torch.Tensor) -> str | None:
        """Why the kernel cannot take `x`, or None where it can."""
        if x.dtype not in self.dtypes:
            return f"dtype {x.dtype} is not one of {', '.join(map(str, self.dtypes))}"
        if not 1 <= x.shape[-1] <= self.max_last_dim:
            return f"last dim {x.shape[-1]} is outside 1..{self.max_last_dim}"
        if not x.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            return f"device {x.device.type} has no Triton (set TRITON_INTERPRET=1 before import)"
        return None


_HALF = (torch.bfloat16, torch.float16)
_HALF_AND_SINGLE = (*_HALF, torch.float32)
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_INTEGERS = (*_SIGNED, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_ANY_SIZE = 2**63 - 1

# None: the op has no Triton kernel.
TABLE: dict[str, TritonLimits | None] = {
    "rms_norm": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=16384),
    "batched_products": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=2**31 - 1),
    "muon_momentum": TritonLimits(dtypes=(torch.float32,), max_last_dim=_ANY_SIZE),
    "muon_pack": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=_ANY_SIZE),
    "muon_copy": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=_ANY_SIZE),
    "muon_update": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=_ANY_SIZE),
    "varlen_attention": None,
    "masked_attention": None,
    "max_logits": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=256),
    "routing_map": TritonLimits(dtypes=_INTEGERS, max_last_dim=_ANY_SIZE),
    "permute": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=2**31 - 1),
    "combine": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=2**31 - 1),
    "grouped_swiglu": TritonLimits(dtypes=_HALF_AND_SINGLE, max_last_dim=_ANY_SIZE),
}


def choose(op: str, x: torch.Tensor) -> Implementation:
    """The implementation of `op` for its first tensor `x`.

    Raises ValueError if MEGACOMPOSER_KERNELS is not one of the three names, or asks for Triton
    where the op's kernel cannot take `x`.
    """
    limits = TABLE[op]
    override = _override()
    if override == "triton" and limits is not None:
        refusal = limits.refusal(x)
        if refusal is not None:
            raise ValueError(f"{OVERRIDE_VARIABLE}=triton: {op} cannot run in Triton: {refusal}")
        return "triton"
    if override == "reference":
        return "reference"
    if override is None and limits is not None and x.is_cuda and limits.refusal(x) is None:
        return "triton"
    return "torch"


def choose_products(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> str:
    """`sm90`, `triton` or `torch` for one product of kernels/batched_products.py.

    sm90 is CUDA C++ for Hopper: float16 operands, float16 or bfloat16 result, and the row strides
    that its bulk copies need, multiples of 8 elements.
    """
    chosen = choose("batched_products", a)
    if not use_sm90(a):
        return "torch" if chosen == "reference" else chosen
    takes = out.dtype in _HALF and all(rows_are_aligned(tensor) for tensor in (a, b, out))
    return "sm90" if takes else "triton"


def takes_lower(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether every product of Newton-Schulz from x [B, m, n] to `out` runs in the CUDA C++ kernel,
    so that its m x m matrices may lack what is above the diagonal."""
    return (
        use_sm90(x)
        and out.dtype in _HALF
        and all(size % 8 == 0 for size in x.shape[-2:])
        and rows_are_aligned(x)
        and rows_are_aligned(out)
    )


def use_sm90(x: torch.Tensor) -> bool:
    """Whether CUDA C++ kernels may take the place of the Triton kernels of Newton-Schulz."""
    if not x.is_cuda or x.dtype != torch.float16 or _override() is not None:
        return False
    from .sm90 import is_available

    return is_available(x.device)


def rows_are_aligned(x: torch.Tensor) -> bool:
    """Whether bulk copies take a half-precision [B, M, N]: it starts at 16 bytes, and steps by
    multiples of 16, not 0 as an expanded tensor does, between rows and matrices."""
    unit = -1 if x.stride(-1) == 1 else -2
    strides = [x.stride(0) if x.shape[0] > 1 else 8, x.stride(-3 - unit)]
    are_multiples = all(s > 0 and s % 8 == 0 for s in strides)
    return x.data_ptr() % 16 == 0 and x.stride(unit) == 1 and are_multiples


def use_flash_varlen(q: torch.Tensor, max_head_dim: int) -> bool:
    """Whether packed attention over several segments runs in `torch.nn.attention.varlen`.

    q: [T, Hq, Dqk]; max_head_dim: the larger of Dqk and Dv. FlashAttention-2, which torch builds
    in, takes bf16 and fp16 and head dims up to 256.
    """
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and max_head_dim <= 256


def use_grouped_sm90(
    x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, groups: int
) -> bool:
    """Whether the expert MLP runs in the CUDA C++ kernels for Hopper: see `takes` of
    grouped_products_sm90.py; groups: of rows, parts times experts. The layer was measured faster
    than on `torch._grouped_mm` with gathers and SwiGLU in passes of their own; the gradient of the
    tokens alone is slower at H = 7168 (docs/benchmarks/moe.md)."""
    if not x.is_cuda or _override() is not None:
        return False
    from .grouped_products_sm90 import takes

    return takes(x, gate_up, down, groups)


def use_grouped_mm(x: torch.Tensor, intermediate_dim: int) -> bool:
    """Whether the expert MLP on rows x [R, H] runs in `torch._grouped_mm`.

    Off CUDA, or in another dtype, torch runs a loop of its own with a host sync in it; and row
    strides must be multiples of 16 bytes.
    """
    aligned = x.shape[-1] % 8 == 0 and intermediate_dim % 8 == 0
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs (gradient checks), float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _override() -> Implementation | None:
    value = os.environ.get(OVERRIDE_VARIABLE)
    if value is None or value == "":
        return None
    if value not in get_args(Implementation):
        names = ", ".join(sorted(get_args(Implementation)))
        raise ValueError(f"{OVERRIDE_VARIABLE}={value!r}: use one of {names}, or unset it")
    return value  # type: ignore[return-value]
