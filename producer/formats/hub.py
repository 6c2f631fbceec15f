"""Rows of a Hugging Face dataset, streamed from the hub or read from a local folder."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from app.errors import SourceError
from producer.formats.rows import Row, table_row

PREFIX = "hf:"
DEFAULT_SPLIT = "train"

_TAKE_UP_AGAIN = 3
"""How often in a row a broken stream is begun again behind its last row."""
_PAUSE_S = 1.0
"""Seconds before the first new beginning; the second waits twice as long."""

_REFERENCE = re.compile(
    r"(?P<repo>[\w.-]+(?:/[\w.-]+)?)(?::(?P<config>[^/@:]+))?(?:/(?P<split>[^/@:]+))?(?:@(?P<revision>[^@\s]+))?"
)


@dataclasses.dataclass(frozen=True)
class HubReference:
    """What `hf:org/name[:config][/split][@revision]` or `hf:./folder` names."""

    repo: str
    """The dataset's name on the hub, or an absolute local path."""
    config: str | None = None
    """One config, or several with commas between them, which are read one after another."""
    split: str = DEFAULT_SPLIT
    revision: str | None = None
    local: bool = False

    @property
    def description(self) -> str:
        """The reference written out in full."""
        if self.local:
            return f"{PREFIX}{self.repo}"
        config = f":{self.config}" if self.config else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repo}{config}/{self.split}{revision}"

    def parts(self) -> list[HubReference]:
        """Return one reference for each config."""
        configs = self.config.split(",") if self.config else [None]
        return [dataclasses.replace(self, config=config) for config in configs]


def parse(source: str) -> HubReference:
    """Read a reference; a path that begins with `/`, `.` or `~` is a local folder. Raises SourceError."""
    text = source.removeprefix(PREFIX)
    if text.startswith(("/", ".", "~")):
        path = Path(text).expanduser().resolve()
        if not path.is_dir():
            raise SourceError(f"There is no folder {path}; {PREFIX} with a path reads a local dataset folder.")
        return HubReference(repo=str(path), local=True)
    found = _REFERENCE.fullmatch(text)
    if found is None:
        raise SourceError(f"{source!r} names no dataset; write it as hf:org/name[:config][/split][@revision].")
    return HubReference(
        repo=found["repo"], config=found["config"], split=found["split"] or DEFAULT_SPLIT, revision=found["revision"]
    )


def load(reference: HubReference) -> Iterable[dict[str, Any]]:
    """Open the dataset without downloading it whole.

    Raises SourceError in one sentence: no `datasets`, no network, no such dataset, config, split or revision, or no
    right to read it.
    """
    try:
        import datasets  # noqa: PLC0415 - heavy, and only in the data extra
    except ImportError as error:
        raise SourceError(
            f"Reading {reference.description} needs datasets; run: pip install 'promptmill[data]'."
        ) from error
    # The one sentence of a SourceError is enough: no bars and no log of each retry around it.
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        dataset = _load_saved(datasets, reference) if _is_saved(reference) else _load_streaming(datasets, reference)
    except SourceError:
        raise
    except Exception as error:  # the hub's client raises classes of half a dozen libraries
        raise _explain(reference, error) from error
    # Images and sound stay bytes: nobody here looks at them, and decoding them needs more libraries.
    return dataset.decode(enable=False) if hasattr(dataset, "decode") else dataset  # type: ignore[no-any-return]


def read(
    reference: HubReference, rows: Iterable[dict[str, Any]], *, limit: int, name: str | None = None
) -> Iterator[Row]:
    """Yield the rows of a loaded dataset, under the name of its split unless another is given.

    A stream that breaks is taken up again behind its last row. Raises SourceError when that fails three times in a row.
    """
    values = iter(rows)
    name = name or (None if reference.local else reference.split)
    number, failures = 1, 0
    while True:
        try:
            value = next(values, None)
        except Exception as error:  # the hub's client raises classes of half a dozen libraries
            failures += 1
            skip = getattr(rows, "skip", None)  # only what can be streamed anew has it
            if skip is None or failures > _TAKE_UP_AGAIN:
                raise _explain(reference, error, number=number) from error
            time.sleep(_PAUSE_S * failures)
            values = iter(skip(number - 1))
            continue
        if value is None:
            return
        yield table_row(value, number=number, name=name, limit=limit)
        number, failures = number + 1, 0


def _is_saved(reference: HubReference) -> bool:
    """Tell whether a local folder was written by `save_to_disk`."""
    folder = Path(reference.repo)
    return reference.local and ((folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file())


def _load_saved(datasets: Any, reference: HubReference) -> Any:
    loaded = datasets.load_from_disk(reference.repo)
    if not isinstance(loaded, dict):
        return loaded.to_iterable_dataset()
    if reference.split not in loaded:
        known = ", ".join(sorted(loaded))
        raise SourceError(
            f"{reference.description} has no split {reference.split!r}, only {known}; name the split's own folder."
        )
    return loaded[reference.split].to_iterable_dataset()


def _load_streaming(datasets: Any, reference: HubReference) -> Any:
    return datasets.load_dataset(
        reference.repo, reference.config, split=reference.split, revision=reference.revision, streaming=True
    )


def _explain(reference: HubReference, error: Exception, *, number: int | None = None) -> SourceError:
    """Return one sentence for whatever went wrong."""
    words = " ".join(str(error).split())
    what = reference.description
    splits = re.search(r"Bad split: .*?Available splits: \[(.*?)\]", words)
    if splits:
        known = splits[1].replace("'", "")
        return SourceError(f"{what} has no split {reference.split!r}, only {known}.")
    configs = re.search(r"BuilderConfig .*? not found. Available: \[(.*?)\]", words)
    if configs:
        known = configs[1].replace("'", "")
        return SourceError(f"{what} has no config {reference.config!r}, only {known}.")
    if "Config name is missing" in words:
        configs = re.search(r"available configs: \[(.*?)\]", words)
        known = configs[1].replace("'", "") if configs else "see its page"
        return SourceError(f"{what} needs a config ({known}); write it as hf:{reference.repo}:CONFIG.")
    if "gated dataset" in words:
        return SourceError(f"{what} is gated: accept its terms on the hub, then run `hf auth login` or set HF_TOKEN.")
    if isinstance(error, ConnectionError):
        return SourceError(
            f"The Hugging Face Hub cannot be reached for {what}; check the network and HF_HUB_OFFLINE, "
            "or give a local folder as hf:PATH."
        )
    where = "" if number is None else f" at row {number}"
    return SourceError(f"{what} cannot be read{where}: {_bounded(words) or type(error).__name__}.")


def _bounded(words: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", words)[:300].rstrip(". ")
