"""The gpu-mesh worker: leases a mesh of devices to each flow run and leaves nothing behind when the run is over."""
