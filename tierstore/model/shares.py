"""All shares of a budget. A share of n is 1/n of the budget; no other file defines one.

A share limits one purpose, so that the others keep some memory. Most were chosen by replaying
traces of models through the planner (`tools/bench/policies.py`). Where two are neighbours, the
smaller number favours prefetching over resident groups. Limits in bytes that do not depend on the
budget, such as the largest group, are defined where they are used.

    share              of what               limits
    -----------------  --------------------  --------------------------------------------------
    AUTO               free memory           a budget of "auto"
    GROUP              the smallest budget   a group of a model
    LARGE_GROUP        the smallest budget   a group, if a smaller one is read too slowly
    TILE               the smallest budget   a tile of a planned loop
    RING               a tier                a ring, unless every plan needs a larger one
    PLANNED_BLOCK      the device            a block that is one unit
    SLICE              the fastest tier      a slice of a model in training
    STATE_GROUP        RAM                   a group of the training state
    STATE_PASSING      RAM                   streaming, if all training state is resident
    IN_FLIGHT          a tier                bytes that arrive there at a time
    EARLY              a tier                groups fetched early and not used yet
    EARLY_IF_STEADY    a tier                the same, while time predictions are accurate
    EARLY_IF_PREFETCH  a tier                the same, for groups that the caller prefetches
    PREFETCH_AHEAD     a tier                prefetched groups, up to the one being fetched
    UNTIMED_AHEAD      a tier                the same, before any bandwidth is known
    SCARCE             RAM                   free RAM below which saved activations are written
    PENDING            offloaded activations activations on the device until they are copied
    READ_LEASES        free RAM              activations leased in place
    SPILL_GROWTH       free disk space       preallocation of a spill file
    COVERAGE           a storage             a view whose whole storage is copied
"""

from __future__ import annotations

AUTO = 2
"""Share of the memory that is free when a store opens.

The other half is for activations on a device and for everything else in the process.
"""

# Partitioning of models --------------------------------------------------------------------------

GROUP = 32
"""Several groups are in use, arriving or next: small ones leave more memory to resident groups."""
LARGE_GROUP = 8
"""For groups of at most `outline.EFFICIENT_READ` bytes, and for models that fit in memory.

A model that fits never moves; its blocks up to this size are units.
"""
TILE = 128
"""Two tiles are in transit on each tier, and a ring holds a few."""
RING = 2
"""While a step uses the ring, only the rest is free for other requests."""
PLANNED_BLOCK = 64
"""A unit and the next one reduce the memory for resident groups: larger blocks become leaves."""
SLICE = 8
"""Used if the number of slices is not given."""
STATE_GROUP = 32
"""Many groups of the state are in RAM at once: see `state_buffers.STREAMING_GROUPS`."""
STATE_PASSING = 8
"""Only activations and frozen groups stream if all state fits in the rest."""

# Prefetching -------------------------------------------------------------------------------------

IN_FLIGHT = 8
"""At least one group. Arriving copies occupy memory before they are useful."""
EARLY = 6
"""Groups fetched early displace groups that could stay."""
EARLY_IF_STEADY = 4
"""Groups are rarely fetched too early while compute times are steady."""
EARLY_IF_PREFETCH = 2
"""The caller knows the order, so more may be fetched early."""
PREFETCH_AHEAD = 2
"""At least one group. More would evict the first prefetched groups."""
UNTIMED_AHEAD = 4
"""At least one group. Without a bandwidth, the right lead time is unknown."""

# Activations and files ---------------------------------------------------------------------------

SCARCE = 4
"""Or `saved_tensors.SCARCE_BYTES`, if less: activations are written before memory runs out."""
PENDING = 32
"""Or `cache.PENDING` bytes, if less."""
READ_LEASES = 2
"""The rest is for activations read by copying, and for new ones."""
SPILL_GROWTH = 2
"""A spill file is preallocated only if at least as much disk space stays free."""
COVERAGE = 4
"""A smaller view is copied alone, because the rest of its storage may never be needed."""
