"""Where bytes can live, and what a caller means to do with them."""

from __future__ import annotations

from enum import Enum, IntEnum


class Tier(IntEnum):
    """A place that holds copies of groups, fastest first."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Access(Enum):
    """What the holder of a lease will do with the tensors.

    READ
        Look at them. Every copy stays valid; many may read at once.
    UPDATE
        Change them in place. Afterwards only the leased copy is valid, and a checkpoint that
        the group came from is no longer trusted.
    TAKE
        Read them for the last time: the group is forgotten when the lease is released.
    """

    READ = "read"
    UPDATE = "update"
    TAKE = "take"


class Hold(Enum):
    """What somebody will do with a group in host memory while they hold it there.

    READ
        Look at it. Every copy stays valid.
    UPDATE
        Change it in place. Afterwards only this copy is valid.
    RENEW
        Give all of it new values: the old ones are not even fetched.
    KEEP
        Change it now and then, and never give it back: nobody should wait for its room.
    """

    READ = "read"
    UPDATE = "update"
    RENEW = "renew"
    KEEP = "keep"
