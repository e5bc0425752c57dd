"""Public Newton-Schulz implementations, as newton_schulz.py calls them. Each package is optional.

Every call takes [B, m, n] and returns B matrices. All run five steps of the "you" polynomial, but
torch.optim's, whose one triple per call costs the same; their settings are the fastest that their
own packages offer on one GPU.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import time
from collections.abc import Callable, Sequence

import torch

from megacomposer.kernels.newton_schulz import COEFFICIENTS, step_coefficients

Call = Callable[[torch.Tensor], Sequence[torch.Tensor]]
YOU = step_coefficients("you", 5)
_GRAM_SEGMENTS = YOU[:2], YOU[2:]
# Compiling, warming up, and recording a CUDA graph take a call each.
_WARMUP_CALLS, _QUICK_CALLS = 3, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Peer:
    """One implementation, perhaps with several ways to call it."""

    variants: Callable[[], dict[str, Call]]
    """Imports the package; the ways to call it, by name."""
    module: str = "torch"
    """Package that must be installed."""
    coefficients: str = "you"
    """Polynomial that its error is measured against."""
    input_dtype: torch.dtype = torch.bfloat16
    """What it takes without a conversion inside the timed call."""
    is_loop: bool = False
    """Whether it takes one matrix at a time, so that it is left out of the mixed case."""
    uncapturable: tuple[str, ...] = ()
    """Variants that replay CUDA graphs of their own, and are timed as they are."""


def _unit_norm(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    wide = x.mT if x.shape[-2] > x.shape[-1] else x
    return (wide / torch.linalg.matrix_norm(wide.float(), keepdim=True)).to(dtype)


def _like(result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return result.mT if x.shape[-2] > x.shape[-1] else result


def _standard_bmm(x: torch.Tensor) -> torch.Tensor:
    """What torchtitan and most ports run: cuBLAS in bfloat16."""
    y = _unit_norm(x, torch.bfloat16)
    for a, b, c in YOU:
        gram = torch.bmm(y, y.mT)
        y = torch.baddbmm(y, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), y, beta=a)
    return _like(y, x)


def _gram_bmm(x: torch.Tensor) -> torch.Tensor:
    """Our gram form on cuBLAS in float16: what its kernels add to the algorithm."""
    y = _unit_norm(x, torch.float16)
    for segment in _GRAM_SEGMENTS:
        gram, q = torch.bmm(y, y.mT), None
        for step, (a, b, c) in enumerate(segment):
            z = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
            z.diagonal(dim1=-2, dim2=-1).add_(a)
            q = z if q is None else torch.bmm(q, z)
            if step < len(segment) - 1:
                gram = torch.bmm(z, torch.bmm(gram, z))
        y = torch.bmm(q, y)
    return _like(y, x)


def _dion() -> dict[str, Call]:
    from dion.newton_schulz_triton import newton_schulz_triton

    return {"newton_schulz_triton": newton_schulz_triton}


def _gram_quack() -> dict[str, Call]:
    import torch._dynamo
    from gram_newton_schulz import GramNewtonSchulz

    # a new shape is compiled for itself, however many there were before
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.automatic_dynamic_shapes = False
    options = {
        "ns_coefficients": [list(triple) for triple in YOU],
        "gram_newton_schulz_reset_iterations": [2],
    }
    compiled = GramNewtonSchulz(**options)
    calls: dict[str, Call] = {
        "reduce-overhead": compiled,
        "eager": GramNewtonSchulz(**options, compile_kwargs=None),
    }
    # older versions keep the compiled function where only an explicit call finds it
    if "__call__" in vars(compiled):
        calls["reduce-overhead, explicit __call__"] = lambda x: compiled.__call__(x)
    return calls


def _emerging() -> dict[str, Call]:
    from absl import logging
    from emerging_optimizers.orthogonalized_optimizers.muon_utils import newton_schulz

    logging.set_verbosity(logging.ERROR)

    def run(x: torch.Tensor, *, use_syrk: bool) -> torch.Tensor:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")  # its switch to bfloat16
        try:
            return newton_schulz(x, 5, "quintic", use_syrk=use_syrk)
        finally:
            torch.set_float32_matmul_precision(precision)

    return {
        "loop, syrk": lambda x: [run(matrix, use_syrk=True) for matrix in x],
        "loop": lambda x: [run(matrix, use_syrk=False) for matrix in x],
    }


def _torch_optim() -> dict[str, Call]:
    from torch.optim import _muon

    function = _muon._zeropower_via_newtonschulz
    names = list(inspect.signature(function).parameters)
    triple = COEFFICIENTS["kj"][0]
    given = {"ns_coefficients": triple, "ns_steps": 5, "eps": 1e-7, "use_addmm": True}
    keywords = {name: given[name] for name in names[1:] if name in given}
    return {"loop": lambda x: [function(matrix, **keywords) for matrix in x]}


# In the order in which they run, should the time not suffice for all.
PEERS: dict[str, Peer] = {
    "cublas": Peer(variants=lambda: {"baddbmm": _standard_bmm}),
    "gram_quack": Peer(
        variants=_gram_quack,
        module="gram_newton_schulz",
        uncapturable=("reduce-overhead", "reduce-overhead, explicit __call__"),
    ),
    "dion": Peer(variants=_dion, module="dion"),
    "torch_gram": Peer(variants=lambda: {"baddbmm": _gram_bmm}),
    "emerging": Peer(
        variants=_emerging,
        module="emerging_optimizers",
        input_dtype=torch.float32,
        is_loop=True,
    ),
    "torch_optim": Peer(
        variants=_torch_optim, coefficients="kj", input_dtype=torch.float32, is_loop=True
    ),
}


def usable_variants(
    name: str, tensors: Sequence[torch.Tensor]
) -> tuple[list[tuple[str, Call]], list[str]]:
    """The ways to call a peer that work on these tensors, fastest first, and why others do not."""
    peer = PEERS[name]
    if importlib.util.find_spec(peer.module) is None:
        return [], [f"{peer.module} is not installed"]
    try:
        calls = peer.variants()
    except Exception as error:  # noqa: BLE001  a foreign package may fail in any way
        return [], [reason(error)]
    timed, faults = [], []
    for variant, call in calls.items():
        try:
            timed.append((_quick_ms(call, tensors), variant, call))
        except Exception as error:  # noqa: BLE001
            faults.append(f"{variant}: {reason(error)}")
    timed.sort(key=lambda entry: entry[0])
    return [(variant, call) for _, variant, call in timed], faults


def reason(error: Exception) -> str:
    """The first line of an error, for a note."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def run_all(call: Call, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
    """The call on each tensor, one after the other."""
    return [call(x) for x in tensors]


def _quick_ms(call: Call, tensors: Sequence[torch.Tensor]) -> float:
    for _ in range(_WARMUP_CALLS):
        run_all(call, tensors)
    _synchronize(tensors)
    start = time.perf_counter()
    for _ in range(_QUICK_CALLS):
        run_all(call, tensors)
    _synchronize(tensors)
    return (time.perf_counter() - start) / _QUICK_CALLS * 1e3


def _synchronize(tensors: Sequence[torch.Tensor]) -> None:
    if tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)
