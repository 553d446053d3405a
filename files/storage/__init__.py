"""Storage outside this machine's disks: object stores and web servers, and their mirrors on disk."""
