"""A dataset folder as the hub has them, with configs and a split, for readers that must not reach the hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def write_hub_dataset(folder: Path, configs: Mapping[str, Sequence[Mapping[str, Any]]], split: str = "train") -> None:
    """Write rows for each config, and the card that names them; the datasets library reads it like one of the hub."""
    folder.mkdir(parents=True, exist_ok=True)
    card = ["---", "configs:"]
    for config, rows in configs.items():
        card += [f"- config_name: {config}", "  data_files:", f"  - split: {split}", f"    path: {config}.jsonl"]
        (folder / f"{config}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")
