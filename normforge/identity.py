"""The name under which this copy of the library is known to PyTorch."""

NAMESPACE = "normforge"
"""The namespace of its operators. A package that stands alone has a copy of the library, in which
this is a name of its own."""
