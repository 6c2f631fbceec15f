"""Typed settings: where they come from, how they are refused, and what never prints."""

from __future__ import annotations

import traceback
from pathlib import Path

import pytest

from app import setting_checks, settings
from app.errors import SettingError
from app.settings import (
    BrokerSettings,
    GenerationSettings,
    QueueSettings,
    ServerSettings,
    StoreSettings,
    WorkerSettings,
)

SECRET = "hunter2-Q"  # noqa: S105  looked for in everything that prints


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read no `.env` or `promptmill.toml` but the test's own."""
    monkeypatch.chdir(tmp_path)


def _refusal(group: type[settings.BrokerSettings | GenerationSettings | ServerSettings]) -> SettingError:
    with pytest.raises(SettingError) as caught:
        settings.load(group)
    return caught.value


def test_defaults() -> None:
    """Without any setting the documented defaults hold."""
    server, worker = settings.load(ServerSettings), settings.load(WorkerSettings)
    assert (server.model_urls, server.max_in_flight) == ((), 128)
    assert (server.request_timeout_s, server.connect_timeout_s) == (1800, 30)
    assert (worker.max_attempts, worker.drain_s, worker.lease_s) == (4, 30, 90)
    assert settings.load(QueueSettings).max_pending == 100_000
    assert settings.load(StoreSettings).prepared_dir == Path("prepared")
    assert settings.load(StoreSettings).state.path == Path(".promptmill")
    assert settings.load(BrokerSettings).keys.prefix == "mill:"


def test_sampling_sends_only_what_was_set() -> None:
    """Without sampling settings a request holds max_tokens and nothing else, so the server's defaults count."""
    generation = settings.load(GenerationSettings)
    assert generation.sampling("id") == {"max_tokens": 8192}
    assert generation.content() == {"max_tokens": 8192, "min_completion_tokens": 0, "keep_truncated": False}


def test_sampling_holds_all_that_was_set() -> None:
    """Sampling settings and extra_body go to the server; rules, model and seed are put elsewhere."""
    generation = settings.load(
        GenerationSettings,
        model="m",
        temperature=0.0,
        stop=("</s>",),
        chat_template_kwargs={"enable_thinking": True},
        extra_body={"ignore_eos": False},
        seed=7,
        system="Be brief.",
        min_completion_tokens=50,
    )
    assert generation.sampling("id") == {
        "max_tokens": 8192,
        "temperature": 0.0,
        "stop": ["</s>"],
        "chat_template_kwargs": {"enable_thinking": True},
        "ignore_eos": False,
    }
    assert generation.content()["extra_body"] == {"ignore_eos": False}


