"""From the arguments of a call to what serves it."""
