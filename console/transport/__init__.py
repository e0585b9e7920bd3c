"""Where a command runs, and whose /proc and /sys are read. One port: ``Runner``."""
