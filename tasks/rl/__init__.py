"""The arithmetic of the algorithms: losses, advantages, rewards, KL."""
