"""The changed constraint of Unit B: each protection fails alone, and whoever is current stays able to write."""

import time
from dataclasses import replace

from sovereign_agent import assistant_service, assistant_work


def probe(lab):
    """Count the transcript's rows after every attempt; each case changes one thing and puts it back."""
    shop = lab.database
    first = _claimed(lab, "opening", "worker-1")
    seen = {"first_claimant": lab.observe(first, "Vanilla: 2 tubs.")}

    assistant_service.backup(shop, lab.folder / "backup.db")
    assistant_service.restore(shop, lab.folder / "backup.db", actor="lucy", reason="the evening's copy")
    seen["restored_and_paused"] = lab.observe(first, "Strawberry: 1 tub.")
    assistant_service.resume(shop, "lucy", "the copy is good")
    seen["stale_epoch"] = lab.observe(first, "Strawberry: 1 tub.")

    fresh = assistant_work.claim(shop, "worker-2", ttl=3600)
    seen["fresh_claimant"] = lab.observe(fresh, "Strawberry: 1 tub.")
    seen["expired_lease"] = lab.observe(fresh, "Too late.", now=time.time() + 3601)
    seen["changed_role"] = lab.observe(replace(fresh, role=assistant_work.RESEARCH), "As somebody else.")
    seen["changed_session"] = lab.observe(replace(fresh, session="another"), "In another session.")
    seen["changed_owner"] = lab.observe(replace(fresh, owner="worker-1"), "Under another name.")
    seen["superseded_generation"] = lab.observe(replace(fresh, generation=fresh.generation - 1), "As before.")

    marker = shop.authority.read_text()
    shop.authority.unlink()
    seen["missing_marker"] = lab.observe(fresh, "Without a marker.")
    shop.authority.write_text(marker)

    assistant_service.pause(shop, "lucy", "an inspector is here")
    seen["paused"] = lab.observe(fresh, "While it is paused.")
    assistant_service.resume(shop, "lucy", "the inspector has left")

    over = time.time() + 1800
    assistant_work.delegate(shop, fresh, "What do tubs cost?", deadline=over, budget=5)
    child = assistant_work.claim(shop, "worker-3", ttl=600, role=assistant_work.RESEARCH)
    seen["delegated_child"] = lab.observe(child, "A tub costs 900.")
    _change(shop, child, "expires_at = 9000000000000000")
    seen["ended_delegation"] = lab.observe(child, "A cone costs 20.", now=over)
    # The parent's row alone: the shop's own `cancel` would take the child's claim along, and hide what is asked here.
    _change(shop, fresh, "status = 'CANCELED', owner = NULL, epoch = NULL, expires_at = NULL, finished_at = 1")
    seen["canceled_parent"] = lab.observe(child, "A cone costs 20.")

    seen["another_fresh_claimant"] = lab.observe(_claimed(lab, "closing", "worker-4"), "Chocolate: 9 tubs.")
    return seen


def _claimed(lab, session, owner):
    assistant_work.enqueue(lab.database, f"{session}-count", session, "Count the stock.")
    return assistant_work.claim(lab.database, owner, ttl=3600)


def _change(shop, claim, what):
    with shop.transaction() as connection:
        connection.execute(f"UPDATE assistant_work SET {what} WHERE id = ?", (claim.id,))  # noqa: S608
