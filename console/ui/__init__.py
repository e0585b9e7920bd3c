"""Draws a snapshot, sends an action."""
