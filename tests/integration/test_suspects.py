"""Deaths of samples in a real Redis: who becomes a suspect, how suspects fly, and which of them is poison."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app import broker as brokers
from app.places import Keys, suspect_field
from app.queue import Done, Queue
from app.records import Kind, Sample
from tests.conftest import Broker

DATASET, OTHER = "Org/Set one", "other"


class Desk:
    """The work list, with workers that live until they are told to die."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        for dataset in (DATASET, OTHER):
            queue.register(dataset, "f" * 16, {"model": "m"})

    def put(self, *ids: str, dataset: str = DATASET) -> None:
        """Put samples on the work list."""
        self.queue.put(dataset, [Sample(id=id_, messages=[], settings="f" * 16) for id_ in ids])

    def take(self, id_: str, owner: str = "w", dataset: str = DATASET) -> str:
        """Take a sample as a living worker, and return the state."""
        self.queue.beat(owner, {}, ttl_s=600)
        return self.queue.take(dataset, id_, owner).state

    def die(self, owner: str = "w") -> None:
        """Let a worker's heartbeat run out."""
        self.queue.client.delete(self.queue.keys.worker(owner))

    def record(self, *ids: str, dataset: str = DATASET, kind: Kind = Kind.ACCEPTED) -> None:
        """Record samples."""
        self.queue.finish(dataset, [Done(id_, kind) for id_ in ids])

    def suspect(self, *ids: str, dataset: str = DATASET) -> None:
        """Put samples on the work list over which two workers have died."""
        self.put(*ids, dataset=dataset)
        for owner in ("first dead", "second dead"):
            assert {self.take(id_, owner, dataset) for id_ in ids} <= {"new", "orphan"}
            self.die(owner)
        assert {self.take(id_, "w", dataset) for id_ in ids} == {"aside"}

    def deaths(self, id_: str, dataset: str = DATASET) -> bytes | None:
        """Return what is noted of a sample's deaths: how many, and the points."""
        value: bytes | None = self.queue.client.hget(self.queue.keys.deaths(dataset), id_)
        return value

    def lane(self) -> dict[bytes, bytes]:
        """Return who flies in the lane, and how."""
        found: dict[bytes, bytes] = self.queue.client.hgetall(self.queue.keys.suspects)
        return found


@pytest.fixture
def desk(broker: Broker) -> Iterator[Desk]:
    """Return a desk with two empty datasets."""
    client = brokers.connect(brokers.parse(broker.url))
    yield Desk(Queue(client, Keys(broker.key_prefix)))
    client.close()


def _field(desk: Desk, id_: str, dataset: str = DATASET) -> bytes:
    return suspect_field(dataset, id_).encode()


# Becoming a suspect


def test_a_death_blames_everybody_in_flight_once(desk: Desk) -> None:
    """Each sample of a dead worker is blamed once, however often its ticket comes; what it did not ask is not."""
    desk.put("a", "b", "c")
    desk.take("a", "dead")
    desk.take("b", "dead")
    desk.die("dead")
    assert [desk.take(id_) for id_ in "abc"] == ["orphan", "orphan", "new"]
    assert [desk.take(id_) for id_ in "abc"] == ["mine"] * 3
    assert [desk.deaths(id_) for id_ in "abc"] == [b"1|2", b"1|2", None]


def test_the_second_death_puts_a_sample_behind_the_others(desk: Desk) -> None:
    """A suspect is not taken when its ticket comes back, and is still queued; its next ticket takes it."""
    desk.suspect("a")
    assert desk.deaths("a") == b"2|4"
    waiting = desk.queue.waiting(DATASET)
    assert (waiting.prompts, waiting.in_flight, waiting.orphaned) == (1, 0, 0)
    taken = desk.queue.take(DATASET, "a", "w")
    assert (taken.state, bool(taken.sample), taken.deaths) == ("new", True, 2)
    assert desk.queue.waiting(DATASET).in_flight == 1


def test_recording_clears_all(desk: Desk) -> None:
    """A sample that is recorded after all leaves nothing, and begins anew when it is retried."""
    desk.suspect("a", "b")
    assert desk.take("a") == "new"
    desk.record("a")
    desk.queue.forget(DATASET, ["b"])
    assert (desk.deaths("a"), desk.deaths("b"), desk.lane()) == (None, None, {})
    desk.put("a")
    assert desk.queue.take(DATASET, "a", "w").deaths == 0


# The verdict


def test_a_death_while_a_suspect_flies_alone_is_proof(desk: Desk) -> None:
    """The third death, with nothing else in flight, makes the sample poison: it is taken to be given up."""
    desk.suspect("a")
    assert desk.take("a", "third") == "new"
    desk.die("third")
    taken = desk.queue.take(DATASET, "a", "w")
    assert (taken.state, bool(taken.sample), taken.deaths) == ("poison", True, 3)
    assert desk.lane() == {}
    desk.die("w")
    assert desk.take("a", "next") == "poison"


