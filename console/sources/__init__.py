"""What we watch. Reads only; a failure is a value."""