def test_sources_win_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument wins over the environment, that over `.env`, that over `promptmill.toml`, that over the default."""
    (tmp_path / "promptmill.toml").write_text("max_tokens = 1\ntop_k = 11\ntop_p = 0.1\ntemperature = 0.1\n")
    (tmp_path / ".env").write_text("MILL_MAX_TOKENS=2\nMILL_TOP_K=22\nMILL_TOP_P=0.2\n")
    monkeypatch.setenv("MILL_MAX_TOKENS", "3")
    monkeypatch.setenv("MILL_TOP_K", "33")
    read = settings.load(GenerationSettings, max_tokens=4, top_k=None)
    assert (read.max_tokens, read.top_k, read.top_p, read.temperature, read.min_p) == (4, 33, 0.2, 0.1, None)


def test_empty_variables_are_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable, as compose files make them, means the default."""
    monkeypatch.setenv("MILL_TEMPERATURE", "")
    monkeypatch.setenv("MILL_MAX_TOKENS", "")
    read = settings.load(GenerationSettings)
    assert (read.temperature, read.max_tokens) == (None, 8192)


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("http://a:8000", ("http://a:8000",)),
        ("http://a:8000/v1", ("http://a:8000",)),
        (" http://a:8000/v1/ , https://b/ ,", ("http://a:8000", "https://b")),
        ("http://gate/team/v1,http://gate/v1", ("http://gate/team", "http://gate")),
        ("", ()),
    ],
)
def test_model_urls(text: str, urls: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Model servers are separated by commas, with or without spaces, a final slash and /v1."""
    monkeypatch.setenv("MILL_MODEL_URLS", text)
    assert settings.load(ServerSettings).model_urls == urls


def test_model_urls_from_toml(tmp_path: Path) -> None:
    """A TOML file may give the model servers as a list."""
    (tmp_path / "promptmill.toml").write_text('model_urls = ["http://a/v1", "http://b"]\n')
    assert settings.load(ServerSettings).model_urls == ("http://a", "http://b")


@pytest.mark.parametrize(
    ("text", "stop"),
    [("</s>", ("</s>",)), ('["a", "b,c"]', ("a", "b,c")), (' ["a"]', ("a",))],
)
def test_stop_strings(text: str, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """One stop string is written as it is, several as a JSON list."""
    monkeypatch.setenv("MILL_STOP", text)
    assert settings.load(GenerationSettings).stop == stop


def test_json_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Template options come from the environment as JSON."""
    monkeypatch.setenv("MILL_CHAT_TEMPLATE_KWARGS", '{"enable_thinking": true}')
    assert settings.load(GenerationSettings).chat_template_kwargs == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("group", "name", "text", "accepted"),
    [
        (ServerSettings, "MILL_MAX_IN_FLIGHT", "many", ": input should be a whole number."),
        (ServerSettings, "MILL_MAX_IN_FLIGHT", "0", "greater than or equal to 1"),
        (ServerSettings, "MILL_REQUEST_TIMEOUT_S", "-1", "greater than 0"),
        (ServerSettings, "MILL_REQUEST_TIMEOUT_S", "inf", "finite"),
        (ServerSettings, "MILL_MODEL_URLS", "gpu-1:8000", "http://127.0.0.1:8000/v1"),
        (ServerSettings, "MILL_MODEL_URLS", "http://a,ftp://b", "'ftp://b'"),
        (ServerSettings, "MILL_MODEL_URLS", "http:///v1", "http://127.0.0.1:8000/v1"),
        (GenerationSettings, "MILL_TEMPERATURE", "-0.1", "must be at least 0"),
        (GenerationSettings, "MILL_TEMPERATURE", "nan", "finite"),
        (GenerationSettings, "MILL_TOP_P", "1.5", "must be above 0 and at most 1"),
        (GenerationSettings, "MILL_KEEP_TRUNCATED", "perhaps", "true or false"),
        (GenerationSettings, "MILL_EXTRA_BODY", "{", "JSON"),
        (GenerationSettings, "MILL_CHAT_TEMPLATE_KWARGS", "[1]", "JSON object"),
        (GenerationSettings, "MILL_STOP", '["END"', "it begins as a JSON list and is none; write it like"),
        (BrokerSettings, "MILL_KEY_PREFIX", "a b", "pattern"),
        (ServerSettings, "MILL_STREAM", "yess", ": input should be true or false."),
        (ServerSettings, "MILL_PROTOCOL", "vlm", ": input should be 'auto', 'openai', 'sglang' or 'vllm-tokens'."),
        (WorkerSettings, "MILL_LEASE_S", "1", "greater than or equal to 5"),
        (QueueSettings, "MILL_MAX_PENDING", "0", "greater than or equal to 1"),
    ],
)
def test_refusals_name_the_variable(
    group: type[ServerSettings], name: str, text: str, accepted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value that cannot be used is refused in one sentence with the variable's name and what it accepts."""
    monkeypatch.setenv(name, text)
    message = str(_refusal(group))
    assert message.startswith(f"{name} cannot be used: ")
    assert accepted in message
    assert message.endswith(".")
    assert "\n" not in message


def test_broken_toml_is_refused(tmp_path: Path) -> None:
    """A file that is not TOML is named, and the command ends with the code for wrong settings."""
    (tmp_path / "promptmill.toml").write_text("max_tokens = = 1\n")
    error = _refusal(GenerationSettings)
    assert "promptmill.toml" in str(error)
    assert error.exit_code == 2


def test_secrets_never_print(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passwords and keys show in no text form of the settings."""
    monkeypatch.setenv("MILL_REDIS_URL", f"redis://:{SECRET}@h/0")
    monkeypatch.setenv("MILL_REDIS_PASSWORD", SECRET)
    monkeypatch.setenv("MILL_API_KEY", SECRET)
    broker, server = settings.load(BrokerSettings), settings.load(ServerSettings)
    forms = [repr(broker), str(broker), str(broker.model_dump()), broker.model_dump_json(), repr(server), str(server)]
    assert SECRET not in " ".join(forms)
    assert server.api_key is not None
    assert server.api_key.get_secret_value() == SECRET


@pytest.mark.parametrize(
    ("group", "name", "text"),
    [
        (BrokerSettings, "MILL_KEY_PREFIX", "a b"),
        (ServerSettings, "MILL_MAX_IN_FLIGHT", "x"),
        (ServerSettings, "MILL_MODEL_URLS", f"me:{SECRET}@gpu-1:8000"),
        (ServerSettings, "MILL_MODEL_URLS", f"ftp://me:{SECRET}@gpu-1"),
        (GenerationSettings, "MILL_EXTRA_BODY", f'{{"key": "{SECRET}"'),
    ],
)
def test_secrets_are_in_no_error(
    group: type[ServerSettings], name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even the traceback of a refused setting holds a password or a key."""
    monkeypatch.setenv("MILL_REDIS_URL", f"redis://:{SECRET}@h/0")
    monkeypatch.setenv("MILL_REDIS_PASSWORD", SECRET)
    monkeypatch.setenv("MILL_API_KEY", SECRET)
    monkeypatch.setenv(name, text)
    error = _refusal(group)
    assert str(error).startswith(name)
    assert SECRET not in "".join(traceback.format_exception(error))


def test_settings_are_frozen() -> None:
    """Nobody changes a setting after it was read."""
    with pytest.raises(ValueError, match="frozen"):
        settings.load(QueueSettings).max_pending = 1  # type: ignore[misc]


def test_unknown_variables_get_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt variable is told with the name it probably means; variables of others are left alone."""
    monkeypatch.setenv("MILL_MAX_INFLIGHT", "4")
    assert setting_checks.unknown_variables() == [
        "MILL_MAX_INFLIGHT is not a setting of promptmill and has no effect; did you mean MILL_MAX_IN_FLIGHT?"
    ]
    assert setting_checks.unknown_variables({"MILL_REDIS_URL": "x", "HOME": "/", "mill_model": "m"}) == []
    assert setting_checks.unknown_variables({"MILL_ZZZZZZZ": ""})[0].endswith("has no effect.")


def test_carried_settings_ignore_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings that travel with a dataset are rebuilt from their content alone, whatever is set where they are used."""
    content = settings.load(GenerationSettings, model="m", stop=["a"], top_p=0.9).content()
    (tmp_path / "promptmill.toml").write_text("top_k = 5\n")
    (tmp_path / ".env").write_text("MILL_MIN_P=0.5\n")
    monkeypatch.setenv("MILL_TEMPERATURE", "0.9")
    monkeypatch.setenv("MILL_MODEL", "other")
    carried = settings.generation_from_content({**content, "samples_per_prompt": 2})
    assert carried.content() == content
    assert carried.sampling("id") == {"max_tokens": 8192, "stop": ["a"], "top_p": 0.9}


def test_carried_settings_that_do_not_fit_are_refused() -> None:
    """Settings of another version that this one cannot understand are refused, not guessed."""
    with pytest.raises(SettingError, match=r"do not fit this version.*MILL_MAX_TOKENS"):
        settings.generation_from_content({"max_tokens": "lots"})


def test_fingerprint_never_changes() -> None:
    """A fingerprint depends on content alone: not on order, machine or version."""
    content = settings.load(GenerationSettings, model="m", temperature=0.5, stop=("é",)).content()
    assert settings.fingerprint(content) == "3876bbde1b491200"
    assert settings.fingerprint(dict(reversed(content.items()))) == settings.fingerprint(content)
    assert settings.fingerprint({**content, "temperature": 0.6}) != settings.fingerprint(content)


def test_compare_names_what_differs() -> None:
    """A comparison names each field with its old and new value, and null where it has none."""
    before, after = {"model": "a", "top_p": 0.9, "max_tokens": 8}, {"model": "b", "max_tokens": 8, "stop": ["x"]}
    assert settings.compare(before, after) == ['model: "a" -> "b"', 'stop: null -> ["x"]', "top_p: 0.9 -> null"]
    assert settings.compare(before, dict(before)) == []


def test_default_variable_leaves_the_users_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another library's variable gets our value only where the user has set none."""
    monkeypatch.setenv("SOME_CONF", "theirs")
    settings.set_default_variable("SOME_CONF", "ours")
    assert settings.child_environment({"MILL_MODEL": "m"})["SOME_CONF"] == "theirs"
    monkeypatch.delenv("SOME_CONF")
    settings.set_default_variable("SOME_CONF", "ours")
    assert settings.child_environment()["SOME_CONF"] == "ours"
    monkeypatch.delenv("SOME_CONF")


def test_child_environment_adds_without_touching_ours() -> None:
    """A child process gets our variables and its own; ours stay as they are."""
    assert settings.child_environment({"MILL_MODEL": "m"})["MILL_MODEL"] == "m"
    assert "MILL_MODEL" not in settings.child_environment()


def test_unknown_entries_of_files_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A misspelt name in `.env` or `promptmill.toml` is named with its file, like a misspelt variable."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".env").write_text("MILL_MODEL_URL=http://a:1\nOTHER=1\n", encoding="utf-8")
    (tmp_path / "promptmill.toml").write_text("max_inflight = 3\nlease_s = 9\nMILL_TOP_K = 1\n", encoding="utf-8")
    useless = "is not a setting of promptmill and has no effect; did you mean"
    assert setting_checks.unknown_variables({"MILL_MODEL": "m"}) == [
        f"MILL_MODEL_URL in .env {useless} MILL_MODEL_URLS?",
        f"MILL_TOP_K in promptmill.toml {useless} top_k?",
        f"max_inflight in promptmill.toml {useless} max_in_flight?",
    ]


def test_a_table_in_the_settings_file_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings below a heading, as in a recipe, are read by nobody, and the way out is named; a setting may be one."""
    monkeypatch.chdir(tmp_path)
    text = "[settings]\ntemperature = 0.5\n[chat_template_kwargs]\nenable_thinking = true\n"
    (tmp_path / "promptmill.toml").write_text(text, encoding="utf-8")
    assert settings.load(GenerationSettings).temperature is None
    (told,) = setting_checks.unknown_variables({})
    assert told == (
        "The table [settings] in promptmill.toml has no effect; its keys belong at the top of the file, before every "
        "table."
    )


def test_unusable_values_are_told_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong values are found in every group of settings, whichever a command reads."""
    assert setting_checks.unusable_values() == []
    monkeypatch.setenv("MILL_STREAM", "yess")
    monkeypatch.setenv("MILL_MAX_IN_FLIGHT", "0")
    monkeypatch.setenv("MILL_REQUEST_TIMEOUT_S", "atuo")
    monkeypatch.setenv("MILL_TOP_K", "-3")
    assert setting_checks.unusable_values() == [
        "MILL_MAX_IN_FLIGHT cannot be used: input should be greater than or equal to 1.",
        "MILL_REQUEST_TIMEOUT_S cannot be used: input should be a number or 'auto'.",
        "MILL_STREAM cannot be used: input should be true or false.",
        "MILL_TOP_K cannot be used: input should be greater than or equal to -1.",
    ]


@pytest.mark.parametrize("key", ["sk-secret\r", "sk-secret\n", "sk-s\u0435cret", "sk-secret\x00"])
def test_a_key_that_no_header_can_carry_is_refused(key: str) -> None:
    """A key with a line break of a file, or other letters than ASCII, is refused by name and never shown."""
    with pytest.raises(SettingError, match="MILL_API_KEY cannot be used: it holds characters") as caught:
        settings.load(settings.ServerSettings, api_key=key)
    assert "sk-" not in "".join(traceback.format_exception(caught.value))


def test_a_server_that_is_named_twice_is_one() -> None:
    """The same server in two spellings does not get twice as many requests."""
    urls = settings.load(settings.ServerSettings, model_urls="http://a:1, http://a:1/v1/,http://b:1").model_urls
    assert urls == ("http://a:1", "http://b:1")


@pytest.mark.parametrize("url", ["http://[::1:8000/v1", "http://a:port", "http://me:pa/ss@host:8000", "http://a:99999"])
def test_a_server_whose_host_cannot_be_read_is_refused(url: str) -> None:
    """A URL that would fail later, or show a piece of its password, is refused with what to do, and not quoted."""
    with pytest.raises(SettingError, match="host or port cannot be read; percent-encode") as caught:
        settings.load(settings.ServerSettings, model_urls=url)
    assert "ss@" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://a b/v1", "http://a:1 http://b:2", "http://a\x07:1", "http://a:1/p\tq"])
def test_a_server_with_white_space_in_its_url_is_refused(url: str) -> None:
    """White space or a control character inside a URL, as of a forgotten comma, is refused with what to do."""
    with pytest.raises(SettingError, match="holds white space or a control character; put a comma between"):
        settings.load(settings.ServerSettings, model_urls=url)


@pytest.mark.parametrize("field", ["model", "messages", "tools", "stream", "stream_options", "n"])
def test_request_fields_of_our_own_are_refused(field: str) -> None:
    """An extra request field that promptmill fills itself, or could not read the answer to, is refused by name."""
    with pytest.raises(SettingError, match=f"MILL_EXTRA_BODY cannot be used: {field} cannot be set there"):
        settings.load(settings.GenerationSettings, extra_body={field: 1, "top_a": 2})


def test_the_request_timeout_is_a_number_or_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds, or `auto`; anything else is refused with the variable's name."""
    for text, value in (("90", 90.0), ("auto", "auto")):
        monkeypatch.setenv("MILL_REQUEST_TIMEOUT_S", text)
        assert settings.load(ServerSettings).request_timeout_s == value
    for text, accepted in (("0", "greater than 0"), ("-3", "greater than 0"), ("atuo", "a number")):
        monkeypatch.setenv("MILL_REQUEST_TIMEOUT_S", text)
        said = f"^MILL_REQUEST_TIMEOUT_S cannot be used: input should be {accepted} or 'auto'\\.$"
        with pytest.raises(SettingError, match=said):
            settings.load(ServerSettings)
