"""The client for each endpoint, by the protocol that the settings name."""

from __future__ import annotations

from app.settings import ServerSettings
from workers.clients.base import Client
from workers.clients.link import Link, LinkOptions
from workers.clients.openai_chat import OpenAIChatClient
from workers.clients.sglang import SGLangClient
from workers.clients.vllm_tokens import VLLMTokensClient
from workers.rendering import Tokenizers

_NATIVE: dict[str, type[SGLangClient | VLLMTokensClient]] = {
    SGLangClient.name: SGLangClient,
    VLLMTokensClient.name: VLLMTokensClient,
}


def class_of(protocol: str) -> type[SGLangClient | VLLMTokensClient | OpenAIChatClient]:
    """Return the class of the clients that a protocol of the settings has."""
    return _NATIVE.get(protocol, OpenAIChatClient)


def make_client(url: str, servers: ServerSettings, tokenizers: Tokenizers, *, max_connections: int) -> Client:
    """Return a client for one of the settings' endpoints, to be made and used inside one event loop."""
    options = LinkOptions(
        api_key=servers.api_key.get_secret_value() if servers.api_key else None,
        request_timeout_s=servers.request_timeout_s,
        connect_timeout_s=servers.connect_timeout_s,
        max_connections=max_connections,
        max_body_bytes=int(servers.max_body_mb * 2**20),
        stream=servers.stream,
        stall_timeout_s=servers.stall_timeout_s,
    )
    native = _NATIVE.get(servers.protocol)
    if native is not None:
        return native(Link(url, options), tokenizers, allow_unknown=servers.allow_unknown_parameters)
    return OpenAIChatClient(
        url,
        api_key=options.api_key,
        request_timeout_s=options.request_timeout_s,
        connect_timeout_s=options.connect_timeout_s,
        max_connections=options.max_connections,
        max_body_bytes=options.max_body_bytes,
        stream=options.stream,
        stall_timeout_s=options.stall_timeout_s,
        asks_backend=servers.protocol == "auto",
        allow_unknown=servers.allow_unknown_parameters,
        tokenizers=tokenizers,
    )
