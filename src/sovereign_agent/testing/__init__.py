"""Testing: the kit for whoever builds on a ledger and wants to see it hold.

promises     what a ledger must hold at every instant, as the rows that would break it
invariants   whether it does
power_loss   the power goes at every point of a story, and what is left on the disk is opened
recorder     what is written and synced below a folder, in its order
torture      real processes, real signals, and then those promises
crash_points the closed list of places at which its processes die, and a ledger that is hard to work with
operations   the assistant and the operator among them
aftermath    what is asked once they are all dead
figures      how soon a death is in the ledger, and how often somebody alive loses what it holds
proxy        a relay to a PostgreSQL server that loses the reply to a commit
schedules    one order of a few actors' transactions, with deaths and jumps of the clock: chosen, and played again
exploration  every such order
scenarios    which actors those are, and what must hold of them
answers      whether all that they were told can be true
workload     what the tortured processes do
simulation   thousands of short histories from seeds, on a clock that is told, with faults at every transaction
cast         who plays in them, and what each can do next
faults       what goes wrong there, injected through the Database that is passed in
checker      a whole history replayed, with or without a diary of every instant
"""
