"""Lucy's shop: an application with tables of its own in the organization's ledger.

stock          what the shop has and what it is worth; every change of it, and the checks
organization   the shop as an organization, in a folder
agent          Lucy's ice cream, and the tools that a model may use on it
demo           one replenishment from the sale to the acceptance
"""