def test_a_death_while_suspects_fly_together_is_none(desk: Desk) -> None:
    """However many deaths two suspects meet together, neither is convicted."""
    desk.suspect("a", "b")
    for number in range(5):
        desk.queue.client.set(desk.queue.keys.lane, 1)
        assert [desk.take("a", f"w{number}"), desk.take("b", f"w{number}")] == ["new", "new"]
        desk.die(f"w{number}")
        assert [desk.take("a"), desk.take("b")] == ["aside", "aside"]
    assert [desk.deaths("a"), desk.deaths("b")] == [b"7|4", b"7|4"]


def test_who_leaves_the_lane_early_was_there(desk: Desk) -> None:
    """A suspect beside which another one flew is not alone again when that one is recorded."""
    desk.suspect("a", "b")
    desk.queue.client.set(desk.queue.keys.lane, 1)
    assert [desk.take("a"), desk.take("b")] == ["new", "new"]
    desk.record("b")
    desk.die()
    assert desk.take("a", "next") == "aside"
    assert desk.deaths("a") == b"3|4"


@pytest.mark.parametrize("first", ["suspect", "fresh"])
def test_a_death_beside_fresh_samples_counts_half(desk: Desk, first: str) -> None:
    """Other samples in flight might be to blame as well: it takes two such deaths to convict."""
    desk.suspect("a")
    for number, state in enumerate(["aside", "poison"]):
        owner, fresh = f"w{number}", f"fresh{number}"
        desk.put(fresh, dataset=OTHER)
        if first == "fresh":
            desk.take(fresh, "elsewhere", OTHER)
        assert desk.take("a", owner) == "new"
        if first == "suspect":
            desk.take(fresh, "elsewhere", OTHER)
        desk.die(owner)
        desk.record(fresh, dataset=OTHER)
        assert desk.take("a") == state


@pytest.mark.parametrize("first", ["suspect", "other"])
def test_a_death_beside_a_sample_with_a_death_is_none(desk: Desk, first: str) -> None:
    """A sample that has met a death before is as likely to be to blame."""
    desk.suspect("a")
    desk.put("b", dataset=OTHER)
    desk.take("b", "dead", OTHER)
    desk.die("dead")
    if first == "other":
        assert desk.take("b", "w", OTHER) == "orphan"
    assert desk.take("a") == "new"
    if first == "suspect":
        assert desk.take("b", "w", OTHER) == "orphan"
    desk.die()
    assert desk.take("a", "next") == "aside"
    assert desk.deaths("a") == b"3|4"


def test_flights_of_dead_workers_are_no_company(desk: Desk) -> None:
    """What a dead worker has left behind does not keep a suspect from being alone."""
    desk.suspect("a")
    desk.put("b")
    desk.take("b", "dead")
    desk.die("dead")
    assert desk.take("a") == "new"
    assert desk.lane() == {_field(desk, "a"): b"w|alone"}


# The lane


def test_the_lane_has_room_for_one_and_doubles(desk: Desk) -> None:
    """One suspect flies at first, of all datasets; every suspect that is recorded doubles the room."""
    desk.suspect(*"abcdefg")
    desk.suspect("x", dataset=OTHER)
    assert [desk.take("a"), desk.take("b"), desk.take("x", dataset=OTHER)] == ["new", "full", "full"]
    desk.record("a")
    assert [desk.take(id_) for id_ in "bcd"] == ["new", "new", "full"]
    desk.record("b", "c")
    assert [desk.take(id_) for id_ in "defg"] == ["new"] * 4
    assert desk.take("x", dataset=OTHER) == "new"
    assert 0 < desk.queue.client.ttl(desk.queue.keys.lane) <= 3600


def test_a_suspect_that_finds_no_room_is_queued(desk: Desk) -> None:
    """A suspect that the lane does not take is in nobody's hands."""
    desk.suspect("a", "b")
    desk.take("a")
    assert desk.take("b") == "full"
    waiting = desk.queue.waiting(DATASET)
    assert (waiting.prompts, waiting.in_flight, waiting.orphaned) == (2, 1, 0)


@pytest.mark.parametrize("seen", ["by the ticket", "by another suspect"])
def test_a_death_in_the_lane_makes_it_narrow(desk: Desk, seen: str) -> None:
    """After a death in the lane the suspects fly one by one again, and the dead ones take no room."""
    desk.suspect(*"abcde")
    desk.queue.client.set(desk.queue.keys.lane, 3)
    assert [desk.take(id_, "dead") for id_ in "abc"] == ["new"] * 3
    desk.die("dead")
    if seen == "by the ticket":
        assert [desk.take(id_) for id_ in "abc"] == ["aside"] * 3
    assert [desk.take("d"), desk.take("e")] == ["new", "full"]
    desk.record("d")
    if seen == "by another suspect":
        assert [desk.take(id_) for id_ in "abc"] == ["aside"] * 3
    assert [desk.take("e"), desk.take("a"), desk.take("b")] == ["new", "new", "full"]


