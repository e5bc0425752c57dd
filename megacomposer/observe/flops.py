"""Model FLOPs of a training token, and the dense bf16 peak of a device: together, MFU.

Counted are the multiply-adds (2 FLOPs each) of every matrix product: projections, attention scores
and values, gated MLPs, routed and shared experts, router, MTP depths and output projection.
Left out are element-wise work, norms, softmax, the embedding look-up, the optimizer, and anything
done twice: recomputed activations count once, so the result is model FLOPs utilisation (MFU), not
hardware FLOPs utilisation. Backward costs twice forward: one product for the input's gradient and
one for the weight's (Kaplan et al. 2020, arXiv 2001.08361; Chowdhery et al. 2022, arXiv 2204.02311,
appendix B).
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

TRAINING_OVER_FORWARD = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes that FLOPs depend on. Nothing is implied: a size that is not used is 0."""

    num_layers: int
    """Decoder layers, MTP layers not counted."""
    hidden_size: int
    ffn_hidden_size: int
    """Intermediate size of a dense layer's gated MLP."""
    num_attention_heads: int
    vocab_size: int
    """Rows of the output projection."""
    attention: Literal["gqa", "mla"] = "gqa"
    num_query_groups: int = 0
    """GQA: key/value heads."""
    head_dim: int = 0
    """GQA: size of a query, key or value head."""
    q_lora_rank: int = 0
    """MLA: size of the query latent; 0 projects queries directly."""
    kv_lora_rank: int = 0
    """MLA: size of the key/value latent."""
    qk_nope_head_dim: int = 0
    """MLA: part of a query/key head without position."""
    qk_rope_head_dim: int = 0
    """MLA: part with rotary position; its key is projected once for all heads."""
    v_head_dim: int = 0
    """MLA: size of a value head."""
    num_experts: int = 0
    """Routed experts of a MoE layer; 0 makes every layer dense."""
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    """Intermediate size of one routed expert."""
    shared_expert_ffn_hidden_size: int = 0
    """Intermediate size of the shared experts together; 0 has none."""
    num_dense_layers: int = 0
    """Leading layers with a dense MLP in a MoE model."""
    mtp_num_layers: int = 0
    """MTP depths; each has the last decoder layer's kind and the output projection again."""

    def __post_init__(self) -> None:
        needed = ["num_layers", "hidden_size", "num_attention_heads", "vocab_size"]
        if self.attention == "gqa":
            needed += ["num_query_groups", "head_dim"]
        else:
            needed += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"]
        if self.num_experts:
            needed += ["experts_per_token", "moe_ffn_hidden_size"]
        if self.num_dense_layers or not self.num_experts:
            needed.append("ffn_hidden_size")
        for name in needed:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; this shape needs it to be >= 1")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"num_dense_layers {self.num_dense_layers} exceeds num_layers {self.num_layers}"
            )


def forward_flops_per_token(shape: ModelShape, *, seq_length: int) -> dict[str, int]:
    """FLOPs of one token's forward pass, by kind of work; the sum of the values is the whole.

    `seq_length` is the length that attention spans: that of a document where documents are packed
    and masked from each other. Causal attention needs half of the full square of scores, and half
    is what is counted: a token is taken to see seq_length / 2 keys. (Exactly it is
    (seq_length + 1) / 2 on average; and a kernel that computes the masked half does more.)
    """
    moe_layers = shape.num_layers - shape.num_dense_layers if shape.num_experts else 0
    dense_layers = shape.num_layers - moe_layers
    if moe_layers:  # an MTP depth is one more layer of the last one's kind
        moe_layers += shape.mtp_num_layers
    else:
        dense_layers += shape.mtp_num_layers
    layers = dense_layers + moe_layers
    hidden = shape.hidden_size
    return {
        "attention_projections": layers * _attention_projections(shape),
        "attention_core": layers * _attention_core(shape, seq_length),
        "dense_mlp": dense_layers * _gated_mlp(hidden, shape.ffn_hidden_size),
        "routed_experts": moe_layers
        * shape.experts_per_token
        * _gated_mlp(hidden, shape.moe_ffn_hidden_size),
        "shared_experts": moe_layers * _gated_mlp(hidden, shape.shared_expert_ffn_hidden_size),
        "router": moe_layers * _linear(hidden, shape.num_experts),
        "mtp_joins": shape.mtp_num_layers * _linear(2 * hidden, hidden),
        "output_projection": (1 + shape.mtp_num_layers) * _linear(hidden, shape.vocab_size),
    }


