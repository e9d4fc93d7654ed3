"""MOVE: a driver for each tier, hops between them, and the mover that runs instructions."""
