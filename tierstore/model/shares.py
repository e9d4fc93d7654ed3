"""Every share of a budget: one in so many bytes of it. What is shared out so is bounded in no other
file by a number of its own.

A share bounds what one purpose may take, so that the others have room. Most were chosen by playing
traces of models against the planner (`tools/bench/policies.py`); where two are neighbours, the
smaller number gives more room to what comes early, and less to what stays. Sizes in bytes that
hold for every budget, such as the largest group, are where they are used.

    share              of what               bounds
    -----------------  --------------------  --------------------------------------------------
    AUTO               what is free          a budget that nobody chose
    GROUP              the smallest budget   a group of a model
    LARGE_GROUP        the smallest budget   a group, where a smaller one is read too slowly
    TILE               the smallest budget   a tile, where a loop is planned
    RING               a tier                a ring, unless no plan does with less
    PLANNED_BLOCK      the device            a block that is one unit
    SLICE              the fastest tier      a slice of a model in training
    STATE_GROUP        RAM                   a group of the optimizer's state
    STATE_PASSING      RAM                   what is left beside state that always stays
    IN_FLIGHT          a tier                what arrives there at once
    EARLY              a tier                what was fetched early and was not used yet
    EARLY_IF_STEADY    a tier                the same, while predictions of time are right
    EARLY_IF_NAMED     a tier                the same, of what the caller named
    NAMED_AHEAD        a tier                what the caller named, up to what is fetched
    UNTIMED_AHEAD      a tier                the same, while no speed is known
    SCARCE             RAM                   what is free once saved activations are written
    PENDING            activations away      what stays on the device until it is copied
    READ_LEASES        free room in RAM      activations that are lent in place
    SPILL_GROWTH       free room on disk     by how much a spill file grows ahead
    COVERAGE           a storage             what a view must show for all of it to be copied
"""

from __future__ import annotations

AUTO = 2
"""Of what is free when a store opens. The other half is for what runs beside it: activations, on a
device, and whatever else the process does."""

# How a model is cut ------------------------------------------------------------------------------

GROUP = 32
"""What is in use, what arrives and what comes next take several groups: the smaller they are, the
more of the tier is left to what stays."""
LARGE_GROUP = 8
"""For groups of at most `outline.WELL_READ` bytes, and for a model that fits, of which nothing has
to move; there, blocks of up to so much are units."""
TILE = 128
"""Two of them are in transit on each tier, and a ring has room for a few."""
RING = 2
"""While a step uses the ring, others that need memory find only what is beside it."""
PLANNED_BLOCK = 64
"""A unit and the one that comes next take room in which other groups could stay. Larger blocks are
cut into leaves."""
SLICE = 8
"""If nobody says how many slices there are."""
STATE_GROUP = 32
"""Many groups of the state are in RAM at once: see `state_buffers.PASSING`."""
STATE_PASSING = 8
"""Where the rest holds all the state, only activations have to pass."""

# What the planner fetches early ------------------------------------------------------------------

IN_FLIGHT = 8
"""Or else one group. What arrives takes room that it does not use yet."""
EARLY = 6
"""What comes early takes the room of what could have stayed."""
EARLY_IF_STEADY = 4
"""Where computing takes as long as it did before, early is hardly ever too early."""
EARLY_IF_NAMED = 2
"""The caller knows."""
NAMED_AHEAD = 2
"""Or else one group: what comes after them would push out the first."""
UNTIMED_AHEAD = 4
"""Or else one group: how early is early enough is not known."""

# Activations and files ---------------------------------------------------------------------------

SCARCE = 4
"""Or `saved_tensors.SCARCE_BYTES`, if that is less: then what is saved is written before anybody
needs its room."""
PENDING = 32
"""Or `cache.PENDING` bytes, if that is less."""
READ_LEASES = 2
"""The rest is for what is read by copying, and for what is saved meanwhile."""
SPILL_GROWTH = 2
"""A spill file grows ahead only where at least as much stays free for others."""
COVERAGE = 4
"""A view of less is copied alone: the rest of its storage may never be asked for."""
