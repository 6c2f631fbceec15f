"""The monitor over ssh: a fake `ssh` on the PATH runs the command here, hangs, dies and comes back."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.errors import MillError, UsageError
from producer.monitor.remote import Machine, RemoteFeed, decode
from producer.monitor.view import View
from tests.conftest import ModelServerFactory
from tests.support.mill import Mill
from tests.support.processes import wait_until

HOST = "me@gpu1"


class Ssh:
    """A program called ssh that does what the test writes into it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.path = folder / "ssh"
        self.log = folder / "log"
        self.pid = folder / "pid"

    def does(self, script: str) -> None:
        """Make it do this from the next start on; `$remote` is the line that ssh would give to the shell there."""
        fresh = self.path.with_suffix(".new")
        head = f'#!/bin/bash\necho "start $*" >>{self.log}\necho $$ >{self.pid}\nremote="${{@: -1}}"\n'
        fresh.write_text(f"{head}{script}\n", encoding="utf-8")
        fresh.chmod(fresh.stat().st_mode | stat.S_IXUSR)
        fresh.replace(self.path)

    @property
    def starts(self) -> int:
        """How often it was started."""
        return len(self.log.read_text(encoding="utf-8").splitlines()) if self.log.exists() else 0


@pytest.fixture
def ssh(tmp_path: Path) -> Ssh:
    """Return a fake ssh that runs the command on this machine."""
    fake = Ssh(tmp_path / "bin")
    fake.does('exec bash -c "$remote"')
    return fake


def write_producer(mill: Mill, folder: Path) -> Path:
    """Write a program that runs producer with the test's settings."""
    path = folder / "there" / "producer"
    path.parent.mkdir()
    settings = "".join(f"export {name}={value!r}\n" for name, value in mill.env.items())
    root = Path(__file__).parents[2]
    run = "import sys; from producer.cli import main; sys.argv[0] = 'producer'; sys.exit(main())"
    path.write_text(f'#!/bin/bash\n{settings}export PYTHONPATH={root}\nexec {sys.executable} -c "{run}" "$@"\n')
    path.chmod(0o700)
    return path


@pytest.fixture
def producer(mill: Mill, tmp_path: Path) -> Path:
    """Return a program that runs producer with the test's settings."""
    return write_producer(mill, tmp_path)


@pytest.fixture
def feeds() -> Iterator[list[RemoteFeed]]:
    """Collect feeds that are closed after the test."""
    opened: list[RemoteFeed] = []
    yield opened
    for feed in opened:
        feed.close()


def machine(ssh: Ssh, producer: Path) -> Machine:
    """Return the other machine."""
    return Machine(HOST, ssh=str(ssh.path), command=str(producer), folder=str(producer.parent))


def taken(feed: RemoteFeed, wanted: str) -> View:
    """Take views until one is as wanted: `picture`, `trouble` or `well` (a picture and no trouble)."""
    rules = {
        "picture": lambda view: view.picture is not None,
        "trouble": lambda view: view.trouble is not None,
        "well": lambda view: view.picture is not None and view.trouble is None,
    }
    views: list[View] = []

    def found() -> bool:
        views.append(feed.take())
        return bool(rules[wanted](views[-1]))

    wait_until(found, 60, wanted, detail=lambda: views[-1])
    return views[-1]


def test_the_numbers_of_another_machine(mill: Mill, ssh: Ssh, producer: Path, feeds: list[RemoteFeed]) -> None:
    """They are those of `status --json` there, come again and again over one connection, and say from where."""
    mill.enqueue(["one", "two"])
    feed = RemoteFeed(machine(ssh, producer), interval_s=0.3, dataset="case")
    feeds.append(feed)
    first = taken(feed, "picture")
    assert first.source == f"{HOST} over ssh"
    assert first.picture is not None
    assert first.picture.datasets["case"].counts.queued == 2
    mill.enqueue(["three"])
    wait_until(lambda: (now := feed.take().picture) and now.datasets["case"].counts.queued == 3, 30, "three samples")
    assert ssh.starts == 1


def test_a_lost_link_keeps_the_last_numbers(mill: Mill, ssh: Ssh, producer: Path, feeds: list[RemoteFeed]) -> None:
    """When ssh dies the last numbers stay and grow older; it is tried again, and they go on when it works."""
    mill.enqueue(["one"])
    feed = RemoteFeed(machine(ssh, producer), interval_s=0.2)
    feeds.append(feed)
    before = taken(feed, "picture")
    ssh.does("echo 'ssh: connect to host gpu1 port 22: No route to host' >&2; exit 255")
    os.killpg(int(ssh.pid.read_text(encoding="utf-8")), signal.SIGKILL)
    lost = taken(feed, "trouble")
    assert lost.picture is not None
    assert lost.trouble is not None
    assert lost.trouble.startswith(f"The link to {HOST} was lost ")
    wait_until(lambda: "No route to host" in (feed.take().trouble or ""), 20, "ssh's own words")
    assert feed.take().age_s() > 0
    ssh.does('exec bash -c "$remote"')
    after = taken(feed, "well")
    assert after.picture is not None
    assert before.picture is not None
    assert after.picture.at > before.picture.at


