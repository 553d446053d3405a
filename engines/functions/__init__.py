"""Host calls: a user's Python functions run on rows, in killable processes on the node's CPUs."""
