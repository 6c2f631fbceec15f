"""The payloads in Redis: each round of a sample is put once, and dropped and counted once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import resources
from typing import TypeVar, cast

import msgspec

from app.broker import Client
from app.places import Keys, folder_name
from app.records import Kind, Sample
from app.tally import Done, counts_of

_KEEP_LANE_S = 3600
"""Seconds after the last recorded suspect for which the lane stays wide."""
_CHUNK = 1000
"""Samples per call of a script, whose stack and whose time are bounded."""

_Item = TypeVar("_Item")


class Payloads:
    """The scripts that rounds.lua stands before; each call is one step in Redis, and may be sent twice."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._keys = keys
        self._put = client.register_script(_script("put"))
        self._finish = client.register_script(_script("finish"))

    def put(self, dataset: str, samples: Sequence[Sample], again: Mapping[str, Kind], *, replace: bool) -> list[str]:
        """Store payloads; return the ids whose round was not there yet.

        `again` names ids on disk as failed or rejected. A later round takes the place of an earlier one, which is on
        disk; `replace` puts a new payload in the place of one of the same round too.
        """
        fresh = list[int]()
        for chunk in _chunks(samples):
            args: list[str | bytes] = [folder_name(dataset), "1" if replace else "0"]
            for sample in chunk:
                before = again.get(sample.id)
                args += [sample.id, msgspec.json.encode(sample), before.value if before else ""]
            fresh += cast("list[int]", self._put(keys=self._keys_of(dataset), args=args))
        return [sample.id for sample, new in zip(samples, fresh, strict=True) if new]

    def finish(self, dataset: str, items: Sequence[Done], *, second: int) -> None:
        """Drop the payloads of recorded samples, but those of later rounds, and count what had one."""
        self._drop(dataset, [(item.id, str(item.round), counts_of(item)) for item in items], second=second)

    def forget(self, dataset: str, ids: Iterable[str] | Mapping[str, int]) -> None:
        """Drop the payloads of those ids, with a mapping only up to the round that it says."""
        rounds: Mapping[str, int] = ids if isinstance(ids, Mapping) else {}
        self._drop(dataset, [(id_, str(rounds.get(id_, "")), "") for id_ in ids], second=0)

    def _drop(self, dataset: str, items: Sequence[tuple[str, str, str]], *, second: int) -> None:
        at = self._keys
        keys = [*self._keys_of(dataset), at.lane, at.rates(dataset), at.stats(dataset)]
        for chunk in _chunks(items):
            args: list[str | int] = [folder_name(dataset), second, _KEEP_LANE_S]
            for item in chunk:
                args += item
            self._finish(keys=keys, args=args)

    def _keys_of(self, dataset: str) -> list[str]:
        at = self._keys
        of_samples = [at.prompts(dataset), at.flights(dataset), at.deaths(dataset), at.crashes(dataset)]
        return [*of_samples, at.suspects, at.again(dataset, Kind.FAILED), at.again(dataset, Kind.REJECTED)]


def _chunks(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    return (items[at : at + _CHUNK] for at in range(0, len(items), _CHUNK))


def _script(name: str) -> str:
    scripts = resources.files("app").joinpath("lua")
    return "".join(scripts.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in ("rounds", name))
