"""Hands samples to workers one by one, and holds those apart over which workers and servers have died."""

from __future__ import annotations

import dataclasses
from importlib import resources
from typing import Any, cast

import msgspec
from redis.commands.core import Script

from app.broker import Client, text
from app.places import Keys, folder_name
from app.records import Sample

decode_sample = msgspec.json.Decoder(Sample).decode


@dataclasses.dataclass(frozen=True)
class Taken:
    """The answer to a worker that wants to ask a sample."""

    state: str
    """gone, held, paused, aside, full, poison, new, mine or orphan (see take.lua)."""
    sample: Sample | None = None
    """Its payload, where this worker may ask it."""
    deaths: int = 0
    """Workers and model servers that died while it was asked."""


class Lane:
    """The scripts that lane.lua stands before (docs/design/poison.md)."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self._client = client
        self._keys = keys
        self._take = client.register_script(_script("take"))
        self._release = client.register_script(_script("release"))
        self._blame = client.register_script(_script("blame"))

    def take(self, dataset: str, sample_id: str, owner: str) -> Taken:
        """Take a sample for `owner`, or say why not."""
        state, *rest = cast("list[Any]", self._run(self._take, dataset, sample_id, owner))
        if not rest:
            return Taken(text(state))
        return Taken(text(state), decode_sample(rest[0]), int(rest[1]))

    def release(self, dataset: str, sample_id: str, owner: str) -> None:
        """Give a sample back that `owner` took and did not record."""
        self._run(self._release, dataset, sample_id, owner)

    def blame(self, dataset: str, sample_id: str, owner: str) -> bool:
        """Count the death of a model server that worked on a sample of `owner`; tell whether it is a suspect now."""
        return bool(self._run(self._blame, dataset, sample_id, owner))

    def _run(self, script: Script, dataset: str, sample_id: str, owner: str) -> Any:
        at, folder = self._keys, folder_name(dataset)
        own = (at.prompts(dataset), at.flights(dataset), at.deaths(dataset))
        keys = [*own, at.paused, at.suspects, at.lane, at.datasets]
        prefixes = (at.worker(""), *(key.removesuffix(folder) for key in own[1:]))
        return script(keys=keys, args=[sample_id, owner, dataset, folder, *prefixes])


def _script(name: str) -> str:
    scripts = resources.files("app").joinpath("lua")
    return "".join(scripts.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in ("lane", name))
