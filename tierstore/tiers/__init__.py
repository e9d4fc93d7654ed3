"""MOVE: a driver for each tier, hops between tiers, and the mover that runs instructions."""
