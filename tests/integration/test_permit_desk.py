"""The bound on requests in flight in a real Redis: kept over all workers, shared fairly, and never lost for good."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from app import broker as brokers
from app.broker import Client
from app.places import Keys
from app.queue import Queue
from tests.conftest import Broker
from workers.permits import PERMIT_TTL_S, Block, PermitDesk

ENDPOINT = "server-1"
_REAL_SERVER = settings(
    deadline=None,
    max_examples=60,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Office:
    """The permits of one endpoint in Redis, and the desks of the workers that lease them."""

    def __init__(self, client: Client, keys: Keys) -> None:
        self.client = client
        self.keys = keys
        self._desks: dict[str, PermitDesk] = {}

    def lease(self, owner: str, *, in_use: int, wanted: int, bound: int = 10) -> Block:
        """Renew an owner's block."""
        desk = self._desks.setdefault(owner, PermitDesk(self.client, self.keys, owner))
        return desk.lease(ENDPOINT, in_use=in_use, wanted=wanted, bound=bound)

    def entries(self) -> dict[str, tuple[int, int, int]]:
        """Return what Redis holds: owner -> held, wanted, expiry in ms."""
        found = cast("dict[bytes, bytes]", self.client.hgetall(self.keys.permits(ENDPOINT)))
        lines = {owner.decode(): value.decode().split("|") for owner, value in found.items()}
        return {owner: (int(held), int(wanted), int(expiry)) for owner, (held, wanted, expiry) in lines.items()}

    def now_ms(self) -> int:
        """Return Redis' clock."""
        seconds, micros = self.client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def let_expire(self, owner: str) -> None:
        """Put an owner's lease into the past, as time would."""
        held, wanted, _expiry = self.entries()[owner]
        self.client.hset(self.keys.permits(ENDPOINT), owner, f"{held}|{wanted}|{self.now_ms() - 1}")

    def held(self) -> dict[str, int]:
        """Return what the living owners hold."""
        now = self.now_ms()
        return {owner: held for owner, (held, _wanted, expiry) in self.entries().items() if expiry > now}

    def clear(self) -> None:
        """Forget everything."""
        self.client.delete(self.keys.permits(ENDPOINT))


@pytest.fixture
def office(broker: Broker) -> Iterator[Office]:
    """Return the permits of an endpoint that nobody has used yet."""
    client = brokers.connect(brokers.parse(broker.url))
    yield Office(client, Keys(broker.key_prefix))
    client.close()


def test_one_worker_gets_what_it_wants_up_to_the_bound(office: Office) -> None:
    """A lone worker holds what it wants, at most the bound, for as long as the lease says by Redis' own clock."""
    assert office.lease("a", in_use=0, wanted=4) == Block(4, 10, 0)
    assert office.lease("a", in_use=4, wanted=40) == Block(10, 10, 0)
    held, wanted, expiry = office.entries()["a"]
    assert (held, wanted) == (10, 40)
    assert 0 < expiry - office.now_ms() <= PERMIT_TTL_S * 1000


def test_a_bound_set_by_hand_goes_before_the_workers_own(office: Office) -> None:
    """It raises and lowers what every worker may have, also mid-run, and its end gives the workers' own back."""
    books = Queue(office.client, office.keys)
    assert office.lease("a", in_use=0, wanted=40) == Block(10, 10, 0)
    books.set_bound(16)
    assert books.bound() == 16
    assert office.lease("a", in_use=10, wanted=40) == Block(16, 16, 0)
    books.set_bound(4)
    assert office.lease("a", in_use=12, wanted=40) == Block(12, 4, 0)  # what runs is let finish
    assert office.lease("a", in_use=3, wanted=40).share == 4
    office.client.set(office.keys.bound, "what is this")
    assert office.lease("a", in_use=3, wanted=40).bound == 10
    books.set_bound(None)
    assert books.bound() is None
    assert office.lease("a", in_use=3, wanted=40) == Block(10, 10, 0)
    with pytest.raises(ValueError, match="would stop all work"):
        books.set_bound(0)


def test_giving_back_leaves_nothing(office: Office) -> None:
    """A worker that wants nothing and uses nothing is not kept in Redis; one with running calls keeps just these."""
    office.lease("a", in_use=0, wanted=6)
    assert office.lease("a", in_use=2, wanted=2) == Block(2, 10, 0)
    assert office.lease("a", in_use=0, wanted=0) == Block(0, 10, 0)
    assert office.entries() == {}


