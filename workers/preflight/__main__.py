"""`python -m workers.preflight`: reads a job as JSON from standard input and writes a report as JSON.

The servers, their keys and how they are asked come from the settings, as a worker takes them; no secret is written.
Logs go to standard error. An error that a person can mend is one sentence there, and ends it with code 2.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import sys

import msgspec

from app import settings
from app.errors import MillError
from app.preflight import Files, Job, Report
from workers.preflight.look import look_at_all


def main() -> int:
    """Do the job; return the exit code."""
    logging.basicConfig(level=logging.ERROR, stream=sys.stderr)
    try:
        job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
        report = _report(job)
    except MillError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.buffer.write(msgspec.json.encode(report))
    sys.stdout.flush()
    return 0


def _report(job: Job) -> Report:
    servers = settings.load(settings.ServerSettings)
    report = Report(servers=look_at_all(job, servers), max_in_flight=servers.max_in_flight, tokenizer=servers.tokenizer)
    if job.canaries is None:
        return report
    from workers.mill import files_needed  # noqa: PLC0415 - a worker's parts, which a cheap look does without
    from workers.preflight.canaries import ask_all  # noqa: PLC0415 - same
    from workers.rendering import Tokenizers  # noqa: PLC0415 - same

    slots = servers.max_in_flight * len(servers.model_urls)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    report.files = Files(slots, files_needed(slots), None if hard == resource.RLIM_INFINITY else hard)
    tokenizers = Tokenizers(servers.tokenizer)
    try:
        asyncio.run(ask_all(report.servers, job, servers, tokenizers))
    except MillError as error:
        report.trouble = str(error)
    report.template = tokenizers.fingerprints.get(servers.tokenizer or "")
    return report


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
