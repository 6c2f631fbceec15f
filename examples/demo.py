"""The demo: real prompts become real answers through Celery, Redis, two workers and Flower, on this machine alone.

`make demo` runs it; a second run resumes, `make demo-stop` ends what it leaves running. Ctrl-C leaves nothing running.
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, Group
from rich.padding import Padding
from rich.panel import Panel
from rich.text import Text

from app.errors import EXIT_INCOMPLETE, EXIT_INTERRUPTED, MillError
from app.places import DatasetFolder, dataset_folder
from app.records import Kind
from app.settings import ServerSettings, StoreSettings, load, set_default_variable
from producer import ports, processes
from producer.services import LocalServices

HERE = Path(__file__).resolve().parent
PROMPTS = HERE / "prompts.jsonl"
SERVER = HERE / "small_model_server.py"
PRODUCER = Path(sys.executable).with_name("producer")
WORKERS = 2
SMALL_SERVER_SLOTS = 8
SMALL_SERVER_PORT = 8011
SHOWN = ("fruits", "planets", "sharegpt-moon")
"""Ids of the prompts whose answers are printed: a plain one, one of several turns, a ShareGPT row."""
SILENCE_S = 300
"""Without one more answer for this many seconds the demo gives up."""
DONE = (Kind.ACCEPTED, Kind.REJECTED, Kind.FAILED)

console = Console(highlight=False, markup=False)


def main() -> int:
    """Run the demo and return its exit code."""
    signal.signal(signal.SIGTERM, _interrupt)
    own_server = bool(load(ServerSettings).model_urls)
    # One folder never mixes two models, so the user's own server gets a dataset of its own.
    dataset = "demo-own-server" if own_server else "demo"
    try:
        with _nothing_left_after_interrupt():
            return run(dataset, own_server=own_server)
    except MillError as error:
        console.print(str(error), style="red", soft_wrap=True)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def run(dataset: str, *, own_server: bool) -> int:
    """Start what is needed, ask for the answers, watch them arrive, show some."""
    if own_server:
        stop_workers_with_other_settings()
    else:
        start_small_server()
    run_command("up", "--workers", str(WORKERS))
    folder = dataset_folder(load(StoreSettings).prepared_dir, dataset)
    before = count(folder)
    total = sum(1 for line in PROMPTS.read_bytes().split(b"\n") if line.strip())
    # Short answers keep the demo short; those that end in mid-sentence are kept too.
    limits = ("--max-tokens", "2048" if own_server else "160", "--keep-truncated")
    prompts = str(PROMPTS.relative_to(Path.cwd())) if PROMPTS.is_relative_to(Path.cwd()) else str(PROMPTS)
    run_command("enqueue", prompts, "--dataset", dataset, *limits)
    watch(folder, dataset)
    after = count(folder)
    if before == total:
        console.print(f"All {total} prompts were answered before: 0 new requests.", style="bold")
    else:
        resumed = f", {before} of them in an earlier run" if before else ""
        console.print(f"{after} of {total} prompts are answered{resumed}.", style="bold")
    show(folder)
    tell_what_runs(folder)
    tell_how_to_go_on(own_server=own_server)
    return 0 if after == total else EXIT_INCOMPLETE


def start_small_server() -> None:
    """Start the bundled model server, unless it runs, and tell the workers and this process where it is."""
    services = LocalServices.from_settings(say)
    known = next((process for process in services.running().beside if process.name == "model"), None)
    if known is None:
        services.down()  # workers from before would ask a server that is gone
        port = SMALL_SERVER_PORT if ports.is_free(SMALL_SERVER_PORT) else ports.free_port()
        known = run_small_server(services, port)
    url = re.search(r"http://\S+:(\d+)/v1", processes.own_words(known))
    if url is None:
        raise MillError(f"The model server does not say where it listens; see {known.log}.")
    set_default_variable("MILL_MODEL_URLS", url.group())
    set_default_variable("MILL_MAX_IN_FLIGHT", str(SMALL_SERVER_SLOTS))
    set_default_variable("MILL_DRAIN_S", "5")
    if stop_workers_with_other_settings():
        run_small_server(services, int(url.group(1)))
    console.print(f"The model server answers at {url.group()}.")


def run_small_server(services: LocalServices, port: int) -> processes.Process:
    """Start the bundled model server on a port; `down` will stop it."""
    say("Starting a small chat model on the CPU: SmolLM2-135M-Instruct in llama.cpp.")
    command = [sys.executable, str(SERVER), "--port", str(port), "--slots", str(SMALL_SERVER_SLOTS)]
    return services.run_beside("model", command, is_ready=lambda: healthy(port))


def stop_workers_with_other_settings() -> bool:
    """Stop everything when workers run that were started with other settings, and say whether there were some."""
    services = LocalServices.from_settings(say)
    if services.is_current():
        return False
    services.down()
    return True


def healthy(port: int) -> bool:
    """Say whether the model server has loaded its model."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def start_command(*arguments: str) -> subprocess.Popen[bytes]:
    """Show a `producer` command as one would type it, and start it."""
    console.print(f"$ producer {' '.join(arguments)}", style="bold cyan", soft_wrap=True)
    return subprocess.Popen([str(PRODUCER), *arguments])


