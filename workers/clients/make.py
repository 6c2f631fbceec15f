"""The client for each endpoint, by the protocol that the settings name."""

from __future__ import annotations

from app.settings import ServerSettings
from workers.clients.base import Client
from workers.clients.link import Link
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
    link, native = Link(url, servers, max_connections=max_connections), _NATIVE.get(servers.protocol)
    if native is not None:
        return native(link, tokenizers, allow_unknown=servers.allow_unknown_parameters)
    return OpenAIChatClient(
        link,
        tokenizers,
        allow_unknown=servers.allow_unknown_parameters,
        asks_backend=servers.protocol == "auto",
    )
