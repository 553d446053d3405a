"""Words of a placement, a file each: how a call computes, what it keeps, when its rows move. A table has them all."""
