"""Storage that is on no disk of this machine: object stores and web servers, and their mirrors on disk."""