def training_flops_per_token(shape: ModelShape, *, seq_length: int) -> int:
    """FLOPs of one token's forward and backward: three times the forward pass.

    Recomputation is not counted. See `forward_flops_per_token` for `seq_length`.
    """
    return TRAINING_OVER_FORWARD * sum(
        forward_flops_per_token(shape, seq_length=seq_length).values()
    )


def mfu(
    *, tokens_per_s_per_gpu: float, flops_per_token: int, device_peak_flops: float | None
) -> float | None:
    """Model FLOPs utilisation as a fraction; None where the device's peak is not known."""
    if device_peak_flops is None:
        return None
    return tokens_per_s_per_gpu * flops_per_token / device_peak_flops


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 tensor-core FLOP/s by the vendor's data sheet, fp32 accumulation, no sparsity.

    `device_name` is what `torch.cuda.get_device_name()` says. None for a device that is not in the
    table, and for a MIG slice, whose share of the device its name does not tell: report no MFU.
    """
    words = set(re.split(r"[^A-Z0-9]+", device_name.upper()))
    if "MIG" in words:
        return None
    for required, flops in _PEAK_FLOPS:
        if required <= words:
            return flops
    return None


# The first row whose words are all in the name counts, so variants come before their family.
_PEAK_FLOPS: tuple[tuple[frozenset[str], float], ...] = tuple(
    (frozenset(words.split()), flops)
    for words, flops in (
        ("H100 PCIE", 756e12),
        ("H100 NVL", 835e12),
        ("H200 NVL", 835e12),
        ("H100", 989e12),
        ("H200", 989e12),
        ("H800", 989e12),
        ("GH200", 989e12),
        ("H20", 148e12),
        ("GB200", 2500e12),
        ("B200", 2250e12),
        ("A100", 312e12),
        ("A800", 312e12),
        ("L40S", 362e12),
        ("L4", 121e12),
        ("MI300X", 1307e12),
    )
)


def _linear(inputs: int, outputs: int) -> int:
    return 2 * inputs * outputs


def _gated_mlp(hidden: int, intermediate: int) -> int:
    """Gate, up and down projection."""
    return 3 * _linear(hidden, intermediate)


def _attention_projections(shape: ModelShape) -> int:
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    if shape.attention == "gqa":
        query = _linear(hidden, heads * shape.head_dim)
        key_value = _linear(hidden, 2 * shape.num_query_groups * shape.head_dim)
        return query + key_value + _linear(heads * shape.head_dim, hidden)
    query_width = heads * (shape.qk_nope_head_dim + shape.qk_rope_head_dim)
    if shape.q_lora_rank:
        query = _linear(hidden, shape.q_lora_rank) + _linear(shape.q_lora_rank, query_width)
    else:
        query = _linear(hidden, query_width)
    # training expands the latent into keys and values; only decoding absorbs that projection
    latent = _linear(hidden, shape.kv_lora_rank + shape.qk_rope_head_dim)
    expand = _linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim))
    return query + latent + expand + _linear(heads * shape.v_head_dim, hidden)


def _attention_core(shape: ModelShape, seq_length: int) -> int:
    if shape.attention == "gqa":
        qk_dim = v_dim = shape.head_dim
    else:
        qk_dim, v_dim = shape.qk_nope_head_dim + shape.qk_rope_head_dim, shape.v_head_dim
    # scores and weighted values are 2 FLOPs per dim and key, over seq_length / 2 keys
    return shape.num_attention_heads * (qk_dim + v_dim) * seq_length
