from datetime import timedelta
import pytest
from sovereign_agent import fencing, relay
from sovereign_agent.errors import *
from support import at_one_barrier

def take(n, location):
    db = location.open()
    try:
        return "taken" if fencing.acquire_actor_lease(db, "a", f"proc_{n}") else ""
    finally: db.close()

def test_lease(db, clock):
    a = fencing.acquire_actor_lease(db, "a", "p1", clock=clock)
    with pytest.raises(AlreadyHeld):
        fencing.acquire_actor_lease(db, "a", "p2", clock=clock)
    clock.advance(fencing.ACTOR_LEASE_TTL)
    b = fencing.acquire_actor_lease(db, "a", "p2", clock=clock)
    assert b.fencing_token > a.fencing_token
    m = relay.send(db, "x", "y", "s", "b", clock=clock)
    c = relay.claim(db, m.id, "y", clock=clock)
    assert relay.claim(db, m.id, "y", clock=clock) == c
    relay.complete(db, m.id, "y", fencing_token=c.fencing_token, clock=clock)
    assert relay.inbox(db, "y", clock=clock) == []
    assert relay.sweep_expired_claims(db, clock) == []

def test_race(location):
    location.open().close()
    assert sorted(at_one_barrier(8, take, location)) == ["actor_lease_held"]*7 + ["taken"]
