"""Which model server answers at an endpoint, found out by asking it, and what follows from that."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from workers.clients import parameters

MODELS_PATH = "/v1/models"
_MOST_WORDS = 40
"""Characters of a version at most: it comes from outside and stands in every record."""
_MOST_TOKENS = 2**40
"""A context of more tokens is no number that somebody chose."""
_LEAST_SCHEMA = 8
"""Properties that a published request schema must have to be believed."""

Document = Mapping[str, Any]
Get = Callable[[str], Awaitable[tuple[Mapping[str, str], Document]]]
"""Asks for a path; returns the answer's headers (names in lower case) and JSON object, both empty for a refusal."""


@dataclasses.dataclass(frozen=True)
class Dialect:
    """What is true of every server of one make at its chat endpoint."""

    shown: str
    """Its name in sentences; empty for a server that was not recognised."""
    ask_ids: frozenset[str] = frozenset()
    """Request fields that, being true, make it answer with the exact ids; empty: it cannot."""
    known: frozenset[str] | None = None
    """The parameters that it takes, by their names in the request; None: not known, so everything is sent."""
    strict: bool = False
    """Whether it refuses unknown parameters; most pass over them in silence."""
    keeps_end: bool | None = None
    """Whether the output ids of an answer that ended by itself hold the end token; None: not known."""
    streams_ids: bool = True
    """Whether it gives the ids that it is asked for in a stream as well."""
    counts_streams: bool = True
    """Whether it takes `stream_options`, by which a stream's last chunk counts the tokens; else it counts unasked."""
    refuses_overlong: bool = False
    """Whether it refuses a prompt that leaves max_tokens no room; the others cut the answer where the context ends."""
    has_null: bool = True
    """Whether a missing content is null in an answer that has thought or calls; else it is empty."""


_VLLM_WAY = frozenset({"return_token_ids"})

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "vllm": Dialect("vLLM", _VLLM_WAY, parameters.VLLM, keeps_end=True),
        "sglang": Dialect(
            "SGLang",
            _VLLM_WAY,
            parameters.SGLANG,
            keeps_end=True,
            streams_ids=False,
            refuses_overlong=True,
            has_null=False,
        ),
        "llama.cpp": Dialect(
            "llama.cpp",
            frozenset({"return_tokens", "verbose"}),
            parameters.LLAMA_CPP,
            keeps_end=True,
            streams_ids=False,
        ),
        "tensorrt-llm": Dialect("TensorRT-LLM", known=parameters.TENSORRT_LLM, strict=True),
        "transformers": Dialect("transformers serve", known=parameters.TRANSFORMERS, strict=True, counts_streams=False),
        # Both hand on what they do not know, so that only the server behind them could tell.
        "litellm": Dialect("LiteLLM", _VLLM_WAY),
        "openrouter": Dialect("OpenRouter"),
        # Asked as it always was: most servers pass over the field, and one that refuses it by name is asked without.
        "": Dialect("", _VLLM_WAY),
    }
)
"""What is known of each make, by the name that records carry."""

_OWNERS = MappingProxyType(
    {"vllm": "vllm", "sglang": "sglang", "llamacpp": "llama.cpp", "tensorrt_llm": "tensorrt-llm"}
)
"""The `owned_by` of the models that servers list, which most leave as they are."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """The server at an endpoint."""

    name: str = ""
    version: str = ""
    known: frozenset[str] | None = None
    """The parameters of this very version, where it publishes them; else those of its dialect."""
    context: int | None = None
    """Tokens of prompt and answer together, where the server tells one number for all its models; None: not known."""
    contexts: tuple[tuple[str, int], ...] = ()
    """The same for each model that it tells it of."""

    def context_of(self, model: str) -> int | None:
        """Return how many tokens a model's prompt and answer may have together; None: not known."""
        return dict(self.contexts).get(model, self.context)

    @property
    def told(self) -> str:
        """Name, version, models and their contexts for a log, as far as the server tells them."""
        models = [f"{model} with a context of {tokens} tokens" for model, tokens in self.contexts]
        alone = [f"a context of {self.context} tokens"] if self.context is not None and not models else []
        return f"{self.shown} ({', '.join(models or alone)})" if models or alone else self.shown

    @property
    def dialect(self) -> Dialect:
        """What is true of its make."""
        return DIALECTS[self.name]

    @property
    def parameters(self) -> frozenset[str] | None:
        """The parameters that its chat endpoint takes; None: not known."""
        return self.dialect.known if self.known is None else self.known

    @property
    def label(self) -> str | None:
        """Name and version as records carry them; None for a server that was not recognised."""
        return f"{self.name} {self.version}".strip() or None

    @property
    def shown(self) -> str:
        """Name and version for a sentence."""
        return f"{self.dialect.shown} {self.version}".strip() or "the server"


