"""Typed settings, read once from MILL_ variables, `.env` and `promptmill.toml`; nobody else reads the environment."""

from __future__ import annotations

import hashlib
import json
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import pydantic
import pydantic_settings
from pydantic import Field, SecretStr

from app import draws
from app.errors import SettingError
from app.model_url import base_url
from app.places import Keys, StateDir
from app.setting_words import explain
from app.verdict import Rules

ENV_PREFIX = "MILL_"
DEFAULT_REDIS_URL = "redis://127.0.0.1:6379/0"
MIN_FREE_DISK_BYTES = 64 * 1024 * 1024

_BASE = pydantic_settings.SettingsConfigDict(
    env_prefix=ENV_PREFIX,
    env_file=".env",
    toml_file="promptmill.toml",
    frozen=True,
    extra="ignore",
    env_ignore_empty=True,
    hide_input_in_errors=True,
    allow_inf_nan=False,  # neither is JSON, so neither could be sent or written down
)


class _Group(pydantic_settings.BaseSettings):
    """A small frozen group of settings."""

    model_config = _BASE

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[pydantic_settings.BaseSettings],
        init_settings: pydantic_settings.PydanticBaseSettingsSource,
        env_settings: pydantic_settings.PydanticBaseSettingsSource,
        dotenv_settings: pydantic_settings.PydanticBaseSettingsSource,
        file_secret_settings: pydantic_settings.PydanticBaseSettingsSource,
    ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
        """Order the sources: arguments, environment, `.env`, `promptmill.toml`."""
        del file_secret_settings
        toml = pydantic_settings.TomlConfigSettingsSource(settings_cls)
        return init_settings, env_settings, dotenv_settings, toml


class BrokerSettings(_Group):
    """Where Redis is."""

    redis_url: SecretStr | None = None
    """`redis://`, `rediss://`, `redis+socket://` or `unix://`; unset: the server that `producer up` started."""
    redis_password: SecretStr | None = None
    """Put into the URL where it has no password, so that the URL itself can be written down."""
    redis_password_file: Path | None = None
    """A file whose first line is the password; read again for every new connection."""
    key_prefix: str = Field(default="mill:", pattern=r"^[A-Za-z0-9._:-]{1,40}$")
    """Begins every Redis key, so that several runs can share one server."""

    @property
    def keys(self) -> Keys:
        """Every Redis key behind the prefix."""
        return Keys(self.key_prefix)


class StoreSettings(_Group):
    """Where files go."""

    prepared_dir: Path = Path("prepared")
    """The folder of the dataset folders."""
    state_dir: Path = Path(".promptmill")
    """The folder of the local services: embedded Redis, process ids, logs."""
    shared_folder: Literal["auto", "yes", "no"] = "auto"
    """Whether several machines use `prepared_dir` at the same time; auto: if it lies on a network disk."""

    @property
    def state(self) -> StateDir:
        """The paths of the local services."""
        return StateDir(self.state_dir)


class ServerSettings(_Group):
    """Where the model servers are and how much may be asked of each."""

    model_urls: Annotated[tuple[str, ...], pydantic_settings.NoDecode] = ()
    """Comma-separated base URLs of identical servers, with or without `/v1`."""
    api_key: SecretStr | None = None
    """Sent as the bearer token."""
    max_in_flight: int = Field(default=128, ge=1, le=65536)
    """Requests in flight per endpoint, over all workers and hosts."""
    request_timeout_s: Annotated[float, Field(gt=0)] | Literal["auto"] = 1800
    """Seconds without an answer (streamed: without its first token) after which a call has failed; auto: worked out
    from max_tokens and the server's observed speed."""
    stream: bool = False
    """Have answers streamed, so that one that stands still is found."""
    stall_timeout_s: float = Field(default=60, gt=0)
    """Seconds without a token after which a stream that has begun has failed."""
    connect_timeout_s: float = Field(default=30, gt=0)
    """Seconds within which a connection must be made."""
    max_body_mb: float = Field(default=64, gt=0)
    """Answers larger than this many MiB are faults."""
    protocol: Literal["auto", "openai", "sglang", "vllm-tokens"] = "auto"
    """How servers are asked; auto: by chat completions, after asking each what it is."""
    tokenizer: str | None = None
    """A folder or hub name of the model's tokenizer; unset: for the protocols that need one, the model's name."""
    allow_unknown_parameters: bool = False
    """Send parameters that the server does not know, instead of pausing the dataset."""

    @pydantic.field_validator("model_urls", mode="before")
    @classmethod
    def _split_urls(cls, value: Any) -> Any:
        items = value.split(",") if isinstance(value, str) else value
        # A server that is named twice is one server.
        return tuple(dict.fromkeys(base_url(str(item)) for item in items if str(item).strip()))

    @pydantic.field_validator("api_key")
    @classmethod
    def _check_key(cls, value: SecretStr | None) -> SecretStr | None:
        text = value.get_secret_value() if value else ""
        if not (text.isascii() and text.isprintable()):
            raise ValueError("it holds characters that no HTTP header can carry (a line break from a file, perhaps)")
        return value


