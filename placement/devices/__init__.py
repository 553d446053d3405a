"""Devices: the meshes of a cluster, the place of each shard on a mesh, and leases of meshes."""
