"""Models on megatron-core: spec provider, attention, MoE, MTP, presets."""
