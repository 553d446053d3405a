"""The steps of `benchmarks.first_gpu_morning`. A file holds the steps of a subject with their expectations."""
