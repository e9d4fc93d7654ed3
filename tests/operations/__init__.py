"""What users do with a model while it is offloaded: one list for the tests and for the guide.

`operation` defines what an operation is, `actions` how it is done with an ordinary model and with
one that is offloaded, and each other module holds tables of the guide. `python -m
tests.operations.tables` writes them into docs/guides/operations.md.
"""
