"""What the studies of a GPU say, as one HTML page that needs nothing else, and as text."""
