"""Texts and files as people have them: odd separators, byte order marks, numbers that are none, huge and empty rows."""

from __future__ import annotations

import json
from pathlib import Path

from app.records import Kind
from producer.simulator.rules import Rule
from tests.conftest import ModelServerFactory
from tests.support.books import assert_progress_files, balanced, by_source_id, records
from tests.support.jsonl_check import parse_strict
from tests.support.mill import Mill
from tests.support.peak import peak_bytes, run_measured

_FEW_ROWS_BYTES = 400 * 2**20
"""What a process with a few of the largest rows in hand may need."""

SEPARATORS = ["a\u2028b", "a\u2029b", "a\u0085b", "v\x0bf\x0cx\x1cy\x1ez", "typed \\r and \\n", "real\r\nbreak\rhere"]


def test_only_a_newline_ends_a_row(mill: Mill, model_server: ModelServerFactory) -> None:
    """Texts with every other separator arrive unchanged, come back whole, and every reader counts the same rows."""
    answer = "got {user} \u2028 \u2029 \u0085 \x0b \x0c \x1c \x1d \x1e end"
    server = model_server([{"content": answer}])
    path = mill.path / "separators.jsonl"
    rows = [{"id": f"s{number}", "prompt": text} for number, text in enumerate(SEPARATORS)]
    path.write_bytes("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
    mill.enqueue(path)
    mill.worker()
    mill.wait_recorded(6)
    assert " queued 0\n" in mill.enqueue(path).stdout
    balanced(mill, read=6, accepted=6, left=0)
    assert sorted(request.key for request in server.requests) == sorted(SEPARATORS)
    assert {record["content"] for record in records(mill)} == {answer.replace("{user}", one) for one in SEPARATORS}
    assert "6 of 6" in mill.run("status").stdout
    for form in ("openai", "sharegpt", "tokens"):
        output = mill.path / f"{form}.jsonl"
        mill.run("export", "case", "--format", form, "--output", str(output))
        assert output.read_bytes().count(b"\n") == 6
    assert_progress_files(mill)


def test_numbers_that_are_none(mill: Mill, model_server: ModelServerFactory) -> None:
    """NaN and infinities in rows are refused by one rule, and one in an answer reaches no file; all JSON is strict."""
    body = (
        b'{"id":"x","object":"chat.completion","model":"toy-model","choices":[{"index":0,"finish_reason":"stop",'
        b'"message":{"role":"assistant","content":"ok"},"logprobs":{"mean":NaN}}],"usage":{"prompt_tokens":1,'
        b'"completion_tokens":2,"total_tokens":3}}'
    )
    model_server([{"match": "nan", "body": body}])
    lines = [f'{{"id":"{word}","score":{word},"prompt":"x"}}' for word in ("NaN", "-Infinity", "1e999")]
    path = mill.path / "numbers.jsonl"
    path.write_text("\n".join([*lines, '{"id":"fine","score":0.5,"prompt":"nan in the answer"}']))
    empty = mill.status()
    assert empty["totals"]["eta"]["seconds"] is None
    assert empty["totals"]["tokens"]["mean"] is None
    mill.enqueue(path)
    document = parse_strict(mill.run("status", "--json").stdout.encode())
    assert document["totals"]["eta"]["seconds"] is None
    mill.worker()
    balanced(mill, read=4, refused=3, accepted=1)
    refused = records(mill, kind=Kind.REFUSED)
    assert [(row["row"], row["reason"]) for row in refused] == [(1, "non_finite"), (2, "non_finite"), (3, "non_finite")]
    assert_progress_files(mill)


def test_files_of_other_systems(mill: Mill, model_server: ModelServerFactory) -> None:
    """A byte order mark, CRLF, blank lines and a missing last newline change no row, no text and no id."""
    server = model_server()
    texts = ["first", "second", "third"]
    plain = mill.write_rows([{"prompt": text} for text in texts], "plain")
    odd = mill.path / "odd.jsonl"
    one, two, three = (json.dumps({"prompt": text}).encode() for text in texts)
    odd.write_bytes(b"\xef\xbb\xbf" + one + b"\r\n\r\n" + two + b"\r\n   \r\n" + three)
    assert "read 3, refused 0" in mill.enqueue(odd).stdout
    assert "already queued 3, queued 0" in mill.enqueue(plain).stdout
    wide = mill.path / "wide.jsonl"
    wide.write_bytes(json.dumps({"prompt": "wide"}).encode("utf-16"))
    told = mill.enqueue(wide, dataset="wide", expect=2)
    assert told.stderr.count("\n") == 1
    assert "UTF-8" in told.stderr
    assert not mill.folder("wide").path.exists()
    mill.worker()
    balanced(mill, read=3, accepted=3)
    assert sorted(server.counts) == texts


def test_one_huge_row_among_small_ones(mill: Mill, model_server: ModelServerFactory) -> None:
    """A row of 4 MB and an answer of 8 MB pass like any other; a row over the limit is refused with the limit."""
    big = {"match": "big answer", "content": "0123456789abcdef", "repeat": 2**19}
    model_server([big], default=Rule(content="fine"), max_model_len=10**9, token_ids=False)
    rows = [{"id": f"h{n}", "prompt": f"word{n} " * (600_000 if n == 3 else 3)} for n in range(6)]
    path = mill.write_rows([*rows, {"id": "answer", "prompt": "big answer"}], "huge")
    said, peak = run_measured("enqueue", str(path), "--dataset", "case", env=mill.env, cwd=mill.path)
    assert "queued 7" in said
    assert peak < _FEW_ROWS_BYTES
    worker = mill.worker(concurrency=2)
    balanced(mill, read=7, accepted=7)
    assert peak_bytes(worker.pid) < _FEW_ROWS_BYTES
    assert len(by_source_id(mill)["answer"]["content"]) == 8 * 2**20
    assert " queued 0\n" in mill.enqueue(path).stdout
    mill.env["MILL_MAX_ROW_MB"] = "1"
    told = mill.enqueue(path, dataset="small")
    assert "read 7, refused 1 " in told.stdout
    (row,) = records(mill, "small", Kind.REFUSED)
    assert (row["row"], row["reason"]) == (4, "too_large")
    assert "MILL_MAX_ROW_MB" in row["detail"]


EMPTY = {
    "nothing": {"messages": [{"role": "user", "content": ""}]},
    "blank": {"prompt": "   \n\t "},
    "null": {"messages": [{"role": "user", "content": None}]},
    "no text": {"messages": [{"role": "user"}]},
    "invisible": {"prompt": "\u200b\u2060"},
    "only system": {"messages": [{"role": "system", "content": "Be kind."}, {"role": "user", "content": ""}]},
}


def test_empty_prompts_are_never_sent(mill: Mill, model_server: ModelServerFactory, tmp_path: Path) -> None:
    """Empty, blank, null and invisible prompts are refused with their row; spaces around a text reach the server."""
    server = model_server(reject_empty=True)
    rows = [{"id": name, **row} for name, row in EMPTY.items()]
    mill.enqueue([*rows, {"id": "kept", "prompt": "  keep my spaces  "}])
    for name, text in (("empty", ""), ("blank", "\n\n  \n")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(text)
        told = mill.enqueue(path, dataset=name, expect=1)
        assert "read 0" in told.stdout
        assert "nothing to ask" in told.stderr
    mill.worker()
    balanced(mill, read=7, refused=6, accepted=1, failed=0)
    assert list(server.counts) == ["  keep my spaces  "]
    assert [row["row"] for row in records(mill, kind=Kind.REFUSED)] == [1, 2, 3, 4, 5, 6]
    told = mill.run("status", "empty").stdout
    assert "Nothing to do" in told
    assert "ETA" not in told
    document = mill.status("empty")["datasets"]["empty"]
    assert (document["percent"], document["eta"]["seconds"]) == (None, None)
    mill.run("monitor", "empty", "--until-done")
