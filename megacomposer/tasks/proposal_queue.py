"""Hands proposals to the workers that prove them, in fair parts of each kind."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Sequence

from megacomposer.tasks.deleter import Proposal, Unusable
from megacomposer.tasks.funnel import Funnel, RejectedError


class ProposalQueue:
    """Proposals for the workers: each kind gets its part of `count`, then what is left over."""

    def __init__(
        self,
        stream: AsyncIterator[Proposal | Unusable],
        funnel: Funnel,
        *,
        kinds: Sequence[str],
        count: int,
        max_candidates: int,
    ) -> None:
        self._stream, self._funnel = stream, funnel
        self._count, self._max_candidates = count, max_candidates
        self._share = math.ceil(count / len(kinds))
        self._lock = asyncio.Lock()
        self._reserved: list[tuple[Proposal, frozenset[str]]] = []
        self._per_kind: Counter[str] = Counter()
        self._deferred: list[Proposal] = []
        self._ended = False
        self._tried = 0

    async def next(self) -> Proposal | None:
        """None when enough are kept or under way, or nothing is left."""
        while len(self._funnel.kept) < self._count and self._tried < self._max_candidates:
            async with self._lock:
                if self._per_kind.total() < self._count:
                    proposal = await self._pull()
                    if proposal is not None:
                        self._per_kind[proposal.kind] += 1
                        return proposal
                    if not self._per_kind.total() or self._all_kept():
                        return None
            # Those under way may yet be rejected; then another is wanted.
            await asyncio.sleep(0.05)
            if self._all_kept() and self._ended and not self._deferred:
                return None
        return None

    def _all_kept(self) -> bool:
        return self._per_kind.total() <= len(self._funnel.kept)

    async def _pull(self) -> Proposal | None:
        while not self._ended:
            found: Proposal | Unusable | None = await anext(self._stream, None)
            if found is None:
                self._ended = True
                break
            self._funnel.candidates += 1
            if isinstance(found, Unusable):
                self._funnel.reject(found.name, found.error)
                await asyncio.sleep(0)
            elif self._per_kind[found.kind] < self._share:
                return found
            else:
                self._funnel.candidates -= 1
                self._deferred.append(found)
        if self._deferred:
            self._funnel.candidates += 1
            return self._deferred.pop(0)
        return None

    def reserve(self, proposal: Proposal, symbols: frozenset[str]) -> None:
        """RejectedError where half of these symbols and another task's are the same."""
        for other, taken in self._reserved:
            if 2 * len(taken & symbols) >= len(taken | symbols):
                raise RejectedError("overlaps", f"with {other.name}")
        self._reserved.append((proposal, symbols))
        self._tried += 1

    def give_up(self, proposal: Proposal) -> None:
        """Another may take its place, also one with the same symbols."""
        self._per_kind[proposal.kind] -= 1
        self._reserved = [entry for entry in self._reserved if entry[0] is not proposal]
