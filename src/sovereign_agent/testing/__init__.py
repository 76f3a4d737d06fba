"""Testing: the kit for whoever builds on a ledger and wants to see it hold.

invariants   every promise that a ledger makes, as the rows that would break it
torture      real processes, real signals, and then those promises
workload     what the tortured processes do
simulation   thousands of short histories from seeds, on a clock that is told, with faults at every transaction
cast         who plays in them, and what each can do next
faults       what goes wrong there, injected through the Database that is passed in
checker      a whole history replayed, with or without a diary of every instant
"""
