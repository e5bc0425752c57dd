"""megatron-core and torch say on import or at first use what does not concern a user of ours."""

from __future__ import annotations

import logging
import warnings


def silence_core_warnings() -> None:
    """Hide notices about absent optional packages and about APIs that torch is renaming.

    Transformer Engine and Apex are optional here, and `model.backend 'te'` without it is an error.
    """
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    # It warns about each layer module that is not its own class.
    logging.getLogger("megatron").setLevel(logging.ERROR)
