#!/usr/bin/env python3
"""Train a recipe: `torchrun --nproc-per-node N scripts/train.py RECIPE [--section.field value]`.

A run directory that exists is continued from its newest checkpoint. SIGUSR1 finishes the step,
saves and ends the process with code 0.
"""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from megacomposer.config.cli import parse_command_line
from megacomposer.recipes.pretrain import RECIPES


def main() -> NoReturn:
    """Parse first, import torch after: a wrong option is answered at once."""
    config = parse_command_line(RECIPES, description="Train a model.")
    from megacomposer.checkpoint.agreement import CheckpointError
    from megacomposer.observe.logging import get_logger
    from megacomposer.runtime.process import end_process, end_process_on_error
    from megacomposer.train.loop import train

    end_process_on_error()
    try:
        train(config)
    except (ValueError, CheckpointError) as error:
        # Most errors are every rank's: rank 0 prints, the others write to their own log.
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"error: {error}", file=sys.stderr)
        else:
            get_logger(__name__).error("%s", error)
        end_process(1)
    end_process(0)


if __name__ == "__main__":
    main()
