"""Searches of a space that was measured whole: which search finds the best config soonest."""
