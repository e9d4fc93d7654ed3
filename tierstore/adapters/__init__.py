"""FIT: turn a framework's shapes into groups, accesses and hints. No movement logic here."""