class WorkerSettings(_Group):
    """How a worker behaves."""

    max_attempts: int = Field(default=4, ge=1)
    """Calls that may fail by the sample's own fault before it is given up."""
    backoff_s: float = Field(default=1.0, gt=0)
    """Seconds before the first retry; doubled each time, with jitter."""
    backoff_max_s: float = Field(default=60.0, gt=0)
    """The longest own backoff in seconds."""
    retry_after_max_s: float = Field(default=600.0, gt=0)
    """The longest Retry-After in seconds that is honoured as given."""
    drain_s: float = Field(default=30, ge=0)
    """Seconds after SIGTERM in which running requests may finish before they are handed back."""
    lease_s: float = Field(default=90, ge=5)
    """Within this many seconds of a worker's death its samples are asked again."""
    progress_s: float = Field(default=10, gt=0)
    """Seconds between two progress lines."""
    probe_s: float = Field(default=3, gt=0)
    """Seconds between two probes of a server that is down, over all workers."""


class LogSettings(_Group):
    """How logs are written."""

    log_format: Literal["text", "json"] = "text"
    """What workers write: lines for people, or one JSON object a line."""


class ExtractSettings(_Group):
    """What a worker that makes hidden states needs to know of its machine."""

    extract: bool = False
    """Whether the worker makes hidden states (`producer extract`) instead of asking model servers."""
    device: str | None = Field(default=None, pattern=r"^(cpu|auto|mps|cuda(:\d+)?)$")
    """Where the target model runs: cpu, cuda, cuda:1, or auto (spread over all GPUs). Unset: cuda if there is one."""


class QueueSettings(_Group):
    """How much enqueue keeps in Redis."""

    max_pending: int = Field(default=100_000, ge=1)
    """Prompts held in Redis at once."""
    max_row_mb: float = Field(default=32, gt=0)
    """Rows larger than this many MiB are refused."""


