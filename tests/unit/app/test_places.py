"""Folders of datasets and keys in Redis."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import UsageError
from app.places import Keys, StateDir, dataset_folder, endpoint_name, folder_name, queue_name
from app.records import Kind

NASTY = [
    *(
        "upper",
        "UPPER",
        "Upper",
        "a/b",
        "a_b",
        "a b",
        "a:b",
        "a\\b",
        "..",
        "../..",
        "../up",
        "/",
        "/etc",
        ".",
        "./x",
        "x.",
    ),
    *(
        ".hidden",
        "-rf",
        "--help",
        "~",
        "~root",
        "con",
        "CON",
        "nul",
        "aux",
        "prn",
        "*",
        "?",
        "$HOME",
        "`id`",
        "a;b",
        "%2e",
    ),
    *(
        "café",
        "cafe\u0301",
        "CAFÉ",
        "日本語",
        "Straße",
        "STRASSE",
        "strasse",
        "\u017f",
        "s",
        "İ",
        "i",
        "\u202eabc",
        "\u200b",
        "😀",
    ),
    *(
        "a" * 64,
        "a" * 65,
        "a" * 66,
        "a" * 200,
        "A" * 200,
        "org/name:config@rev",
        "mill.a",
        "a~0b5d8e3f",
        " a",
        "a ",
        "_",
    ),
]

_names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=50).filter(str.strip)


@pytest.mark.parametrize("name", ["alpaca", "ultra-chat_200k", "v1.5", "0", "a" * 64, "_"])
def test_plain_names_are_their_own_folder(name: str) -> None:
    """A plain name is found under prepared/ as it was typed."""
    assert folder_name(name) == name


def test_other_names_say_where_they_come_from() -> None:
    """A name with other characters keeps its readable part and gets eight hex digits that tell it from all others."""
    assert folder_name("org/name") == "org_name~7e624f06"
    assert folder_name("-rf").startswith("rf~")
    assert folder_name("/").startswith("_~")


def test_no_two_nasty_names_share_a_folder() -> None:
    """Names that differ in case, accents, separators or length alone have different folders on every disk."""
    folders = {folder_name(name).casefold() for name in NASTY}
    assert len(folders) == len(NASTY)


@given(first=_names, second=_names)
def test_no_two_names_share_a_folder(first: str, second: str) -> None:
    """Two names have one folder only if they are one name."""
    assert (folder_name(first).casefold() == folder_name(second).casefold()) == (first == second)


@given(name=_names | st.sampled_from(NASTY), change=st.sampled_from([str.upper, str.lower, str.swapcase, str.title]))
def test_case_variants_have_folders_of_their_own(name: str, change: object) -> None:
    """A name and its upper-case spelling do not meet on a disk that ignores case."""
    other = change(name)  # type: ignore[operator]
    if other != name and len(other.encode()) <= 200:
        assert folder_name(other).casefold() != folder_name(name).casefold()


@given(name=_names | st.sampled_from(NASTY))
def test_nothing_is_outside_the_prepared_folder(name: str) -> None:
    """Every name leads to a folder directly below prepared/, whose name no shell or option parser misreads."""
    prepared = Path("/srv/prepared")
    path = dataset_folder(prepared, name).path
    assert path.parent == prepared
    assert path.resolve().parent == prepared
    assert path.name[0] not in ".-~"
    assert not set(path.name) & set("/\\ \n*?$`;:")
    assert len(path.name) <= 80


@pytest.mark.parametrize("name", ["", " ", "\t", "a\nb", "a\0b", "\x7f", "a" * 201, "é" * 101, "\ud800"])
def test_impossible_names_are_refused(name: str) -> None:
    """An empty, endless or unprintable name is refused in one line that can be shown."""
    with pytest.raises(UsageError) as caught:
        folder_name(name)
    assert str(caught.value).isprintable()
    assert caught.value.exit_code == 2


def test_files_of_a_dataset() -> None:
    """Each kind of line has its own file, and nothing of a dataset lies outside its folder."""
    folder = dataset_folder(Path("prepared"), "d")
    assert {kind.value: folder.lines(kind).name for kind in Kind} == {
        "refused": "refused.jsonl",
        "pending": "samples.jsonl",
        "failed": "failures.jsonl",
        "rejected": "rejected.jsonl",
        "accepted": "raw_responses.jsonl",
    }
    others = [
        folder.manifest,
        folder.index,
        folder.shared_index,
        folder.lock,
        folder.torn,
        folder.progress,
        folder.progress_log,
    ]
    assert {path.parent for path in others} == {Path("prepared/d")}
    assert len({path.name for path in others} | {folder.lines(kind).name for kind in Kind}) == 12


def test_files_of_the_local_services() -> None:
    """The local services keep all they know in the state folder."""
    state = StateDir(Path("state"))
    assert {path.parent for path in (state.broker, state.services, state.logs, state.lock)} == {Path("state")}


def _all_keys(keys: Keys, word: str) -> list[str]:
    found = [keys.datasets, keys.paused, keys.unacked, keys.workers]
    found += [keys.again(word, kind) for kind in (Kind.FAILED, Kind.REJECTED)]
    for name, method in inspect.getmembers(keys, inspect.ismethod):
        if not name.startswith("_") and name != "again":
            found.append(method(word))
    return found


def test_every_key_is_behind_the_prefix_and_different() -> None:
    """Runs that share a Redis server under different prefixes never share a key."""
    mine, theirs = _all_keys(Keys("a:"), "d"), _all_keys(Keys("b:"), "d")
    assert all(key.startswith("a:") for key in mine)
    assert len({*mine, *theirs}) == len(mine) + len(theirs)


def test_keys_use_the_folder_name() -> None:
    """Two datasets have the same key only if they have the same folder, whatever their names hold."""
    assert Keys().prompts("org/name") == f"mill:prompts:{folder_name('org/name')}"
    assert Keys().queue("UP") == f"mill:{queue_name('UP')}" == f"mill:mill.{folder_name('UP')}"


def test_endpoint_name_hides_credentials() -> None:
    """An endpoint's name in keys and logs holds its host, no user and no password."""
    name = endpoint_name("http://me:secret@gpu-1:8000")
    assert name.startswith("gpu-1_8000-")
    assert "secret" not in name
    assert (
        endpoint_name("http://gpu-1:8001") != endpoint_name("http://gpu-1:8000") == endpoint_name("http://gpu-1:8000")
    )
