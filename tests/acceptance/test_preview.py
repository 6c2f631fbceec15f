"""`producer preview` and `producer presets`, as a user runs them: without Redis, without waiting."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.hub_folder import write_hub_dataset
from tests.support.processes import Finished, run_producer

NO_REDIS = {"MILL_REDIS_URL": "redis://127.0.0.1:1/0", "HF_HUB_OFFLINE": "1"}
GIB = 1 << 30


def run(folder: Path, *arguments: str, expect: int = 0) -> Finished:
    """Run `producer ARGUMENTS` in a folder with a Redis that is not there."""
    finished = run_producer(*arguments, env=NO_REDIS, cwd=folder)
    assert finished.code == expect, finished.stdout + finished.stderr
    return finished


def write(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines; texts are lines already."""
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_what_a_preview_shows(tmp_path: Path) -> None:
    """The first samples, how rows were read, and refusals with row numbers, without Redis and without a folder."""
    rows = [
        {
            "conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "two"}],
            "tools": [{"name": "f"}],
        },
        {"conversations": [{"from": "human", "value": "one"}], "tools": [{"name": "f"}]},
        {"conversations": [{"from": "narrator", "value": "x"}]},
        "{broken",
        {"conversations": [{"from": "system", "value": "s\u001b[31m"}, {"from": "human", "value": "three"}]},
    ]
    told = run(tmp_path, "preview", str(write(tmp_path / "x.jsonl", rows)))

    assert "adapter auto reads the first rows as sharegpt." in told.stderr
    assert "[user] one" in told.stdout
    assert '[tool definition] {"name": "f"}\n[user] one' in told.stdout
    assert "\x1b" not in told.stdout
    assert "[system] s\\u001b[31m" in told.stdout
    assert "read 5 rows, samples 2, refused 3" in told.stdout
    assert "duplicate: 1 (row 2): the same prompt as row 1" in told.stdout
    assert "unknown_role: 1 (row 3): turn 1 has the unknown role 'narrator'" in told.stdout
    assert "not_json: 1 (row 4)" in told.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["x.jsonl"]


def test_a_preview_for_machines(tmp_path: Path) -> None:
    """--json holds samples, counts, left-out rows and every refused row; -n bounds the samples alone."""
    rows = [{"question": f"q{n}", "uid": n, "lang": "en" if n % 2 else "de"} for n in range(20)] + [
        {"question": " ", "lang": "en"}
    ]
    words = ("--columns", "prompt=question,id=uid", "--filter", "lang=en", "--system", "S", "-n", "1", "--json")
    told = run(tmp_path, "preview", str(write(tmp_path / "x.jsonl", rows)), *words).json()

    (sample,) = told["samples"]
    assert sample["messages"] == [{"role": "system", "content": "S"}, {"role": "user", "content": "q1"}]
    assert sample["id"].startswith("1-")
    assert (told["read"], told["refused"], told["left_out"]) == (11, 1, {"lang=en": 10})
    assert told["reasons"] == {"empty_prompt": 1}
    assert told["refused_rows"][0]["row"] == 21


@pytest.mark.parametrize("ending", [".jsonl", ".json"])
def test_a_huge_file_is_not_read_to_its_end(tmp_path: Path, ending: str) -> None:
    """The first rows of 10 GB are shown at once; the size of a source does not matter."""
    path = tmp_path / f"x{ending}"
    rows = [json.dumps({"prompt": f"p{n}"}) for n in range(3000)]
    path.write_text("\n".join(rows) + "\n" if ending == ".jsonl" else "[" + ",\n".join(rows) + ",\n")
    with path.open("r+b") as stream:
        stream.truncate(10 * GIB)
    began = time.monotonic()
    told = run(tmp_path, "preview", str(path), "--rows", "500")

    assert "read 500 rows (--rows reads more), samples 500" in told.stdout
    assert time.monotonic() - began < 10  # reading it all takes longer than that


def test_a_preset_is_previewed(tmp_path: Path) -> None:
    """A preset's name is enough; what it reads and under which licence is told."""
    pytest.importorskip("datasets")
    write_hub_dataset(tmp_path / "openai" / "gsm8k", {"main": [{"question": "2+2?", "answer": "#### 4"}]})
    told = run(tmp_path, "preview", "gsm8k")

    assert "preset gsm8k: hf:openai/gsm8k:main/train, licence MIT." in told.stderr
    assert "[user] 2+2?" in told.stdout


def test_the_list_of_presets(tmp_path: Path) -> None:
    """Every preset is listed with hub id and licence, for people and for machines."""
    listed = run(tmp_path, "presets", "--json").json()
    shown = run(tmp_path, "presets").stdout

    assert len(listed) >= 20
    for preset in listed:
        assert preset["name"] in shown
        assert preset["hub"] in shown
        assert f"licence: {preset['licence']}" in shown
        assert preset["source"].startswith(f"hf:{preset['hub']}")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("no.jsonl",), "There is no file"),
        (("glaive",), "did you mean glaive-v"),
        (("x.jsonl", "--columns", "id=nope"), "no row has the column 'nope'; the columns are prompt"),
        (("x.jsonl", "--filter", "nope=1"), "no row has the column 'nope'"),
        (("x.jsonl", "--filter", "nope"), "write it as COLUMN=VALUE"),
        (("x.jsonl", "--adapter", "nope"), "There is no adapter 'nope'"),
        (("x.jsonl", "--adapter", "nope:f"), "the module 'nope' cannot be imported"),
        (("x.jsonl", "--adapter", "glaive-v2"), "nothing that --adapter glaive-v2 reads"),
        (("x.jsonl", "--chat-template-kwargs", "x"), "--chat-template-kwargs cannot be used"),
        (("x.jsonl", "--dedupe", "fuzzy"), "'fuzzy' is not one of"),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """Whatever is typed wrongly is told in one sentence with exit code 2."""
    write(tmp_path / "x.jsonl", [{"prompt": "a"}])
    told = run(tmp_path, "preview", *words, expect=2)

    assert said in told.stderr
    assert "Traceback" not in told.stderr


def test_an_input_without_prompts_fails(tmp_path: Path) -> None:
    """Where no row is a sample the exit code is 1, and the reasons are there."""
    told = run(tmp_path, "preview", str(write(tmp_path / "x.jsonl", [{"prompt": " "}])), expect=1)

    assert "empty_prompt: 1 (row 1)" in told.stdout
