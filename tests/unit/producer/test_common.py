"""The line of progress, written to a stream that is no terminal."""

from __future__ import annotations

import pytest

from producer.commands.common import ProgressLine


def test_without_a_terminal_a_line_comes_every_ten_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    """Each line stands alone, the first after 10 s, and nothing is cleared at the end."""
    now = 0.0
    line = ProgressLine(clock=lambda: now)
    for second in range(25):
        now = float(second)
        line.show(f"at {second}")
    line.close()
    assert capsys.readouterr().err == "producer: at 10\nproducer: at 20\n"
