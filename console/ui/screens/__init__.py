"""Screens that open over the dashboard, one a file."""
