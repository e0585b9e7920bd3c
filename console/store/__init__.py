"""What we remember between runs."""
