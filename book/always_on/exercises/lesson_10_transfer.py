"""The changed constraint of Unit B: each protection fails alone, and whoever is current stays able to write."""

import time
from dataclasses import replace

from sovereign_agent import assistant_service, assistant_work


def probe(lab):
    """Count the transcript's rows after every attempt; each case changes one thing and puts it back."""
    shop, at = lab.database, int(time.time())
    first = _claimed(lab, "opening", "worker-1")
    seen = {"first_claimant": lab.observe(first, "Vanilla: 2 tubs.")}

    assistant_service.backup(shop, lab.folder / "backup.db")
    assistant_service.restore(shop, lab.folder / "backup.db", actor="lucy", reason="the evening's copy")
    seen["restored_and_paused"] = lab.observe(first, "Strawberry: 1 tub.")
    assistant_service.resume(shop, "lucy", "the copy is good")
    seen["stale_epoch"] = lab.observe(first, "Strawberry: 1 tub.")

    fresh = assistant_work.claim(shop, "worker-2", ttl=3600, now=at)
    seen["fresh_claimant"] = lab.observe(fresh, "Strawberry: 1 tub.", now=at + 3599)
    seen["expired_lease"] = lab.observe(fresh, "Too late.", now=at + 3600)
    seen["changed_role"] = lab.observe(replace(fresh, role=assistant_work.RESEARCH), "As somebody else.")
    seen["changed_session"] = lab.observe(replace(fresh, session="another"), "In another session.")
    seen["changed_subject"] = lab.observe(replace(fresh, subject="ices"), "About something else.")
    seen["changed_work"] = lab.observe(replace(fresh, id=_queued(lab, "closing")), "On another item.")
    seen["changed_owner"] = lab.observe(replace(fresh, owner="worker-1"), "Under another name.")
    seen["superseded_generation"] = lab.observe(replace(fresh, generation=fresh.generation - 1), "As before.")

    marker = shop.authority.read_text()
    shop.authority.unlink()
    seen["missing_marker"] = lab.observe(fresh, "Without a marker.")
    shop.authority.write_text(f"epoch_{0:032}\n")
    seen["foreign_marker"] = lab.observe(fresh, "Under another marker.")
    shop.authority.write_text(marker)

    assistant_service.pause(shop, "lucy", "an inspector is here")
    seen["paused"] = lab.observe(fresh, "While it is paused.")
    assistant_service.resume(shop, "lucy", "the inspector has left")

    assistant_work.delegate(shop, fresh, "What do tubs cost?", deadline=at + 1800, budget=5)
    child = assistant_work.claim(shop, "worker-3", ttl=600, role=assistant_work.RESEARCH)
    seen["delegated_child"] = lab.observe(child, "A tub costs 900.")
    _change(shop, child, "expires_at = 9000000000000000")
    seen["ended_delegation"] = lab.observe(child, "A cone costs 20.", now=at + 1800)
    # The parent's row alone: the shop's own `cancel` would take the child's claim along, and hide what is asked here.
    _change(shop, fresh, "status = 'CANCELED', owner = NULL, epoch = NULL, expires_at = NULL, finished_at = 1")
    seen["canceled_parent"] = lab.observe(child, "A cone costs 20.")

    seen["another_fresh_claimant"] = lab.observe(_claimed(lab, "closing", "worker-4"), "Chocolate: 9 tubs.")
    return seen


def _queued(lab, session):
    return assistant_work.enqueue(lab.database, f"{session}-count", session, "Count the stock.")


def _claimed(lab, session, owner):
    _queued(lab, session)
    return assistant_work.claim(lab.database, owner, ttl=3600)


def _change(shop, claim, what):
    with shop.transaction() as connection:
        connection.execute(f"UPDATE assistant_work SET {what} WHERE id = ?", (claim.id,))  # noqa: S608
