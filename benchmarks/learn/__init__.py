"""Does an algorithm learn? Tasks whose answers can be checked, before and after training."""
