"""A rank: the engines and rows of one device, and what they are told to do."""
