"""MOVE: arenas, files, copies and the carrier that makes them. Decides nothing."""
