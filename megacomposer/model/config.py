"""Configuration of a model: shapes in the field's terms, one adapter away from megatron-core."""

from __future__ import annotations

import dataclasses
from typing import Literal

from megacomposer.config import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnConfig(Config):
    """YaRN position scaling (Peng et al. 2023, arXiv 2309.00071), DeepSeek's field names."""

    factor: float
    """Context extension factor."""
    original_max_positions: int
    """Context length of the base model, in tokens."""
    beta_fast: float = 32.0
    """Rotations in the original context above which a frequency is left alone."""
    beta_slow: float = 1.0
    """Rotations below which a frequency is divided by `factor`."""
    mscale: float = 1.0
    """Attention temperature coefficient of the rotary part."""
    mscale_all_dim: float = 1.0
    """Attention temperature coefficient of all dims; enters the softmax scale squared."""

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"yarn.factor is {self.factor}; it must be >= 1")
        if self.original_max_positions < 1:
            raise ValueError(
                f"yarn.original_max_positions is {self.original_max_positions}; it must be >= 1"
            )
        if not self.beta_fast >= self.beta_slow > 0:
            raise ValueError(
                f"yarn.beta_fast {self.beta_fast} and yarn.beta_slow {self.beta_slow} must be > 0,"
                " and the first not the smaller one"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    num_layers: int
    """Decoder layers, MTP layers not counted."""
    hidden_size: int
    ffn_hidden_size: int
    """Intermediate size of a dense layer's gated MLP."""
    num_attention_heads: int
    vocab_size: int
    """Rows of the embedding that the tokenizer uses."""
    attention: Literal["gqa", "mla"] = "gqa"
    num_query_groups: int = 0
    """GQA: key/value heads; 0 means one per query head."""
    head_dim: int = 0
    """GQA: size of a head; 0 means hidden_size / num_attention_heads."""
    qk_norm: bool = False
    """GQA: RMSNorm on queries and keys per head. (MLA always normalises its latents.)"""
    q_lora_rank: int = 0
    """MLA: size of the query latent; 0 projects queries directly."""
    kv_lora_rank: int = 0
    """MLA: size of the key/value latent."""
    qk_nope_head_dim: int = 0
    """MLA: part of a query/key head without position."""
    qk_rope_head_dim: int = 0
    """MLA: part of a query/key head with rotary position; its key is shared by all heads."""
    v_head_dim: int = 0
    """MLA: size of a value head."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    yarn: YarnConfig | None = None
    """Position scaling for contexts beyond the base model's."""
    norm_eps: float = 1e-6
    tie_embeddings: bool = False
    """Use the embedding as output projection."""
    vocab_pad_multiple: int = 64
    """The embedding is padded to a multiple of this; padded logits are masked out of the loss."""

    num_experts: int = 0
    """Routed experts of a MoE layer; 0 makes every layer dense."""
    experts_per_token: int = 0
    moe_ffn_hidden_size: int = 0
    """Intermediate size of one routed expert."""
    shared_expert_ffn_hidden_size: int = 0
    """Intermediate size of the shared expert; 0 has none."""
    num_dense_layers: int = 0
    """Leading layers with a dense MLP in a MoE model."""
    router_score: Literal["softmax", "sigmoid"] = "softmax"
    """softmax: over the chosen logits; sigmoid: per expert, chosen ones normalised to sum 1."""
    router_num_groups: int = 0
    """Expert groups for group-limited routing; 0 routes over all experts."""
    router_topk_groups: int = 0
    """Groups a token may choose from."""
    router_scale: float = 1.0
    """Factor on the normalised routing weights."""
    router_bias: bool = False
    """A bias per expert in the choice of experts, for balance without a loss (arXiv 2408.15664)."""
    router_bias_update_rate: float = 0.0
    """Step of that bias towards balance, each optimizer step; 0 keeps the biases as they are."""
    router_bias_update: Literal["sign", "error"] = "sign"
    """What the rate multiplies: the sign of how far an expert's load is below the mean (as in
    DeepSeek-V3), or how far it is, as a share of the mean: 1 without tokens, -2 at three times the
    mean. By sign an expert without tokens gains nothing on the many that are a little short of
    some; errors sum to zero, and vanish at balance."""
    router_aux_loss_coeff: float = 0.0
    """Weight of the Switch load-balancing loss over the global batch; 0 turns it off. The loads in
    it are those of the step before, so it does not depend on micro-batches or layout."""
    router_z_loss_coeff: float = 0.0
    """Weight of the mean squared log-sum-exp of the router's logits (ST-MoE); 0 turns it off."""
    router_replay_threshold: float = 0.5
    """A replayed expert is dropped below this fraction of the probability of the router's own K-th
    expert; 0 replays all, 1 none that the router would not take. (The value is our choice.)"""
    moe_backend: Literal["megacomposer", "megatron"] = "megacomposer"
    """MoE layer: ours, or for comparison megatron-core's router, dispatcher and loop over experts,
    whose auxiliary loss is per micro-batch and which cannot replay."""

    moe_exchange: Literal["collective", "peer"] = "collective"
    """How tokens travel to the ranks of their experts: by all-to-all collectives, or by copies from
    peer memory between GPUs of one host. Results are the same. On two H200s neither was faster for
    a whole layer (docs/benchmarks/two_gpus.md); copies leave the multiprocessors to the experts."""
    moe_exchange_parts: int = 1
    """Tokens travel in so many parts, and the experts work on one while the next is on its way.
    Parts have fewer rows of each expert, which costs more than it hides at EP 2."""

    mtp_num_layers: int = 0
    """Multi-token-prediction depths (DeepSeek-V3, arXiv 2412.19437)."""
    mtp_loss_weight: float = 0.1
    """Weight of the mean of the MTP losses."""

    init_std: float = 0.02
    """Standard deviation of weights; residual outputs get it divided by sqrt(2 num_layers)."""
    embedding_init_std: float = 0.0
    """Standard deviation of the embedding; 0 means init_std. Near 1 a token's own embedding
    outweighs what layers add to it at first, so that tokens differ in front of the routers
    (docs/moe.md; arXiv 2312.16903 argues for 1, for another reason)."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Type of activations and of the weights in compute. Master weights are float32 always."""
    recompute: Literal["none", "full"] = "none"
    """full: keep only layer inputs and recompute each layer in backward."""
    backend: Literal["native", "te"] = "native"
    """Linear and norm modules: megatron-core's with our norm, or Transformer Engine's."""

    def __post_init__(self) -> None:
        sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads")
        for name in (*sizes, "vocab_size", "vocab_pad_multiple"):
            if getattr(self, name) < 1:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be >= 1")
        if self.embedding_init_std < 0:
            raise ValueError(
                f"model.embedding_init_std is {self.embedding_init_std}; it must be >= 0"
            )
        if self.embedding_init_std and self.tie_embeddings:
            raise ValueError(
                "model.embedding_init_std would also scale the output projection of"
                " model.tie_embeddings; leave it 0"
            )
        if self.mtp_num_layers < 0:
            raise ValueError(f"model.mtp_num_layers is {self.mtp_num_layers}; it must be >= 0")
        self._check_attention()
        self._check_moe()

    def _check_attention(self) -> None:
        if self.attention == "gqa":
            groups = self.num_query_groups or self.num_attention_heads
            if self.num_attention_heads % groups:
                raise ValueError(
                    f"model.num_query_groups {groups} does not divide"
                    f" model.num_attention_heads {self.num_attention_heads}"
                )
            if not self.head_dim and self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"model.hidden_size {self.hidden_size} is not a multiple of"
                    f" model.num_attention_heads {self.num_attention_heads}; set model.head_dim"
                )
            if self.yarn is not None:
                raise ValueError("model.yarn is for attention 'mla'; GQA scales model.rope_theta")
        else:
            names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
            for name in names:
                if getattr(self, name) <= 0:
                    raise ValueError(f"model.{name} must be > 0 with model.attention 'mla'")
        if self.rotary_dim % 2:
            rotary = "qk_rope_head_dim" if self.attention == "mla" else "head_dim"
            raise ValueError(
                f"model.{rotary} is {self.rotary_dim}; rotary positions turn pairs, so it must be"
                " even"
            )

    def _check_moe(self) -> None:
        if not self.num_experts:
            return
        if not 0 < self.experts_per_token <= self.num_experts:
            raise ValueError(
                f"model.experts_per_token is {self.experts_per_token}; it must be between 1 and"
                f" model.num_experts = {self.num_experts}"
            )
        if self.moe_exchange_parts < 1:
            raise ValueError(
                f"model.moe_exchange_parts is {self.moe_exchange_parts}; it must be >= 1"
            )
        if self.moe_ffn_hidden_size <= 0:
            raise ValueError("model.moe_ffn_hidden_size must be > 0 when model.num_experts is")
        if self.num_dense_layers > self.num_layers:
            raise ValueError(
                f"model.num_dense_layers {self.num_dense_layers} exceeds"
                f" model.num_layers {self.num_layers}"
            )
        if self.router_bias and self.router_score != "sigmoid":
            raise ValueError(
                "model.router_bias needs model.router_score 'sigmoid'; a softmax router balances by"
                " model.router_aux_loss_coeff"
            )
        if self.router_bias_update_rate and not self.router_bias:
            raise ValueError("model.router_bias_update_rate needs model.router_bias True")
        if self.router_bias_update == "error" and not self.router_bias_update_rate:
            raise ValueError(
                "model.router_bias_update 'error' needs a model.router_bias_update_rate above 0"
            )
        if self.router_bias_update_rate < 0:
            raise ValueError(
                f"model.router_bias_update_rate is {self.router_bias_update_rate}; it must be >= 0"
            )
        for name in ("router_aux_loss_coeff", "router_z_loss_coeff"):
            if getattr(self, name) < 0:
                raise ValueError(f"model.{name} is {getattr(self, name)}; it must be >= 0")
        if not 0 <= self.router_replay_threshold <= 1:
            raise ValueError(
                f"model.router_replay_threshold is {self.router_replay_threshold}; it must be"
                " between 0 and 1"
            )
        if self.router_score == "softmax" and self.experts_per_token == 1:
            raise ValueError(
                "model.router_score 'softmax' over one chosen expert is always 1 and teaches the"
                " router nothing; use 'sigmoid', or model.experts_per_token >= 2"
            )
        if self.router_num_groups or self.router_topk_groups:
            self._check_router_groups()

    def _check_router_groups(self) -> None:
        groups, chosen = self.router_num_groups, self.router_topk_groups
        if groups < 1 or self.num_experts % groups:
            raise ValueError(
                f"model.router_num_groups {groups} does not divide"
                f" model.num_experts {self.num_experts}"
            )
        if not 1 <= chosen <= min(groups, self.experts_per_token):
            raise ValueError(
                f"model.router_topk_groups is {chosen}; it must be between 1 and the smaller of"
                f" model.router_num_groups = {groups} and model.experts_per_token ="
                f" {self.experts_per_token}"
            )
        if self.experts_per_token > chosen * (self.num_experts // groups):
            raise ValueError(
                f"model.experts_per_token {self.experts_per_token} exceeds the"
                f" {chosen * (self.num_experts // groups)} experts of"
                f" model.router_topk_groups = {chosen} groups"
            )

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def gqa_head_dim(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def rotary_dim(self) -> int:
        """Dims of a query or key head that rotary positions turn."""
        return self.qk_rope_head_dim if self.attention == "mla" else self.gqa_head_dim

    @property
    def padded_vocab_size(self) -> int:
        multiple = self.vocab_pad_multiple
        return -(-self.vocab_size // multiple) * multiple

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) has experts. MTP layers are as the last one."""
        return self.num_experts > 0 and layer >= self.num_dense_layers
