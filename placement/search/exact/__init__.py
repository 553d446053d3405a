"""The exact search: iterative deepening with neighbourhoods."""
