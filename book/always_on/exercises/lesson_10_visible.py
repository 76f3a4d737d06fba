"""What Unit A's function and Unit B's repair are first held to: one old worker, before and after the epoch moved."""

from sovereign_agent import assistant_work


def probe(lab):
    """Let a worker write, replace the epoch under it, and let it write again. Its claim and its process stay."""
    assistant_work.enqueue(lab.database, "opening", "lucy", "Count the stock before the shop opens.")
    claim = assistant_work.claim(lab.database, "worker-1", ttl=3600)
    before = lab.observe(claim, "Vanilla: 2 tubs.")
    lab.replace_epoch()
    after = lab.observe(claim, "Strawberry: 1 tub.")
    return {"before": before, "after": after, "lines": lab.lines(claim.id)}