def test_a_newcomer_gets_its_share_within_two_renewals_of_the_others(office: Office) -> None:
    """Three workers that hold everything make room for a fourth as soon as their calls end."""
    owners = ("a", "b", "c")
    for _ in range(2):
        for owner in owners:
            office.lease(owner, in_use=0, wanted=100, bound=128)
    assert sorted(office.held().values()) == [42, 43, 43]

    assert office.lease("new", in_use=0, wanted=100, bound=128).held == 0
    for owner in owners:  # calls have ended since, more wait
        office.lease(owner, in_use=20, wanted=120, bound=128)
    assert office.lease("new", in_use=0, wanted=100, bound=128).held == 32
    for owner in owners:
        office.lease(owner, in_use=20, wanted=120, bound=128)
    assert office.held() == {"a": 32, "b": 32, "c": 32, "new": 32}


def test_running_calls_are_never_taken_away(office: Office) -> None:
    """A worker keeps what it uses when others come, and the newcomer gets each permit as it comes free."""
    office.lease("a", in_use=0, wanted=10)
    for in_use in (10, 9, 7):
        assert office.lease("a", in_use=in_use, wanted=10).held == in_use
        assert office.lease("b", in_use=0, wanted=10).held == 10 - in_use


def test_a_busy_worker_shrinks_when_others_come(office: Office) -> None:
    """A worker whose permits are all in use hands none on beyond its fair share, so that the newcomer gets its own."""
    office.lease("a", in_use=0, wanted=40)
    assert office.lease("b", in_use=0, wanted=40).held == 0
    shrunk = office.lease("a", in_use=10, wanted=40)
    assert (shrunk.held, shrunk.share) == (10, 5)
    in_use = 10
    for _ in range(5):  # every call that ends is not followed by another one
        in_use -= 1
        office.lease("a", in_use=in_use, wanted=40)
    assert office.lease("b", in_use=0, wanted=40).share == 5


def test_an_expired_block_comes_free(office: Office) -> None:
    """The permits of a worker whose lease ran out go to the others, and its entry is removed."""
    office.lease("dead", in_use=0, wanted=10)
    assert office.lease("b", in_use=0, wanted=10).held == 0
    office.let_expire("dead")
    assert office.lease("b", in_use=0, wanted=10) == Block(10, 10, 0)
    assert set(office.entries()) == {"b"}


def test_a_worker_with_another_bound_keeps_to_its_own(office: Office) -> None:
    """Workers that were started with another bound grow or shrink to it, from their next renewal on."""
    office.lease("a", in_use=0, wanted=50, bound=10)
    assert office.lease("a", in_use=10, wanted=50, bound=30) == Block(30, 30, 0)
    assert office.lease("a", in_use=12, wanted=50, bound=3) == Block(12, 3, 0)
    assert office.lease("a", in_use=1, wanted=50, bound=3) == Block(3, 3, 0)


def test_an_owner_that_redis_forgot_does_not_grow_at_once(office: Office) -> None:
    """After a wipe workers first tell what they use; only then does anybody with running calls get more."""
    for owner in ("a", "b"):
        office.lease(owner, in_use=0, wanted=5)
    office.clear()
    assert office.lease("a", in_use=3, wanted=10) == Block(3, 10, 0)
    assert office.lease("b", in_use=5, wanted=10) == Block(5, 10, 3)
    assert office.lease("a", in_use=3, wanted=10) == Block(5, 10, 5)
    assert sum(office.held().values()) == 10


def test_an_owner_whose_lease_ran_out_does_not_grow_at_once(office: Office) -> None:
    """A worker that was away for longer than its lease keeps its running calls and no more at its first renewal."""
    office.lease("a", in_use=0, wanted=6)
    office.let_expire("a")
    assert office.lease("a", in_use=4, wanted=10).held == 4
    assert office.lease("a", in_use=4, wanted=10).held == 10


def test_endpoints_do_not_share_their_permits(office: Office) -> None:
    """Each endpoint has the whole bound for itself."""
    desk = PermitDesk(office.client, office.keys, "a")
    assert office.lease("a", in_use=0, wanted=10).held == 10
    assert desk.lease("server-2", in_use=0, wanted=10, bound=10) == Block(10, 10, 0)


# Fairness


