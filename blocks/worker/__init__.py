"""The gpu-mesh worker: it leases a mesh of devices to each flow run and leaves no process behind."""
