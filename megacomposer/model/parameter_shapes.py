"""Every parameter of a model that is not built: for plans of worlds larger than this machine."""

from __future__ import annotations

from collections.abc import Iterator

from megacomposer.mesh.placement import Placement
from megacomposer.model.config import ModelConfig
from megacomposer.model.parameters import Matrix, logical_matrices


def parameter_placements(
    config: ModelConfig, *, split_output_heads: bool = True
) -> list[tuple[Placement, tuple[Matrix, ...]]]:
    """Placement and logical matrices of every trainable parameter, as `describe_parameters` finds
    them on the model itself and in its order. They do not depend on the layout."""
    return [
        (
            placement,
            logical_matrices(
                placement.name,
                placement.global_shape,
                config,
                split_output_heads=split_output_heads,
            ),
        )
        for placement in _model(config)
    ]


def _model(config: ModelConfig) -> Iterator[Placement]:
    vocabulary = (config.padded_vocab_size, config.hidden_size)
    yield Placement(name="embedding.word_embeddings.weight", global_shape=vocabulary, tp_dim=0)
    for layer in range(config.num_layers):
        yield from _layer(f"decoder.layers.{layer}", config, moe=config.is_moe_layer(layer))
    yield _norm("decoder.final_layernorm", config.hidden_size)
    if not config.tie_embeddings:
        yield Placement(name="output_layer.weight", global_shape=vocabulary, tp_dim=0)
    moe = config.is_moe_layer(config.num_layers - 1)
    for depth in range(config.mtp_num_layers):
        prefix = f"mtp.{depth}"
        yield _norm(f"{prefix}.enorm", config.hidden_size)
        yield _norm(f"{prefix}.hnorm", config.hidden_size)
        yield _replicated(f"{prefix}.eh_proj", config.hidden_size, 2 * config.hidden_size)
        yield from _layer(f"{prefix}.transformer_layer", config, moe=moe)
        yield _norm(f"{prefix}.final_layernorm", config.hidden_size)


def _layer(prefix: str, config: ModelConfig, *, moe: bool) -> Iterator[Placement]:
    yield _norm(f"{prefix}.input_layernorm", config.hidden_size)
    attention = _latent_attention if config.attention == "mla" else _grouped_query_attention
    yield from attention(f"{prefix}.self_attention", config)
    yield _norm(f"{prefix}.pre_mlp_layernorm", config.hidden_size)
    if moe:
        yield from _experts(f"{prefix}.mlp", config)
    else:
        yield from _mlp(f"{prefix}.mlp", config.hidden_size, config.ffn_hidden_size)


def _latent_attention(prefix: str, config: ModelConfig) -> Iterator[Placement]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    query_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    latent = config.kv_lora_rank
    if config.q_lora_rank:
        yield _replicated(f"{prefix}.linear_q_down_proj", config.q_lora_rank, hidden)
        yield _norm(f"{prefix}.q_layernorm", config.q_lora_rank)
        yield _column(f"{prefix}.linear_q_up_proj", heads * query_dim, config.q_lora_rank)
    else:
        yield _column(f"{prefix}.linear_q_proj", heads * query_dim, hidden)
    yield _replicated(f"{prefix}.linear_kv_down_proj", latent + config.qk_rope_head_dim, hidden)
    yield _norm(f"{prefix}.kv_layernorm", latent)
    key_value_dim = config.qk_nope_head_dim + config.v_head_dim
    yield _column(f"{prefix}.linear_kv_up_proj", heads * key_value_dim, latent)
    yield _row(f"{prefix}.linear_proj", hidden, heads * config.v_head_dim)


def _grouped_query_attention(prefix: str, config: ModelConfig) -> Iterator[Placement]:
    hidden, heads, head_dim = config.hidden_size, config.num_attention_heads, config.gqa_head_dim
    yield _row(f"{prefix}.linear_proj", hidden, heads * head_dim)
    yield _column(f"{prefix}.linear_qkv", (heads + 2 * config.query_groups) * head_dim, hidden)
    if config.qk_norm:
        yield _norm(f"{prefix}.q_layernorm", head_dim)
        yield _norm(f"{prefix}.k_layernorm", head_dim)


def _experts(prefix: str, config: ModelConfig) -> Iterator[Placement]:
    count, hidden, inner = config.num_experts, config.hidden_size, config.moe_ffn_hidden_size
    yield _replicated(f"{prefix}.router", count, hidden)
    for leaf, shape in (("gate_up", (count, 2 * inner, hidden)), ("down", (count, hidden, inner))):
        yield Placement(name=f"{prefix}.experts.{leaf}", global_shape=shape, kind="expert")
    if config.shared_expert_ffn_hidden_size:
        yield from _mlp(f"{prefix}.shared_experts", hidden, config.shared_expert_ffn_hidden_size)


def _mlp(prefix: str, hidden: int, inner: int) -> Iterator[Placement]:
    yield Placement(
        name=f"{prefix}.linear_fc1.weight", global_shape=(2 * inner, hidden), tp_dim=0, halves=2
    )
    yield _row(f"{prefix}.linear_fc2", hidden, inner)


def _column(prefix: str, rows: int, columns: int) -> Placement:
    return Placement(name=f"{prefix}.weight", global_shape=(rows, columns), tp_dim=0)


def _row(prefix: str, rows: int, columns: int) -> Placement:
    return Placement(name=f"{prefix}.weight", global_shape=(rows, columns), tp_dim=1)


def _replicated(prefix: str, rows: int, columns: int) -> Placement:
    return Placement(name=f"{prefix}.weight", global_shape=(rows, columns))


def _norm(prefix: str, size: int) -> Placement:
    return Placement(name=f"{prefix}.weight", global_shape=(size,))
