"""Sends an export and its card to the Hugging Face hub, as one commit."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.errors import IncompleteError, UsageError
from producer.export.outputs import OutputFile
from producer.export.report import size_words

FOLDER = "data/"
"""Where the files lie in the repository."""
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")


@dataclasses.dataclass(frozen=True)
class Parcel:
    """What is sent, and where to."""

    repository: str
    """ORG/NAME."""
    private: bool
    files: Sequence[OutputFile]
    card: str

    def sentences(self) -> list[str]:
        """Say what is sent, one line a file."""
        kind = "private" if self.private else "PUBLIC"
        return [
            f"To the {kind} dataset {self.repository} on the Hugging Face hub:",
            f"  README.md ({size_words(len(self.card.encode()))})",
            *(f"  {FOLDER}{file.path.name} ({file.rows:,} rows, {size_words(file.bytes)})" for file in self.files),
        ]


def check_repository(name: str) -> None:
    """Raise UsageError unless the name is ORG/NAME."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"--push {name!r} cannot be used; give the dataset as ORG/NAME.")


def find_token() -> str:
    """Return the hub's token; raises UsageError where there is none, or no library to send with."""
    token = _hub().get_token()
    if not token:
        raise UsageError(
            "There is no token for the Hugging Face hub; run `hf auth login` or set HF_TOKEN, then export again."
        )
    return str(token)


def push(parcel: Parcel, token: str) -> str:
    """Make the repository where it does not exist, and add the files in one commit; return its address.

    An existing repository keeps its visibility. Raises IncompleteError when the hub refuses or cannot be reached.
    """
    hub = _hub()
    api = hub.HfApi(token=token)
    operations = [hub.CommitOperationAdd("README.md", parcel.card.encode())]
    operations += [hub.CommitOperationAdd(f"{FOLDER}{file.path.name}", str(Path(file.path))) for file in parcel.files]
    try:
        address = api.create_repo(parcel.repository, repo_type="dataset", private=parcel.private, exist_ok=True)
        api.create_commit(
            parcel.repository, operations, commit_message="Add an export of promptmill", repo_type="dataset"
        )
    except (OSError, hub.errors.HfHubHTTPError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise IncompleteError(
            f"The hub did not take {parcel.repository} ({first}); the files are written here, so look at the token's "
            "rights and the connection, and export again with --overwrite."
        ) from error
    return str(address)


def _hub() -> Any:
    try:
        import huggingface_hub  # noqa: PLC0415 heavy
        import huggingface_hub.errors  # noqa: PLC0415 heavy
    except ImportError as error:
        raise UsageError(
            "--push needs huggingface_hub, which is not installed: run `pip install 'promptmill[data]'`."
        ) from error
    return huggingface_hub
