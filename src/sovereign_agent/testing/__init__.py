"""Testing: the kit for whoever builds on a ledger and wants to see it hold.

invariants   every promise that a ledger makes, as the rows that would break it
torture      real processes, real signals, and then those promises
workload     what the tortured processes do
"""
