"""USE: files, locks, file mappings, object files, tensors over bytes, streams.

The parts of the operating system and of torch's memory that tiers, engine, adapters and the command
line use. Nothing here depends on a store.
"""
