"""How tokens come to the experts and results go back, part after part.

Shape suffixes: T tokens of this rank, N tokens that its experts get, H hidden dim.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

import torch


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Tokens that travel together, and their rows, consecutive both."""

    tokens: slice
    """Of the N."""
    rows: slice
    """Of the routing map's."""


class Arrival(Protocol):
    """Tokens on their way to the experts."""

    tokens_NH: torch.Tensor
    """Dense; a part may be read after `wait`."""

    def wait(self, part: int) -> None:
        """Makes the current stream wait for that part."""
        ...


class Return(Protocol):
    """Results on their way from the experts to the tokens they belong to."""

    def rows(self, part: int) -> torch.Tensor:
        """Dense [tokens of the part, H]: where its results are to be written."""
        ...

    def send(self, part: int) -> None:
        """They are written. Parts go in order."""
        ...

    def sum(self) -> torch.Tensor:
        """[T, H]: each token's results, added in float32 and rounded once; call it once."""
        ...


class TokenExchange(Protocol):
    """One expert layer's exchange. Forward and backward use it once each, in the same way on every
    rank: tokens or their gradients to the experts, then results or gradients back."""

    parts: tuple[Part, ...]

    def started(self) -> Arrival:
        """The tokens that were sent before the layer began; asked for once."""
        ...

    def send(self, x_TH: torch.Tensor) -> Arrival:
        """Sends tokens, or gradients of their results, to the experts."""
        ...

    def give_back(self) -> Return:
        """What takes the results."""
        ...


class OwnTokens:
    """The exchange of a rank that has all experts: nothing moves."""

    def __init__(self, x_TH: torch.Tensor, rows: int) -> None:
        self.parts = (Part(tokens=slice(0, x_TH.shape[0]), rows=slice(0, rows)),)
        self._like, self._started = x_TH, _Here(x_TH)

    def started(self) -> Arrival:
        return self._started

    def send(self, x_TH: torch.Tensor) -> Arrival:
        return _Here(x_TH)

    def give_back(self) -> Return:
        return _Kept(torch.empty_like(self._like, memory_format=torch.contiguous_format))


class _Here:
    def __init__(self, tokens_NH: torch.Tensor) -> None:
        self.tokens_NH = tokens_NH

    def wait(self, part: int) -> None:
        """It is there."""


class _Kept:
    def __init__(self, out_TH: torch.Tensor) -> None:
        self._out_TH = out_TH

    def rows(self, part: int) -> torch.Tensor:
        return self._out_TH

    def send(self, part: int) -> None:
        """It stays."""

    def sum(self) -> torch.Tensor:
        return self._out_TH
