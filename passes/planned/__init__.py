"""How each kind of region is planned."""
