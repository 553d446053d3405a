"""The gang on several machines through Ray: places, node agents, and wires between them."""
