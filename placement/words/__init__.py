"""Words of a placement, a file each: cuts of a call, memory that it saves, moves of its rows. A table lists them."""
