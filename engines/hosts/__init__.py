"""Host calls: a person's plain Python functions run on rows in killable processes, on the CPUs of the node."""
