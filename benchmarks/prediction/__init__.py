"""Predictions against the committed measurements: the score, and the fit of the correction."""
