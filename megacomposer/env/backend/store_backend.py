"""What backends share that keep layers in a store of this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

from megacomposer.env.audit import Record
from megacomposer.env.backend.layers import LayerStore
from megacomposer.env.sandbox import Sandbox, Snapshot


class StoreBackend:
    """The part of `megacomposer.env.sandbox.SandboxBackend` that is about layers and the end."""

    def __init__(self, store: LayerStore, record: Record) -> None:
        self.store, self.record = store, record
        self._running: set[Sandbox] = set()

    async def import_tree(self, workspace: str) -> Snapshot:
        digest = await asyncio.to_thread(self.store.import_tree, Path(workspace))
        return Snapshot(layers=(digest,))

    async def export_layer(self, digest: str, file: str) -> None:
        await asyncio.to_thread(self.store.export_layer, digest, Path(file))

    async def import_layer(self, file: str) -> str:
        return await asyncio.to_thread(self.store.import_layer, Path(file))

    async def close(self) -> None:
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._running)))

    def forget(self, sandbox: Sandbox) -> None:
        """A sandbox has removed itself."""
        self._running.discard(sandbox)
