"""One algorithm per file as a flow function, and the decorator that traces it."""
