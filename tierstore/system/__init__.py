"""USE: files, locks, maps of files, object files, tensors over bytes, streams.

What tiers, engine, adapters and the command line use of the operating system and of torch's memory.
Nothing in here knows a store.
"""
