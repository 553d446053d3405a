"""Which rows each device has and needs, and the moves between them."""
