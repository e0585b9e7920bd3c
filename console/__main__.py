"""``python -m console`` is ``gpuops``."""

from console.cli import main

if __name__ == "__main__":
    main()