def test_a_closed_feed_leaves_no_connection(mill: Mill, ssh: Ssh, producer: Path) -> None:
    """Whoever ends the monitor ends its ssh, also one that goes on writing."""
    mill.enqueue(["one"])
    feed = RemoteFeed(machine(ssh, producer), interval_s=0.2)
    taken(feed, "picture")
    feed.close()
    group = int(ssh.pid.read_text(encoding="utf-8"))

    def is_gone() -> bool:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(is_gone, 20, "the end of the connection")


@pytest.mark.slow
def test_a_connection_that_hangs_is_made_anew(mill: Mill, ssh: Ssh, producer: Path, feeds: list[RemoteFeed]) -> None:
    """A view is given at once also while nothing comes, and a silent connection is given up and tried again."""
    mill.enqueue(["one"])
    ssh.does("exec sleep 600")
    feed = RemoteFeed(machine(ssh, producer), interval_s=0.2)
    feeds.append(feed)
    for _ in range(3):
        began = time.monotonic()
        assert feed.take().picture is None
        assert time.monotonic() - began < 2
    ssh.does('exec bash -c "$remote"')
    assert "nothing came" in (taken(feed, "trouble").trouble or "")
    taken(feed, "well")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'bash: producer: command not found' >&2; exit 127", "does not run '.*/producer'.*--remote-command"),
        ("echo 'Error: No such option: --watch' >&2; exit 2", "on me@gpu1 is older"),
        ("echo \"env: cannot change directory to '/x'\" >&2; exit 125", "cannot change directory"),
        ("echo 'Permission denied (publickey).' >&2; exit 255", "could not be reached by ssh: Permission denied"),
        (
            "echo 'Welcome!'; echo '{\"schema\": 1}'; sleep 600",
            "form 1, this .* form 2: promptmill on me@gpu1 is older",
        ),
        ("echo '{\"schema\": 9}'; sleep 600", "form 9, .*: this promptmill is older; install the same version on both"),
        ('echo \'{"schema": "x"}\'; sleep 600', "no numbers of promptmill"),
    ],
)
def test_what_will_never_work_is_said_once(
    ssh: Ssh, tmp_path: Path, feeds: list[RemoteFeed], script: str, words: str
) -> None:
    """No such program, another version, a host that refuses: one sentence that says which side to change."""
    ssh.does(script)
    feed = RemoteFeed(Machine(HOST, ssh=str(ssh.path), command=str(tmp_path / "producer")), interval_s=0.2)
    feeds.append(feed)

    def take_all() -> None:
        for _ in range(30):
            feed.take()

    with pytest.raises(MillError, match=words):
        take_all()


def test_no_word_is_ever_a_script() -> None:
    """Every word for the other machine is quoted for its shell, and a host that is an option is refused."""
    odd = Machine(HOST, ssh="ssh -p 2222", command="my/producer", folder="a b; rm -rf $HOME")
    words = odd.arguments(interval_s=3, dataset="-x'; reboot")
    assert words[:3] == ["ssh", "-p", "2222"]
    assert words[-3:-1] == ["--", HOST]
    assert words[-1] == ("env -C 'a b; rm -rf $HOME' my/producer status --json --watch 3 -- '-x'\"'\"'; reboot'")
    for host in ("-oProxyCommand=reboot", "", "a b", "a\nb"):
        with pytest.raises(UsageError, match="is not a host"):
            Machine(host).arguments(interval_s=3, dataset=None)
    for options in ({"ssh": ""}, {"command": "producer '"}):
        with pytest.raises(UsageError, match="cannot be used"):
            Machine(HOST, **options).arguments(interval_s=3, dataset=None)


def test_the_whole_command_without_a_terminal(
    mill: Mill, model_server: ModelServerFactory, ssh: Ssh, tmp_path: Path
) -> None:
    """`producer monitor --ssh` ends with the work there, and with one sentence for options that do not fit."""
    model_server()
    mill.enqueue(["one", "two"])
    mill.worker()
    program = write_producer(mill, tmp_path)
    words = ("--ssh", HOST, "--ssh-command", str(ssh.path), "--remote-command", str(program), "--interval", "0.3")
    done = mill.run("monitor", *words, "--until-done")
    assert "case done: 2/2 (100.0 %)" in done.stdout, done.stdout + done.stderr
    refused = mill.run("monitor", "--ssh", HOST, "--from", ".", expect=2)
    assert refused.stderr.startswith("producer: --ssh and --from cannot be used together")
    assert mill.run("status", "--watch", "3", expect=2).stderr.startswith("producer: --watch needs --json")


def test_a_picture_survives_the_way(mill: Mill) -> None:
    """What `status --json --watch` writes is one line, a snapshot with two more fields, that this version reads."""
    mill.enqueue(["one"])
    process = mill.start("status", "--json", "--watch", "0.2", name="stream")
    process.wait_for_output('"schema"')
    wait_until(lambda: process.output().count("\n") >= 2, 20, "a second line")
    line = process.output().splitlines()[0]
    found = decode(line.encode(), HOST)
    assert found.datasets["case"].counts.samples == 1
    assert '"paces":' in line
