"""Reports on the studies of a GPU, as one HTML page that needs nothing else, and as text."""
