"""Rows on disk, as columns of plain values: Parquet, Arrow, JSON, saved and generated datasets."""