def run_command(*arguments: str) -> None:
    """Run a `producer` command to its end.

    Raises MillError when it fails; its own message is on the screen then.
    """
    with start_command(*arguments) as process:
        code = process.wait()
    if code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if code != 0:
        raise MillError(f"`producer {arguments[0]}` ended with exit code {code}.")


def count(folder: DatasetFolder) -> int:
    """Count the prompts that are done: the lines of the files that end one."""
    return sum(folder.lines(kind).read_bytes().count(b"\n") for kind in DONE if folder.lines(kind).exists())


def watch(folder: DatasetFolder, dataset: str) -> None:
    """Show the answers arriving until all are there, with the product's own monitor.

    Raises MillError when none arrives for a long time.
    """
    done, last = count(folder), time.monotonic()
    interval_s = "1" if sys.stdout.isatty() else "5"
    with start_command("monitor", dataset, "--until-done", "--interval", interval_s) as monitor:
        while monitor.poll() is None:
            time.sleep(0.2)
            if count(folder) != done:
                done, last = count(folder), time.monotonic()
            if time.monotonic() - last > SILENCE_S:
                monitor.terminate()
                raise MillError(f"No answer arrived for {SILENCE_S} s; `producer logs` says why.")
    if monitor.returncode == EXIT_INTERRUPTED:
        raise KeyboardInterrupt


def show(folder: DatasetFolder) -> None:
    """Print some records readably: the conversation and its answer."""
    for record in some_records(folder):
        turns = [Text(f"{turn['role']}: {turn['content']}", style="dim") for turn in record["messages"]]
        answer = Padding(Text(str(record["content"]).strip()), (1, 0, 0, 0))
        usage = record.get("usage") or {}
        title = f"{record['id']} · {usage.get('completion_tokens', '?')} tokens · {record['latency_s']:.1f} s"
        console.print(Panel(Group(*turns, answer), title=title, title_align="left", width=min(console.width, 100)))


def some_records(folder: DatasetFolder) -> list[dict[str, Any]]:
    """Return a few records: those whose ids begin as SHOWN says, where they are recorded."""
    path = folder.lines(Kind.ACCEPTED)
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    records = [json.loads(line) for line in lines if line]
    return [record for name in SHOWN for record in records if record["id"].startswith(f"{name}-")]


def tell_what_runs(folder: DatasetFolder) -> None:
    """Say where everything is, what still runs, and how to stop it."""
    services = LocalServices.from_settings(say).running()
    console.print(f"The records:    {folder.lines(Kind.ACCEPTED)}")
    if services.flower_url:
        console.print(f"The dashboard:  {services.flower_url}")
    names = ", ".join(process.name for process in services.all)
    console.print(f"Still running: {names}. Stop them with: make demo-stop", style="bold", soft_wrap=True)


def tell_how_to_go_on(*, own_server: bool) -> None:
    """Say how to ask for one's own prompts, of this model server or another one."""
    producer = PRODUCER.relative_to(Path.cwd()) if PRODUCER.is_relative_to(Path.cwd()) else PRODUCER
    # The small server's context is short, and the default of 8,192 tokens is not.
    limits = "" if own_server else " --max-tokens 160 --keep-truncated"
    say('Your own prompts, one {"prompt": "..."} a line, go to the same workers and model server:')
    say(f"  {producer} enqueue mine.jsonl --dataset mine{limits}")
    say(f"  {producer} monitor mine")
    if not own_server:
        say("To use another model server, run make demo-stop first, then with its address:")
        say(f"  MILL_MODEL_URLS=http://127.0.0.1:8000/v1 {producer} up --workers {WORKERS}")


def say(sentence: str) -> None:
    """Print one step."""
    console.print(sentence, soft_wrap=True)


@contextlib.contextmanager
def _nothing_left_after_interrupt() -> Iterator[None]:
    """Stop every service when the demo fails or is interrupted, whatever it was doing."""
    try:
        yield
    except BaseException:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        console.print("Stopping what the demo started; what is answered is kept.")
        LocalServices.from_settings(say).down()
        raise


def _interrupt(_number: int, _frame: object) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
