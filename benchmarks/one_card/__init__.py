"""The parts of `one_gpu.py`."""
