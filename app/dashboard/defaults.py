"""Flower's options where the user has set none: local, bounded in memory, and showing samples and their failures."""

from __future__ import annotations

import ast
import contextlib
import ipaddress
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

ADDRESS = "127.0.0.1"
MAX_TASKS = 25_000
"""Tasks in Flower's memory, about 5 kB each; counts do not depend on it, they come from Redis and the files."""
COLUMNS = "args,state,exception,runtime,worker,received,uuid"
"""Dataset and sample, how it went, why not, how long, where, when, and the link to the task's own page."""
RUNTIME_BUCKETS_S = [1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1200.0, 1800.0]
MAX_REASON_CHARS = 300

_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
_RAISED = re.compile(r"^(?:[A-Za-z_][\w.]*)\((.*)\)$", re.DOTALL)


class Task(Protocol):
    """The field of Flower's task that is made readable."""

    exception: Any


class RefusedAddressError(Exception):
    """Flower would have shown everything to everybody on the network."""


def flower_options(given: Mapping[str, Any], *, cookie_file: Path) -> dict[str, Any]:
    """Return the options to set: those that the user has not given by command line or FLOWER_ variable.

    Raises RefusedAddressError when Flower would listen beyond this machine without asking who comes.
    """
    require_login_beyond_localhost(given)
    ours: dict[str, Any] = {
        "address": ADDRESS,
        "max_tasks": MAX_TASKS,
        "tasks_columns": COLUMNS,
        "task_runtime_metric_buckets": RUNTIME_BUCKETS_S,
        "format_task": format_task,
        # Worker names end in random digits, so those of ended workers would pile up.
        "purge_offline_workers": 3600,
    }
    chosen = {name: value for name, value in ours.items() if name not in given}
    if "cookie_secret" not in given:
        secret = kept_secret(cookie_file)
        chosen |= {"cookie_secret": secret} if secret else {}
    return chosen


def require_login_beyond_localhost(given: Mapping[str, Any]) -> None:
    """Refuse an address that others can reach while no login is set.

    Raises RefusedAddressError naming the address and the ways out.
    """
    logins = [str(login) for login in given.get("basic_auth") or ()]
    # Flower takes an empty login for one, and then lets in whoever sends an empty one.
    if any(not all(login.partition(":")[::2]) for login in logins):
        raise RefusedAddressError(
            "Flower's login lacks its user or its password; set it like FLOWER_BASIC_AUTH=user:password."
        )
    if logins or given.get("auth") or given.get("unix_socket"):
        return
    address = str(given.get("address", ADDRESS))
    if not is_loopback(address):
        raise RefusedAddressError(
            f"Flower would show every task to whoever reaches {address or 'any address of this machine'} without a "
            "login; set FLOWER_BASIC_AUTH=user:password, or leave the address at 127.0.0.1 and use an SSH tunnel."
        )


def format_task(task: Task) -> Task:
    """Make a failed task's row readable: the reason without its class name."""
    task.exception = readable_reason(task.exception)
    return task


def readable_reason(text: Any) -> Any:
    """Return the first line of an exception's message, given the exception's text form such as `Error('why')`."""
    raised = _RAISED.match(text) if isinstance(text, str) else None
    if raised is None:
        return text
    # One argument is written without the comma that would make it a tuple.
    values = _literal(f"({raised.group(1)},)") if raised.group(1).strip() else None
    message = str(values[0]) if isinstance(values, tuple) and values else raised.group(1)
    lines = message.strip().splitlines()
    return lines[0][:MAX_REASON_CHARS] if lines else text


def kept_secret(path: Path) -> str | None:
    """Return the secret that signs login cookies, made once, so that a restart logs nobody out.

    Returns None where it cannot be kept; Flower then makes one for its own lifetime.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError), os.fdopen(os.open(path, _NEW_FILE, 0o600), "w") as stream:
            stream.write(secrets.token_urlsafe(48))
        return path.read_text(encoding="ascii").strip() or None
    except OSError:
        return None


def given_options(options: Iterable[Any]) -> dict[str, Any]:
    """Return the options that the command line or a FLOWER_ variable has set, from tornado's option objects."""
    # Tornado has no public way to tell an option that was set to its default from one that was not set.
    return {option.name.replace("-", "_"): option.value() for option in options if option._value is not option.UNSET}  # noqa: SLF001


def _literal(text: Any) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def is_loopback(address: str) -> bool:
    """Tell whether an address, or the name of one, is of this machine alone."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
