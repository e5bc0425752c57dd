"""Models on megatron-core: spec provider, attention, MoE, MTP, presets."""

from megacomposer.runtime.core_warnings import silence_core_warnings

# Before any module of the room imports megatron-core.
silence_core_warnings()
