"""`TensorLayout` blocks as chunks of torch's distributed checkpoint (DCP).

DCP stores a tensor as a list of rectangles ("chunks") and copies, on load, each overlap of a saved
rectangle with a wanted one. Our blocks are such rectangles, so every reshard (TP, FSDP, EP, CP,
other world sizes) is DCP's own mechanism; these planners only name the rectangles. They build on
the abstract planner interface, which is the same in torch 2.11 and 2.13.
"""

from __future__ import annotations

import io
import math
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from megacomposer.mesh.sharding import TensorLayout

from .manifest import CorruptCheckpointError

Tensors = dict[str, tuple[TensorLayout, torch.Tensor]]
"""Checkpoint key -> the layout and this rank's local storage tensor, shape `layout.local_shape`.

Every rank names every key, also where it holds no block of it.
"""
Table = dict[str, tuple[str, tuple[int, ...]]]
"""Key -> (dtype, global shape): what must agree between a checkpoint and a run."""


class BlockSavePlanner(SavePlanner):
    """Writes the blocks of the ranks that are primary for them, each exactly once."""

    def __init__(self, tensors: Tensors) -> None:
        self._sources: dict[tuple[str, torch.Size], torch.Tensor] = {}
        self._tensors = tensors
        self._is_coordinator = False

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        items = []
        for key, (layout, local) in self._tensors.items():
            if math.prod(layout.global_shape) == 0:
                # Nobody holds a block of an empty tensor; its shape is recorded all the same.
                if self._is_coordinator:
                    empty = local.new_empty(layout.global_shape)
                    items.append(self._item(key, layout, (0,) * empty.dim(), empty))
            elif layout.is_primary:
                for block in layout.blocks:
                    view = local.detach()[block.local_slices]
                    items.append(self._item(key, layout, block.global_offset, view))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        missing = sorted(self._tensors.keys() - metadata.state_dict_metadata.keys())
        faults = [f"{key}: no rank is primary for any block" for key in missing]
        for key, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata), key
            fault = _cover_fault(entry)
            if fault is not None:
                faults.append(f"{key} of shape {tuple(entry.size)}: {fault}")
        if faults:
            raise ValueError("the ranks' blocks do not tile the tensor: " + "; ".join(faults[:8]))
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        return self._sources[_address(write_item.index)]

    def _item(
        self, key: str, layout: TensorLayout, offset: tuple[int, ...], source: torch.Tensor
    ) -> WriteItem:
        index = MetadataIndex(key, offset)
        self._sources[_address(index)] = source
        return WriteItem(
            index=index,
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=_chunk(offset, source.shape),
                properties=TensorProperties(dtype=source.dtype),
                size=torch.Size(layout.global_shape),
            ),
        )


class BlockLoadPlanner(LoadPlanner):
    """Fills every block of every rank, primary or not, in place."""

    def __init__(self, tensors: Tensors) -> None:
        self._targets: dict[tuple[str, torch.Size], torch.Tensor] = {}
        self._tensors = tensors
        self._metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for key, (layout, local) in self._tensors.items():
            saved = self._metadata.state_dict_metadata[key]
            assert isinstance(saved, TensorStorageMetadata), key
            reads = create_read_items_for_chunk_list(
                key, saved, [_chunk(block.global_offset, block.shape) for block in layout.blocks]
            )
            found = sum(math.prod(read.lengths) for read in reads)
            wanted = sum(math.prod(block.shape) for block in layout.blocks)
            assert found == wanted, (key, found, wanted)  # the save checked that chunks tile
            for block in layout.blocks:
                self._targets[(key, torch.Size(block.global_offset))] = local.detach()[
                    block.local_slices
                ]
            items += reads
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self._targets[_address(read_item.dest_index)]
        ranges = zip(read_item.dest_offsets, read_item.lengths, strict=True)
        return target[tuple(slice(start, start + length) for start, length in ranges)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing: `resolve_tensor` gave out a view of the target itself."""


class ShardWriter(FileSystemWriter):
    """DCP's file writer: one fsynced file per rank, and no trace of the path in `.metadata`.

    The path would also tie the pickle to one Python version (3.13 moved pathlib's classes).
    """

    def storage_meta(self) -> StorageMeta | None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            # torch.save closes its zip archive on the way out, which fails too and hides why.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise


class ShardReader(FileSystemReader):
    """DCP's file reader over metadata that was verified and read already."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata


_METADATA_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
}


def _memory_format(kind: Any, name: str) -> Any:
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise CorruptCheckpointError(
            f".metadata asks for {name} of {kind}, which no checkpoint of ours does"
        )
    return _MEM_FORMAT_ENCODING[name]


class _MetadataUnpickler(pickle.Unpickler):
    """DCP's `.metadata` is a pickle; this reads one without running what a stranger put in it."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):  # how Python 3.11.0 to 3.11.3 name an enum
            return _memory_format
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in _METADATA_CLASSES:
            raise CorruptCheckpointError(
                f".metadata refers to {module}.{name}, which no checkpoint of ours contains"
            )
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """DCP's table of tensors and chunks of the checkpoint directory `path`."""
    with (path / ".metadata").open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    assert isinstance(metadata, Metadata), type(metadata)
    return metadata


def tensor_table(tensors: Tensors) -> Table:
    """The table of what a run saves or asks for."""
    return {
        key: (str(local.dtype).removeprefix("torch."), tuple(layout.global_shape))
        for key, (layout, local) in tensors.items()
    }


def saved_table(metadata: Metadata) -> Table:
    """The table of what a checkpoint holds."""
    table: Table = {}
    for key, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata), key
        table[key] = (str(entry.properties.dtype).removeprefix("torch."), tuple(entry.size))
    return table


def _chunk(offset: tuple[int, ...], shape: tuple[int, ...]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))


def _address(index: MetadataIndex) -> tuple[str, torch.Size]:
    assert index.offset is not None
    return index.fqn, index.offset


def _cover_fault(entry: TensorStorageMetadata) -> str | None:
    """Why the chunks are not a partition of the tensor, or None when they are one."""
    size, chunks = entry.size, entry.chunks
    for chunk in chunks:
        ends = [o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)]
        if any(o < 0 or e > n for o, e, n in zip(chunk.offsets, ends, size, strict=True)):
            return f"block {tuple(chunk.offsets)} + {tuple(chunk.sizes)} is out of bounds"
    active: list[ChunkStorageMetadata] = []
    for chunk in sorted(chunks, key=lambda chunk: tuple(chunk.offsets)):
        if len(size) > 0:  # sweep along dim 0: only chunks that reach this row can overlap
            active = [a for a in active if a.offsets[0] + a.sizes[0] > chunk.offsets[0]]
        for other in active:
            if _overlap(chunk, other):
                return f"two primary ranks hold block {tuple(chunk.offsets)}"
        active.append(chunk)
    covered = sum(math.prod(chunk.sizes) for chunk in chunks)
    if covered != math.prod(size):
        return f"primary blocks hold {covered} of {math.prod(size)} elements"
    return None


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(a < b + m and b < a + n for a, n, b, m in spans)