def test_a_suspect_that_is_handed_back_makes_room(desk: Desk) -> None:
    """A worker that ends in order leaves the lane without a death and without widening it."""
    desk.suspect("a", "b")
    desk.take("a")
    desk.queue.release(DATASET, "a", "somebody else")
    assert desk.take("b") == "full"
    desk.queue.release(DATASET, "a", "w")
    assert [desk.take("b"), desk.take("a")] == ["new", "full"]
    assert desk.deaths("a") == b"2|4"


def test_a_ticket_that_comes_twice_keeps_its_place(desk: Desk) -> None:
    """A worker that has a suspect gets it again, also in a lane that is full, and it flies as before."""
    desk.suspect("a", "b")
    assert [desk.take("a"), desk.take("a"), desk.take("b")] == ["new", "mine", "full"]
    assert desk.lane() == {_field(desk, "a"): b"w|alone"}
    assert desk.take("a", "another") == "held"


def test_hundreds_of_suspects_drain_in_few_rounds(desk: Desk) -> None:
    """Where suspects are innocent, 300 of them are recorded in at most five rounds of answers."""
    left = [f"s{number}" for number in range(300)]
    desk.suspect(*left)
    rounds = 0
    while left:
        flying = [id_ for id_ in left if desk.take(id_) == "new"]
        desk.record(*flying)
        left = [id_ for id_ in left if id_ not in set(flying)]
        rounds += 1
    assert rounds <= 5


# Deaths of servers


def test_a_servers_death_is_blamed_in_place(desk: Desk) -> None:
    """The first death leaves the sample with its worker; the second gives it back as a suspect."""
    desk.put("a")
    desk.take("a")
    assert not desk.queue.blame(DATASET, "a", "w")
    assert (desk.take("a"), desk.deaths("a")) == ("mine", b"1|2")
    assert desk.queue.blame(DATASET, "a", "w")
    assert desk.queue.waiting(DATASET).in_flight == 0
    assert (desk.take("a"), desk.deaths("a")) == ("new", b"2|4")


def test_deaths_of_workers_and_servers_add_up(desk: Desk) -> None:
    """A suspect that flies alone and kills a server is poison, whatever died before."""
    desk.suspect("a")
    desk.take("a")
    assert desk.queue.blame(DATASET, "a", "w")
    taken = desk.queue.take(DATASET, "a", "w")
    assert (taken.state, taken.deaths) == ("poison", 3)


def test_a_servers_death_narrows_the_lane(desk: Desk) -> None:
    """Suspects that are in flight together when a server dies prove nothing, and go one by one then."""
    desk.suspect("a", "b")
    desk.queue.client.set(desk.queue.keys.lane, 5)
    assert [desk.take("a"), desk.take("b")] == ["new", "new"]
    assert [desk.queue.blame(DATASET, id_, "w") for id_ in "ab"] == [True, True]
    assert [desk.deaths(id_) for id_ in "ab"] == [b"3|4", b"3|4"]
    assert [desk.take("a"), desk.take("b")] == ["new", "full"]


def test_nobody_blames_anothers_sample(desk: Desk) -> None:
    """A worker that has lost a sample to another one, or whose sample is recorded, blames it for nothing."""
    desk.put("a")
    desk.take("a")
    assert not desk.queue.blame(DATASET, "a", "somebody else")
    desk.record("a")
    assert not desk.queue.blame(DATASET, "a", "w")
    assert desk.deaths("a") is None


def test_three_deaths_of_busy_workers_convict_nobody(desk: Desk) -> None:
    """Whichever sample flies as the only suspect when a busy worker is killed for the third time, it is innocent."""
    ids = [f"s{number}" for number in range(8)]
    desk.suspect(*ids)
    desk.put("fresh")
    assert [desk.take("fresh", "third"), desk.take("s0", "third")] == ["new", "new"]
    desk.die("third")
    assert [desk.take(id_) for id_ in ("s0", "fresh", "s1")] == ["aside", "orphan", "new"]


# A pause


@pytest.mark.parametrize("is_suspect", [False, True])
def test_a_pause_lets_go_of_what_its_taker_hands_back(desk: Desk, *, is_suspect: bool) -> None:
    """A ticket that comes back to its owner in a pause keeps no other worker from the sample after it."""
    if is_suspect:
        desk.suspect("a")
    else:
        desk.put("a")
    assert desk.take("a") == "new"
    desk.queue.pause(DATASET, "by hand")
    assert desk.take("a") == "paused"
    assert (desk.queue.flights(DATASET), desk.lane()) == ({}, {})
    desk.queue.resume(DATASET)
    assert desk.take("a", "another") == "new"


def test_a_pause_leaves_others_flights_alone(desk: Desk) -> None:
    """A paused dataset's samples that another worker asks stay that worker's; a dead one's are blamed later."""
    desk.put("a", "b")
    desk.take("a", "another")
    desk.take("b", "dead")
    desk.die("dead")
    desk.queue.pause(DATASET, "by hand")
    assert [desk.take(id_) for id_ in "ab"] == ["held", "paused"]
    assert desk.queue.flights(DATASET) == {"a": "another", "b": "dead"}
    desk.queue.resume(DATASET)
    assert (desk.take("b"), desk.deaths("b")) == ("orphan", b"1|2")
