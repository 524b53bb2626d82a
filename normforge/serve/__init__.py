"""Leads from the arguments of a call to what serves it."""
