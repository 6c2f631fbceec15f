"""A TLS door before a plain Redis, with a certificate of an authority that only the test knows."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
import threading
from pathlib import Path
from typing import Self

from producer.ports import free_port


def find_openssl() -> str | None:
    """Return the program that makes certificates, if this machine has it."""
    return shutil.which("openssl")


class Authority:
    """A certificate authority and one certificate of it for 127.0.0.1 and localhost."""

    def __init__(self, folder: Path) -> None:
        """Make both with openssl in a folder of their own."""
        folder.mkdir(parents=True)
        self.authority, self.certificate, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        authority_key, request, names = folder / "ca.key", folder / "request.pem", folder / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n", encoding="ascii")
        new = ["req", "-newkey", "rsa:2048", "-nodes"]
        _openssl(*new, "-x509", "-subj", "/CN=test", "-keyout", authority_key, "-out", self.authority, "-days", "2")
        _openssl(*new, "-subj", "/CN=localhost", "-keyout", self.key, "-out", request)
        signed = ["-CA", self.authority, "-CAkey", authority_key, "-CAcreateserial", "-extfile", names, "-days", "2"]
        _openssl("x509", "-req", "-in", request, *signed, "-out", self.certificate)


def _openssl(*words: str | Path) -> None:
    subprocess.run([find_openssl() or "openssl", *map(str, words)], check=True, capture_output=True)


class TlsDoor:
    """Speaks TLS on a port of its own and passes everything on to a port without."""

    def __init__(self, authority: Authority, inner_port: int) -> None:
        """Take the certificate, and the port of the server behind."""
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(authority.certificate, authority.key)
        self._inner_port = inner_port
        self.port = free_port()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-door", daemon=True)
        self._passing: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        opening = asyncio.start_server(self._enter, "127.0.0.1", self.port, ssl=self._context)
        self._server = asyncio.run_coroutine_threadsafe(opening, self._loop).result(10)
        return self

    def __exit__(self, *_exc: object) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _enter(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._inner_port)
            ways = [_pass_on(reader, inner_writer), _pass_on(inner_reader, writer)]
            with contextlib.suppress(OSError, ssl.SSLError):
                await asyncio.gather(*ways)
        except asyncio.CancelledError:
            pass
        finally:
            self._passing.discard(task)
            writer.transport.abort()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
