"""Host calls: plain Python functions of a user run on rows, in killable processes on the CPUs of the node."""
