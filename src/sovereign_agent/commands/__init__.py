"""The verbs, one file a family. No rule lives here: a verb asks a service and prints what it answers.

A verb imports what it needs when it is asked for, so that `--help`, which loads every family, starts at once.
`options` and `printing` are what the families share; `views`, `checkup` and `waiting` are the parts that need
the whole house.
"""
