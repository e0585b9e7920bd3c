"""What is true: frozen values and pure rules. No I/O, no clock, no screen."""
