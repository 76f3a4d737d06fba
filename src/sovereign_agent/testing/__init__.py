"""Testing: the kit for whoever builds on a ledger and wants to see it hold.

invariants   every promise that a ledger makes, as the rows that would break it
torture      real processes, real signals, and then those promises
schedules    one order of a few actors' transactions, with deaths and jumps of the clock: chosen, and played again
exploration  every such order
scenarios    which actors those are, and what must hold of them
answers      whether all that they were told can be true
workload     what the tortured processes do
"""
