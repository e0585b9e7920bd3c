"""gpuops: a terminal operations console for large models on your own GPUs."""

__version__ = "0.1.0"
