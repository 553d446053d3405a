"""The rank processes of a node: fork server, start, messages, faults and end."""
