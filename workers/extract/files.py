"""Files of hidden states in the layouts of the trainers' readers: whole and durable, or not there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from app import jsonl
from app.extraction import Layout, Sequence


class Written(NamedTuple):
    """A file as it is on disk."""

    bytes: int
    sha256: str


def tensors_of(layout: Layout, id_: str, sequence: Sequence, states: Any) -> dict[str, Any]:
    """Return what a file holds, by the names, shapes and types that the layout's reader wants.

    `states` is [tokens, layers + 1, hidden_size] with the last layer at last. SpecForge reads a batch of one; all three
    want the auxiliary layers side by side, which speculators does itself.
    """
    import torch  # noqa: PLC0415 heavy

    ids = torch.tensor(sequence.ids, dtype=torch.long)
    if layout is Layout.SPECULATORS:
        return {"hidden_states": states.contiguous(), "token_ids": ids}
    mask = torch.tensor(sequence.mask, dtype=torch.long)
    # Copies, for torch would save the memory that a view looks into, whole.
    last, side_by_side = states[:, -1].clone(), states[:, :-1].flatten(1).clone()
    if layout is Layout.SPECFORGE:
        return {
            "input_ids": ids,
            "loss_mask": mask,
            "hidden_state": last.unsqueeze(0),
            "aux_hidden_state": side_by_side.unsqueeze(0),
        }
    return {
        "input_ids": ids,
        "hidden_states": last,
        "aux_hidden_states": side_by_side,
        "loss_mask": mask,
        "conversation_id": id_,
    }


def write_states(path: Path, layout: Layout, tensors: Mapping[str, Any]) -> Written:
    """Write the file beside its place, make it durable, and let it take its name; one that is there is replaced.

    Raises StoreError.
    """
    # Of a name of its own: a worker that was taken for dead may be writing the same sample.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with jsonl.translated(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                hashing = _Hashing(file)
                _save(hashing, layout, tensors)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        jsonl.fsync_folder(path.parent)
    return Written(hashing.bytes, hashing.digest)


def _save(file: _Hashing, layout: Layout, tensors: Mapping[str, Any]) -> None:
    if layout is Layout.SPECULATORS:
        import safetensors.torch  # noqa: PLC0415 heavy

        file.write(safetensors.torch.save(dict(tensors), metadata={"format": "pt"}))
        return
    import torch  # noqa: PLC0415 heavy

    torch.save(dict(tensors), file)


class _Hashing:
    """A file that knows the digest of what was written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._sha256 = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes) -> int:
        self._sha256.update(data)
        self.bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()