UNKNOWN = Backend()
"""A server that was not asked, or was not recognised: asked as OpenAI's chat completions, all parameters sent."""


async def identify(base_url: str, get: Get) -> Backend:
    """Ask a server that is up what it is: its list of models first, which mostly says it, then the paths of each make.

    At most seven small requests, none of which generates anything. `get` may raise, and its exceptions come through.
    """
    get = _once_a_path(get)
    headers, models = await get(MODELS_PATH)
    name = "openrouter" if "openrouter.ai" in base_url else _name_by(headers, models)
    document: Document = {}
    if name in {"vllm", "tensorrt-llm"}:
        _, document = await get("/version")
    elif name == "sglang":
        document = await _server_info(get)
    elif name == "llama.cpp":
        _, document = await get("/props")
    elif not name:
        name, document = await _by_paths(get)
    known = await _published(get) if name in {"vllm", "sglang", "tensorrt-llm"} else None
    contexts = _listed_contexts(models)
    context = _one_context(name, document, contexts)
    return Backend(name, _version(headers, document), known, context, contexts)


def _once_a_path(get: Get) -> Get:
    answers: dict[str, tuple[Mapping[str, str], Document]] = {}

    async def remembered(path: str) -> tuple[Mapping[str, str], Document]:
        if path not in answers:
            answers[path] = await get(path)
        return answers[path]

    return remembered


def model_names(models: Document) -> list[str]:
    """Return the names in a list of models, as `/v1/models` gives it."""
    names = [model.get("id") for model in _listed(models)]
    return [name for name in names if isinstance(name, str)]


def _listed(models: Document) -> list[Document]:
    data = models.get("data")
    return [model for model in data if isinstance(model, dict)] if isinstance(data, list) else []


def _name_by(headers: Mapping[str, str], models: Document) -> str:
    if "x-litellm-version" in headers:
        return "litellm"
    owners = [model.get("owned_by") for model in _listed(models)]
    return next((_OWNERS[owner] for owner in owners if isinstance(owner, str) and owner in _OWNERS), "")


async def _server_info(get: Get) -> Document:
    _, document = await get("/server_info")
    return document or (await get("/get_server_info"))[1]  # what SGLang called it before 0.5


async def _by_paths(get: Get) -> tuple[str, Document]:
    """Recognise a server whose models have owners of their own."""
    document = await _server_info(get)
    if "tokenizer_path" in document or "internal_states" in document:
        return "sglang", document
    _, document = await get("/props")
    if "default_generation_settings" in document:
        return "llama.cpp", document
    _, schema = await get("/openapi.json")
    paths = schema.get("paths")
    if isinstance(paths, dict):
        if {"/load_model", "/v1/responses"} <= paths.keys():
            return "transformers", {}
        if "/v1/chat/completions/render" in paths or "/inference/v1/generate" in paths:
            return "vllm", (await get("/version"))[1]
    return "", {}


def _version(headers: Mapping[str, str], document: Document) -> str:
    version = headers.get("x-litellm-version") or document.get("version") or document.get("build_info") or ""
    return version[:_MOST_WORDS] if isinstance(version, str) and version.isprintable() else ""


def _listed_contexts(models: Document) -> tuple[tuple[str, int], ...]:
    """Return the contexts that a list of models tells, as vLLM, SGLang and their kin do."""
    found = [(model.get("id"), _tokens(model.get("max_model_len"))) for model in _listed(models)]
    return tuple((name, tokens) for name, tokens in found if isinstance(name, str) and tokens is not None)


def _one_context(name: str, document: Document, listed: tuple[tuple[str, int], ...]) -> int | None:
    """Return the context of models that the list says nothing of, such as adapters beside their base model.

    A proxy may take models that it does not list, and of them nothing is known.
    """
    if name == "llama.cpp":  # what one slot has, which is less than the server was started with
        slot = document.get("default_generation_settings")
        return _tokens(slot.get("n_ctx")) if isinstance(slot, dict) else None
    if name == "sglang" and not listed:
        return _tokens(document.get("context_length"))
    contexts = {tokens for _, tokens in listed} if name in {"vllm", "sglang"} else set()
    return contexts.pop() if len(contexts) == 1 else None


def _tokens(value: Any) -> int | None:
    return value if type(value) is int and 0 < value < _MOST_TOKENS else None


async def _published(get: Get) -> frozenset[str] | None:
    """Return the chat parameters that the server's own schema names, which fit its version better than any list."""
    _, document = await get("/openapi.json")
    schemas = document.get("components", {})
    for key in ("schemas", "ChatCompletionRequest", "properties"):
        schemas = schemas.get(key, {}) if isinstance(schemas, dict) else {}
    if not isinstance(schemas, dict) or len(schemas) < _LEAST_SCHEMA or "messages" not in schemas:
        return None
    return frozenset(schemas) | parameters.TOKEN_LIMITS
