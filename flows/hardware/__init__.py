"""The hardware of the cost model: datasheets, profiles on disk, clusters as text."""
