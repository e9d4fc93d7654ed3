"""FIT: map a framework's modules and tensors to groups, accesses and hints. Moves no bytes."""