def _is_max_min_fair(held: Sequence[int], wants: Sequence[int], bound: int) -> bool:
    """Tell whether nobody could get more without taking it from somebody who has no more (integers: but one)."""
    if sum(held) != min(bound, sum(wants)) or any(has > want for has, want in zip(held, wants, strict=True)):
        return False
    unmet = [has for has, want in zip(held, wants, strict=True) if has < want]
    return not unmet or max(held) <= min(unmet) + 1


@_REAL_SERVER
@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 60))
def test_the_bound_is_shared_fairly(office: Office, wants: list[int], bound: int) -> None:
    """Whatever each wants, two rounds of renewals lead to a max-min fair share that uses the whole bound."""
    office.clear()
    for _ in range(3):
        blocks = [office.lease(f"o{number}", in_use=0, wanted=want, bound=bound) for number, want in enumerate(wants)]
    assert _is_max_min_fair([block.held for block in blocks], wants, bound), (blocks, wants)


# The bound


class _Workers(RuleBasedStateMachine):
    """Workers that lease, call, die, and are started with another bound."""

    office: Office
    owners = ("a", "b", "c", "d")

    def __init__(self) -> None:
        super().__init__()
        self.office.clear()
        self.bound = 8
        self.in_use: dict[str, int] = {}
        self.share: dict[str, int] = {}

    @rule(owner=st.sampled_from(owners), more=st.integers(0, 12))
    def renew(self, owner: str, more: int) -> None:
        """Lease as a worker does: what it uses, and as many more as there are calls waiting."""
        in_use = self.in_use.get(owner, 0)
        before = sum(self.office.held().values())
        block = self.office.lease(owner, in_use=in_use, wanted=in_use + more, bound=self.bound)
        assert block.share is not None
        assert block.share <= block.held
        self.share[owner] = block.share
        self.in_use.setdefault(owner, 0)
        now = self.office.held()
        assert now.get(owner, 0) == block.held
        assert block.held >= in_use
        assert block.held <= max(in_use, in_use + more)
        assert block.bound == self.bound
        assert block.others == sum(now.values()) - block.held
        # A lowered bound cannot take running calls away; but nothing grows above it.
        assert sum(now.values()) <= max(block.bound, before)

    @rule(owner=st.sampled_from(owners), calls=st.integers(0, 12))
    def call(self, owner: str, calls: int) -> None:
        """Start calls as far as the block allows."""
        if owner in self.share:
            self.in_use[owner] = max(self.in_use[owner], min(self.share[owner], self.in_use[owner] + calls))

    @rule(owner=st.sampled_from(owners), ended=st.integers(0, 12))
    def end(self, owner: str, ended: int) -> None:
        """Let calls end."""
        if owner in self.in_use:
            self.in_use[owner] = max(0, self.in_use[owner] - ended)

    @rule(owner=st.sampled_from(owners))
    def die(self, owner: str) -> None:
        """Kill a worker with its calls; its block stays until the lease runs out."""
        self.share.pop(owner, None)
        self.in_use.pop(owner, None)

    @rule(owner=st.sampled_from(owners))
    def expire(self, owner: str) -> None:
        """Let a dead worker's lease run out."""
        if owner not in self.share and owner in self.office.entries():
            self.office.let_expire(owner)

    @precondition(lambda self: self.changes_bound)
    @rule(bound=st.integers(1, 16))
    def change_bound(self, bound: int) -> None:
        """Give the workers another bound."""
        self.bound = bound

    @invariant()
    def running_calls_are_covered(self) -> None:
        """Every running call has a permit in Redis."""
        held = self.office.held()
        assert all(used <= held.get(owner, 0) for owner, used in self.in_use.items())

    changes_bound = True


class _WorkersOfOneBound(_Workers):
    """The same under a bound that stays as it is."""

    changes_bound = False

    @invariant()
    def the_bound_is_kept(self) -> None:
        """All living owners together hold, and so use, no more than the bound."""
        assert sum(self.office.held().values()) <= self.bound
        assert sum(self.in_use.values()) <= self.bound


def test_the_bound_is_never_exceeded(office: Office) -> None:
    """Whatever workers lease, start, end and lose, they never hold or use more than the bound together."""
    machine = type("Machine", (_WorkersOfOneBound,), {"office": office})
    run_state_machine_as_test(machine, settings=_REAL_SERVER)


def test_a_changed_bound_takes_effect_without_harm(office: Office) -> None:
    """While the bound changes nothing grows above it and no running call loses its permit."""
    machine = type("Machine", (_Workers,), {"office": office})
    run_state_machine_as_test(machine, settings=_REAL_SERVER)
