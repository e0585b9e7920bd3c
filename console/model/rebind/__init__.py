"""Giving cards from one guest to the other: what is there, what stands in the way, what was left half done."""
