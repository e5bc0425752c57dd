"""megacomposer: an open, Megatron-style parallel trainer for coding models, on megatron-core."""

__version__ = "0.1.0"
