"""Named complete configurations, as functions."""
