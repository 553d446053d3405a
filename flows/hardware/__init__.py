"""The hardware that costs are counted by: datasheets, profiles on disk, clusters in words."""
