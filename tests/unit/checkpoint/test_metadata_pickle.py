"""What `.metadata` may name. tests/distributed/test_checkpoint_corruption.py covers the rest."""

from __future__ import annotations

import io
import pickle
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from megacomposer.checkpoint.manifest import CorruptCheckpointError
from megacomposer.checkpoint.planner import _MetadataUnpickler


class ByGetattr:
    """Pickles as Python 3.11.0 to 3.11.3 pickle a member of an enum, on any Python."""

    def __init__(self, holder: Any, name: str) -> None:
        self.holder, self.name = holder, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.holder, self.name)


def load(value: object) -> object:
    return _MetadataUnpickler(io.BytesIO(pickle.dumps(value))).load()


def test_checkpoint_of_an_early_python_3_11_cannot_be_read() -> None:
    for member in _MEM_FORMAT_ENCODING:
        assert load(ByGetattr(_MEM_FORMAT_ENCODING, member.name)) is member
        assert load(member) is member


@pytest.mark.parametrize(
    ("holder", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "mro")]
)
def test_pickle_reaches_any_attribute_of_what_it_may_name(holder: Any, name: str) -> None:
    with pytest.raises(CorruptCheckpointError, match=f"asks for {name} of"):
        load(ByGetattr(holder, name))