class GenerationSettings(_Group):
    """Every setting that changes what a record holds; fixed by enqueue and carried with the dataset."""

    model: str | None = None
    """The model's name for the server; unset: the one the server lists first."""
    max_tokens: int = Field(default=8192, ge=1)
    """The longest answer in tokens."""
    temperature: float | str | None = None
    """A number, or a distribution (see app.draws)."""
    top_p: float | str | None = None
    """As temperature."""
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: Annotated[tuple[str, ...] | None, pydantic_settings.NoDecode] = None
    """Stop strings (a JSON list in the environment)."""
    reasoning_effort: str | None = None
    """A word, or weighted words (see app.draws)."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Template options as JSON, such as {"enable_thinking": true}."""
    extra_body: dict[str, Any] | None = None
    """More request fields as JSON, put at the request's top level."""
    seed: int | None = None
    """The run's seed; each sample's own seed is derived from it and its id. Unset: no seed is sent."""
    system: str | None = None
    """A system prompt for samples that have none."""
    min_completion_tokens: int = Field(default=0, ge=0)
    """Shorter answers are rejected as too_short."""
    keep_truncated: bool = False
    """Accept answers that were cut at max_tokens."""
    allow_think_leak: bool = False
    """Accept answers with a think tag in their content."""
    max_repetition: float | None = Field(default=None, ge=0, le=1)
    """Answers of which a greater share repeats itself are rejected as repetition; unset: none is."""
    turns: Literal["last", "all"] = "last"
    """Which assistant turns of a conversation are made anew; all: each in order, on the history made so far."""

    @pydantic.field_validator("stop", mode="before")
    @classmethod
    def _parse_stop(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if not value.lstrip().startswith("["):
            return (value,)
        try:
            return tuple(json.loads(value))
        except ValueError:
            raise ValueError('it begins as a JSON list and is none; write it like ["END", "###"]') from None

    @pydantic.field_validator(*draws.DRAWN, mode="before")
    @classmethod
    def _check_drawn(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        return None if value is None else draws.checked(str(info.field_name), value)

    @pydantic.field_validator("extra_body")
    @classmethod
    def _check_extra_body(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if own := sorted(_OWN_FIELDS & (value or {}).keys()):
            raise ValueError(f"{', '.join(own)} cannot be set there, for promptmill sets or needs it itself")
        return value

    def content(self) -> dict[str, Any]:
        """Return the settings that were set, as plain JSON values."""
        content = self.model_dump(mode="json", exclude_none=True)
        if not self.allow_think_leak:
            del content["allow_think_leak"]  # manifests that are older than the setting do not have it
        if self.turns == "last":
            del content["turns"]  # the same
        return content

    def rules(self) -> Rules:
        """Return what is asked of the completions."""
        return Rules(**{name: getattr(self, name) for name in Rules.__struct_fields__})

    def sampling(self, sample_id: str) -> dict[str, Any]:
        """Return a sample's request fields: only what was set (and max_tokens, which always is), and its own draws."""
        fields = self.model_dump(mode="json", exclude_none=True, exclude=_NOT_SENT)
        for name in draws.DRAWN:
            if name in fields:
                fields[name] = draws.draw(name, fields[name], self.seed, sample_id)
        fields.update(self.extra_body or {})
        return fields


_OWN_FIELDS = {"model", "messages", "tools", "stream", "stream_options", "n"}
"""Request fields that promptmill fills itself, or whose answers it could not read."""
_NOT_SENT = {"model", "extra_body", "seed", "system", "turns", *Rules.__struct_fields__}

GROUPS: tuple[type[_Group], ...] = (
    BrokerSettings,
    StoreSettings,
    ServerSettings,
    WorkerSettings,
    LogSettings,
    ExtractSettings,
    QueueSettings,
    GenerationSettings,
)

_Settings = TypeVar("_Settings", bound=_Group)


def load(group: type[_Settings], **overrides: Any) -> _Settings:
    """Read one group; keyword arguments that are not None win over every other source.

    Raises SettingError naming the variable and what it accepts.
    """
    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return group(**given)
    except pydantic.ValidationError as error:
        raise SettingError(explain(error, ENV_PREFIX)[0]) from error
    except (OSError, ValueError) as error:
        raise SettingError(f"The settings could not be read from .env or promptmill.toml: {error}.") from error


def secret_values() -> list[str]:
    """Return every secret in the settings, so that logs can leave them out.

    Raises SettingError.
    """
    broker, servers = load(BrokerSettings), load(ServerSettings)
    plain = [one.get_secret_value() for one in (broker.redis_password, servers.api_key) if one]
    urls = [*servers.model_urls, *([broker.redis_url.get_secret_value()] if broker.redis_url else [])]
    quoted = [url.rpartition("@")[0].rpartition("/")[2].partition(":")[2] for url in urls if "@" in url]
    return [*plain, *quoted, *(urllib.parse.unquote(one) for one in quoted)]


def set_default_variable(name: str, value: str) -> None:
    """Give another library's environment variable a value unless the user has set it."""
    os.environ.setdefault(name, value)


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment for a process that this one starts."""
    return {**os.environ, **(extra or {})}


def generation_from_content(content: Mapping[str, Any]) -> GenerationSettings:
    """Rebuild generation settings from their JSON content alone, whatever this machine's variables say.

    Raises SettingError when the content does not fit this version.
    """
    try:
        known = {name: value for name, value in content.items() if name in GenerationSettings.model_fields}
        return _CarriedGenerationSettings(**known)
    except pydantic.ValidationError as error:
        message = f"The dataset's settings do not fit this version of promptmill: {explain(error, ENV_PREFIX)[0]}"
        raise SettingError(message) from error


class _CarriedGenerationSettings(GenerationSettings):
    """Generation settings that read no variable and no file."""

    model_config = pydantic_settings.SettingsConfigDict(frozen=True, extra="forbid", toml_file=None)

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[pydantic_settings.BaseSettings],
        init_settings: pydantic_settings.PydanticBaseSettingsSource,
        *_others: Any,
        **_more: Any,
    ) -> tuple[pydantic_settings.PydanticBaseSettingsSource, ...]:
        """Take arguments only."""
        del settings_cls
        return (init_settings,)


def fingerprint(content: Mapping[str, Any]) -> str:
    """Return 16 hex digits of the SHA-256 over the content's canonical JSON."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return one `name: old -> new` for each field that differs."""
    names = sorted(set(before) | set(after))
    return [
        f"{name}: {json.dumps(before.get(name))} -> {json.dumps(after.get(name))}"
        for name in names
        if before.get(name) != after.get(name)
    ]
