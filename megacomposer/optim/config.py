"""What the optimizer and its learning-rate schedule can be told. No torch here."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megacomposer.config import Config

# The per-step sets of kernels/newton_schulz.py define this many steps; a test keeps the two equal.
PER_STEP_SET_STEPS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig(Config):
    """The optimizer, its moments and decay, and gradient clipping."""

    name: Literal["adamw", "muon", "muon_reference"] = "adamw"
    """`adamw` for every parameter, or Muon for the parameters that have logical matrices (attention
    heads, experts, gate and up halves) and AdamW for the rest (embeddings, head, router, norms).
    `muon` sends each matrix to the rank that orthogonalises it; `muon_reference` gathers each
    parameter whole on every rank: readable, not fast, and equal to `muon` bit for bit."""
    lr: float = 3e-4
    """Peak learning rate; the schedule scales it."""
    weight_decay: float = 0.1
    """Decoupled weight decay: a parameter shrinks by lr * weight_decay a step (arXiv 1711.05101).
    Parameters marked as not decayed (norms, biases) are left out."""
    router_lr_multiplier: float = 1.0
    """AdamW's learning rate of the routers, and with it their decay, as a multiple of its others'.
    Adam moves all H weights of an expert by about lr at once: where tokens share a direction, its
    logit by lr * H, 0.6 a step at 3e-4 and 2048, faster than balance can follow."""
    clip_grad_norm: float = 1.0
    """Gradients are scaled down to this global L2 norm before the update of moments; 0 = off."""
    qk_clip_threshold: float = 0.0
    """Largest attention logit (scaled, before the softmax) that a head may show in a step; beyond
    it the head's query and key weights are scaled down after the update (QK-clip, Kimi K2, arXiv
    2507.20534, which uses 100). 0 = off. Not for models with query/key norms."""

    adam_beta1: float = 0.9
    """Decay of AdamW's first moment."""
    adam_beta2: float = 0.95
    """Decay of AdamW's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment, after bias correction."""

    muon_momentum: float = 0.95
    """Decay mu of Muon's momentum, which is a sum: buf = mu * buf + gradient."""
    muon_nesterov: bool = True
    """Orthogonalise gradient + mu * buf instead of buf."""
    muon_ns_steps: int = 5
    """Newton-Schulz steps."""
    muon_ns_coefficients: Literal["kj", "you", "polar_express"] = "you"
    """Polynomial coefficients: Keller Jordan's one triple, You Jiacheng's five, or Polar Express'
    five. Composer's are not public; the default is our choice."""
    muon_scale: Literal["rms_match", "spectral", "none"] = "rms_match"
    """Factor on an orthogonalised matrix of m rows (outputs) and n columns (inputs):
    `rms_match` 0.2 * sqrt(max(m, n)), which gives it AdamW's usual RMS so that both share one
    learning rate and decay (Moonlight, arXiv 2502.16982); `spectral` sqrt(max(1, m / n))
    (Keller Jordan); `none` 1."""
    muon_adam_lr_multiplier: float = 1.0
    """Under Muon, the learning rate of the AdamW parameters as a multiple of `lr`. 1 fits
    `muon_scale=rms_match`; the other scales usually want AdamW's rate well below Muon's."""
    muon_cautious_decay: bool = False
    """Decay only the elements that the update moves towards zero (after arXiv 2411.16085)."""
    muon_o_proj: Literal["per_head", "whole"] = "per_head"
    """Orthogonalise an attention output projection head by head (its columns), or as one matrix."""
    muon_ns_form: Literal["auto", "standard", "gram"] = "auto"
    """Form of the Newton-Schulz iteration; `auto` is gram. See kernels/newton_schulz.py."""
    muon_wire_dtype: Literal["fp16", "bf16", "fp32"] = "fp16"
    """What Newton-Schulz reads and what it returns, on the wire between ranks and everywhere else.
    Each matrix is scaled by a power of two first, so that fp16 neither overflows nor loses range;
    it keeps 3 bits more than bf16."""
    muon_bucket_mib: float = 256.0
    """Most MiB on the wire of the matrices that one rank orthogonalises in an exchange, rounded to
    whole matrices. Exchanges are smaller where these would be fewer than four, since only several
    overlap, but not below 16 MiB, where launches take longer than the link. A rank keeps about
    3 * muon_buffers such buffers, more where parameters have replicas."""
    muon_buffers: int = 3
    """Exchanges in flight or at work at once; 1 overlaps nothing but local work."""
    muon_reserved_sms: int = 0
    """Multiprocessors of a GPU that Newton-Schulz leaves to the exchanges, where there are any. The
    exchanges then have a communicator of their own that takes no more, in powers of two; 0 leaves
    them none, and NCCL to itself: on two H200s that made the shortest step, by 2 to 6 %
    (docs/benchmarks/two_gpus.md)."""

    def __post_init__(self) -> None:
        rates = ("lr", "weight_decay", "muon_adam_lr_multiplier", "router_lr_multiplier")
        for field in (*rates, "clip_grad_norm", "qk_clip_threshold"):
            if not 0.0 <= getattr(self, field) < float("inf"):
                raise ValueError(f"{field}={getattr(self, field)} must be finite and at least 0")
        for field in ("adam_beta1", "adam_beta2", "muon_momentum"):
            if not 0.0 <= getattr(self, field) < 1.0:
                raise ValueError(f"{field}={getattr(self, field)} must be in [0, 1)")
        if not self.adam_eps > 0.0:
            raise ValueError(f"adam_eps={self.adam_eps} must be positive")
        if self.muon_ns_steps < 1:
            raise ValueError(f"muon_ns_steps={self.muon_ns_steps} must be at least 1")
        if not 0.0 < self.muon_bucket_mib < float("inf"):
            raise ValueError(f"muon_bucket_mib={self.muon_bucket_mib} must be positive")
        if self.muon_buffers < 1:
            raise ValueError(f"muon_buffers={self.muon_buffers} must be at least 1")
        if self.muon_reserved_sms < 0:
            raise ValueError(f"muon_reserved_sms={self.muon_reserved_sms} must be at least 0")
        if self.muon_ns_coefficients != "kj" and self.muon_ns_steps > PER_STEP_SET_STEPS:
            raise ValueError(
                f"muon_ns_steps={self.muon_ns_steps}: the set {self.muon_ns_coefficients!r} has "
                f"{PER_STEP_SET_STEPS}; use at most that, or muon_ns_coefficients='kj'"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Config):
    """The learning rate over a run, relative to its peak."""

    kind: Literal["constant", "cosine", "wsd"] = "cosine"
    """After warm-up: stay at the peak; half a cosine down to the minimum; or warm-up-stable-decay
    (arXiv 2404.06395): stay at the peak, then decay in the last part of the run."""
    warmup_steps: int = 0
    """Steps of linear warm-up; the peak is reached at this step, counting from 0."""
    min_lr_frac: float = 0.0
    """Learning rate at the end of a decay, as a fraction of the peak."""
    wsd_decay_frac: float = 0.1
    """Last part of the run, as a fraction of its steps, in which `wsd` decays."""
    wsd_decay_shape: Literal["linear", "sqrt"] = "sqrt"
    """`wsd` decays as 1 - t, or as 1 - sqrt(t) (arXiv 2405.18392), with t from 0 to 1."""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be at least 0")
        if not 0.0 <= self.min_lr_frac <= 1.0:
            raise ValueError(f"min_lr_frac={self.min_lr_frac} must be in [0, 1]")
        if not 0.0 < self.wsd_decay_frac <= 1.0:
            raise ValueError(
                f"wsd_decay_frac={self.wsd_decay_frac} must be in (0, 1]; "
                "use kind='constant' for a run without decay"
            )
