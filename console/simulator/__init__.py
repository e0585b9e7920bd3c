"""The embedded box that `gpuops demo` runs."""
