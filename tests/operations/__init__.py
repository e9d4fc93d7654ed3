"""Operations on an offloaded model: one list for the tests and for the guide.

`operation` defines an operation, `actions` performs it on an ordinary and on an offloaded model,
and each other module holds tables of the guide. `python -m tests.operations.tables` writes them
into docs/guides/operations.md.
"""
